#include "weft/collectives/internal/operation.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "weft/collectives/internal/device_staging.h"
#include "weft/collectives/internal/reduce.h"
#include "weft/rpc/plain_tensor.h"

namespace weft::internal {
namespace {

int64_t numel(const Tensors& tensors) {
  int64_t n = 0;
  for (const at::Tensor& t : tensors) n += t.numel();
  return n;
}

at::TensorOptions plain_options(const at::Tensor& t) {
  return t.options().device(at::kCPU).requires_grad(false);
}

uint64_t bytes_of(const Tensors& tensors) {
  uint64_t out = 0;
  for (const at::Tensor& t : tensors) {
    if (t.defined()) out += static_cast<uint64_t>(t.numel()) * t.element_size();
  }
  return out;
}

// Tensors as one piece of plain memory: their own where it is one and plain, else a copy.
class Flat {
 public:
  Flat(const Operation& o, const Turn& turn, const Tensors& tensors, bool read)
      : operation_(o), turn_(turn), tensors_(tensors) {
    if (tensors.size() == 1 && tensors[0].is_cpu() && is_plain(tensors[0])) {
      memory_ = tensors[0];
      own_ = false;
      return;
    }
    memory_ = at::empty({numel(tensors)}, plain_options(tensors[0]));
    if (read) move_in(operation_, turn_, tensors_, memory_);
  }
  char* data() const { return static_cast<char*>(memory_.unsafeGetTensorImpl()->mutable_data()); }
  // What was written goes to where the caller sees it.
  void write_back() {
    if (own_) {
      move_out(operation_, turn_, tensors_, memory_);
      return;
    }
    if (!memory_.is_inference()) memory_.unsafeGetTensorImpl()->bump_version();
  }

 private:
  const Operation& operation_;
  const Turn& turn_;
  const Tensors& tensors_;
  at::Tensor memory_;
  bool own_ = true;
};

Blocks blocks_of(const Tensors& tensors) {
  std::vector<uint64_t> lengths;
  for (const at::Tensor& t : tensors) lengths.push_back(static_cast<uint64_t>(t.numel()));
  return Blocks::of(lengths);
}

Blocks split_blocks(const at::Tensor& t, const std::vector<int64_t>& splits, int size) {
  const auto n = static_cast<uint64_t>(t.numel());
  if (splits.empty()) return Blocks::even(n, size);
  const int64_t rows = t.dim() == 0 ? 1 : t.size(0);
  const uint64_t row = rows == 0 ? 0 : n / static_cast<uint64_t>(rows);
  std::vector<uint64_t> lengths;
  for (const int64_t split : splits) lengths.push_back(static_cast<uint64_t>(split) * row);
  return Blocks::of(lengths);
}

// A copy that the operation may use up.
Tensors copy_of(const Operation& o, const Turn& turn, const Tensors& tensors) {
  const at::Tensor flat = at::empty({numel(tensors)}, plain_options(tensors[0]));
  move_in(o, turn, tensors, flat);
  return {flat};
}

Status perform_lists(Engine& engine, const Turn& turn, Operation& o, ElementType type) {
  const Membership& m = engine.member();
  const auto rank = m.rank;
  const uint64_t size = element_size(type);
  switch (o.kind) {
    case OpKind::kAllGather: {
      Flat out(o, turn, o.outputs, false);
      Flat in(o, turn, o.inputs, true);
      const Blocks blocks = o.outputs.size() == 1
                                ? Blocks::even(static_cast<uint64_t>(o.outputs[0].numel()), m.size)
                                : blocks_of(o.outputs);
      if (blocks.length(rank) > 0) {
        std::memmove(out.data() + blocks.begin(rank) * size, in.data(), blocks.length(rank) * size);
      }
      WEFT_RETURN_IF_ERROR(engine.all_gather(turn, type, o.algorithm, out.data(), blocks));
      out.write_back();
      return absl::OkStatus();
    }
    case OpKind::kGather: {
      Flat in(o, turn, o.inputs, true);
      const auto n = static_cast<uint64_t>(o.inputs[0].numel());
      if (rank != o.root) {
        return engine.gather(turn, type, o.algorithm, in.data(), n, nullptr, Blocks(), o.root);
      }
      Flat out(o, turn, o.outputs, false);
      WEFT_RETURN_IF_ERROR(engine.gather(turn, type, o.algorithm, in.data(), n, out.data(),
                                         blocks_of(o.outputs), o.root));
      out.write_back();
      return absl::OkStatus();
    }
    case OpKind::kScatter: {
      Flat out(o, turn, o.outputs, false);
      const auto n = static_cast<uint64_t>(o.outputs[0].numel());
      if (rank == o.root) {
        Flat in(o, turn, o.inputs, true);
        WEFT_RETURN_IF_ERROR(engine.scatter(turn, type, o.algorithm, in.data(), blocks_of(o.inputs),
                                            out.data(), n, o.root));
      } else {
        WEFT_RETURN_IF_ERROR(
            engine.scatter(turn, type, o.algorithm, nullptr, Blocks(), out.data(), n, o.root));
      }
      out.write_back();
      return absl::OkStatus();
    }
    case OpKind::kReduceScatter: {
      // Peers may read the input where it is, while the output is written.
      bool shared = false;
      for (const at::Tensor& t : o.inputs) shared = shared || share_memory(t, o.outputs[0]);
      const Tensors kept = shared ? copy_of(o, turn, o.inputs) : Tensors();
      Flat in(o, turn, shared ? kept : o.inputs, true);
      Flat out(o, turn, o.outputs, false);
      const Blocks blocks = o.inputs.size() == 1
                                ? Blocks::even(static_cast<uint64_t>(o.inputs[0].numel()), m.size)
                                : blocks_of(o.inputs);
      WEFT_RETURN_IF_ERROR(
          engine.reduce_scatter(turn, type, o.op, o.algorithm, in.data(), blocks, out.data()));
      out.write_back();
      return absl::OkStatus();
    }
    default: {
      const bool single = o.name == "all_to_all_single";
      const Blocks from =
          single ? split_blocks(o.inputs[0], o.input_splits, m.size) : blocks_of(o.inputs);
      const Blocks to =
          single ? split_blocks(o.outputs[0], o.output_splits, m.size) : blocks_of(o.outputs);
      // Rows that go out must not be overwritten by rows that come in.
      const bool same = single && share_memory(o.inputs[0], o.outputs[0]);
      const Tensors kept = same ? copy_of(o, turn, o.inputs) : Tensors();
      Flat in(o, turn, same ? kept : o.inputs, true);
      Flat out(o, turn, o.outputs, false);
      WEFT_RETURN_IF_ERROR(
          engine.all_to_all(turn, type, o.algorithm, in.data(), from, out.data(), to));
      out.write_back();
      return absl::OkStatus();
    }
  }
}

Status perform_checked(Engine& engine, const Turn& turn, Operation& o) {
  if (o.kind == OpKind::kBarrier) return engine.barrier(turn);
  if (o.kind == OpKind::kMonitoredBarrier) return engine.monitored_barrier(turn);
  if (o.kind == OpKind::kSend && o.receives) return perform_receive(engine, turn, o);
  WEFT_ASSIGN_OR_RETURN(
      const ElementType type,
      element_type_of((o.outputs.empty() ? o.inputs : o.outputs)[0].scalar_type()));
  switch (o.kind) {
    case OpKind::kSend: return perform_send(engine, turn, o, type);
    case OpKind::kAllReduce: {
      Flat work(o, turn, o.outputs, true);
      WEFT_RETURN_IF_ERROR(engine.all_reduce(turn, type, o.op, o.algorithm, work.data(),
                                             static_cast<uint64_t>(numel(o.outputs))));
      work.write_back();
      return absl::OkStatus();
    }
    case OpKind::kBroadcast: {
      const bool root = engine.member().rank == o.root;
      Flat work(o, turn, o.outputs, root);
      WEFT_RETURN_IF_ERROR(engine.broadcast(turn, type, o.algorithm, work.data(),
                                            static_cast<uint64_t>(numel(o.outputs)), o.root));
      if (!root) work.write_back();
      return absl::OkStatus();
    }
    case OpKind::kReduce: {
      const auto n = static_cast<uint64_t>(numel(o.outputs));
      if (engine.member().rank != o.root) {
        const Tensors copy = copy_of(o, turn, o.outputs);
        const Flat used_up(o, turn, copy, true);
        return engine.reduce(turn, type, o.op, used_up.data(), n, o.root);
      }
      Flat work(o, turn, o.outputs, true);
      WEFT_RETURN_IF_ERROR(engine.reduce(turn, type, o.op, work.data(), n, o.root));
      work.write_back();
      return absl::OkStatus();
    }
    default: return perform_lists(engine, turn, o, type);
  }
}

// The part of `memory` that is t's, each in turn.
at::Tensor next_part(const at::Tensor& memory, int64_t* at, const at::Tensor& t) {
  const at::Tensor part = memory.narrow(0, *at, t.numel()).view(t.sizes());
  *at += t.numel();
  return part;
}

}  // namespace

void move_in(const Operation& o, const Turn& turn, const Tensors& tensors,
             const at::Tensor& memory) {
  int64_t at = 0;
  std::vector<at::Tensor> from;
  std::vector<at::Tensor> to;
  for (const at::Tensor& t : tensors) {
    const at::Tensor part = next_part(memory, &at, t);
    if (o.staging == nullptr) {
      part.copy_(t);
    } else {
      from.push_back(t);
      to.push_back(part);
    }
  }
  if (!from.empty()) o.staging->copy(o, turn, std::move(from), std::move(to));
}

void move_out(const Operation& o, const Turn& turn, const Tensors& tensors,
              const at::Tensor& memory) {
  int64_t at = 0;
  std::vector<at::Tensor> from;
  std::vector<at::Tensor> to;
  for (const at::Tensor& t : tensors) {
    const at::Tensor part = next_part(memory, &at, t);
    if (o.staging == nullptr) {
      t.copy_(part);
    } else {
      from.push_back(part);
      to.push_back(t);
    }
  }
  if (from.empty()) return;
  std::vector<at::Tensor> written = to;
  o.staging->copy(o, turn, std::move(from), std::move(to));
  for (const at::Tensor& t : written) {
    if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  }
}

uint64_t bytes_of(const Operation& operation) {
  return std::max(bytes_of(operation.inputs), bytes_of(operation.outputs));
}

Status compare_operations(Engine& engine, const Turn& turn, const Operation& o) {
  Fingerprint mine;
  mine.op = o.kind;
  mine.reduction = o.op.kind();
  mine.root = o.root;
  const Tensors& tensors = o.outputs.empty() ? o.inputs : o.outputs;
  if (!tensors.empty()) {
    WEFT_ASSIGN_OR_RETURN(mine.type, element_type_of(tensors[0].scalar_type()));
  }
  switch (o.kind) {
    case OpKind::kAllReduce:
    case OpKind::kBroadcast:
    case OpKind::kReduce: mine.count = static_cast<uint64_t>(numel(o.outputs)); break;
    // Every rank knows all sizes; of gather, scatter and all_to_all it does not.
    case OpKind::kAllGather: mine.count = static_cast<uint64_t>(numel(o.outputs)); break;
    case OpKind::kReduceScatter: mine.count = static_cast<uint64_t>(numel(o.inputs)); break;
    default: break;
  }
  return engine.compare(turn, mine);
}

Status perform_operation(Engine& engine, const Turn& turn, Operation& operation) {
  const at::NoGradGuard no_grad;
  engine.note().set_bytes(bytes_of(operation));
  try {
    WEFT_RETURN_IF_ERROR(perform_checked(engine, turn, operation));
    if (operation.staging != nullptr) operation.staging->finish(operation, turn);
    return absl::OkStatus();
  } catch (...) {
    return status_from_current_exception();
  }
}

}  // namespace weft::internal
