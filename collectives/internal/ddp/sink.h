#ifndef WEFT_COLLECTIVES_INTERNAL_DDP_SINK_H_
#define WEFT_COLLECTIVES_INTERNAL_DDP_SINK_H_

// What data parallelism needs of LibTorch's graphs, in one place: they are no stable interface.
//
// Threads: as LibTorch's graphs.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "torch/csrc/autograd/edge.h"
#include "weft/collectives/grad_accessor.h"

namespace weft::internal {

using GraphNode = decltype(torch::autograd::Edge::function);
using OnBackward = std::function<void(const std::shared_ptr<GradAccessor>&)>;

// Puts a node between the outputs of a forward and what is made of them: `begins` is called at the
// beginning of each backward that comes through, before any parameter below has its gradient.
// Tensors that do not require grad stay as they are.
// `deadline`: of a backward that was given none.
void watch_outputs(const std::vector<at::Tensor*>& outputs, absl::Duration deadline,
                   OnBackward begins);

// `ready` is called whenever a backward has added up all that it has for `leaf`.
class LeafHook {
 public:
  LeafHook(const at::Tensor& leaf, OnBackward ready);
  LeafHook(LeafHook&&) noexcept = default;
  LeafHook& operator=(LeafHook&&) noexcept = default;
  // Takes the hook away.
  ~LeafHook();
  // Somebody has such a hook on this leaf.
  static bool is_on(const at::Tensor& leaf);

 private:
  GraphNode accumulator_;
  uintptr_t key_ = 0;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_DDP_SINK_H_
