#ifndef WEFT_PIPELINE_REDUCER_H_
#define WEFT_PIPELINE_REDUCER_H_

// GradReducer: what the reduce action of a plan goes through: it makes a stage's gradients those of
// all replicas of the stage. group_reducer() is one over a process group.
//
//   weft::ProcessGroup group = ...;                      // the replicas of this stage, at each of them
//   weft::pipeline_service({.make_reducer = [group](const weft::ServiceContext&,
//                                                   const weft::pipeline::Plan&, int stage) {
//     return weft::pipeline::group_reducer(group);
//   }});
//   weft::pipeline::Pipeline p(worker, stages,
//                              weft::pipeline::with_reductions(weft::pipeline::zb_h1(2, 8)), ...);
//
// A stage whose module is a DistributedDataParallel needs none: its own reducer is told when its
// gradients are there.

#include <cstdint>
#include <memory>

#include "ATen/core/Tensor.h"
#include "absl/time/time.h"
#include "weft/collectives/process_group.h"
#include "weft/common/api.h"
#include "weft/common/error.h"

namespace weft::pipeline {

// What one stage computes. All calls come from the thread that runs the worker's list.
class GradReducer {
 public:
  virtual ~GradReducer() = default;
  // `gradient` has all that the step adds to it, and is the reducer's until finish(). Once for each
  // gradient of a step, in an order that depends on the module and the plan alone; those of the
  // layers near the output come first, while the others are still computed.
  virtual Status ready(const at::Tensor& gradient) = 0;
  // All are ready. Ends when they are reduced, in place.
  virtual Status finish(absl::Duration time_left) = 0;
  // The step has failed: there is no finish() for what is ready.
  virtual void drop() {}
};

// How gradients are put together, and what becomes of them.
struct GroupReducerOptions {
  // Gradients are reduced together until they are so many bytes.
  int64_t bucket_bytes = int64_t{25} << 20;
  ReduceOp op = ReduceOp::kAvg;
};

// Every member calls the same: the replicas have equal modules and plans. A step that fails at one
// replica ends at the others with their deadline, or with the group's error. Throws weft::Error,
// kind invalid_argument, without a group or with a bucket below 1 byte.
WEFT_API std::shared_ptr<GradReducer> group_reducer(const ProcessGroup& group,
                                                    const GroupReducerOptions& options = {});

}  // namespace weft::pipeline

#endif  // WEFT_PIPELINE_REDUCER_H_
