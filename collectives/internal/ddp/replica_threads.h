#ifndef WEFT_COLLECTIVES_INTERNAL_DDP_REPLICA_THREADS_H_
#define WEFT_COLLECTIVES_INTERNAL_DDP_REPLICA_THREADS_H_

// ReplicaThreads: the same work for several replicas at once, one on the caller's thread and each
// other one on a thread that is kept.
//
// Threads: any; two callers at once share the threads, one after another.

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/condition.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"

namespace weft::internal {

// Without LibTorch's lines about where it was thrown.
std::string exception_text(const std::exception& e);

class ReplicaThreads {
 public:
  ReplicaThreads(std::shared_ptr<Runtime> runtime, std::vector<at::Device> devices);
  ~ReplicaThreads();
  ReplicaThreads(const ReplicaThreads&) = delete;
  ReplicaThreads& operator=(const ReplicaThreads&) = delete;

  // Calls body(0), body(1), ... for the replicas `on`[0], `on`[1], ..., on their devices and with the
  // caller's modes of LibTorch; body(mine) on the calling thread. Returns when all have ended; throws
  // weft::Error, user, with what the first of them has thrown.
  void run(const std::vector<size_t>& on, const std::function<void(size_t)>& body, size_t mine = 0);

  at::Device device(size_t replica) const { return devices_[replica]; }

 private:
  [[noreturn]] void fail(size_t replica, const std::exception_ptr& error) const;

  const std::shared_ptr<Runtime> runtime_;
  const std::vector<at::Device> devices_;
  Mutex mutex_;
  Condition ended_;
  std::vector<std::shared_ptr<Executor>> loops_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_DDP_REPLICA_THREADS_H_
