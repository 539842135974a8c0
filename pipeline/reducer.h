#ifndef WEFT_PIPELINE_REDUCER_H_
#define WEFT_PIPELINE_REDUCER_H_

// GradReducer: what the reduce action of a plan goes through: it makes a stage's gradients those of
// all replicas of the stage. group_reducer() is one over a process group, call_reducer() one over calls
// between the replicas' workers, where there are no process groups.
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
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/time/time.h"
#include "weft/collectives/process_group.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/time.h"
#include "weft/rpc/spi/service.h"

namespace weft::pipeline {

// What one stage computes. All calls but cancel() come from the thread that runs the worker's list.
class GradReducer {
 public:
  virtual ~GradReducer() = default;
  // `gradient` has all that the step adds to it, and is the reducer's until finish(). Once for each
  // gradient of a step, in an order that depends on the module and the plan alone; those of the
  // layers near the output come first, while the others are still computed.
  virtual Status ready(const at::Tensor& gradient) = 0;
  // All are ready. Ends when they are reduced, in place.
  virtual Status finish(absl::Duration time_left) = 0;
  // The pipeline has ended with an error, which a finish() that waits ends with. From any thread.
  virtual void cancel(const Status& why) { (void)why; }
  // The step has failed with `why`, which cancel() may not have brought yet: there is no finish() for
  // what is ready.
  virtual void drop(const Status& why) { (void)why; }
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

// How gradients are put together when they go by calls.
struct CallReducerOptions {
  // What the replicas of a stage have in common, and nothing else at their workers: with one more
  // life of a pipeline it is another one.
  std::string name{};
  // Gradients are sent together until they are so many bytes.
  int64_t bucket_bytes = int64_t{25} << 20;
  ReduceOp op = ReduceOp::kAvg;  // or kSum
  // How long a replica waits for the parts of the others; the step's deadline may be earlier.
  Timeout timeout = absl::Minutes(10);
};

// For PipelineServiceOptions::make_reducer. `replicas`: the workers that have the stage, in the same
// order at each; this one is among them. Costs each replica a call per bucket that is added up
// elsewhere: bucket k is at replica k modulo their number. All have the same bits: parts are added in
// the order of the replicas. A step that fails at one replica ends at the others at once; the loss of a
// replica's worker ends it when it is known: at once on a host where another replica waits for it, else
// with its lease, at the latest with the step's deadline. So does an error of the pipeline.
// Throws weft::Error: kind invalid_argument for a name that is empty or taken, buckets below 1 byte,
// another operation, or a worker that is none of the replicas; not_found for a replica that is unknown.
WEFT_API std::shared_ptr<GradReducer> call_reducer(const ServiceContext& context,
                                                   const std::vector<std::string>& replicas,
                                                   const CallReducerOptions& options);

}  // namespace weft::pipeline

#endif  // WEFT_PIPELINE_REDUCER_H_
