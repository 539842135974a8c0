#ifndef WEFT_PS_TRAINER_H_
#define WEFT_PS_TRAINER_H_

// ps::Trainer: steps of layers, where the next batch's rows are pulled while this one is computed, and
// pushes travel while the next one is.
//
//   weft::ps::Trainer trainer({&words, &head});
//   trainer.run([&]() -> std::optional<Batch> { return batches.next(); },       // none: the end
//               [&](const Batch& b) { words.prefetch(b.ids); },
//               [&](const Batch& b) { loss(head.forward(words.forward(b.ids)), b.labels).backward(); });
//
// With (const Batch&, DistAutogradContext&) as the last function's arguments each batch has a context of
// its own, and what that has for the layers' leaves is pushed.
//
// What is pulled ahead does not have the steps that end meanwhile: with `ahead` 1 the step of this client
// before, and what others have done in that time. A bound of SSP is greater by `ahead` for such rows. With
// `refresh` a client sees its own steps: rows that its push changes and that wait are pulled again with
// the push. One client alone then computes exactly what it computes with `ahead` 0.
// Threads: one at a time.

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/future.h"
#include "weft/dist_autograd/context.h"
#include "weft/ps/layers.h"

namespace weft::ps {

// How a trainer overlaps its steps.
struct TrainerOptions {
  // Batches that are looked up before the one that is computed; 0 to 32.
  int ahead = 1;
  bool refresh = false;
  // Pushes leave within the backward, each as soon as its layer has its gradients (Layer::step_in_backward()).
  // For a computation with one backward.
  bool in_backward = false;
  // For each step, from 0: instead of the rules' own learning rates.
  std::function<double(int64_t step)> rate{};
  // For a push. Default: the worker's rpc_timeout.
  Timeout deadline{};
};

// What a run has done.
struct TrainerReport {
  int64_t steps = 0;
  int64_t dropped = 0;       // batch: pushes of a layer that came too late in some part
  uint64_t most_behind = 0;  // of a push, in updates since the values were pulled
};

class WEFT_API Trainer {
 public:
  // The layers must outlive it. Throws weft::Error, kind invalid_argument: no layers, or `ahead` out of
  // its range.
  explicit Trainer(std::vector<Layer*> layers, TrainerOptions options = {});

  // Until `next` has no more and every push is acknowledged. Throws what a function throws, and what a
  // pull or push ends with, at the step after it at the latest; then the layers have forgotten what was
  // pulled and computed, and another run may follow.
  template <class Next, class LookUp, class Compute>
  TrainerReport run(Next next, LookUp look_up, Compute compute) {
    using Batch = typename std::decay_t<std::invoke_result_t<Next&>>::value_type;
    report_ = {};
    std::deque<Batch> batches;
    bool more = true;
    try {
      for (;;) {
        while (more && batches.size() <= static_cast<size_t>(options_.ahead)) {
          std::optional<Batch> batch = next();
          more = batch.has_value();
          if (!more) break;
          if (options_.ahead > 0) look_up(std::as_const(*batch));
          batches.push_back(*std::move(batch));
        }
        if (batches.empty()) break;
        const Batch batch = std::move(batches.front());
        batches.pop_front();
        begin_step();
        if constexpr (std::is_invocable_v<Compute&, const Batch&, DistAutogradContext&>) {
          DistAutogradContext context(worker());
          compute(batch, context);
          step(&context);
        } else {
          compute(batch);
          step(nullptr);
        }
      }
      finish();
    } catch (...) {
      drop();
      throw;
    }
    return report_;
  }

 private:
  const Worker& worker() const;
  StepOptions step_options() const;
  void begin_step();
  // Ends the pushes of the step before, and begins those of this one which have not left.
  void step(const DistAutogradContext* context);
  void finish();
  void drop();

  const std::vector<Layer*> layers_;
  const TrainerOptions options_;
  std::vector<Future<PushResult>> pushes_;
  TrainerReport report_;
};

}  // namespace weft::ps

#endif  // WEFT_PS_TRAINER_H_
