#ifndef WEFT_RPC_INTERNAL_AGENT_RECEIVE_MEMORY_H_
#define WEFT_RPC_INTERNAL_AGENT_RECEIVE_MEMORY_H_

// ReceiveMemory: memory for large tensors that arrive. Blocks outlive their tensors and serve the
// next ones: of a 64 MiB message a third of the time went into page faults of memory that the
// system had just been given back (docs/benchmarks.md). Blocks are aligned to 2 MiB and ask for
// huge pages.
//
// Bounded twice: at most `max_kept` bytes are kept for later, and blocks that were not used between
// two calls of sweep() go back to the system. Tensors in use are not counted here; the receiver's
// byte budget bounds them while they arrive.
//
// Threads: any. Tensors may outlive the worker: each holds the memory it came from.

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "weft/common/api.h"
#include "weft/common/mutex.h"

namespace weft::internal {

class WEFT_API ReceiveMemory : public std::enable_shared_from_this<ReceiveMemory> {
 public:
  // Smaller tensors are left to LibTorch's allocator.
  static constexpr size_t kSmallest = size_t{1} << 20;

  explicit ReceiveMemory(uint64_t max_kept) : max_kept_(max_kept) {}
  ~ReceiveMemory();
  ReceiveMemory(const ReceiveMemory&) = delete;
  ReceiveMemory& operator=(const ReceiveMemory&) = delete;

  // A contiguous tensor on the CPU with values of any kind. Throws c10::Error when the system has
  // no memory.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, size_t nbytes);

  void sweep() ABSL_LOCKS_EXCLUDED(mutex_);

  struct Counters {
    uint64_t kept_bytes = 0;
    uint64_t reused = 0;
    uint64_t mapped = 0;
  };
  Counters counters() const ABSL_LOCKS_EXCLUDED(mutex_);

  // What is taken for so many bytes: multiples of 2 MiB, and of an eighth of the largest power of
  // two in them, so that messages of nearly one size share blocks and at most an eighth is wasted.
  static size_t block_size(size_t bytes);

 private:
  struct Lease;
  struct Free {
    void* data = nullptr;
    uint64_t since = 0;  // sweep
  };

  void* take(size_t size) ABSL_LOCKS_EXCLUDED(mutex_);
  void give_back(void* data, size_t size) ABSL_LOCKS_EXCLUDED(mutex_);
  static void release(void* lease);

  const uint64_t max_kept_;
  mutable Mutex mutex_;
  std::map<size_t, std::vector<Free>> free_ ABSL_GUARDED_BY(mutex_);  // by size; last is youngest
  Counters counters_ ABSL_GUARDED_BY(mutex_);
  uint64_t sweeps_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_AGENT_RECEIVE_MEMORY_H_
