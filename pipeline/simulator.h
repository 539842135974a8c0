#ifndef WEFT_PIPELINE_SIMULATOR_H_
#define WEFT_PIPELINE_SIMULATOR_H_

// simulate(): how long a plan takes, what it holds in memory, and why workers idle, from the costs
// of its stages and edges. Times are whole ticks (nanoseconds, when they shall be compared with a
// run), so results are exact.
//
//   Simulation s = simulate(plan, Costs::uniform(plan, /*forward=*/1000, 1000, 1000));
//   s.makespan, s.span_bubble(), s.peak_memory()
//
// Rules. A worker runs its list in order. A forward starts when its inputs are there, a backward
// when the gradients of its outputs are; a send leaves when it is reached and costs its worker
// nothing; a message takes its bytes over the bandwidth and the latency. A receive waits only with
// `blocking_receives`. A full backward costs input_grad + weight_grad. Memory: +activation when a
// forward ends, down to `weight_activation` when an input gradient ends, to nothing when the
// weights' gradient has ended. Where stages share a weight, the last reduction of a worker that has
// one of them waits: it gives its gradient to the worker of the first of these stages, which gives
// the sum back when it has all. Replicas wait for each other in every reduction. With a barrier all
// stages step at the end of their worker's list, once the first worker has a part of the norm of all
// gradients from every other one, and each of them has the whole back. Pure; any thread.

#include <cstdint>
#include <string>
#include <vector>

#include "weft/common/api.h"
#include "weft/pipeline/plan.h"

namespace weft::pipeline {

using Ticks = int64_t;  // time in any unit

struct StageCost {  // of one micro-batch
  Ticks forward = 0;
  Ticks input_grad = 0;
  Ticks weight_grad = 0;
  Ticks reduce = 0;               // of the stage's gradients, once a step
  Ticks step = 0;                 // of the optimizer, once a step
  int64_t activation = 1;         // held from the forward to the input gradient
  int64_t weight_activation = 1;  // held from there to the weights' gradient
};

struct EdgeCost {  // of one message
  Ticks latency = 0;
  int64_t bytes = 0;               // of one micro-batch, each way
  int64_t bytes_per_kilotick = 0;  // 0: bytes cost no time
};

struct Costs {
  std::vector<StageCost> stages;
  std::vector<EdgeCost> edges;
  std::vector<EdgeCost>
      tied{};       // of each group of Plan::tied, each way; those not given cost nothing
  EdgeCost norm{};  // with a barrier: between the first worker and each other one, each way
  EdgeCost
      replicas{};  // of a reduction: between the first replica's worker and each other's, each way
  // The same for every worker: what is given is one worker's whole share, which its stages divide.
  // Throws kind invalid_argument when a share does not divide.
  WEFT_API static Costs uniform(const Plan& plan, Ticks forward, Ticks input_grad,
                                Ticks weight_grad, Ticks latency = 0, int64_t activation = 1);
  // From the whole share of each worker, which its stages divide (rounded down), and the same edge
  // everywhere. One share stands for all. Throws kind invalid_argument for another number of them.
  WEFT_API static Costs divided(const Plan& plan, const std::vector<StageCost>& shares,
                                const EdgeCost& edge);
};

struct SimulateOptions {  // what is simulated
  int steps = 1;          // that follow each other without a barrier
  bool blocking_receives = false;
  // As PipelineOptions::clip_norm and skip_not_finite put it before the steps of all stages. Throws kind
  // invalid_argument for an asynchronous plan.
  bool barrier = false;
};

// Where a worker's idle time went. The sum is makespan - busy.
struct IdleTime {
  Ticks warm_up = 0;     // before its first action
  Ticks drain = 0;       // after its last one
  Ticks dependency = 0;  // waiting for an action of another worker
  Ticks transport = 0;   // waiting for a message whose sender had done its work
  Ticks imbalance = 0;   // the part of `dependency` that is due to it having less to do
  Ticks total() const { return warm_up + drain + dependency + transport + imbalance; }
};

enum class WaitReason : uint8_t { kWarmUp, kDependency, kTransport, kDrain };  // why it was idle

// A time in which a worker had nothing to do.
struct TimedWait {
  WaitReason reason = WaitReason::kWarmUp;  // see IdleTime
  Ticks start = 0;                          // from
  Ticks end = 0;                            // until
};

struct TimedAction {  // when an action ran
  Action action;      // of the plan
  int step = 0;       // from 0
  Ticks start = 0;    // from
  Ticks end = 0;      // until
};

struct WorkerTimeline {              // what one worker did
  std::vector<TimedAction> actions;  // in order
  // In order; with the actions they fill the makespan. Those of a reduction that waits for others
  // lie inside of it.
  std::vector<TimedWait> waits;
  Ticks busy = 0;
  Ticks first_start = 0;
  Ticks last_end = 0;
  int64_t peak_memory = 0;
  IdleTime idle;
};

struct WEFT_API Simulation {
  Ticks makespan = 0;
  std::vector<Ticks> step_ends;  // when each step ended
  std::vector<WorkerTimeline> workers;

  Ticks max_busy() const;          // of the busiest worker
  Ticks max_span() const;          // first start to last end, of the worker where it is longest
  double makespan_bubble() const;  // 1 - max busy / makespan
  double span_bubble() const;      // 1 - max busy / max span
  int64_t peak_memory() const;     // of the worker that holds most
};

// Throws kind invalid_argument for costs of other sizes, or a plan that cannot run to its end,
// naming what each worker waits for.
WEFT_API Simulation simulate(const Plan& plan, const Costs& costs, SimulateOptions options = {});
// As many replicas as there are costs, one beside the other: the reduction of a stage begins when all
// of them have come to it and the first one knows (Costs::replicas of the first), takes as long as that of
// the longest, and the others know a message later. Throws as simulate() does.
WEFT_API std::vector<Simulation> simulate_replicas(const Plan& plan,
                                                   const std::vector<Costs>& costs,
                                                   SimulateOptions options = {});

}  // namespace weft::pipeline

#endif  // WEFT_PIPELINE_SIMULATOR_H_
