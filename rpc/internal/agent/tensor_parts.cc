// Tensors to and from the buffers that tensor_meta.h describes.

#include <algorithm>
#include <cstring>
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
#include "weft/rpc/internal/agent/tensor_checks.h"
#include "weft/rpc/internal/codec/text.h"
#include "weft/rpc/plain_tensor.h"

namespace weft::internal {
namespace {

using c10::ScalarType;

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
  if (is_plain(dense)) {
    // What an inference tensor was made into must be usable in autograd where it arrives in place.
    if (copy && dense.device().is_cpu() && !dense.is_inference()) {
      // As clone() does, without the dispatcher: small arguments are copied in a microsecond.
      at::Tensor own = at::detail::empty_cpu(dense.sizes(), dense.options());
      if (dense.nbytes() > 0) {
        std::memcpy(own.mutable_data_ptr(), dense.const_data_ptr(), dense.nbytes());
      }
      return own;
    }
    if (copy || dense.is_inference()) return dense.detach().clone(at::MemoryFormat::Contiguous);
    return dense.requires_grad() ? dense.detach() : dense;
  }
  return plain(dense);
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
    return refuse_tensor("its indices are not int64");
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
    if (Status s = check_meta(&parts.meta, /*fill=*/true); !s.ok())
      return refuse_tensor(std::string(s.message()));
    return parts;
  } catch (const std::exception& e) {
    return from_torch("preparing a tensor for sending", e);
  }
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
