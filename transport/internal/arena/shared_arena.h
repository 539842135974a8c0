#ifndef WEFT_TRANSPORT_INTERNAL_ARENA_SHARED_ARENA_H_
#define WEFT_TRANSPORT_INTERNAL_ARENA_SHARED_ARENA_H_

// SharedArena: the memory of one worker that its peers on this host see, and who uses what of it.
//
// A block is alive while it is referred to: by tensors of this process (holders), and leases. A
// lease says that one link's peer may use a block; it ends when the peer frees it, or with the end
// of the link's private socket. Invariants, cited by tests:
//   ARENA-1  a block is free again exactly when it has neither holders nor leases.
//   ARENA-2  a lease ends once: a free of an unknown lease, or of another link's, changes nothing
//            and is counted.
//   ARENA-3  when the last peer's process is gone and no tensor here is left, nothing is in use.
//   ARENA-4  a full arena is no error and no thread waits for room: the message goes by the wire.
//
// Small blocks rest for a while before they are used again: until then the caches next to the cores of
// sender and receiver have let go of their lines, and a write to them waits for no other core
// (docs/collectives.md, "Shared memory"). Rest is no use: ARENA-1 holds, and a full arena has none.
//
// The file is as large as the arena may become and takes memory only where blocks were; memory that
// no block used for two sweeps goes back to the system.
//
// Threads: any.

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "weft/common/api.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/transport/arena_heap.h"
#include "weft/transport/memory_file.h"
#include "weft/transport/shared_writes.h"

namespace weft::internal {

class WEFT_API SharedArena : public std::enable_shared_from_this<SharedArena> {
 public:
  // Memory is taken from the system and given back in pieces of this size.
  static constexpr uint64_t kPiece = uint64_t{2} << 20;
  // Blocks of up to kSmallBlock rest, kRest bytes of them together.
  static constexpr uint64_t kSmallBlock = uint64_t{512} << 10;
  static constexpr uint64_t kRest = uint64_t{2} << 20;

  // `capacity` is rounded up to pieces. Errors: see MemoryFile::make.
  static StatusOr<std::shared_ptr<SharedArena>> make(uint64_t capacity,
                                                     std::shared_ptr<Runtime> runtime);

  // Memory for a tensor of this process, with any values, aligned to a page; null when there is no
  // room. The returned pointer holds the block, and the arena.
  std::shared_ptr<char> allocate(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);

  struct Loan {
    uint64_t offset = 0;
    uint64_t lease = 0;
    // The bytes lay in the arena already: this process goes on using them, and so may other peers.
    bool shared = false;
  };
  // Makes the bytes readable for `link`'s peer: as they lie when they are in the arena, else as a
  // copy that is the peer's alone. None: no room (ARENA-4).
  std::optional<Loan> lend(std::string_view bytes, uint64_t link) ABSL_LOCKS_EXCLUDED(mutex_);
  // False: there is no such lease of this link (ARENA-2).
  bool take_back(uint64_t lease, uint64_t link) ABSL_LOCKS_EXCLUDED(mutex_);
  // The peer behind the link uses nothing any more.
  void forget(uint64_t link) ABSL_LOCKS_EXCLUDED(mutex_);
  // A number for a new link.
  uint64_t new_link() ABSL_LOCKS_EXCLUDED(mutex_);

  void sweep() ABSL_LOCKS_EXCLUDED(mutex_);

  struct Counters {
    uint64_t capacity = 0;
    uint64_t used_bytes = 0;
    uint64_t populated_bytes = 0;
    uint64_t blocks = 0;
    uint64_t leases = 0;
    uint64_t copied = 0;  // loans of copies
    uint64_t copied_bytes = 0;
    uint64_t shared = 0;  // loans without a copy
    uint64_t full = 0;    // refused for want of room
    uint64_t ignored_frees = 0;
  };
  Counters counters() const ABSL_LOCKS_EXCLUDED(mutex_);

  const MemoryFile& file() const { return *file_; }

 private:
  struct Block {
    uint64_t size = 0;
    uint64_t users = 0;  // holders and leases
  };
  struct Lease {
    uint64_t block = 0;
    uint64_t link = 0;
  };
  class Holder;

  SharedArena(std::shared_ptr<MemoryFile> file, std::shared_ptr<Runtime> runtime);
  // With one user, who is the caller.
  std::optional<uint64_t> take(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  void drop(uint64_t block) ABSL_LOCKS_EXCLUDED(mutex_);
  void drop_locked(uint64_t block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Frees the longest resting blocks until `bytes` of them are left.
  void wake_locked(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Copies into a block of this arena.
  void write(uint64_t offset, std::string_view bytes) ABSL_LOCKS_EXCLUDED(mutex_);

  const std::shared_ptr<MemoryFile> file_;
  const std::shared_ptr<Runtime> runtime_;
  mutable Mutex mutex_;
  ArenaHeap heap_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, Block> blocks_ ABSL_GUARDED_BY(mutex_);  // by offset
  std::map<uint64_t, Lease> leases_ ABSL_GUARDED_BY(mutex_);
  struct Resting {
    uint64_t offset = 0;
    uint64_t size = 0;
  };
  std::deque<Resting> resting_ ABSL_GUARDED_BY(mutex_);
  uint64_t resting_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  SharedWrites writes_ ABSL_GUARDED_BY(mutex_);
  struct Piece {
    bool populated = false;
    uint64_t last_used = 0;  // sweep
  };
  std::vector<Piece> pieces_ ABSL_GUARDED_BY(mutex_);
  uint64_t sweeps_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_lease_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_link_ ABSL_GUARDED_BY(mutex_) = 0;
  Counters counters_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_ARENA_SHARED_ARENA_H_
