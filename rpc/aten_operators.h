#ifndef WEFT_RPC_ATEN_OPERATORS_H_
#define WEFT_RPC_ATEN_OPERATORS_H_

// LibTorch's operators as callees. A library that says lib.aten() lets others call the pure
// operators of a fixed list (default_aten_operators(): nothing in place, nothing that opens files,
// loads code or returns uninitialised memory), by LibTorch's own names, through its dispatcher:
//
//   weft::FunctionRef<at::Tensor(at::Tensor, at::Tensor)> add{"aten::add.Tensor"};
//   at::Tensor sum = weft::rpc_sync(worker, "ps0", add, a, b);
//
//   weft::FunctionRef<at::Tensor(std::vector<int64_t>, at::TensorOptions)> ones{"aten::ones"};
//   at::Tensor leaf = weft::rpc_sync(worker, "ps0", ones, std::vector<int64_t>{2, 3},
//                                    at::TensorOptions().dtype(at::kDouble).requires_grad(true));
//
// How a schema is written as a signature: Tensor is at::Tensor, Scalar at::Scalar, int and SymInt
// int64_t, ScalarType at::ScalarType, T[] std::vector<T>, T? std::optional<T>; dtype, layout,
// device and pin_memory in a row are one at::TensorOptions, which also has requires_grad; a
// Generator is left out (the callee's default is used). Arguments at the end that have defaults may
// be left out. Several results are a std::tuple.

#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/api.h"
#include "weft/rpc/value.h"

namespace weft {

// A number that knows its own type: bool, int, float or complex.
template <>
struct Codec<at::Scalar> {
  static constexpr KindText kKind{"scalar"};
  WEFT_API static void encode(Encoder& out, const at::Scalar& value);
  WEFT_API static StatusOr<at::Scalar> decode(Decoder& in);
};

template <>
struct Codec<at::TensorOptions> {
  static constexpr KindText kKind{"tensor_options"};
  WEFT_API static void encode(Encoder& out, const at::TensorOptions& value);
  WEFT_API static StatusOr<at::TensorOptions> decode(Decoder& in);
};

// The allow-list, sorted: "aten::abs", "aten::add.Tensor", ...
WEFT_API std::vector<std::string> default_aten_operators();

}  // namespace weft

#endif  // WEFT_RPC_ATEN_OPERATORS_H_
