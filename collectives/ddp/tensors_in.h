#ifndef WEFT_COLLECTIVES_DDP_TENSORS_IN_H_
#define WEFT_COLLECTIVES_DDP_TENSORS_IN_H_

// What the templates of data parallelism share: how a module is held, and where tensors are in the
// values that it takes and returns.

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"

namespace weft::internal {

// The tensors in what a forward takes or returns.
inline void find_tensors(at::Tensor& value, std::vector<at::Tensor*>* out) {
  out->push_back(&value);
}
template <class T>
void find_tensors(std::optional<T>& value, std::vector<at::Tensor*>* out);
template <class T>
void find_tensors(std::vector<T>& value, std::vector<at::Tensor*>* out);
template <class T, size_t N>
void find_tensors(std::array<T, N>& value, std::vector<at::Tensor*>* out);
template <class K, class T>
void find_tensors(std::map<K, T>& value, std::vector<at::Tensor*>* out);
template <class A, class B>
void find_tensors(std::pair<A, B>& value, std::vector<at::Tensor*>* out);
template <class... T>
void find_tensors(std::tuple<T...>& value, std::vector<at::Tensor*>* out);

template <class T>
void find_tensors(std::optional<T>& value, std::vector<at::Tensor*>* out) {
  if (value.has_value()) find_tensors(*value, out);
}
template <class T>
void find_tensors(std::vector<T>& value, std::vector<at::Tensor*>* out) {
  for (T& one : value) find_tensors(one, out);
}
template <class T, size_t N>
void find_tensors(std::array<T, N>& value, std::vector<at::Tensor*>* out) {
  for (T& one : value) find_tensors(one, out);
}
template <class K, class T>
void find_tensors(std::map<K, T>& value, std::vector<at::Tensor*>* out) {
  for (auto& [key, one] : value) find_tensors(one, out);
}
template <class A, class B>
void find_tensors(std::pair<A, B>& value, std::vector<at::Tensor*>* out) {
  find_tensors(value.first, out);
  find_tensors(value.second, out);
}
template <class... T>
void find_tensors(std::tuple<T...>& value, std::vector<at::Tensor*>* out) {
  std::apply([out](T&... one) { (find_tensors(one, out), ...); }, value);
}

// A holder's Impl, or a module itself.
template <class M, class = void>
struct HeldModule {
  using Held = std::shared_ptr<M>;
};
template <class M>
struct HeldModule<M, std::void_t<decltype(std::declval<M&>().ptr())>> {
  using Held = M;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_DDP_TENSORS_IN_H_
