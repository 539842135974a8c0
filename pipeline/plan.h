#ifndef WEFT_PIPELINE_PLAN_H_
#define WEFT_PIPELINE_PLAN_H_

// Plan: what every worker of a pipeline does in one step, as data. A worker runs its list from top
// to bottom, one action at a time. Schedules (pipeline/schedule.h) make plans, the simulator
// predicts how long one takes (pipeline/simulator.h), the verifier proves that one is right
// (pipeline/verifier.h), and Pipeline runs it (pipeline/pipeline.h).
//
//   Plan plan = one_f_one_b(/*stages=*/4, /*micro_batches=*/8);
//   std::string text = to_text(plan);           // and back with plan_from_text()
//
// An action as text, with stages 0 and 1 and micro-batch 3:
//
//   F0.3    forward                      SF0>1.3  send the forward's result over the edge 0>1
//   B0.3    full backward                RF0>1.3  receive it (at the worker of stage 1)
//   I0.3    gradient of the inputs       SB0>1.3  send its gradient back, from 1 to 0
//   W0.3    gradient of the weights      RB0>1.3  receive it (at the worker of stage 0)
//   C0.3    forward again (recompute)    D0       reduce the gradients of stage 0
//                                        U0       step the optimizer of stage 0; U0.3 after
//                                                 micro-batch 3 (asynchronous plans)
//
// Values; any thread.

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/error.h"

namespace weft::pipeline {

enum class ActionKind : uint8_t {  // see the table above
  kForward,
  kBackward,
  kInputGrad,
  kWeightGrad,
  kRecompute,
  kSendForward,
  kReceiveForward,
  kSendBackward,
  kReceiveBackward,
  kReduce,
  kStep,
};

// Whether an action sends or receives.
constexpr bool is_transfer(ActionKind kind) {
  return kind == ActionKind::kSendForward || kind == ActionKind::kReceiveForward ||
         kind == ActionKind::kSendBackward || kind == ActionKind::kReceiveBackward;
}

struct Action {                            // one entry of a worker's list
  ActionKind kind = ActionKind::kForward;  // what is done
  int stage = 0;                           // of a transfer: the stage at this end
  int micro_batch = -1;                    // -1: of none (reduce, step)
  int edge = -1;                           // transfers: index into Plan::edges
  friend auto operator<=>(const Action&, const Action&) = default;
};

// What stage `from` gives to stage `to`: all of its outputs, or one of them.
struct Edge {
  int from = 0;
  int to = 0;
  int output = -1;  // -1: all
  friend auto operator<=>(const Edge&, const Edge&) = default;
};

struct Plan {
  std::string schedule;  // a word: where it comes from
  int micro_batches = 0;
  // Each stage steps after every micro-batch, with the weights of its forward kept for its
  // backward, instead of once after all of them.
  bool asynchronous = false;
  std::vector<int> placement;  // by stage: its worker, 0 to workers.size()-1
  std::vector<Edge> edges;
  // Groups of stages with one weight: their gradients are summed.
  std::vector<std::vector<int>> tied;
  std::vector<std::vector<Action>> workers;

  int stages() const { return static_cast<int>(placement.size()); }
  friend bool operator==(const Plan&, const Plan&) = default;
};

// Bounds of what is decoded.
inline constexpr int kMaxStages = 4096;
inline constexpr int kMaxMicroBatches = 1 << 16;
inline constexpr size_t kMaxActions = 1 << 22;

WEFT_API std::string to_text(const Plan& plan, const Action& action);
// A line per worker after a few of head.
WEFT_API std::string to_text(const Plan& plan);
WEFT_API std::string to_json(const Plan& plan);
// Strict: kind invalid_argument with the line (of JSON: the byte), what was expected and what was
// found. A decoded plan has indices in range; whether it is right, the verifier says.
WEFT_API StatusOr<Plan> plan_from_text(std::string_view text);
WEFT_API StatusOr<Plan> plan_from_json(std::string_view json);
// Either, by its first character.
WEFT_API StatusOr<Plan> parse_plan(std::string_view text);
// What decoders refuse, for plans made by hand.
WEFT_API Status check_indices(const Plan& plan);

// Sends of the plan: what travels in one step.
WEFT_API int64_t count_sends(const Plan& plan);
// Indices of the edges that leave or reach each stage, in order.
WEFT_API std::vector<std::vector<int>> edges_from(const Plan& plan);
WEFT_API std::vector<std::vector<int>> edges_to(const Plan& plan);

// Puts sends and receives between the actions of a plan that has none, along one order of all
// transfers: no buffers can deadlock then. Kind invalid_argument, naming the actions that wait for
// each other, when the actions cannot run in the order given.
WEFT_API Status insert_transfers(Plan* plan);

}  // namespace weft::pipeline

#endif  // WEFT_PIPELINE_PLAN_H_
