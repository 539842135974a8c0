#include "weft/transport/internal/descriptors.h"

#include <dirent.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/common/posix.h"

namespace weft::internal {
namespace {

constexpr rlim_t kMostRaised = 65'536;
constexpr uint64_t kPartForOptional = 4;
constexpr absl::Duration kCountServes = absl::Milliseconds(100);
// Sockets that a connection has besides its optional ones, about.
constexpr uint64_t kOthersOfConnection = 3;

rlimit limits() {
  rlimit out = {};
  // It cannot fail: the resource is known and the place is there.
  (void)getrlimit(RLIMIT_NOFILE, &out);
  return out;
}

uint64_t count_open(uint64_t limit) {
  struct stat info = {};
  // Since Linux 6.2 the size of the directory is the number of descriptors.
  if (stat("/proc/self/fd", &info) == 0 && info.st_size > 0) {
    return static_cast<uint64_t>(info.st_size);
  }
  DIR* const all = opendir("/proc/self/fd");
  if (all == nullptr) return errno == EMFILE || errno == ENFILE ? limit : 0;
  uint64_t n = 0;
  while (readdir(all) != nullptr) ++n;
  closedir(all);
  return n < 3 ? 0 : n - 3;  // ".", ".." and the directory's own
}

}  // namespace

DescriptorUse descriptor_use() {
  const uint64_t limit = limits().rlim_cur;
  return {count_open(limit), limit};
}

void raise_descriptor_limit() {
  rlimit limit = limits();
  const rlim_t wanted = std::min(limit.rlim_max, kMostRaised);
  if (limit.rlim_cur >= wanted) return;
  limit.rlim_cur = wanted;
  // Where it is not allowed the limit stays, and errors name it.
  (void)setrlimit(RLIMIT_NOFILE, &limit);
}

Status no_descriptors_left() {
  const rlimit limit = limits();
  return make_error(
      ErrorKind::kResource,
      absl::StrCat("no descriptor is left (Too many open files): this process may have ",
                   limit.rlim_cur, " (RLIMIT_NOFILE, hard limit ", limit.rlim_max,
                   "); raise the limit (ulimit -n) or connect fewer workers"));
}

Status check_descriptors(size_t count) {
  std::vector<UniqueFd> tried;
  for (size_t i = 0; i < count; ++i) {
    tried.emplace_back(eventfd(0, EFD_CLOEXEC));
    if (tried.back().valid()) continue;
    if (errno == EMFILE) return no_descriptors_left();
    return make_error(ErrorKind::kResource,
                      absl::StrCat("cannot open a descriptor: ", system_error(errno)));
  }
  return absl::OkStatus();
}

Status OptionalSockets::admit(size_t count) {
  MutexLock lock(&mutex_);
  const absl::Time now = runtime_->now();
  if (now - counted_at_ > kCountServes) {
    counted_ = descriptor_use();
    counted_at_ = now;
  } else {
    counted_.open += kOthersOfConnection;
  }
  if (counted_.open + count <= counted_.limit / kPartForOptional) {
    counted_.open += count;
    return absl::OkStatus();
  }
  refused_.fetch_add(static_cast<int64_t>(count), std::memory_order_relaxed);
  return make_error(
      ErrorKind::kResource,
      absl::StrCat(counted_.open, " of ", counted_.limit,
                   " descriptors are in use (RLIMIT_NOFILE), and data connections are opened while "
                   "a quarter is not: raise the limit (ulimit -n)"));
}

}  // namespace weft::internal
