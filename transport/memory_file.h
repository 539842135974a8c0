#ifndef WEFT_TRANSPORT_MEMORY_FILE_H_
#define WEFT_TRANSPORT_MEMORY_FILE_H_

// MemoryFile: an anonymous file in memory, mapped as a whole: our own, made and sealed here, or one
// that a peer handed over. Sealed means that no process can make it shorter or longer, so that no
// access within its size can fault because of what the peer does (a hole that it punches reads as
// zeroes).
//
// Threads: immutable, except populate() and discard(), which the owner serialises.

#include <cstdint>
#include <memory>

#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/transport/local_socket.h"

namespace weft::internal {

class WEFT_API MemoryFile {
 public:
  // No peer may make us map more.
  static constexpr uint64_t kMaxBytes = uint64_t{1} << 40;

  // Errors, kind resource: the system has no such files, or a limit of the process is in the way.
  // Takes address space only: memory comes with populate().
  static StatusOr<std::shared_ptr<MemoryFile>> make(uint64_t bytes);
  // Checks everything that a peer could have got wrong before the first access. Errors, kind
  // protocol: not of the announced size, not sealed, not a file in memory.
  static StatusOr<std::shared_ptr<MemoryFile>> adopt(UniqueFd fd, uint64_t announced_bytes);

  // A file that only we ever write to: sealed against that where the kernel can (5.1).
  static StatusOr<std::shared_ptr<MemoryFile>> make_for_one_writer(uint64_t bytes);
  // A peer's file of that kind, mapped to read. Errors as those of adopt().
  static StatusOr<std::shared_ptr<MemoryFile>> adopt_to_read(UniqueFd fd, uint64_t announced_bytes);

  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  char* data() const { return data_; }
  uint64_t size() const { return size_; }
  int fd() const { return fd_.get(); }

  // Gets memory for the range now, so that a system without any says so here, and not by a signal
  // at the first access.
  Status populate(uint64_t offset, uint64_t bytes);
  // Gives the memory of the range back; it reads as zeroes afterwards.
  void discard(uint64_t offset, uint64_t bytes);

 private:
  MemoryFile(UniqueFd fd, char* data, uint64_t size)
      : fd_(std::move(fd)), data_(data), size_(size) {}
  static StatusOr<UniqueFd> make_unsealed(uint64_t bytes);
  static Status check(const UniqueFd& fd, uint64_t announced_bytes);
  static StatusOr<std::shared_ptr<MemoryFile>> map(UniqueFd fd, uint64_t bytes, bool to_write);

  const UniqueFd fd_;
  char* const data_;
  const uint64_t size_;
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_MEMORY_FILE_H_
