#ifndef WEFT_DIST_OPTIM_INTERNAL_PARAMETERS_H_
#define WEFT_DIST_OPTIM_INTERNAL_PARAMETERS_H_

// ParameterTable: what all optimizers of a worker share of a parameter: its lock, its version, and
// which step has it for itself. Several trainers may each have an optimizer over the same one.
//
//   OPT-1  under per_parameter_lock and versioned, updates of one parameter run one at a time; on a
//          device, each comes after the one before, whichever streams queue them.
//   OPT-2  a parameter's version counts its updates, by any optimizer of this worker: the steps in
//          which it had a gradient, and those that failed after they had changed it.
//   OPT-3  a versioned step that has reserved a parameter is the only one that may update it until
//          it has, was cancelled, or its time is over. No step waits for a reservation: a step that
//          meets one is refused, so steps over several owners cannot wait for each other.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>

#include "ATen/core/Tensor.h"
#include "absl/time/time.h"
#include "weft/common/condition.h"
#include "weft/common/error.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/rpc/spi/device_order.h"

namespace weft::internal {

class Parameter {
 public:
  Parameter(Runtime* runtime, std::atomic<int64_t>* waits)
      : runtime_(runtime), waits_(waits), freed_(runtime) {}

  // OPT-1; waits while another thread has the lock. resource_exhausted: too many threads wait.
  Status lock();
  void unlock();

  int64_t version() const;
  // An update by the calling thread. `parameter`: the tensor itself.
  void updated(const at::Tensor& parameter);

  // OPT-1, on devices: what the calling thread queues from now on comes after what others have
  // queued here, and the tensors' memory outlives it...
  void order_here(c10::ArrayRef<at::Tensor> tensors);
  // ...and what it and others have queued comes before what is ordered from now on.
  void queued_here(const at::Tensor& parameter);

  // OPT-3. `by` is compared, never followed. True: reserved, or it was already.
  bool reserve(const void* by, absl::Time until);
  // False: not reserved by it any more. From now on until give_back(), however long that takes.
  bool keep(const void* by);
  void give_back(const void* by);

 private:
  Runtime* const runtime_;
  std::atomic<int64_t>* const waits_;
  mutable Mutex mutex_;
  Condition freed_;
  bool locked_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t version_ ABSL_GUARDED_BY(mutex_) = 0;
  GuardRef after_ ABSL_GUARDED_BY(mutex_);  // null: nothing has been queued
  const void* reserved_by_ ABSL_GUARDED_BY(mutex_) = nullptr;
  absl::Time reserved_until_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

// A lock that may fail.
class ParameterLock {
 public:
  explicit ParameterLock(Parameter* parameter)
      : parameter_(parameter), status_(parameter->lock()) {}
  ~ParameterLock() {
    if (status_.ok()) parameter_->unlock();
  }
  ParameterLock(const ParameterLock&) = delete;
  ParameterLock& operator=(const ParameterLock&) = delete;
  const Status& status() const { return status_; }

 private:
  Parameter* const parameter_;
  const Status status_;
};

class ParameterTable {
 public:
  explicit ParameterTable(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}

  // The same record for the same tensor, as long as that lives.
  std::shared_ptr<Parameter> find(const at::Tensor& tensor);
  // Number of parameters that are in use.
  size_t in_use() const;
  // How often a thread has waited for a lock.
  int64_t waits() const { return waits_.load(); }
  // Entries that sweeps have gone through.
  int64_t looked_at() const;

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Entry {
    WeakTensor tensor;
    std::shared_ptr<Parameter> parameter;
  };

  const std::shared_ptr<Runtime> runtime_;
  std::atomic<int64_t> waits_{0};
  static constexpr size_t kFewParameters = 64;

  mutable Mutex mutex_;
  std::map<const c10::TensorImpl*, Entry> parameters_ ABSL_GUARDED_BY(mutex_);
  size_t sweep_at_ ABSL_GUARDED_BY(mutex_) = kFewParameters;
  int64_t looked_at_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace weft::internal

#endif  // WEFT_DIST_OPTIM_INTERNAL_PARAMETERS_H_
