#ifndef WEFT_PIPELINE_ADVICE_H_
#define WEFT_PIPELINE_ADVICE_H_

// advise(): what every schedule costs for given stages, and which one to take.
//
//   AdviceRequest request;
//   request.workers = 4;
//   request.micro_batches = 8;
//   request.shares = {{.forward = 20'000'000, .input_grad = ..., .weight_grad = ...}};  // ns
//   const Advice advice = advise(request);
//   advice.candidates[advice.best].schedule
//
// The costs are those of each worker's whole share of the model, which its stages divide. The
// recommended schedule is the fastest synchronous one whose memory is within the cap; among equals
// the one with less memory, then with fewer messages. Pure; any thread.

#include <cstdint>
#include <string>
#include <vector>

#include "weft/common/api.h"
#include "weft/pipeline/plan.h"
#include "weft/pipeline/simulator.h"

namespace weft::pipeline {

struct AdviceRequest {
  int workers = 0;
  int micro_batches = 0;
  std::vector<StageCost> shares{};       // one per worker, or one for all
  EdgeCost edge{};                       // between neighbours
  int64_t memory_cap = 0;                // of activations at a worker; 0: none
  bool overlapped = false;               // steps follow each other without a barrier
  std::vector<std::string> schedules{};  // empty: schedule_names() and interleaved:4
  std::vector<Plan> plans{};             // others, to be compared with them
};

struct Candidate {  // a schedule with its predicted costs
  std::string schedule;
  Plan plan;            // of the schedule
  Simulation one_step;  // its simulation
  Ticks period = 0;     // of steps without a barrier, once they run evenly
  int64_t messages = 0;
  int64_t bytes = 0;
  bool fits = true;         // the memory is within the cap
  bool synchronous = true;  // the gradients are those of the batch
  IdleTime idle;            // of all workers
};

struct Advice {
  std::vector<Candidate> candidates;
  int best = -1;  // -1: none fits
  std::string why;
};

// Throws kind invalid_argument for sizes that no schedule takes, costs of another number of workers,
// or a schedule that is unknown.
WEFT_API Advice advise(const AdviceRequest& request);

}  // namespace weft::pipeline

#endif  // WEFT_PIPELINE_ADVICE_H_
