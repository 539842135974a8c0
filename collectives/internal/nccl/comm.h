#ifndef WEFT_COLLECTIVES_INTERNAL_NCCL_COMM_H_
#define WEFT_COLLECTIVES_INTERNAL_NCCL_COMM_H_

// Comm: a communicator of NCCL that does not block: a call returns at once, and what NCCL then still
// has to do, connecting for example, is waited for here, until a deadline or the end of the group.
//
// Threads: all methods from any; the owner closes it last.

#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "weft/collectives/internal/link.h"
#include "weft/collectives/internal/nccl/api.h"
#include "weft/common/condition.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"

namespace weft::internal {

class Comm {
 public:
  Comm(std::shared_ptr<const NcclApi> api, std::shared_ptr<Runtime> runtime);
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  const NcclApi& api() const { return *api_; }

  // REQUIRES: the current device is the communicator's. `given_up`: see making.h.
  Status connect(const Membership& member, const std::string& id,
                 absl::FunctionRef<Status()> given_up, absl::Time deadline);
  // Runs `body`, which queues, as one group of NCCL's, and waits until NCCL has taken it.
  Status call(absl::Time deadline, absl::FunctionRef<ncclResult_t(ncclComm_t)> body);
  // What has gone wrong in the background.
  Status async_error();

  // Every call, under way or to come, ends with `cause`; the GPU goes on until abort().
  void refuse(const Status& cause);
  // Ends what the GPU does. REQUIRES: refuse().
  void abort();
  // What peers still need from this rank is done, until then at the latest.
  void finish(absl::Time until);

 private:
  Status wait_ready_locked(absl::Time deadline, absl::FunctionRef<Status()> given_up)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void abort_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<const NcclApi> api_;
  const std::shared_ptr<Runtime> runtime_;
  Mutex mutex_;
  Condition changed_;
  ncclComm_t comm_ ABSL_GUARDED_BY(mutex_) = nullptr;
  Status refused_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_NCCL_COMM_H_
