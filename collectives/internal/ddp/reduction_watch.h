#ifndef WEFT_COLLECTIVES_INTERNAL_DDP_REDUCTION_WATCH_H_
#define WEFT_COLLECTIVES_INTERNAL_DDP_REDUCTION_WATCH_H_

// ReductionWatch: what observers see of the reductions of one DistributedDataParallel: when buckets
// were ready, left and were reduced, on the timeline, in the metrics weft_ddp_* and in a dictionary;
// and what a reduction waits for.
//
// Threads: doing(), times() and row() from anywhere, also while a lock of the reducer's caller is
// held; the others by the thread that has the reducer's mutex or runs the end of the reduction.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "weft/collectives/internal/group_core.h"
#include "weft/collectives/process_group.h"
#include "weft/common/metrics.h"
#include "weft/common/mutex.h"

namespace weft::internal {

// The times of the last reduction that has succeeded, and sums over all of them.
struct ReductionTimes {
  absl::Duration forward{};
  absl::Duration backward{};  // from its beginning to the last gradient
  absl::Duration reducing{};  // from the first bucket that left to the last that was reduced
  absl::Duration overlap{};   // the part of it that ran beside the backward
  absl::Duration exposed{};   // the part that the backward waited for
};

class ReductionWatch final : public GroupUser {
 public:
  ReductionWatch(const ProcessGroup& group, std::string module);

  absl::Time now() const { return core_->runtime().now(); }
  // A forward that is to be reduced has ended.
  void forward_ended(absl::Time begun);

  void begin(int64_t forward, size_t buckets);
  void ready(size_t bucket);
  void launched(size_t bucket, int64_t bytes);
  // The first bucket that has left and of which this was not said yet, or as many as there are.
  size_t first_unreduced() const { return unreduced_; }
  void reduced(size_t bucket);
  void gradients_ended();
  // What the thread at the end of the reduction waits for from now on; "": nothing.
  void waits_for(std::string what);
  void end(int64_t early);
  // `why`: what doing() says from then on.
  void fail(std::string why);

  // "bucket 0 of 2 (first.weight and 1 more), which waits for rank 1"; "" while nothing is waited
  // for.
  std::string doing() const;
  // The ranks that the group's operation under way waits for; "": none.
  std::string ranks() const;
  ReductionTimes last() const;
  ReductionTimes sums() const;

  Row row() const override;

 private:
  struct Bucket {
    absl::Time ready{};
    absl::Time launched = absl::InfiniteFuture();
    absl::Time reduced{};
    int64_t bytes = -1;  // -1: has not left
  };
  void trace(const ReductionTimes& times) const;

  const std::shared_ptr<GroupCore> core_;
  const std::string module_;

  // The reduction under way.
  int64_t forward_ = 0;
  uint64_t id_ = 0;
  absl::Time begun_{};
  absl::Time gradients_ended_{};
  std::vector<Bucket> buckets_;
  size_t unreduced_ = 0;

  Counter* reductions_ = nullptr;
  Counter* failures_ = nullptr;
  Counter* reduced_buckets_ = nullptr;
  Counter* early_buckets_ = nullptr;
  Counter* bytes_ = nullptr;
  Histogram* exposed_ = nullptr;
  Histogram* reducing_ = nullptr;

  mutable Mutex mutex_;
  std::string waits_for_ ABSL_GUARDED_BY(mutex_);
  std::string failed_ ABSL_GUARDED_BY(mutex_);
  absl::Time since_ ABSL_GUARDED_BY(mutex_){};
  int64_t shown_forward_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t done_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Duration last_forward_ ABSL_GUARDED_BY(mutex_){};
  ReductionTimes last_ ABSL_GUARDED_BY(mutex_);
  ReductionTimes sums_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_DDP_REDUCTION_WATCH_H_
