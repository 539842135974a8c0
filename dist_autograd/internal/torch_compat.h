#ifndef WEFT_DIST_AUTOGRAD_INTERNAL_TORCH_COMPAT_H_
#define WEFT_DIST_AUTOGRAD_INTERNAL_TORCH_COMPAT_H_

// What differs between versions of LibTorch in how nodes of its graphs are held and made. Later
// ones hold them in an intrusive_ptr.

#include <memory>
#include <utility>

#include "torch/csrc/autograd/edge.h"
#include "torch/csrc/autograd/function.h"

namespace weft::internal {

using Node = torch::autograd::Node;
using NodePtr = decltype(torch::autograd::Edge::function);

// LibTorch's deleter: graphs of any depth are freed without recursion.
template <class T, class... Args>
std::shared_ptr<T> make_node(Args&&... args) {
  return std::shared_ptr<T>(new T(std::forward<Args>(args)...), torch::autograd::deleteNode);
}

}  // namespace weft::internal

#endif  // WEFT_DIST_AUTOGRAD_INTERNAL_TORCH_COMPAT_H_
