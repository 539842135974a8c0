#ifndef WEFT_COLLECTIVES_INTERNAL_SHM_FILE_H_
#define WEFT_COLLECTIVES_INTERNAL_SHM_FILE_H_

// What a member of a group in shared memory shows to the others: one sealed file that it alone
// writes to, and that they map to read.
//
// SHM-1: every file has one writer. What a peer's page says is checked before it is used.
//
//   page      counter of barriers, whether its thread sleeps, headers of its operations
//   ends      per peer and lane: how far it has written its ring to that peer, and how far it has
//             read that peer's ring to it
//   slots     kTurns of kSlot bytes: what it puts in, by turns
//   results   the same, in groups of three and more: what it has reduced, by turns
//   rings     per peer and lane, of kRing bytes
//   heap      tensors made by group.empty()
//
// Threads: the page by any; the rest belongs to the thread of the operation, the heap locks.

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "weft/collectives/internal/header.h"
#include "weft/common/error.h"
#include "weft/common/mutex.h"
#include "weft/transport/arena_heap.h"
#include "weft/transport/memory_file.h"

namespace weft::internal {

// All of one word each, so that a reader never sees half of one.
struct ShmHeader {
  std::atomic<uint64_t> sequence;  // of the operation; written last
  std::atomic<uint64_t> words[sizeof(Header) / sizeof(uint64_t)];
  std::atomic<uint64_t> place;  // of the tensor in the file; 0: it is not there
};

struct ShmPage {
  alignas(64) std::atomic<uint64_t> counter;
  alignas(64) std::atomic<uint32_t> nap;  // odd: the thread of the operation sleeps
  alignas(64) ShmHeader headers[2];       // by turns
};

struct ShmEnds {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> taken;
};

// Where things lie in a file; equal for all members of a group.
struct ShmLayout {
  static constexpr uint64_t kSlot = 256 << 10;
  // Two would do (shm_engine.h). With more, a slot has left the caches next to the cores that used it
  // when its turn comes again, and writing to it waits for no other core.
  static constexpr uint64_t kTurns = 8;
  static constexpr uint64_t kRing = 256 << 10;
  static constexpr int kRings = 2;                       // lanes
  static constexpr uint64_t kHeap = uint64_t{16} << 30;  // address space, not memory

  explicit ShmLayout(int size);

  uint64_t ends(int peer, int lane) const {
    return ends_begin + sizeof(ShmEnds) * static_cast<uint64_t>(peer * kRings + lane);
  }
  uint64_t ring(int peer, int lane) const {
    return rings_begin + kRing * static_cast<uint64_t>(peer * kRings + lane);
  }
  uint64_t slot(uint64_t turn) const { return slots_begin + kSlot * (turn % kTurns); }
  uint64_t result(uint64_t turn) const { return results_begin + kSlot * (turn % kTurns); }

  uint64_t ends_begin = 0;
  uint64_t slots_begin = 0;
  uint64_t results_begin = 0;
  uint64_t rings_begin = 0;
  uint64_t heap_begin = 0;
  uint64_t total = 0;
};

// A member's file, own or a peer's.
class ShmFile {
 public:
  ShmFile(const ShmLayout& layout, std::shared_ptr<MemoryFile> file)
      : layout_(layout), file_(std::move(file)) {}

  ShmPage& page() const { return *reinterpret_cast<ShmPage*>(file_->data()); }
  ShmEnds& ends(int peer, int lane) const {
    return *reinterpret_cast<ShmEnds*>(file_->data() + layout_.ends(peer, lane));
  }
  char* ring(int peer, int lane) const { return file_->data() + layout_.ring(peer, lane); }
  char* slot(uint64_t turn) const { return file_->data() + layout_.slot(turn); }
  char* result(uint64_t turn) const { return file_->data() + layout_.result(turn); }
  char* at(uint64_t offset) const { return file_->data() + offset; }
  const std::shared_ptr<MemoryFile>& file() const { return file_; }

 private:
  const ShmLayout layout_;
  const std::shared_ptr<MemoryFile> file_;
};

// The heap of the own file. Lives as long as a tensor in it.
class ShmHeap : public std::enable_shared_from_this<ShmHeap> {
 public:
  ShmHeap(const ShmLayout& layout, std::shared_ptr<MemoryFile> file);

  // Touched memory for so many bytes, which goes back with the last handle. Errors, kind resource.
  StatusOr<std::shared_ptr<char>> allocate(uint64_t bytes);
  // Where that memory lies in the file; 0: elsewhere.
  uint64_t place_of(const char* data, uint64_t bytes) const;

 private:
  const ShmLayout layout_;
  const std::shared_ptr<MemoryFile> file_;
  Mutex mutex_;
  ArenaHeap heap_ ABSL_GUARDED_BY(mutex_);
};

// Own and peers' files by rank; the own one is written to, the others are mapped to read.
struct ShmFiles {
  explicit ShmFiles(int size) : layout(size) {}
  const ShmLayout layout;
  std::vector<std::unique_ptr<ShmFile>> by_rank;
  std::shared_ptr<ShmHeap> heap;
};

StatusOr<std::shared_ptr<MemoryFile>> make_shm_file(int size);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_SHM_FILE_H_
