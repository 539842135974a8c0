#include "weft/rpc/internal/tensor_meta.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <utility>

#include "ATen/EmptyTensor.h"
#include "ATen/ops/_coalesced.h"
#include "ATen/ops/_indices.h"
#include "ATen/ops/_sparse_coo_tensor_unsafe.h"
#include "ATen/ops/_values.h"
#include "ATen/ops/clone.h"
#include "c10/core/CPUAllocator.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "c10/core/Storage.h"
#include "c10/core/TensorImpl.h"
#include "c10/util/Exception.h"
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

WEFT_COLD std::string shape_text(c10::IntArrayRef sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i > 0) text.append(", ");
    append_piece(&text, sizes[i]);
  }
  return text.append("]");
}

WEFT_COLD Status refuse(std::string_view why) {
  return make_error(ErrorKind::kInvalidArgument, cat("this tensor cannot be sent: ", why));
}
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

// Everything that can be said of a descriptor alone; also fills nbytes when `fill` is set.
Status validate(TensorMeta* meta, bool fill) {
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

// The permutation that makes a dense tensor contiguous; nullopt when there is none (holes,
// overlaps). Empty: it is contiguous already.
std::optional<DimOrder> memory_order(const at::Tensor& tensor) {
  const int64_t dims = tensor.dim();
  // The format is asked first: with one channel both formats are contiguous, and only this way the
  // strides arrive as they were.
  if (dims == 4 && tensor.suggest_memory_format() == at::MemoryFormat::ChannelsLast &&
      tensor.is_contiguous(at::MemoryFormat::ChannelsLast)) {
    return DimOrder{0, 2, 3, 1};
  }
  if (dims == 5 && tensor.suggest_memory_format() == at::MemoryFormat::ChannelsLast3d &&
      tensor.is_contiguous(at::MemoryFormat::ChannelsLast3d)) {
    return DimOrder{0, 2, 3, 4, 1};
  }
  if (tensor.is_contiguous()) return DimOrder();
  if (!tensor.is_non_overlapping_and_dense()) return std::nullopt;
  DimOrder order(static_cast<size_t>(dims));
  std::iota(order.begin(), order.end(), uint8_t{0});
  // The number of the dimension decides last: a stable order without stable_sort's allocation.
  std::sort(order.begin(), order.end(), [&tensor](uint8_t a, uint8_t b) {
    // Dimensions of size 1 have strides that say nothing; they stay in front.
    const bool a_free = tensor.size(a) == 1;
    const bool b_free = tensor.size(b) == 1;
    if (a_free != b_free) return a_free;
    if (!a_free && tensor.stride(a) != tensor.stride(b)) return tensor.stride(a) > tensor.stride(b);
    return a < b;
  });
  if (std::is_sorted(order.begin(), order.end())) return std::nullopt;
  return order;
}

at::Tensor permuted(const at::Tensor& tensor, const DimOrder& order) {
  c10::DimVector dims;
  for (const uint8_t dim : order) dims.push_back(dim);
  return tensor.permute(dims);
}

DimOrder inverse(const DimOrder& order) {
  DimOrder result(order.size());
  for (size_t i = 0; i < order.size(); ++i) result[order[i]] = static_cast<uint8_t>(i);
  return result;
}

// The memory of `dense`, contiguous, detached and of its own when asked for or needed.
at::Tensor gather(const at::Tensor& dense, bool copy) {
  const c10::DispatchKeySet keys = dense.key_set();
  const bool zero = keys.has(c10::DispatchKey::ZeroTensor);
  if (!dense.is_conj() && !dense.is_neg() && !zero && dense.is_contiguous()) {
    // What an inference tensor was made into must be usable in autograd where it arrives in place.
    if (copy || dense.is_inference()) return dense.detach().clone(at::MemoryFormat::Contiguous);
    return dense.requires_grad() ? dense.detach() : dense;
  }
  const at::Tensor plain = dense.detach();
  // Each gives the same tensor back when there is nothing to do, but here there is.
  if (zero) return plain.clone(at::MemoryFormat::Contiguous);
  return plain.resolve_conj().resolve_neg().contiguous();
}

Status split_dense(const at::Tensor& tensor, bool copy, TensorParts* parts) {
  const std::optional<DimOrder> order = memory_order(tensor);
  if (order.has_value() && !order->empty()) {
    at::Tensor view = permuted(tensor, *order);
    if (view.is_contiguous()) {
      parts->meta.order = *order;
      parts->buffers.push_back(gather(view, copy));
      return absl::OkStatus();
    }
  }
  parts->buffers.push_back(gather(tensor, copy));
  return absl::OkStatus();
}

Status split_sparse(const at::Tensor& tensor, bool copy, TensorParts* parts) {
  parts->meta.layout = TensorLayout::kSparseCoo;
  parts->meta.coalesced = tensor.is_coalesced();
  parts->meta.sparse_dim = static_cast<int32_t>(tensor.sparse_dim());
  parts->meta.nnz = tensor._nnz();
  parts->buffers.push_back(gather(tensor._indices(), copy));
  parts->buffers.push_back(gather(tensor._values(), copy));
  if (parts->buffers[0].scalar_type() != ScalarType::Long) {
    return refuse("its indices are not int64");
  }
  return absl::OkStatus();
}

// Zeros and ones, whatever the sender's memory held: any other byte in a bool is undefined
// behaviour.
void normalise_bools(const at::Tensor& buffer) {
  const size_t n = buffer.nbytes();
  const auto* bytes = static_cast<const unsigned char*>(buffer.const_data_ptr());
  unsigned char any = 0;
  for (size_t i = 0; i < n; ++i) any |= bytes[i];
  if (any <= 1) return;  // the usual case touches nothing
  auto* mutable_bytes = static_cast<unsigned char*>(buffer.mutable_data_ptr());
  for (size_t i = 0; i < n; ++i) mutable_bytes[i] = mutable_bytes[i] != 0 ? 1 : 0;
}

Status check_indices(const TensorMeta& meta, const at::Tensor& indices) {
  const auto* data = static_cast<const int64_t*>(indices.const_data_ptr());
  const int64_t nnz = meta.nnz;
  for (int64_t d = 0; d < meta.sparse_dim; ++d) {
    const int64_t size = meta.sizes[static_cast<size_t>(d)];
    for (int64_t i = 0; i < nnz; ++i) {
      const int64_t index = data[d * nnz + i];
      if (index < 0 || index >= size) {
        return make_error(ErrorKind::kProtocol,
                          cat("sparse tensor ", shape_text(meta.sizes), ": entry ", i,
                              " has index ", index, " in dimension ", d));
      }
    }
  }
  if (!meta.coalesced || meta.sparse_dim == 0) return absl::OkStatus();
  for (int64_t i = 1; i < nnz; ++i) {
    bool greater = false;
    for (int64_t d = 0; d < meta.sparse_dim && !greater; ++d) {
      const int64_t before = data[d * nnz + i - 1];
      const int64_t here = data[d * nnz + i];
      if (here < before) break;
      greater = here > before;
    }
    if (!greater) {
      return make_error(ErrorKind::kProtocol, cat("sparse tensor ", shape_text(meta.sizes),
                                                  " is marked coalesced, but entry ", i,
                                                  " does not follow entry ", i - 1, " in order"));
    }
  }
  return absl::OkStatus();
}

WEFT_COLD Status from_torch(const char* doing, const std::exception& e) {
  const auto* error = dynamic_cast<const c10::Error*>(&e);
  return make_error(
      ErrorKind::kInternal,
      cat(doing, ": ", error != nullptr ? error->what_without_backtrace() : e.what()));
}

}  // namespace

Status check_sendable_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return refuse("it is undefined");
  if (tensor.is_nested()) return refuse("nested tensors are not supported");
  if (tensor.is_quantized()) {
    return refuse(cat("it is quantized (", c10::toString(tensor.scalar_type()),
                      "); send dequantize() of it, or int_repr() and the parameters"));
  }
  if (!tensor.device().is_cpu() && !tensor.device().is_cuda()) {
    return refuse(cat("it is on ", tensor.device().str(),
                      "; tensors travel from the CPU and from CUDA devices only"));
  }
  if (row_of(tensor.scalar_type()) == nullptr) {
    return refuse(cat("dtype ", c10::toString(tensor.scalar_type()), " does not travel"));
  }
  if (tensor.dim() > kMaxTensorDims) {
    return refuse(cat("it has ", tensor.dim(), " dimensions, at most ", kMaxTensorDims));
  }
  const c10::DispatchKeySet keys = tensor.key_set();
  if (keys.has(c10::DispatchKey::FuncTorchBatched) ||
      keys.has(c10::DispatchKey::FuncTorchGradWrapper) ||
      keys.has(c10::DispatchKey::Functionalize)) {
    return refuse("it is a wrapper of a function transform (vmap, grad)");
  }
  if (tensor.layout() != at::kStrided && tensor.layout() != at::kSparse) {
    return refuse(cat("its layout is ", static_cast<int>(tensor.layout()),
                      "; dense and sparse COO tensors travel (to_dense(), to_sparse())"));
  }
  return absl::OkStatus();
}

StatusOr<TensorParts> split_for_wire(const at::Tensor& tensor, bool copy) {
  WEFT_RETURN_IF_ERROR(check_sendable_tensor(tensor));
  try {
    const c10::InferenceMode not_inference(false);
    const c10::NoGradGuard no_grad;
    TensorParts parts;
    parts.meta.dtype = tensor.scalar_type();
    parts.meta.requires_grad = tensor.requires_grad();
    parts.meta.sizes = c10::DimVector(tensor.sizes());
    const bool sparse = tensor.layout() == at::kSparse;
    WEFT_RETURN_IF_ERROR(sparse ? split_sparse(tensor, copy, &parts)
                                : split_dense(tensor, copy, &parts));
    if (Status s = validate(&parts.meta, /*fill=*/true); !s.ok())
      return refuse(std::string(s.message()));
    return parts;
  } catch (const std::exception& e) {
    return from_torch("preparing a tensor for sending", e);
  }
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
  WEFT_RETURN_IF_ERROR(validate(&meta, /*fill=*/false));
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

StatusOr<at::Tensor> allocate_buffer(const BufferSpec& spec, ReceiveMemory* memory) {
  try {
    const c10::InferenceMode not_inference(false);
    if (memory != nullptr && spec.nbytes >= ReceiveMemory::kSmallest) {
      return memory->empty(spec.sizes, spec.dtype, spec.nbytes);
    }
    // Without the dispatcher, which costs more than the memory.
    return at::Tensor(at::detail::empty_cpu(spec.sizes, spec.dtype));
  } catch (const std::exception&) {
    return make_error(ErrorKind::kResource,
                      cat("cannot allocate ", spec.nbytes, " bytes for a tensor ",
                          c10::toString(spec.dtype), shape_text(spec.sizes)));
  }
}

StatusOr<Buffers> allocate_buffers(const TensorMeta& meta, ReceiveMemory* memory) {
  Buffers buffers;
  for (const BufferSpec& spec : buffer_specs(meta)) {
    WEFT_ASSIGN_OR_RETURN(at::Tensor buffer, allocate_buffer(spec, memory));
    buffers.push_back(std::move(buffer));
  }
  return buffers;
}

at::Tensor buffer_around(const BufferSpec& spec, char* data, std::shared_ptr<void> owner) {
  const c10::InferenceMode not_inference(false);
  auto held = std::make_unique<std::shared_ptr<void>>(std::move(owner));
  c10::DataPtr pointer(
      data, held.release(), [](void* p) { delete static_cast<std::shared_ptr<void>*>(p); },
      c10::Device(c10::kCPU));
  // Resized, the tensor moves to LibTorch's own allocator, like any from another one.
  c10::Storage storage(c10::Storage::use_byte_size_t(), spec.nbytes, std::move(pointer),
                       c10::GetDefaultCPUAllocator(), /*resizable=*/true);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(spec.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(spec.sizes);
  return tensor;
}

bool may_stay_shared(const TensorMeta& meta, size_t i) {
  if (meta.dtype == ScalarType::Bool) return false;
  return meta.layout == TensorLayout::kDense || i > 0;
}

StatusOr<at::Tensor> join_from_wire(const TensorMeta& meta, Buffers buffers) {
  const BufferSpecs specs = buffer_specs(meta);
  if (buffers.size() != specs.size()) {
    return make_error(ErrorKind::kInternal,
                      cat(buffers.size(), " buffers for a tensor of ", specs.size()));
  }
  for (size_t i = 0; i < specs.size(); ++i) {
    const at::Tensor& b = buffers[i];
    if (!b.defined() || !b.device().is_cpu() || b.layout() != at::kStrided ||
        b.scalar_type() != specs[i].dtype || b.sizes() != at::IntArrayRef(specs[i].sizes) ||
        !b.is_contiguous()) {
      return make_error(ErrorKind::kInternal,
                        cat("buffer ", i, " is not the one that belongs to tensor ",
                            c10::toString(meta.dtype), shape_text(meta.sizes)));
    }
  }
  try {
    if (meta.dtype == ScalarType::Bool) normalise_bools(buffers.back());
    if (meta.layout == TensorLayout::kDense && meta.order.empty()) return std::move(buffers[0]);
    const c10::InferenceMode not_inference(false);
    const c10::NoGradGuard no_grad;
    if (meta.layout == TensorLayout::kDense) {
      return permuted(buffers[0], inverse(meta.order)).detach();
    }
    WEFT_RETURN_IF_ERROR(check_indices(meta, buffers[0]));
    return at::_sparse_coo_tensor_unsafe(buffers[0], buffers[1], meta.sizes,
                                         buffers[1].options().layout(at::kSparse), meta.coalesced);
  } catch (const std::exception& e) {
    return from_torch("putting a received tensor together", e);
  }
}

void restore_requires_grad(const TensorMeta& meta, at::Tensor* tensor) {
  if (meta.requires_grad && !tensor->requires_grad()) tensor->set_requires_grad(true);
}

}  // namespace weft::internal
