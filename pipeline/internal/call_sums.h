#ifndef WEFT_PIPELINE_INTERNAL_CALL_SUMS_H_
#define WEFT_PIPELINE_INTERNAL_CALL_SUMS_H_

// CallSums: gradients of replicas that are summed at this worker, for call_reducer(). Each replica
// gives its part of a bucket by one call, whose answer is the sum; it leaves when all parts are there.
//
//   SUM-1  a bucket is named (reducer, round, bucket); each replica gives its part once.
//   SUM-2  parts are added in the order of the replicas, so every replica has the same bits.
//   SUM-3  every part is answered exactly once: with the sum, or with why there is none.
//   SUM-4  parts for a reducer that this worker has not made (yet) wait within a bound, and until the
//          time of their call is over.
//
// Any thread; nothing is answered under its lock.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/mutex.h"
#include "weft/common/worker_info.h"
#include "weft/pipeline/internal/messages.h"

namespace weft::pipeline::internal {

struct SumMessage {
  std::string reducer{};
  int64_t round = 0;  // how many times the reducer has finished before
  int64_t bucket = 0;
  int64_t rank = 0;  // of the replica that gives them
  int64_t size = 0;  // how many replicas there are
  bool mean = true;
  std::vector<at::Tensor> tensors{};
};
WEFT_STRUCT(SumMessage, reducer, round, bucket, rank, size, mean, tensors);

struct SumAnswer {
  std::vector<at::Tensor> tensors{};
};
WEFT_STRUCT(SumAnswer, tensors);

struct SumFailMessage {  // a replica gives nothing more
  std::string reducer{};
  int64_t kind = 0;
  std::string why{};
};
WEFT_STRUCT(SumFailMessage, reducer, kind, why);

class WEFT_API CallSums {
 public:
  using Done = absl::AnyInvocable<void(StatusOr<std::vector<at::Tensor>>)>;
  // Parts that wait for reducers of which nothing is known here.
  static constexpr size_t kMaxEarly = 1024;

  // A reducer of this worker, until remove(); `replicas` by rank. Kind invalid_argument when it has
  // one of that name.
  Status add_reducer(const std::string& name, std::vector<WorkerInfo> replicas);
  void remove_reducer(const std::string& name);

  // `until`: when the caller stops waiting.
  void give(SumMessage part, absl::Time now, absl::Time until, Done done);
  // Parts that wait are answered with it, and so is what comes later, until remove_reducer().
  void fail(const std::string& name, const Status& why);
  void on_worker_gone(const WorkerInfo& worker, const Status& why);
  static Status gone_error(size_t rank, const WorkerInfo& worker, const Status& why);
  void close(const Status& why);
  int64_t waiting() const;  // parts

 private:
  struct Part {
    std::vector<at::Tensor> tensors;
    absl::Time until;
    Done done;
  };
  struct Reducer {
    std::vector<WorkerInfo> replicas;
    Status failed;
  };
  using Name = std::tuple<std::string, int64_t, int64_t>;
  using Parts = std::map<int64_t, Part>;  // by rank
  Status refused(const SumMessage& part, const Parts& parts) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<Parts> take(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Early parts whose callers have stopped waiting; how many others are there.
  size_t drop_late(absl::Time now, std::vector<Parts>* late) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void answer(std::vector<Parts> all, const Status& why);

  mutable Mutex mutex_;
  std::map<std::string, Reducer> reducers_ ABSL_GUARDED_BY(mutex_);
  std::map<Name, Parts> parts_ ABSL_GUARDED_BY(mutex_);
  Status closed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::pipeline::internal

#endif  // WEFT_PIPELINE_INTERNAL_CALL_SUMS_H_
