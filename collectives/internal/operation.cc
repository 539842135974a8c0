#include "weft/collectives/internal/operation.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "weft/collectives/internal/reduce.h"
#include "weft/collectives/internal/text.h"

namespace weft::internal {
namespace {

Status invalid(std::string_view name, std::string_view why) {
  return make_error(ErrorKind::kInvalidArgument, cat(name, ": ", why));
}

bool may_overlap_itself(const at::Tensor& t) {
  if (t.numel() <= 1 || t.is_contiguous()) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) > 1) dims.emplace_back(t.stride(d), t.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;  // of what the dimensions so far address
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

// Bytes from the first to the last element, both included.
std::pair<uintptr_t, uintptr_t> span_of(const at::Tensor& t) {
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += t.stride(d) * (t.size(d) - 1);
  const auto begin = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  return {begin, begin + static_cast<uintptr_t>((last + 1) * t.element_size())};
}

// Two tensors that interleave are no overlap; those without gaps that share bytes are.
bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0 || a.device() != b.device()) return false;
  if (!a.is_contiguous() || !b.is_contiguous()) return a.is_same(b);
  const auto [a_begin, a_end] = span_of(a);
  const auto [b_begin, b_end] = span_of(b);
  return a_begin < b_end && b_begin < a_end;
}

Status check_tensor(const Operation& o, const at::Tensor& t, std::string_view role, size_t i) {
  const auto which = [&] { return cat("the ", role, " tensor ", i); };
  if (!t.defined()) return invalid(o.name, cat(which(), " is undefined"));
  if (t.layout() != at::kStrided) return invalid(o.name, cat(which(), " is not strided"));
  if (t.is_meta()) return invalid(o.name, cat(which(), " has no memory (meta)"));
  if (const auto type = element_type_of(t.scalar_type()); !type.ok()) {
    return invalid(o.name, cat(which(), ": ", type.status().message()));
  }
  return absl::OkStatus();
}

Status check_tensors(const Operation& o) {
  const at::Tensor* first = nullptr;
  const auto check = [&](const Tensors& tensors, std::string_view role, bool written) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& t = tensors[i];
      WEFT_RETURN_IF_ERROR(check_tensor(o, t, role, i));
      if (first == nullptr) first = &t;
      if (t.scalar_type() != first->scalar_type()) {
        return invalid(o.name, cat("the tensors are of types ", c10::toString(first->scalar_type()),
                                   " and ", c10::toString(t.scalar_type())));
      }
      if (!written) continue;
      if (may_overlap_itself(t)) {
        return invalid(o.name,
                       cat("the ", role, " tensor ", i, " overlaps itself (an expanded view?)"));
      }
      for (size_t k = 0; k < i; ++k) {
        if (share_memory(t, tensors[k])) {
          return invalid(o.name,
                         cat("the ", role, " tensors ", k, " and ", i, " overlap each other"));
        }
      }
    }
    return absl::OkStatus();
  };
  WEFT_RETURN_IF_ERROR(check(o.outputs, "output", true));
  return check(o.inputs, "input", false);
}

Status check_lists(const Membership& m, const Operation& o) {
  const auto size = static_cast<size_t>(m.size);
  const auto count_is = [&](const Tensors& list, std::string_view role, size_t wanted) {
    if (list.size() == wanted) return absl::OkStatus();
    return invalid(
        o.name, cat(list.size(), " ", role, " tensors at rank ", m.rank, ", wanted are ", wanted));
  };
  const auto same_count = [&](const at::Tensor& a, const at::Tensor& b, std::string_view what) {
    if (a.numel() == b.numel()) return absl::OkStatus();
    return invalid(o.name, cat(what, ": ", a.numel(), " and ", b.numel(), " elements"));
  };
  const size_t at_root = m.rank == o.root ? size : 0;
  const auto own = static_cast<size_t>(m.rank);
  switch (o.kind) {
    case OpKind::kAllGather:
      if (o.outputs.size() == 1 && o.name == "all_gather_into_tensor") {
        if (o.outputs[0].numel() == o.inputs[0].numel() * m.size) return absl::OkStatus();
        return invalid(o.name, cat("an output of ", o.outputs[0].numel(), " elements for ", m.size,
                                   " inputs of ", o.inputs[0].numel()));
      }
      WEFT_RETURN_IF_ERROR(count_is(o.outputs, "output", size));
      return same_count(o.outputs[own], o.inputs[0], "the own output and the input differ");
    case OpKind::kGather:
      WEFT_RETURN_IF_ERROR(count_is(o.outputs, "output", at_root));
      if (at_root == 0) return absl::OkStatus();
      return same_count(o.outputs[own], o.inputs[0], "the own output and the input differ");
    case OpKind::kScatter:
      WEFT_RETURN_IF_ERROR(count_is(o.inputs, "input", at_root));
      if (at_root == 0) return absl::OkStatus();
      return same_count(o.inputs[own], o.outputs[0], "the own input and the output differ");
    case OpKind::kReduceScatter:
      if (o.name == "reduce_scatter_tensor") {
        if (o.inputs[0].numel() == o.outputs[0].numel() * m.size) return absl::OkStatus();
        return invalid(o.name, cat("an input of ", o.inputs[0].numel(), " elements for ", m.size,
                                   " outputs of ", o.outputs[0].numel()));
      }
      WEFT_RETURN_IF_ERROR(count_is(o.inputs, "input", size));
      return same_count(o.inputs[own], o.outputs[0], "the own input and the output differ");
    case OpKind::kAllToAll:
      if (o.name == "all_to_all_single") return absl::OkStatus();
      WEFT_RETURN_IF_ERROR(count_is(o.outputs, "output", size));
      WEFT_RETURN_IF_ERROR(count_is(o.inputs, "input", size));
      return same_count(o.outputs[own], o.inputs[own], "what stays at this rank differs");
    default: return absl::OkStatus();
  }
}

Status check_splits(const Membership& m, const Operation& o) {
  if (o.name != "all_to_all_single") return absl::OkStatus();
  const auto check = [&](const at::Tensor& t, const std::vector<int64_t>& splits,
                         std::string_view role) {
    const int64_t rows = t.dim() == 0 ? 1 : t.size(0);
    if (splits.empty()) {
      if (rows % m.size == 0) return absl::OkStatus();
      return invalid(o.name,
                     cat("an ", role, " of ", rows, " rows for ", m.size, " ranks needs splits"));
    }
    const bool right = splits.size() == static_cast<size_t>(m.size) &&
                       std::all_of(splits.begin(), splits.end(),
                                   [rows](int64_t n) { return n >= 0 && n <= rows; }) &&
                       std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows;
    if (right) return absl::OkStatus();
    return invalid(o.name, cat("the ", role, " splits are not ", m.size,
                               " numbers that add up to its ", rows, " rows"));
  };
  WEFT_RETURN_IF_ERROR(check(o.outputs[0], o.output_splits, "output"));
  return check(o.inputs[0], o.input_splits, "input");
}

int64_t numel(const Tensors& tensors) {
  int64_t n = 0;
  for (const at::Tensor& t : tensors) n += t.numel();
  return n;
}

// Tensors as one piece of plain memory: their own where it is one and contiguous, else a copy.
class Flat {
 public:
  Flat(const Tensors& tensors, bool read, int64_t elements = -1) : tensors_(tensors) {
    if (tensors.size() == 1 && tensors[0].is_cpu() && tensors[0].is_contiguous()) {
      memory_ = tensors[0];
      own_ = false;
      return;
    }
    const int64_t n = elements >= 0 ? elements : numel(tensors);
    memory_ = at::empty({n}, tensors[0].options().device(at::kCPU).requires_grad(false));
    if (read) move(true);
  }
  char* data() const { return static_cast<char*>(memory_.unsafeGetTensorImpl()->mutable_data()); }
  // What was written goes to where the caller sees it.
  void write_back() {
    if (own_) {
      move(false);
      return;
    }
    if (!memory_.is_inference()) memory_.unsafeGetTensorImpl()->bump_version();
  }

 private:
  void move(bool in) {
    int64_t at = 0;
    for (const at::Tensor& t : tensors_) {
      const at::Tensor part = memory_.narrow(0, at, t.numel()).view(t.sizes());
      if (in) {
        part.copy_(t);
      } else {
        t.copy_(part);
      }
      at += t.numel();
    }
  }

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
Tensors copy_of(const Tensors& tensors) {
  Tensors out;
  const at::Tensor flat =
      at::empty({numel(tensors)}, tensors[0].options().device(at::kCPU).requires_grad(false));
  int64_t at = 0;
  for (const at::Tensor& t : tensors) {
    flat.narrow(0, at, t.numel()).view(t.sizes()).copy_(t);
    at += t.numel();
  }
  out.push_back(flat);
  return out;
}

Status send(Engine& engine, const Turn& turn, const Operation& o, ElementType type) {
  const at::Tensor& t = o.inputs[0];
  Header header;
  header.op = static_cast<uint8_t>(OpKind::kSend);
  header.type = static_cast<uint8_t>(type);
  header.group = engine.member().group;
  header.generation = engine.member().generation;
  header.tag = o.tag;
  header.count = static_cast<uint64_t>(t.numel());
  header.detail = static_cast<uint64_t>(t.dim());
  const at::Tensor plain = t.to(at::kCPU).contiguous();
  const uint64_t shape = header.detail * sizeof(int64_t);
  const uint64_t bytes = header.count * element_size(type);
  header.bytes = shape + bytes;
  std::vector<char> body(header.bytes);
  if (shape > 0) std::memcpy(body.data(), t.sizes().data(), shape);
  if (bytes > 0) std::memcpy(body.data() + shape, plain.const_data_ptr(), bytes);
  const Outgoing out{o.root, header, body.data()};
  return engine.link().send_points({&out, 1}, turn.deadline);
}

// A message as a tensor, after everything in it was checked.
StatusOr<at::Tensor> tensor_of(const PointMessage& message, at::ScalarType type) {
  const Header& h = message.header;
  const uint64_t size = element_size(static_cast<ElementType>(h.type));
  const Status bad =
      make_error(ErrorKind::kProtocol,
                 cat("rank ", message.peer, " sent a tensor of ", h.detail, " dimensions and ",
                     h.count, " elements in ", message.body.size(), " bytes"));
  if (h.detail > 64 || h.bytes != message.body.size() || h.bytes < h.detail * sizeof(int64_t) ||
      size == 0) {
    return bad;
  }
  const uint64_t shape = h.detail * sizeof(int64_t);
  if ((h.bytes - shape) / size != h.count || (h.bytes - shape) % size != 0) return bad;
  std::vector<int64_t> sizes(h.detail);
  if (shape > 0) std::memcpy(sizes.data(), message.body.data(), shape);
  uint64_t elements = 1;
  for (const int64_t n : sizes) {
    if (n < 0 || __builtin_mul_overflow(elements, static_cast<uint64_t>(n), &elements)) return bad;
  }
  if (elements != h.count) return bad;
  at::Tensor out = at::empty(sizes, at::TensorOptions().dtype(type));
  if (h.count > 0) {
    std::memcpy(out.mutable_data_ptr(), message.body.data() + shape, h.count * size);
  }
  return out;
}

StatusOr<at::ScalarType> scalar_type_of(uint8_t type);

Status receive(Engine& engine, const Turn& turn, Operation& o) {
  WEFT_ASSIGN_OR_RETURN(const PointMessage message,
                        engine.link().receive_point(o.root, o.tag, turn.deadline));
  WEFT_ASSIGN_OR_RETURN(const at::ScalarType type, scalar_type_of(message.header.type));
  WEFT_ASSIGN_OR_RETURN(const at::Tensor got, tensor_of(message, type));
  if (o.source != nullptr) *o.source = message.peer;
  if (o.any_shape) {
    o.received = got;
    return absl::OkStatus();
  }
  const at::Tensor& to = o.outputs[0];
  if (to.scalar_type() != type || to.numel() != got.numel()) {
    return make_error(ErrorKind::kInvalidArgument,
                      cat("rank ", message.peer, " sent ", element_name(message.header.type), " x ",
                          got.numel(), " with tag ", o.tag, ", this rank expects ",
                          c10::toString(to.scalar_type()), " x ", to.numel()));
  }
  to.copy_(got.view(to.sizes()));
  return absl::OkStatus();
}

constexpr std::pair<at::ScalarType, ElementType> kTypes[] = {
    {at::ScalarType::Bool, ElementType::kBool},
    {at::ScalarType::Byte, ElementType::kUInt8},
    {at::ScalarType::Char, ElementType::kInt8},
    {at::ScalarType::Short, ElementType::kInt16},
    {at::ScalarType::UInt16, ElementType::kUInt16},
    {at::ScalarType::Int, ElementType::kInt32},
    {at::ScalarType::UInt32, ElementType::kUInt32},
    {at::ScalarType::Long, ElementType::kInt64},
    {at::ScalarType::UInt64, ElementType::kUInt64},
    {at::ScalarType::Half, ElementType::kHalf},
    {at::ScalarType::BFloat16, ElementType::kBFloat16},
    {at::ScalarType::Float, ElementType::kFloat},
    {at::ScalarType::Double, ElementType::kDouble},
    {at::ScalarType::ComplexHalf, ElementType::kComplexHalf},
    {at::ScalarType::ComplexFloat, ElementType::kComplexFloat},
    {at::ScalarType::ComplexDouble, ElementType::kComplexDouble},
    {at::ScalarType::Float8_e4m3fn, ElementType::kFloat8E4M3Fn},
    {at::ScalarType::Float8_e5m2, ElementType::kFloat8E5M2},
    {at::ScalarType::Float8_e4m3fnuz, ElementType::kFloat8E4M3Fnuz},
    {at::ScalarType::Float8_e5m2fnuz, ElementType::kFloat8E5M2Fnuz},
};

StatusOr<at::ScalarType> scalar_type_of(uint8_t type) {
  for (const auto& [scalar, element] : kTypes) {
    if (static_cast<uint8_t>(element) == type) return scalar;
  }
  return make_error(ErrorKind::kProtocol, cat("there is no type of elements ", type));
}

Status perform_lists(Engine& engine, const Turn& turn, Operation& o, ElementType type) {
  const Membership& m = engine.member();
  const auto rank = m.rank;
  const uint64_t size = element_size(type);
  switch (o.kind) {
    case OpKind::kAllGather: {
      Flat out(o.outputs, false);
      Flat in(o.inputs, true);
      const Blocks blocks = o.outputs.size() == 1
                                ? Blocks::even(static_cast<uint64_t>(o.outputs[0].numel()), m.size)
                                : blocks_of(o.outputs);
      if (blocks.length(rank) > 0) {
        std::memmove(out.data() + blocks.begin(rank) * size, in.data(), blocks.length(rank) * size);
      }
      WEFT_RETURN_IF_ERROR(engine.all_gather(turn, type, out.data(), blocks));
      out.write_back();
      return absl::OkStatus();
    }
    case OpKind::kGather: {
      Flat in(o.inputs, true);
      const auto n = static_cast<uint64_t>(o.inputs[0].numel());
      if (rank != o.root) {
        return engine.gather(turn, type, in.data(), n, nullptr, Blocks(), o.root);
      }
      Flat out(o.outputs, false);
      WEFT_RETURN_IF_ERROR(
          engine.gather(turn, type, in.data(), n, out.data(), blocks_of(o.outputs), o.root));
      out.write_back();
      return absl::OkStatus();
    }
    case OpKind::kScatter: {
      Flat out(o.outputs, false);
      const auto n = static_cast<uint64_t>(o.outputs[0].numel());
      if (rank == o.root) {
        Flat in(o.inputs, true);
        WEFT_RETURN_IF_ERROR(
            engine.scatter(turn, type, in.data(), blocks_of(o.inputs), out.data(), n, o.root));
      } else {
        WEFT_RETURN_IF_ERROR(engine.scatter(turn, type, nullptr, Blocks(), out.data(), n, o.root));
      }
      out.write_back();
      return absl::OkStatus();
    }
    case OpKind::kReduceScatter: {
      const Tensors work = copy_of(o.inputs);
      Flat in(work, true);
      const Blocks blocks = o.inputs.size() == 1
                                ? Blocks::even(static_cast<uint64_t>(o.inputs[0].numel()), m.size)
                                : blocks_of(o.inputs);
      WEFT_RETURN_IF_ERROR(engine.reduce_scatter(turn, type, o.op, in.data(), blocks));
      Flat out(o.outputs, false);
      if (blocks.length(rank) > 0) {
        std::memcpy(out.data(), in.data() + blocks.begin(rank) * size, blocks.length(rank) * size);
      }
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
      const Tensors kept = same ? copy_of(o.inputs) : Tensors();
      Flat in(same ? kept : o.inputs, true);
      Flat out(o.outputs, false);
      WEFT_RETURN_IF_ERROR(engine.all_to_all(turn, type, in.data(), from, out.data(), to));
      out.write_back();
      return absl::OkStatus();
    }
  }
}

Status perform_checked(Engine& engine, const Turn& turn, Operation& o) {
  if (o.kind == OpKind::kBarrier) return engine.barrier(turn);
  if (o.kind == OpKind::kMonitoredBarrier) return engine.monitored_barrier(turn);
  if (o.kind == OpKind::kSend && o.receives) return receive(engine, turn, o);
  WEFT_ASSIGN_OR_RETURN(
      const ElementType type,
      element_type_of((o.outputs.empty() ? o.inputs : o.outputs)[0].scalar_type()));
  switch (o.kind) {
    case OpKind::kSend: return send(engine, turn, o, type);
    case OpKind::kAllReduce: {
      Flat work(o.outputs, true);
      WEFT_RETURN_IF_ERROR(engine.all_reduce(turn, type, o.op, o.algorithm, work.data(),
                                             static_cast<uint64_t>(numel(o.outputs))));
      work.write_back();
      return absl::OkStatus();
    }
    case OpKind::kBroadcast: {
      const bool root = engine.member().rank == o.root;
      Flat work(o.outputs, root);
      WEFT_RETURN_IF_ERROR(engine.broadcast(turn, type, work.data(),
                                            static_cast<uint64_t>(numel(o.outputs)), o.root));
      if (!root) work.write_back();
      return absl::OkStatus();
    }
    case OpKind::kReduce: {
      const auto n = static_cast<uint64_t>(numel(o.outputs));
      if (engine.member().rank != o.root) {
        const Tensors copy = copy_of(o.outputs);
        const Flat used_up(copy, true);
        return engine.reduce(turn, type, o.op, used_up.data(), n, o.root);
      }
      Flat work(o.outputs, true);
      WEFT_RETURN_IF_ERROR(engine.reduce(turn, type, o.op, work.data(), n, o.root));
      work.write_back();
      return absl::OkStatus();
    }
    default: return perform_lists(engine, turn, o, type);
  }
}

}  // namespace

StatusOr<ElementType> element_type_of(at::ScalarType type) {
  for (const auto& [scalar, element] : kTypes) {
    if (scalar == type) return element;
  }
  return make_error(ErrorKind::kInvalidArgument, cat("tensors of type ", c10::toString(type),
                                                     " do not travel in process groups"));
}

Status check_operation(const Membership& m, const Operation& o) {
  if (o.kind == OpKind::kBarrier || o.kind == OpKind::kMonitoredBarrier) return absl::OkStatus();
  if (o.outputs.empty() && o.inputs.empty() && !o.any_shape) {
    return invalid(o.name, "there is no tensor");
  }
  WEFT_RETURN_IF_ERROR(check_tensors(o));
  const bool rooted = o.kind == OpKind::kBroadcast || o.kind == OpKind::kReduce ||
                      o.kind == OpKind::kGather || o.kind == OpKind::kScatter;
  if (rooted && (o.root < 0 || o.root >= m.size)) {
    return invalid(o.name, cat("root ", o.root, " in a group of ", m.size));
  }
  if (o.kind == OpKind::kSend) {
    const bool any = o.receives && o.root == -1;
    if (!any && (o.root < 0 || o.root >= m.size)) {
      return invalid(o.name, cat("rank ", o.root, " in a group of ", m.size));
    }
    if (o.root == m.rank) return invalid(o.name, "the peer is this rank itself");
  }
  if (o.kind == OpKind::kAllReduce || o.kind == OpKind::kReduce ||
      o.kind == OpKind::kReduceScatter) {
    WEFT_ASSIGN_OR_RETURN(
        const ElementType type,
        element_type_of((o.outputs.empty() ? o.inputs : o.outputs)[0].scalar_type()));
    WEFT_RETURN_IF_ERROR(annotate(check_reduction(type, o.op), o.name));
  }
  WEFT_RETURN_IF_ERROR(check_lists(m, o));
  return check_splits(m, o);
}

Status perform_operation(Engine& engine, const Turn& turn, Operation& operation) {
  const at::NoGradGuard no_grad;
  try {
    return perform_checked(engine, turn, operation);
  } catch (...) {
    return status_from_current_exception();
  }
}

}  // namespace weft::internal
