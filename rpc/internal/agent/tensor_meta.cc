#include "weft/rpc/internal/agent/tensor_meta.h"

#include <limits>
#include <utility>

#include "c10/core/TensorImpl.h"
#include "weft/rpc/internal/agent/tensor_checks.h"
#include "weft/rpc/internal/codec/text.h"
#include "weft/rpc/internal/codec/varint.h"

namespace weft::internal {
namespace {

using c10::ScalarType;

// The closed list. Codes are ours, so that LibTorch may renumber; they are never reused.
struct DtypeRow {
  uint8_t code;
  ScalarType dtype;
  uint8_t item_bytes;
  bool differentiable;
};
constexpr DtypeRow kDtypes[] = {
    {0, ScalarType::Byte, 1, false},
    {1, ScalarType::Char, 1, false},
    {2, ScalarType::Short, 2, false},
    {3, ScalarType::Int, 4, false},
    {4, ScalarType::Long, 8, false},
    {5, ScalarType::Half, 2, true},
    {6, ScalarType::Float, 4, true},
    {7, ScalarType::Double, 8, true},
    {8, ScalarType::ComplexHalf, 4, true},
    {9, ScalarType::ComplexFloat, 8, true},
    {10, ScalarType::ComplexDouble, 16, true},
    {11, ScalarType::Bool, 1, false},
    {15, ScalarType::BFloat16, 2, true},
    {18, ScalarType::Bits1x8, 1, false},
    {19, ScalarType::Bits2x4, 1, false},
    {20, ScalarType::Bits4x2, 1, false},
    {21, ScalarType::Bits8, 1, false},
    {22, ScalarType::Bits16, 2, false},
    {23, ScalarType::Float8_e5m2, 1, true},
    {24, ScalarType::Float8_e4m3fn, 1, true},
    {25, ScalarType::Float8_e5m2fnuz, 1, true},
    {26, ScalarType::Float8_e4m3fnuz, 1, true},
    {27, ScalarType::UInt16, 2, false},
    {28, ScalarType::UInt32, 4, false},
    {29, ScalarType::UInt64, 8, false},
    {44, ScalarType::Float8_e8m0fnu, 1, true},
    {45, ScalarType::Float4_e2m1fn_x2, 1, true},
};

const DtypeRow* row_of(ScalarType dtype) {
  for (const DtypeRow& row : kDtypes) {
    if (row.dtype == dtype) return &row;
  }
  return nullptr;
}
const DtypeRow* row_of_code(uint8_t code) {
  for (const DtypeRow& row : kDtypes) {
    if (row.code == code) return &row;
  }
  return nullptr;
}

// Flags of a descriptor.
constexpr uint8_t kFlagSparse = 1;
constexpr uint8_t kFlagRequiresGrad = 2;
constexpr uint8_t kFlagCoalesced = 4;
constexpr uint8_t kFlagOrder = 8;
constexpr uint8_t kFlagDevice = 16;
constexpr uint8_t kAllFlags = 31;

WEFT_COLD Status hostile(std::string_view why) {
  return make_error(ErrorKind::kProtocol, cat("tensor descriptor: ", why));
}

// a * b into *a; false on overflow of the positive int64 range, which bounds every size in
// LibTorch.
bool multiply(uint64_t* a, uint64_t b) {
  uint64_t product = 0;
  if (__builtin_mul_overflow(*a, b, &product)) return false;
  if (product > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return false;
  *a = product;
  return true;
}

// Bytes of a dense block. Zero sizes count as one in the check for overflow, because strides are
// computed from them all the same.
bool block_bytes(c10::ArrayRef<int64_t> sizes, uint64_t item_bytes, uint64_t* bytes) {
  uint64_t bound = item_bytes;
  bool empty = false;
  for (const int64_t size : sizes) {
    if (size < 0) return false;
    empty = empty || size == 0;
    if (size > 0 && !multiply(&bound, static_cast<uint64_t>(size))) return false;
  }
  *bytes = empty ? 0 : bound;
  return true;
}

c10::DimVector value_sizes(const TensorMeta& meta) {
  c10::DimVector sizes{meta.nnz};
  sizes.append(meta.sizes.begin() + meta.sparse_dim, meta.sizes.end());
  return sizes;
}

}  // namespace

std::string shape_text(c10::IntArrayRef sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i > 0) text.append(", ");
    append_piece(&text, sizes[i]);
  }
  return text.append("]");
}

Status refuse_tensor(std::string_view why) {
  return make_error(ErrorKind::kInvalidArgument, cat("this tensor cannot be sent: ", why));
}

Status check_meta(TensorMeta* meta, bool fill) {
  const DtypeRow* row = row_of(meta->dtype);
  if (row == nullptr) return hostile("the dtype is not one that travels");
  if (meta->sizes.size() > static_cast<size_t>(kMaxTensorDims)) {
    return hostile(cat(meta->sizes.size(), " dimensions, at most ", kMaxTensorDims));
  }
  if (meta->requires_grad && !row->differentiable) {
    return hostile("requires_grad is set on a dtype that has no gradient");
  }
  uint64_t bytes = 0;
  if (meta->layout == TensorLayout::kDense) {
    if (meta->coalesced) return hostile("a dense tensor is marked coalesced");
    if (!block_bytes(meta->sizes, row->item_bytes, &bytes)) {
      return hostile(cat("the sizes ", shape_text(meta->sizes), " overflow 64 bits"));
    }
    if (!meta->order.empty()) {
      if (meta->order.size() != meta->sizes.size()) {
        return hostile("the memory order names another number of dimensions");
      }
      uint64_t seen = 0;
      bool identity = true;
      for (size_t i = 0; i < meta->order.size(); ++i) {
        if (meta->order[i] >= meta->sizes.size()) {
          return hostile("the memory order is not a permutation");
        }
        seen |= uint64_t{1} << meta->order[i];
        identity = identity && meta->order[i] == i;
      }
      const uint64_t all =
          meta->sizes.size() == 64 ? ~uint64_t{0} : (uint64_t{1} << meta->sizes.size()) - 1;
      if (seen != all) return hostile("the memory order is not a permutation");
      if (identity) return hostile("the memory order is spelled out although it is the plain one");
    }
  } else {
    if (!meta->order.empty()) return hostile("a sparse tensor has a memory order");
    if (meta->nnz < 0 || meta->sparse_dim < 0 ||
        static_cast<size_t>(meta->sparse_dim) > meta->sizes.size()) {
      return hostile(cat("sparse_dim ", meta->sparse_dim, " of ", meta->sizes.size(),
                         " dimensions with ", meta->nnz, " entries"));
    }
    uint64_t ignored = 0;
    uint64_t indices = 0;
    uint64_t values = 0;
    if (!block_bytes(meta->sizes, 1, &ignored) ||
        !block_bytes({int64_t{meta->sparse_dim}, meta->nnz}, 8, &indices) ||
        !block_bytes(value_sizes(*meta), row->item_bytes, &values) ||
        __builtin_add_overflow(indices, values, &bytes)) {
      return hostile(cat("the sizes ", shape_text(meta->sizes), " with ", meta->nnz,
                         " entries overflow 64 bits"));
    }
    if (meta->coalesced && meta->sparse_dim == 0 && meta->nnz > 1) {
      return hostile("several entries of a coalesced tensor without sparse dimensions");
    }
  }
  if (fill) {
    meta->nbytes = bytes;
  } else if (meta->nbytes != bytes) {
    return hostile(cat(meta->nbytes, " bytes declared, ", bytes, " follow from ",
                       c10::toString(meta->dtype), shape_text(meta->sizes)));
  }
  return absl::OkStatus();
}

Status check_sendable_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return refuse_tensor("it is undefined");
  if (tensor.is_nested()) return refuse_tensor("nested tensors are not supported");
  if (tensor.is_quantized()) {
    return refuse_tensor(cat("it is quantized (", c10::toString(tensor.scalar_type()),
                             "); send dequantize() of it, or int_repr() and the parameters"));
  }
  if (!tensor.device().is_cpu() && !tensor.device().is_cuda()) {
    return refuse_tensor(cat("it is on ", tensor.device().str(),
                             "; tensors travel from the CPU and from CUDA devices only"));
  }
  if (row_of(tensor.scalar_type()) == nullptr) {
    return refuse_tensor(cat("dtype ", c10::toString(tensor.scalar_type()), " does not travel"));
  }
  if (tensor.dim() > kMaxTensorDims) {
    return refuse_tensor(cat("it has ", tensor.dim(), " dimensions, at most ", kMaxTensorDims));
  }
  const c10::DispatchKeySet keys = tensor.key_set();
  if (keys.has(c10::DispatchKey::FuncTorchBatched) ||
      keys.has(c10::DispatchKey::FuncTorchGradWrapper) ||
      keys.has(c10::DispatchKey::Functionalize)) {
    return refuse_tensor("it is a wrapper of a function transform (vmap, grad)");
  }
  if (tensor.layout() != at::kStrided && tensor.layout() != at::kSparse) {
    return refuse_tensor(cat("its layout is ", static_cast<int>(tensor.layout()),
                             "; dense and sparse COO tensors travel (to_dense(), to_sparse())"));
  }
  return absl::OkStatus();
}

void append_meta(const TensorMeta& meta, std::string* out) {
  const bool sparse = meta.layout == TensorLayout::kSparseCoo;
  const DtypeRow* row = row_of(meta.dtype);
  out->push_back(static_cast<char>(row == nullptr ? 0xff : row->code));
  out->push_back(static_cast<char>(
      (sparse ? kFlagSparse : 0) | (meta.requires_grad ? kFlagRequiresGrad : 0) |
      (meta.coalesced ? kFlagCoalesced : 0) | (meta.order.empty() ? 0 : kFlagOrder) |
      (meta.device == kCpuCode ? 0 : kFlagDevice)));
  out->push_back(static_cast<char>(meta.sizes.size()));
  for (const int64_t size : meta.sizes) append_varint(static_cast<uint64_t>(size), out);
  out->append(reinterpret_cast<const char*>(meta.order.data()), meta.order.size());
  if (sparse) {
    out->push_back(static_cast<char>(meta.sparse_dim));
    append_varint(static_cast<uint64_t>(meta.nnz), out);
  }
  append_varint(meta.nbytes, out);
  if (meta.device != kCpuCode) append_varint(meta.device, out);
}

Status take_meta(std::string_view* in, TensorMeta* out) {
  constexpr uint64_t kMax = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  std::string_view rest = *in;
  TensorMeta meta;
  if (rest.size() < 3) return hostile("it ends early");
  const auto code = static_cast<uint8_t>(rest[0]);
  const auto flags = static_cast<uint8_t>(rest[1]);
  const auto dims = static_cast<uint8_t>(rest[2]);
  rest.remove_prefix(3);
  const DtypeRow* row = row_of_code(code);
  if (row == nullptr) return hostile(cat("unknown dtype number ", int{code}));
  meta.dtype = row->dtype;
  if ((flags & ~kAllFlags) != 0) return hostile(cat("unknown flags ", int{flags}));
  meta.requires_grad = (flags & kFlagRequiresGrad) != 0;
  meta.coalesced = (flags & kFlagCoalesced) != 0;
  if ((flags & kFlagSparse) != 0) meta.layout = TensorLayout::kSparseCoo;
  if (dims > kMaxTensorDims) {
    return hostile(cat(int{dims}, " dimensions, at most ", kMaxTensorDims));
  }
  const auto take = [&rest](uint64_t* value) {
    const size_t used = take_varint(rest, value);
    rest.remove_prefix(used);
    return used != 0;
  };
  meta.sizes.reserve(dims);
  for (int i = 0; i < dims; ++i) {
    uint64_t size = 0;
    if (!take(&size)) return hostile(cat("size ", i, " is not a number"));
    if (size > kMax) return hostile(cat("size ", i, " is above the range of int64"));
    meta.sizes.push_back(static_cast<int64_t>(size));
  }
  if ((flags & kFlagOrder) != 0) {
    if (dims == 0) return hostile("a memory order of no dimensions");
    if (rest.size() < dims) return hostile("the memory order ends early");
    meta.order.assign(rest.begin(), rest.begin() + dims);
    rest.remove_prefix(dims);
  }
  if (meta.layout == TensorLayout::kSparseCoo) {
    if (rest.empty()) return hostile("sparse_dim is missing");
    meta.sparse_dim = static_cast<uint8_t>(rest[0]);
    rest.remove_prefix(1);
    uint64_t nnz = 0;
    if (!take(&nnz)) return hostile("the number of entries is not a number");
    if (nnz > kMax) return hostile("the number of entries is above the range of int64");
    meta.nnz = static_cast<int64_t>(nnz);
  }
  if (!take(&meta.nbytes)) return hostile("the number of bytes is not a number");
  if ((flags & kFlagDevice) != 0) {
    // Whether the receiver has it is a question of the call, not of the connection.
    uint64_t device = 0;
    if (!take(&device) || device == kCpuCode || device > UINT32_MAX ||
        !device_of_code(static_cast<DeviceCode>(device)).has_value()) {
      return hostile(cat("number ", device, " stands for no device"));
    }
    meta.device = static_cast<DeviceCode>(device);
  }
  WEFT_RETURN_IF_ERROR(check_meta(&meta, /*fill=*/false));
  *out = std::move(meta);
  *in = rest;
  return absl::OkStatus();
}

BufferSpecs buffer_specs(const TensorMeta& meta) {
  BufferSpecs specs;
  const DtypeRow* row = row_of(meta.dtype);
  const uint64_t item_bytes = row == nullptr ? 0 : row->item_bytes;
  BufferSpec data;
  data.dtype = meta.dtype;
  if (meta.layout == TensorLayout::kDense) {
    data.sizes = meta.sizes;
    for (size_t i = 0; i < meta.order.size(); ++i) data.sizes[i] = meta.sizes[meta.order[i]];
    data.nbytes = meta.nbytes;
    specs.push_back(std::move(data));
    return specs;
  }
  BufferSpec indices;
  indices.dtype = ScalarType::Long;
  indices.sizes = {int64_t{meta.sparse_dim}, meta.nnz};
  block_bytes(indices.sizes, 8, &indices.nbytes);
  data.sizes = value_sizes(meta);
  block_bytes(data.sizes, item_bytes, &data.nbytes);
  specs.push_back(std::move(indices));
  specs.push_back(std::move(data));
  return specs;
}

}  // namespace weft::internal
