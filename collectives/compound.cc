// Operations that are made of others.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/_sparse_coo_tensor_unsafe.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "weft/collectives/broadcast_object.h"
#include "weft/collectives/internal/device_queue.h"
#include "weft/collectives/internal/operation.h"
#include "weft/collectives/internal/text.h"
#include "weft/collectives/point_operations.h"
#include "weft/collectives/sparse.h"

namespace weft {
namespace {

Status not_sparse(const at::Tensor& mine, const AllReduceOptions& options) {
  std::string_view why;
  if (!mine.defined() || mine.layout() != at::kSparse) why = "the tensor is not sparse (COO)";
  const ReduceOp::Kind kind = options.op.kind();
  if (kind != ReduceOp::kSum && kind != ReduceOp::kAvg) why = "only sum and avg";
  if (why.empty()) return absl::OkStatus();
  return make_error(ErrorKind::kInvalidArgument, internal::cat("all_reduce_sparse: ", why));
}

// A tensor as whole numbers: type, dimensions, sizes.
void append_shape(const at::Tensor& t, int64_t type, std::vector<int64_t>* out) {
  out->push_back(type);
  out->push_back(t.dim());
  out->insert(out->end(), t.sizes().begin(), t.sizes().end());
}

at::Tensor words(const std::vector<int64_t>& numbers) {
  at::Tensor out =
      at::empty({static_cast<int64_t>(numbers.size())}, at::TensorOptions().dtype(at::kLong));
  if (!numbers.empty()) {
    std::memcpy(out.mutable_data_ptr(), numbers.data(), numbers.size() * sizeof(int64_t));
  }
  return out;
}

// The root's numbers of what follows: bytes of the value, tensors, words of their shapes; or a
// negative number of bytes, and that many of an error's text.
struct Announcement {
  int64_t bytes = 0;
  int64_t tensors = 0;
  int64_t shape_words = 0;
};

StatusOr<std::vector<at::Tensor>> tensors_of_shapes(const std::vector<int64_t>& shapes,
                                                    int64_t count) {
  const Status bad = make_error(ErrorKind::kProtocol, "broadcast_object: shapes that are none");
  std::vector<at::Tensor> out;
  size_t at = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (at + 2 > shapes.size() || shapes[at] < 0 || shapes[at] > 127) return bad;
    const auto type = static_cast<at::ScalarType>(shapes[at]);
    const int64_t dims = shapes[at + 1];
    if (!internal::element_type_of(type).ok() || dims < 0 ||
        at + 2 + static_cast<uint64_t>(dims) > shapes.size()) {
      return bad;
    }
    const at::IntArrayRef sizes(shapes.data() + at + 2, static_cast<size_t>(dims));
    for (const int64_t n : sizes) {
      if (n < 0) return bad;
    }
    out.push_back(at::empty(sizes, at::TensorOptions().dtype(type)));
    at += 2 + static_cast<size_t>(dims);
  }
  return out;
}

}  // namespace

std::vector<Work> batch_isend_irecv(ProcessGroup& group,
                                    const std::vector<PointOperation>& operations) {
  if (group.valid() && group.handle()->core().device() != nullptr) {
    return internal::batch_on_device(*group.handle(), operations);
  }
  std::vector<Work> out(operations.size());
  for (const bool sends : {true, false}) {
    for (size_t i = 0; i < operations.size(); ++i) {
      const PointOperation& one = operations[i];
      if (one.sends != sends) continue;
      out[i] = sends ? group.send_async(one.tensor, one.peer, one.options)
                     : group.recv_async(one.tensor, one.peer, one.options);
    }
  }
  return out;
}

StatusOr<at::Tensor> try_all_reduce_sparse(ProcessGroup& group, const at::Tensor& mine,
                                           const AllReduceOptions& options) {
  WEFT_RETURN_IF_ERROR(not_sparse(mine, options));
  const at::NoGradGuard no_grad;
  try {
    const at::Tensor own = mine.coalesce();
    const at::Tensor indices = own._indices().contiguous();
    const at::Tensor values = own._values().contiguous();
    // How many entries each rank has, and that all tensors are of one size.
    std::vector<int64_t> about{values.size(0), own.sparse_dim(), own.dim()};
    about.insert(about.end(), own.sizes().begin(), own.sizes().end());
    const auto n = static_cast<int64_t>(about.size());
    const at::Tensor all = at::empty({group.size(), n}, at::TensorOptions().dtype(at::kLong));
    const CollectiveOptions gather{.timeout = options.timeout};
    WEFT_RETURN_IF_ERROR(group.try_all_gather_into_tensor(all, words(about), gather));
    const auto* const rows = all.const_data_ptr<int64_t>();
    TensorList all_indices;
    TensorList all_values;
    for (int r = 0; r < group.size(); ++r) {
      const int64_t* const row = rows + r * n;
      if (!std::equal(row + 1, row + n, about.begin() + 1)) {
        return make_error(ErrorKind::kInvalidArgument,
                          internal::cat("all_reduce_sparse: rank ", r,
                                        " has a tensor of other sizes than rank ", group.rank()));
      }
      std::vector<int64_t> sizes = values.sizes().vec();
      sizes[0] = row[0];
      all_indices.push_back(at::empty({row[0], own.sparse_dim()}, indices.options()));
      all_values.push_back(at::empty(sizes, values.options()));
    }
    WEFT_RETURN_IF_ERROR(group.try_all_gather(all_indices, indices.t().contiguous(), gather));
    WEFT_RETURN_IF_ERROR(group.try_all_gather(all_values, values, gather));
    at::Tensor sum = at::_sparse_coo_tensor_unsafe(at::cat(all_indices).t().contiguous(),
                                                   at::cat(all_values), own.sizes())
                         .coalesce();
    if (options.op.kind() == ReduceOp::kAvg) sum._values().div_(group.size());
    return sum;
  } catch (...) {
    return annotate(status_from_current_exception(), "all_reduce_sparse");
  }
}

namespace internal {
namespace {

StatusOr<Payload> broadcast_steps(ProcessGroup& group, StatusOr<Payload> mine,
                                  const RootedOptions& options) {
  const bool root = group.rank() == options.root;
  std::vector<int64_t> shapes;
  if (root && mine.ok()) {
    for (at::Tensor& t : mine->tensors) {
      if (!t.defined() || t.layout() != at::kStrided || !element_type_of(t.scalar_type()).ok()) {
        mine = make_error(ErrorKind::kInvalidArgument,
                          "broadcast_object: a tensor that process groups do not carry");
        break;
      }
      t = t.detach().to(at::kCPU).contiguous();
      append_shape(t, static_cast<int64_t>(t.scalar_type()), &shapes);
    }
  }
  if (root && mine.ok() && !mine->references.empty()) {
    mine = make_error(ErrorKind::kInvalidArgument,
                      "broadcast_object: references travel with calls alone");
  }
  Announcement what;
  std::string text;
  if (root && mine.ok()) {
    text = mine->body;
    what = {static_cast<int64_t>(text.size()), static_cast<int64_t>(mine->tensors.size()),
            static_cast<int64_t>(shapes.size())};
  } else if (root) {
    text = std::string(mine.status().message());
    what.bytes = -1 - static_cast<int64_t>(text.size());
  }
  at::Tensor head = words({what.bytes, what.tensors, what.shape_words});
  WEFT_RETURN_IF_ERROR(group.try_broadcast(head, options));
  const auto* const numbers = head.const_data_ptr<int64_t>();
  what = {numbers[0], numbers[1], numbers[2]};
  constexpr int64_t kMost = int64_t{1} << 32;
  const bool sound = what.bytes > -kMost && what.bytes < kMost && what.tensors >= 0 &&
                     what.tensors < kMost && what.shape_words >= 0 && what.shape_words < kMost;
  if (!sound) return make_error(ErrorKind::kProtocol, "broadcast_object: no head of a value");
  const int64_t bytes = what.bytes < 0 ? -1 - what.bytes : what.bytes;
  const at::Tensor body = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
  if (root && bytes > 0) std::memcpy(body.mutable_data_ptr(), text.data(), text.size());
  at::Tensor shape = root && mine.ok()
                         ? words(shapes)
                         : at::empty({what.shape_words}, at::TensorOptions().dtype(at::kLong));
  WEFT_RETURN_IF_ERROR(group.try_broadcast(body, options));
  if (what.bytes < 0) {
    if (root) return mine.status();
    return make_error(
        ErrorKind::kInvalidArgument,
        cat("broadcast_object: rank ", options.root, " has no value: ",
            std::string(body.const_data_ptr<uint8_t>(), body.const_data_ptr<uint8_t>() + bytes)));
  }
  WEFT_RETURN_IF_ERROR(group.try_broadcast(shape, options));
  Payload out;
  if (root) {
    out = *std::move(mine);
  } else {
    const auto* const from = body.const_data_ptr<uint8_t>();
    out.body.assign(from, from + bytes);
    const auto* const sizes = shape.const_data_ptr<int64_t>();
    WEFT_ASSIGN_OR_RETURN(
        out.tensors,
        tensors_of_shapes(std::vector<int64_t>(sizes, sizes + what.shape_words), what.tensors));
  }
  for (const at::Tensor& t : out.tensors) {
    WEFT_RETURN_IF_ERROR(group.try_broadcast(t, options));
  }
  return out;
}

}  // namespace

StatusOr<Payload> broadcast_payload(ProcessGroup& group, StatusOr<Payload> mine,
                                    const RootedOptions& options) {
  try {
    return broadcast_steps(group, std::move(mine), options);
  } catch (...) {
    return annotate(status_from_current_exception(), "broadcast_object");
  }
}

}  // namespace internal
}  // namespace weft
