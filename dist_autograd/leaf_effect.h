#ifndef WEFT_DIST_AUTOGRAD_LEAF_EFFECT_H_
#define WEFT_DIST_AUTOGRAD_LEAF_EFFECT_H_

// LeafEffect: what a layer above does with the gradients of one backward where and when they become
// final, at each worker that takes part: an optimizer that steps within the backward. What it is to
// do travels with the pass, as bytes, and what became of it at each worker comes back with the end
// of that worker's part, so that it costs no message.

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/worker_key.h"
#include "weft/dist_autograd/context.h"

namespace weft::internal {

// The effect of one pass at one worker. Called by one thread at a time, without locks, grad mode
// off. What a method throws is an error of the pass.
class WEFT_API LeafEffect {
 public:
  virtual ~LeafEffect();
  // What this pass has for `leaf` is final: all its contributions have been added, and hooks and
  // reducers are through with it. True: it was used up, and the context is not to have it.
  virtual bool on_final(const at::Tensor& leaf, const at::Tensor& gradient) = 0;
  // All that is to run at this worker has run. What the root is to know of it.
  virtual std::string finish() = 0;
};

// Null: nothing is to be done at this worker. `data` is not empty.
using MakeLeafEffect = std::function<StatusOr<std::unique_ptr<LeafEffect>>(std::string_view data)>;

// What makes the effects of passes at this worker; the last one counts.
WEFT_API void set_leaf_effects(const Worker& worker, MakeLeafEffect make);

// What finish() has said, by worker; of a pass that has failed, by those that were heard of.
using LeafOutcomes = std::map<WorkerKey, std::string>;

// As try_backward(), with an effect.
WEFT_API Status backward_with_effect(const DistAutogradContext& context,
                                     const std::vector<at::Tensor>& losses,
                                     const BackwardOptions& options, std::string data,
                                     LeafOutcomes* outcomes);

}  // namespace weft::internal

#endif  // WEFT_DIST_AUTOGRAD_LEAF_EFFECT_H_
