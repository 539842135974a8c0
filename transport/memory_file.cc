#include "weft/transport/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"

namespace weft::internal {
namespace {

// Shrink, so that the other side cannot make our accesses fault; seal, so that it cannot add a seal
// that takes our next mapping's right to write (transport.md, 10.2).
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

Status no_memory_file(const char* what, int code) {
  return make_error(ErrorKind::kResource,
                    absl::StrCat("no memory to share: ", what, ": ", system_error(code)));
}

Status bad_file(std::string why) {
  return make_error(ErrorKind::kProtocol,
                    absl::StrCat("the file that the peer shares is refused: ", why));
}

}  // namespace

StatusOr<std::shared_ptr<MemoryFile>> MemoryFile::map(UniqueFd fd, uint64_t bytes, bool to_write) {
  const int access = to_write ? PROT_READ | PROT_WRITE : PROT_READ;
  void* const data = mmap(nullptr, bytes, access, MAP_SHARED | MAP_NORESERVE, fd.get(), 0);
  if (data == MAP_FAILED) return no_memory_file("mmap", errno);
  return std::shared_ptr<MemoryFile>(
      new MemoryFile(std::move(fd), static_cast<char*>(data), bytes));
}

StatusOr<UniqueFd> MemoryFile::make_unsealed(uint64_t bytes) {
  rlimit limit = {};
  // ftruncate() beyond it would end the process by a signal.
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      limit.rlim_cur < bytes) {
    return make_error(ErrorKind::kResource,
                      absl::StrCat("no memory to share: this process may make files of ",
                                   limit.rlim_cur, " bytes (ulimit -f), wanted are ", bytes));
  }
  UniqueFd fd(memfd_create("weft-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return no_memory_file("memfd_create", errno);
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return no_memory_file("ftruncate", errno);
  }
  return fd;
}

StatusOr<std::shared_ptr<MemoryFile>> MemoryFile::make(uint64_t bytes) {
  WEFT_ASSIGN_OR_RETURN(UniqueFd fd, make_unsealed(bytes));
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) return no_memory_file("sealing", errno);
  return map(std::move(fd), bytes, true);
}

StatusOr<std::shared_ptr<MemoryFile>> MemoryFile::make_for_one_writer(uint64_t bytes) {
  WEFT_ASSIGN_OR_RETURN(UniqueFd fd, make_unsealed(bytes));
  const int descriptor = fd.get();
  WEFT_ASSIGN_OR_RETURN(std::shared_ptr<MemoryFile> file, map(std::move(fd), bytes, true));
  // Our own mapping is from before; an older kernel refuses the seal that it does not know.
  if (fcntl(descriptor, F_ADD_SEALS, kSeals | F_SEAL_FUTURE_WRITE) != 0 &&
      fcntl(descriptor, F_ADD_SEALS, kSeals) != 0) {
    return no_memory_file("sealing", errno);
  }
  return file;
}

Status MemoryFile::check(const UniqueFd& fd, uint64_t announced_bytes) {
  if (announced_bytes == 0 || announced_bytes > kMaxBytes) {
    return bad_file(absl::StrCat("its size is announced as ", announced_bytes));
  }
  struct stat is = {};
  if (fstat(fd.get(), &is) != 0) return bad_file(system_error(errno));
  if (!S_ISREG(is.st_mode)) return bad_file("it is no regular file");
  if (is.st_size < 0 || static_cast<uint64_t>(is.st_size) != announced_bytes) {
    return bad_file(
        absl::StrCat("it has ", is.st_size, " bytes, announced were ", announced_bytes));
  }
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    return bad_file(absl::StrCat("its seals are ", seals, ", so it could still be truncated"));
  }
  return absl::OkStatus();
}

StatusOr<std::shared_ptr<MemoryFile>> MemoryFile::adopt(UniqueFd fd, uint64_t announced_bytes) {
  WEFT_RETURN_IF_ERROR(check(fd, announced_bytes));
  return map(std::move(fd), announced_bytes, true);
}

StatusOr<std::shared_ptr<MemoryFile>> MemoryFile::adopt_to_read(UniqueFd fd,
                                                                uint64_t announced_bytes) {
  WEFT_RETURN_IF_ERROR(check(fd, announced_bytes));
  return map(std::move(fd), announced_bytes, false);
}

MemoryFile::~MemoryFile() { munmap(data_, size_); }

Status MemoryFile::populate(uint64_t offset, uint64_t bytes) {
  int result;
  do {
    result = fallocate(fd_.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result != 0) return no_memory_file("fallocate", errno);
  return absl::OkStatus();
}

void MemoryFile::discard(uint64_t offset, uint64_t bytes) {
  // Nothing is lost when it fails: the memory stays with the file.
  (void)fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(bytes));
}

}  // namespace weft::internal
