#ifndef WEFT_DIST_AUTOGRAD_INTERNAL_TORCH_COMPAT_H_
#define WEFT_DIST_AUTOGRAD_INTERNAL_TORCH_COMPAT_H_

// What differs between versions of LibTorch in how nodes of its graphs are held and made. Later
// ones hold them in an intrusive_ptr.

#include <memory>
#include <utility>

#include "torch/csrc/autograd/edge.h"
#include "torch/csrc/autograd/function.h"

#if defined(__SANITIZE_THREAD__)
#define WEFT_SEES_RACES 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define WEFT_SEES_RACES 1
#endif
#endif
#ifdef WEFT_SEES_RACES
#include <sanitizer/tsan_interface.h>
#endif

namespace weft::internal {

using Node = torch::autograd::Node;
using NodePtr = decltype(torch::autograd::Edge::function);

// LibTorch's deleter: graphs of any depth are freed without recursion.
template <class T, class... Args>
std::shared_ptr<T> make_node(Args&&... args) {
  return std::shared_ptr<T>(new T(std::forward<Args>(args)...), torch::autograd::deleteNode);
}

// The last reference to a node of ours is often a tensor's, and LibTorch, which is not
// instrumented, lets go of it: its atomic counts order our last use before the destructor, but
// ThreadSanitizer cannot see that. These two say it: the first when we are done with a node, the
// second in its destructor.
inline void last_use_of([[maybe_unused]] Node* node) {
#ifdef WEFT_SEES_RACES
  __tsan_release(node);
#endif
}
inline void end_of([[maybe_unused]] Node* node) {
#ifdef WEFT_SEES_RACES
  __tsan_acquire(node);
#endif
}

}  // namespace weft::internal

#undef WEFT_SEES_RACES

#endif  // WEFT_DIST_AUTOGRAD_INTERNAL_TORCH_COMPAT_H_
