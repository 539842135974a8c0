#ifndef WEFT_COLLECTIVES_INTERNAL_OPERATION_H_
#define WEFT_COLLECTIVES_INTERNAL_OPERATION_H_

// Operation: what a caller asked for, with its tensors. Checked on the caller's thread, performed
// in its turn: tensors become plain memory here, and nowhere else.
//
// Threads: one at a time.

#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/container/inlined_vector.h"
#include "weft/collectives/internal/engine.h"
#include "weft/common/api.h"

namespace weft::internal {

class DeviceStaging;

using Tensors = absl::InlinedVector<at::Tensor, 1>;

struct Operation {
  OpKind kind = OpKind::kNone;
  std::string_view name;  // a literal
  Tensors outputs;        // written; all_reduce, broadcast and reduce also read them
  Tensors inputs;
  ReduceOp op{};
  Algorithm algorithm = Algorithm::kAuto;
  int root = -1;  // send, recv: the peer
  int tag = 0;
  bool receives = false;               // kind kSend
  bool any_shape = false;              // receives
  std::vector<int64_t> output_splits;  // all_to_all of one tensor each
  std::vector<int64_t> input_splits;
  std::shared_ptr<int> source;  // where recv writes from whom it was
  at::Tensor received;          // any_shape
  // For tensors on a GPU (device_staging.h). Null: they are on the CPU.
  DeviceStaging* staging = nullptr;
  std::shared_ptr<const void> after;  // what the caller had queued
  // Contiguous copies on the device that stand for outputs, and these outputs.
  std::vector<std::pair<at::Tensor, at::Tensor>> scattered;

  bool counts() const { return kind != OpKind::kSend; }
};

// Error, kind invalid_argument, before anything moves.
Status check_operation(const Membership& member, const Operation& operation);
Status perform_operation(Engine& engine, const Turn& turn, Operation& operation);

// Bytes of `tensors` in their order into `memory`, or out of it, wherever they are. Throws weft::Error.
void move_in(const Operation& o, const Turn& turn, const Tensors& tensors,
             const at::Tensor& memory);
void move_out(const Operation& o, const Turn& turn, const Tensors& tensors,
              const at::Tensor& memory);
// The bytes of this rank's inputs or of its outputs, the larger of both.
uint64_t bytes_of(const Operation& operation);
// What this rank is about to do, compared with all others. Error, kind invalid_argument, on every
// rank: they differ.
Status compare_operations(Engine& engine, const Turn& turn, const Operation& operation);

Status perform_send(Engine& engine, const Turn& turn, const Operation& o, ElementType type);
Status perform_receive(Engine& engine, const Turn& turn, Operation& o);

// Whether a write to one may change the other. Tensors that interleave do not share; those without
// gaps that have bytes in common do.
bool share_memory(const at::Tensor& a, const at::Tensor& b);

StatusOr<at::ScalarType> scalar_type_of(uint8_t type);
WEFT_API StatusOr<ElementType> element_type_of(at::ScalarType type);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_OPERATION_H_
