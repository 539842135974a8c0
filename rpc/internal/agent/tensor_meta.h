#ifndef WEFT_RPC_INTERNAL_AGENT_TENSOR_META_H_
#define WEFT_RPC_INTERNAL_AGENT_TENSOR_META_H_

// One tensor on the wire: a small descriptor (TensorMeta) and one or two buffers of plain bytes. A
// dense tensor has one buffer; a sparse COO tensor has two, the indices (int64) and the values.
//
// Sender:    split_for_wire() -> append_meta() into the header, the buffers' bytes into the frames.
// Receiver:  take_meta() (validates everything that can be known from the descriptor, allocates
//            nothing that it does not hold) -> charge total_bytes() to the budget ->
//            allocate_buffers() -> copy the bytes in -> join_from_wire().
//
// Buffers are always contiguous. Strides are never sent: a dense tensor whose memory is a
// permutation of a contiguous one (channels_last, a transpose) sends that permutation, so it costs
// no copy and its layout survives; every other view is gathered first, so that it never drags its
// storage along.
//
// Free functions without state; any thread. They neither read nor change the caller's grad mode.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "ATen/core/Tensor.h"
#include "absl/container/inlined_vector.h"
#include "c10/core/ScalarType.h"
#include "c10/util/DimVector.h"
#include "c10/util/SmallVector.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/rpc/internal/agent/receive_memory.h"
#include "weft/rpc/internal/device/devices.h"

namespace weft::internal {

inline constexpr int kMaxTensorDims = 64;

enum class TensorLayout : uint8_t { kDense = 0, kSparseCoo = 1 };

using DimOrder = c10::SmallVector<uint8_t, 8>;

struct TensorMeta {
  c10::ScalarType dtype = c10::ScalarType::Float;
  TensorLayout layout = TensorLayout::kDense;
  // The flag of the sender's tensor. join_from_wire() leaves the flag alone, because an interceptor
  // may claim the tensor first: see restore_requires_grad().
  bool requires_grad = false;
  c10::DimVector sizes;
  // Dense: buffer dimension i is tensor dimension order[i]; empty means the identity.
  DimOrder order;
  // Sparse COO only.
  bool coalesced = false;
  int32_t sparse_dim = 0;
  int64_t nnz = 0;
  // All buffers together.
  uint64_t nbytes = 0;
  // Where it belongs at the receiver. Its bytes come to host memory all the same.
  DeviceCode device = kCpuCode;

  friend bool operator==(const TensorMeta&, const TensorMeta&) = default;
};

// What one buffer must look like.
struct BufferSpec {
  c10::ScalarType dtype = c10::ScalarType::Byte;
  c10::DimVector sizes;
  uint64_t nbytes = 0;
};

// One or two: without an allocation of their own.
using BufferSpecs = absl::InlinedVector<BufferSpec, 2>;
using Buffers = absl::InlinedVector<at::Tensor, 2>;

struct TensorParts {
  TensorMeta meta;
  // Contiguous, detached, on the tensor's device: of one on the CPU nbytes() and const_data_ptr()
  // apply, of another one the bytes must be copied to the host first.
  Buffers buffers;
};

// What split_for_wire() would refuse, without doing any of it.
WEFT_API Status check_sendable_tensor(const at::Tensor& tensor);

// The buffers alias `tensor` when its memory can be sent as it lies and `copy` is false. Errors,
// kind invalid_argument: undefined, quantized, neither on the CPU nor on a CUDA device, or of a
// layout or dtype that cannot travel.
WEFT_API StatusOr<TensorParts> split_for_wire(const at::Tensor& tensor, bool copy);

WEFT_API void append_meta(const TensorMeta& meta, std::string* out);
// Takes one descriptor from the front of `in`. Errors, kind protocol: anything that no correct peer
// sends, nbytes that does not follow from dtype and sizes included.
WEFT_API Status take_meta(std::string_view* in, TensorMeta* out);

// REQUIRES of the rest: a meta from take_meta() or split_for_wire().
WEFT_API BufferSpecs buffer_specs(const TensorMeta& meta);
inline uint64_t total_bytes(const TensorMeta& meta) { return meta.nbytes; }
inline size_t buffer_count(const TensorMeta& meta) {
  return meta.layout == TensorLayout::kDense ? 1 : 2;
}

// Memory with values of any kind, as buffer_specs() says, large tensors from `memory` unless that
// is null. Error, kind resource: there is none.
WEFT_API StatusOr<Buffers> allocate_buffers(const TensorMeta& meta,
                                            ReceiveMemory* memory = nullptr);
// The same for one of them.
WEFT_API StatusOr<at::Tensor> allocate_buffer(const BufferSpec& spec, ReceiveMemory* memory);
// Around bytes that are there already; holds `owner` for as long as they are used. REQUIRES: data
// is aligned as the dtype wants it.
WEFT_API at::Tensor buffer_around(const BufferSpec& spec, char* data, std::shared_ptr<void> owner);
// May buffer `i` of such a tensor lie in memory that the sender can still write to? Not what is
// checked before it is used as an address, nor what is corrected in place.
WEFT_API bool may_stay_shared(const TensorMeta& meta, size_t i);

// The tensor, around the buffers (no copy). Bytes of bool are made 0 or 1; indices of a sparse
// tensor are checked, all of them, before it exists. Errors, kind protocol.
WEFT_API StatusOr<at::Tensor> join_from_wire(const TensorMeta& meta, Buffers buffers);

// For tensors that no interceptor claimed.
WEFT_API void restore_requires_grad(const TensorMeta& meta, at::Tensor* tensor);

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_AGENT_TENSOR_META_H_
