#ifndef WEFT_PS_INTERNAL_BACKWARD_PUSH_H_
#define WEFT_PS_INTERNAL_BACKWARD_PUSH_H_

// A step of a layer whose push leaves within the backward: when the last of the layer's leaves has its
// gradient, and not when the whole backward is over.
//
// Threads: watch() and end() from the layer's thread; gradients come on those of a backward. The push is made
// on the thread that brings the last one, and end() waits for one that is being made: what it uses is the
// layer's. REQUIRES: a push does not end its own BackwardPush.

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "torch/csrc/autograd/edge.h"
#include "weft/common/condition.h"
#include "weft/common/future.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/ps/client.h"

namespace weft::ps::internal {

// What a step has for its leaves.
class LeafGradients {
 public:
  virtual ~LeafGradients() = default;
  // Undefined: none.
  virtual at::Tensor take(const at::Tensor& leaf) const = 0;
  // A backward may still add to these gradients where they lie, so a push that is on its way wants a copy.
  virtual bool shared() const = 0;
};

// Takes them out of `.grad`, where another backward would add to them.
class GradFields : public LeafGradients {
 public:
  at::Tensor take(const at::Tensor& leaf) const override;
  bool shared() const override { return false; }
};

class BackwardPush : public std::enable_shared_from_this<BackwardPush> {
 public:
  using Push = std::function<Future<PushResult>(const LeafGradients&)>;

  BackwardPush(Runtime* runtime, Push push) : changed_(runtime), push_(std::move(push)) {}

  // Another leaf without whose gradient the push does not leave.
  void watch(const at::Tensor& leaf) ABSL_LOCKS_EXCLUDED(mutex_);
  bool has_left() const ABSL_LOCKS_EXCLUDED(mutex_);
  // No push leaves after this, nor is being made. The one that has left.
  std::optional<Future<PushResult>> end() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  class Hook;
  struct Leaf {
    at::Tensor leaf{};
    // A leaf refers to it weakly, and its hooks are to last.
    decltype(torch::autograd::Edge::function) accumulator{};
    at::Tensor gradient{};  // of a context; undefined: it is in `.grad`
    bool ready = false;
  };

  // Undefined: no push is wanted any more.
  at::Tensor leaf(size_t index) const ABSL_LOCKS_EXCLUDED(mutex_);
  void ready(size_t index, at::Tensor of_context) ABSL_LOCKS_EXCLUDED(mutex_);

  mutable Mutex mutex_;
  Condition changed_;                  // `pushing_`
  Push push_ ABSL_GUARDED_BY(mutex_);  // null: it has been used, or is not to be
  std::vector<Leaf> leaves_ ABSL_GUARDED_BY(mutex_);
  size_t ready_ ABSL_GUARDED_BY(mutex_) = 0;  // leaves
  bool pushing_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<Future<PushResult>> left_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_BACKWARD_PUSH_H_
