#include "weft/transport/internal/memory_limit.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace weft::internal {
namespace {

// The least of the files `name` in `group` and its parents, below `mount`. A file that is missing, or
// says "max", is no limit.
uint64_t least_limit(Files& files, absl::string_view mount, absl::string_view group,
                     absl::string_view name, uint64_t least) {
  std::string path(absl::StripSuffix(group, "/"));
  while (true) {
    const absl::StatusOr<std::string> text = files.read(absl::StrCat(mount, path, "/", name));
    uint64_t bytes = 0;
    if (text.ok() && absl::SimpleAtoi(absl::StripAsciiWhitespace(*text), &bytes)) {
      least = std::min(least, bytes);
    }
    if (path.empty()) return least;
    path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
}

}  // namespace

uint64_t memory_limit(Files& files, uint64_t physical) {
  const absl::StatusOr<std::string> groups = files.read("/proc/self/cgroup");
  if (!groups.ok()) return physical;
  uint64_t least = physical;
  // "hierarchy:controllers:path", one a line; of version 2 "0::path".
  for (absl::string_view line : absl::StrSplit(*groups, '\n')) {
    const std::vector<absl::string_view> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    if (fields[1].empty()) {
      least = least_limit(files, "/sys/fs/cgroup", fields[2], "memory.max", least);
      continue;
    }
    for (absl::string_view controller : absl::StrSplit(fields[1], ',')) {
      if (controller != "memory") continue;
      least =
          least_limit(files, "/sys/fs/cgroup/memory", fields[2], "memory.limit_in_bytes", least);
    }
  }
  return least;
}

}  // namespace weft::internal
