#ifndef WEFT_PIPELINE_INTERNAL_RUNNER_STEP_H_
#define WEFT_PIPELINE_INTERNAL_RUNNER_STEP_H_

// What a step that runs keeps, on the runner's own thread.

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "weft/pipeline/internal/messages.h"
#include "weft/pipeline/internal/runner.h"

namespace weft::pipeline::internal {

struct Runner::Current {
  BeginMessage* message = nullptr;
  EndMessage end{};
  absl::Time deadline = absl::InfiniteFuture();
  absl::Time began = absl::InfinitePast();  // the action that runs: with all that it takes
  size_t place = 0;                         // in the worker's list
  int64_t live = 0;
  std::vector<size_t> put_off{};  // steps, as places in the worker's list, behind the barrier
  // What a stage made and this worker has not sent yet, by (stage, micro-batch): outputs, and
  // gradients of inputs with how many come from each edge.
  std::map<std::pair<int, int>, Tensors> outputs{};
  std::map<std::pair<int, int>, Tensors> gradients{};
  std::map<std::pair<int, int>, int> outputs_left{};
  std::map<std::pair<int, int>, int> gradients_left{};
  // How many tensors each edge brought to a forward, and how many outputs one gave.
  std::map<std::pair<int, int>, size_t> brought{};
  std::map<std::pair<int, int>, size_t> given{};
};

}  // namespace weft::pipeline::internal

#endif  // WEFT_PIPELINE_INTERNAL_RUNNER_STEP_H_
