#ifndef WEFT_TESTS_SIM_PIPELINE_WORLD_H_
#define WEFT_TESTS_SIM_PIPELINE_WORLD_H_

// The real runtime of pipelines on virtual time: a scenario, what came of it, and what is wrong with
// that. Stages wait instead of computing, and give exact values: whole numbers modulo 2^64, so a
// gradient that is lost, doubled, of another micro-batch or scaled by another's weight shows.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "weft/common/error.h"
#include "weft/common/runtime.h"
#include "weft/pipeline/internal/planted.h"
#include "weft/pipeline/pipeline.h"
#include "weft/pipeline/simulator.h"

namespace weft::testing {

struct Scenario {
  pipeline::Plan plan;
  pipeline::Costs costs;
  int steps = 1;
  uint64_t seed = 1;
  // Each frame is under way for so long; unset: 10 to 500 us, by the seed.
  std::optional<absl::Duration> latency{};
  // A stage, step and micro-batch whose forward fails; -1: none.
  int throw_stage = -1;
  int64_t throw_step = 0;
  int throw_micro_batch = 0;
  // A worker (not the maker, which is the first) whose process ends, or stops, so long after the
  // first step has begun; -1: none.
  int lost_worker = -1;
  absl::Duration lost_after{};
  bool stops = false;  // it neither ends nor is heard of
  // All connections break so often, each time after `lost_after`.
  int cuts = 0;
  // While steps run: frames late, in another order and twice; and lost or repeated, because the
  // connection breaks before or after one.
  bool disorder = false;
  bool losses = false;
  // Forwards alone; their outputs are compared, too.
  bool forward_only = false;
  // Steps wait for a norm over all stages. It clips nothing.
  bool barrier = false;
  pipeline::internal::RunnerBug bug{};
  // Around the workers' runtime; null: nothing.
  std::function<std::shared_ptr<Runtime>(std::shared_ptr<Runtime>)> wrap{};
};

constexpr absl::Duration kLease = absl::Seconds(3);

struct Outcome {
  std::vector<StatusOr<pipeline::StepResult>> steps;
  Status later;
  int64_t left = 0;                // slots and parts, at all workers that are there
  std::vector<std::string> parts;  // what ended the part of each worker, or what it does
  int cut = 0;                     // connections
  int64_t faults = 0;              // that hit a frame
  absl::Duration until_known{};    // from the loss (or the first step) to the end of the last step
  uint64_t hash = 0;
  std::string wrong;  // gradients of a stage at its step, or an action that ran twice
};

Outcome run(const Scenario& s);

// "", or the first difference to the prediction: times of every action, and peaks.
std::string differs_from_simulation(const Scenario& s);
// The same of one pipeline's steps, whose first worker began at `base`.
std::string differs_from(const pipeline::Plan& plan, const pipeline::Simulation& want,
                         const std::vector<StatusOr<pipeline::StepResult>>& steps, int64_t base);

// A plan of a random schedule, sometimes with skips, and faults of every kind.
Scenario random_scenario(uint64_t seed);
// "", or what is wrong: a step's result, the error that ended it, a gradient, or something left over.
std::string wrong_with(const Scenario& s, const Outcome& got);
std::string to_text(const Scenario& s);

pipeline::Costs costs_of(const pipeline::Plan& plan, bool uneven, pipeline::Ticks latency,
                         uint64_t seed);

}  // namespace weft::testing

#endif  // WEFT_TESTS_SIM_PIPELINE_WORLD_H_
