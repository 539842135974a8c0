// What is wrong with an operation before anything moves.
#include <algorithm>
#include <numeric>
#include <utility>

#include "weft/collectives/internal/operation.h"
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

Status check_tensor(const Operation& o, const at::Tensor& t, std::string_view role, size_t i) {
  const auto which = [&] { return cat("the ", role, " tensor ", i); };
  if (!t.defined()) return invalid(o.name, cat(which(), " is undefined"));
  if (t.layout() != at::kStrided) return invalid(o.name, cat(which(), " is not strided"));
  if (!t.is_cpu() && !t.is_cuda() && !t.is_meta()) {
    return invalid(o.name, cat(which(), " is on ", t.device().str(),
                               ": process groups work on tensors of the CPU and of CUDA devices"));
  }
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
      if (t.device() != first->device()) {
        return invalid(o.name, cat("the ", role, " tensor ", i, " is on ", t.device().str(),
                                   ", others are on ", first->device().str()));
      }
      if (!written) continue;
      if (t._is_zerotensor()) {
        return invalid(o.name, cat("the ", role, " tensor ", i,
                                   " is a view of zeros without memory, which nothing can write"));
      }
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

// A rank that passes blocks of others on knows their lengths only when all are equal.
Status check_algorithm(const Membership& m, const Operation& o) {
  if (o.algorithm == Algorithm::kAuto) return absl::OkStatus();
  const std::string_view name = algorithm_name(static_cast<uint8_t>(o.algorithm));
  if (!offers(o.kind, o.algorithm)) {
    return invalid(o.name, cat("there is no such algorithm for it: ", name));
  }
  const bool equal_blocks = o.algorithm == Algorithm::kBinomialTree
                                ? o.kind == OpKind::kGather || o.kind == OpKind::kScatter
                                : o.kind == OpKind::kAllToAll && o.algorithm == Algorithm::kBruck;
  if (!equal_blocks) return absl::OkStatus();
  const auto all_alike = [](const auto& list, const auto& length) {
    return std::all_of(list.begin(), list.end(),
                       [&](const auto& one) { return length(one) == length(list[0]); });
  };
  const auto numel = [](const at::Tensor& t) { return t.numel(); };
  const auto itself = [](int64_t n) { return n; };
  bool alike = all_alike(o.output_splits, itself) && all_alike(o.input_splits, itself);
  const bool single = o.name == "all_to_all_single";
  // The list with the blocks of all ranks: at the root, and of all_to_all both.
  if (!single && o.outputs.size() == static_cast<size_t>(m.size)) {
    alike = alike && all_alike(o.outputs, numel);
  }
  if (!single && o.inputs.size() == static_cast<size_t>(m.size)) {
    alike = alike && all_alike(o.inputs, numel);
  }
  if (o.kind == OpKind::kAllToAll && !o.inputs.empty() && !o.outputs.empty()) {
    alike = alike && o.inputs[0].numel() == o.outputs[0].numel();
  }
  if (alike) return absl::OkStatus();
  return invalid(o.name, cat(name, " wants blocks of one length on all ranks"));
}

}  // namespace

// Two tensors that interleave are no overlap; those without gaps that share bytes are.
bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0 || a.device() != b.device()) return false;
  if (!a.is_contiguous() || !b.is_contiguous()) return a.is_same(b);
  const auto [a_begin, a_end] = span_of(a);
  const auto [b_begin, b_end] = span_of(b);
  return a_begin < b_end && b_begin < a_end;
}

Status check_operation(const Membership& m, const Operation& o) {
  WEFT_RETURN_IF_ERROR(check_algorithm(m, o));
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

}  // namespace weft::internal
