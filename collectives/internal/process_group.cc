#include "weft/collectives/process_group.h"

#include <algorithm>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "weft/collectives/internal/device_engine.h"
#include "weft/collectives/internal/device_queue.h"
#include "weft/collectives/internal/group_handle.h"
#include "weft/collectives/internal/operation.h"
#include "weft/collectives/internal/service.h"
#include "weft/collectives/internal/text.h"

namespace weft {

using internal::Operation;
using internal::OpKind;
using internal::Tensors;

namespace {

Tensors list_of(const TensorList& tensors) { return Tensors(tensors.begin(), tensors.end()); }
Tensors list_of(const at::Tensor& tensor) { return Tensors{tensor}; }

Operation operation(OpKind kind, std::string_view name, Tensors outputs, Tensors inputs = {}) {
  Operation out;
  out.kind = kind;
  out.name = name;
  out.outputs = std::move(outputs);
  out.inputs = std::move(inputs);
  return out;
}

Operation reducing(Operation out, ReduceOp op) {
  out.op = op;
  return out;
}

Operation rooted(Operation out, int root, Algorithm algorithm = Algorithm::kAuto) {
  out.root = root;
  out.algorithm = algorithm;
  return out;
}

Operation by(Algorithm algorithm, Operation out) {
  out.algorithm = algorithm;
  return out;
}

Operation reduced_all(std::string_view name, Tensors tensors, const AllReduceOptions& options) {
  Operation out = operation(OpKind::kAllReduce, name, std::move(tensors));
  out.op = options.op;
  out.algorithm = options.algorithm;
  return out;
}

Operation with_splits(Operation out, const AllToAllOptions& options) {
  out.output_splits = options.output_splits;
  out.input_splits = options.input_splits;
  out.algorithm = options.algorithm;
  return out;
}

Operation point(Operation out, int peer, const PointOptions& options, bool receives) {
  out.root = peer;
  out.tag = options.tag;
  out.receives = receives;
  return out;
}

}  // namespace

int ProcessGroup::rank() const { return handle_->core().member().rank; }
int ProcessGroup::size() const { return handle_->core().member().size; }
const std::string& ProcessGroup::name() const { return handle_->core().options().name; }
std::string_view ProcessGroup::backend() const { return handle_->backend(); }
uint32_t ProcessGroup::generation() const { return handle_->core().member().generation; }
uint64_t ProcessGroup::sequence() const { return handle_->core().sequence(); }
const std::shared_ptr<Runtime>& ProcessGroup::runtime() const {
  return handle_->core().options().runtime;
}
absl::Duration ProcessGroup::timeout() const { return handle_->core().options().timeout; }

Status ProcessGroup::run(Operation operation, Timeout timeout) {
  if (handle_ == nullptr) return make_error(ErrorKind::kState, "there is no process group");
  internal::GroupCore& core = handle_->core();
  WEFT_RETURN_IF_ERROR(internal::check_operation(core.member(), operation));
  if (core.device() != nullptr && operation.kind != OpKind::kMonitoredBarrier) {
    WEFT_ASSIGN_OR_RETURN(const internal::DeviceQueued queued,
                          internal::queue_on_device(*handle_, {&operation, 1}, timeout,
                                                    internal::DeviceOrder::kBeforeCaller));
    if (queued.ended.has_value()) return queued.ended->try_wait();
    if (queued.guard != nullptr) queued.guard->before_use();
    return absl::OkStatus();
  }
  return run_on_host(&operation, timeout);
}

Status ProcessGroup::run_on_host(Operation* operation, Timeout timeout) {
  internal::GroupCore& core = handle_->core();
  WEFT_RETURN_IF_ERROR(core.staging().prepare(operation));
  return core.run(operation->name, timeout, operation->counts(), [&](const internal::Turn& turn) {
    return core.on_host(
        [&] { return internal::perform_operation(core.engine(), turn, *operation); });
  });
}

Work ProcessGroup::start(Operation operation, Timeout timeout) {
  if (handle_ == nullptr) {
    return Work(Future<void>::ready(make_error(ErrorKind::kState, "there is no process group")));
  }
  internal::GroupCore& core = handle_->core();
  if (Status s = internal::check_operation(core.member(), operation); !s.ok()) {
    return Work(Future<void>::ready(std::move(s)));
  }
  if (core.device() != nullptr && operation.kind != OpKind::kMonitoredBarrier) {
    auto queued = internal::queue_on_device(*handle_, {&operation, 1}, timeout,
                                            internal::DeviceOrder::kBesideCaller);
    if (!queued.ok()) return Work(Future<void>::ready(queued.status()));
    if (queued->ended.has_value()) return Work(*std::move(queued->ended));
    return Work(core.queued(operation.name, queued->guard), operation.source);
  }
  if (Status s = core.staging().prepare(&operation); !s.ok()) {
    return Work(Future<void>::ready(std::move(s)));
  }
  const std::string_view name = operation.name;
  const bool counts = operation.counts();
  std::shared_ptr<const int> source = operation.source;
  return Work(
      core.start(name, timeout, counts,
                 [&core, operation = std::move(operation)](const internal::Turn& turn) mutable {
                   return core.on_host(
                       [&] { return internal::perform_operation(core.engine(), turn, operation); });
                 }),
      std::move(source));
}

// The two forms of an operation that are not in the header.
#define WEFT_FORMS(name, parameters, timeout, operation)                         \
  Status ProcessGroup::try_##name parameters { return run(operation, timeout); } \
  Work ProcessGroup::name##_async parameters { return start(operation, timeout); }

WEFT_FORMS(barrier, (const CollectiveOptions& options), options.timeout,
           by(options.algorithm, operation(OpKind::kBarrier, "barrier", {})))
WEFT_FORMS(monitored_barrier, (const CollectiveOptions& options), options.timeout,
           by(options.algorithm, operation(OpKind::kMonitoredBarrier, "monitored_barrier", {})))
WEFT_FORMS(all_reduce, (const at::Tensor& tensor, const AllReduceOptions& options), options.timeout,
           reduced_all("all_reduce", list_of(tensor), options))
WEFT_FORMS(all_reduce_coalesced, (const TensorList& tensors, const AllReduceOptions& options),
           options.timeout, reduced_all("all_reduce_coalesced", list_of(tensors), options))
WEFT_FORMS(broadcast, (const at::Tensor& tensor, const RootedOptions& options), options.timeout,
           rooted(operation(OpKind::kBroadcast, "broadcast", list_of(tensor)), options.root,
                  options.algorithm))
WEFT_FORMS(broadcast_coalesced, (const TensorList& tensors, const RootedOptions& options),
           options.timeout,
           rooted(operation(OpKind::kBroadcast, "broadcast_coalesced", list_of(tensors)),
                  options.root, options.algorithm))
WEFT_FORMS(reduce, (const at::Tensor& tensor, const ReduceOptions& options), options.timeout,
           rooted(reducing(operation(OpKind::kReduce, "reduce", list_of(tensor)), options.op),
                  options.root))
WEFT_FORMS(all_gather,
           (const TensorList& outputs, const at::Tensor& input, const CollectiveOptions& options),
           options.timeout,
           by(options.algorithm,
              operation(OpKind::kAllGather, "all_gather", list_of(outputs), list_of(input))))
WEFT_FORMS(all_gather_into_tensor,
           (const at::Tensor& output, const at::Tensor& input, const CollectiveOptions& options),
           options.timeout,
           by(options.algorithm, operation(OpKind::kAllGather, "all_gather_into_tensor",
                                           list_of(output), list_of(input))))
WEFT_FORMS(gather,
           (const TensorList& outputs, const at::Tensor& input, const RootedOptions& options),
           options.timeout,
           rooted(operation(OpKind::kGather, "gather", list_of(outputs), list_of(input)),
                  options.root, options.algorithm))
WEFT_FORMS(scatter,
           (const at::Tensor& output, const TensorList& inputs, const RootedOptions& options),
           options.timeout,
           rooted(operation(OpKind::kScatter, "scatter", list_of(output), list_of(inputs)),
                  options.root, options.algorithm))
WEFT_FORMS(reduce_scatter,
           (const at::Tensor& output, const TensorList& inputs,
            const ReduceScatterOptions& options),
           options.timeout,
           by(options.algorithm, reducing(operation(OpKind::kReduceScatter, "reduce_scatter",
                                                    list_of(output), list_of(inputs)),
                                          options.op)))
WEFT_FORMS(reduce_scatter_tensor,
           (const at::Tensor& output, const at::Tensor& input, const ReduceScatterOptions& options),
           options.timeout,
           by(options.algorithm, reducing(operation(OpKind::kReduceScatter, "reduce_scatter_tensor",
                                                    list_of(output), list_of(input)),
                                          options.op)))
WEFT_FORMS(all_to_all,
           (const TensorList& outputs, const TensorList& inputs, const CollectiveOptions& options),
           options.timeout,
           by(options.algorithm,
              operation(OpKind::kAllToAll, "all_to_all", list_of(outputs), list_of(inputs))))
WEFT_FORMS(all_to_all_single,
           (const at::Tensor& output, const at::Tensor& input, const AllToAllOptions& options),
           options.timeout,
           with_splits(operation(OpKind::kAllToAll, "all_to_all_single", list_of(output),
                                 list_of(input)),
                       options))
WEFT_FORMS(send, (const at::Tensor& tensor, int to, const PointOptions& options), options.timeout,
           point(operation(OpKind::kSend, "send", {}, list_of(tensor)), to, options, false))

#undef WEFT_FORMS

StatusOr<int> ProcessGroup::try_recv(const at::Tensor& tensor, int from,
                                     const PointOptions& options) {
  Operation receiving =
      point(operation(OpKind::kSend, "recv", list_of(tensor)), from, options, true);
  const auto source = std::make_shared<int>(-1);
  receiving.source = source;
  WEFT_RETURN_IF_ERROR(run(std::move(receiving), options.timeout));
  return *source;
}

Work ProcessGroup::recv_async(const at::Tensor& tensor, int from, const PointOptions& options) {
  Operation receiving =
      point(operation(OpKind::kSend, "recv", list_of(tensor)), from, options, true);
  receiving.source = std::make_shared<int>(-1);
  return start(std::move(receiving), options.timeout);
}

StatusOr<at::Tensor> ProcessGroup::try_recv_any_shape(int from, const PointOptions& options) {
  if (handle_ == nullptr) return make_error(ErrorKind::kState, "there is no process group");
  Operation receiving = point(operation(OpKind::kSend, "recv_any_shape", {}), from, options, true);
  receiving.any_shape = true;
  internal::GroupCore& core = handle_->core();
  WEFT_RETURN_IF_ERROR(internal::check_operation(core.member(), receiving));
  if (core.device() != nullptr) {
    WEFT_RETURN_IF_ERROR(internal::check_on_device(core.member(), *core.device(), receiving));
  }
  WEFT_RETURN_IF_ERROR(run_on_host(&receiving, options.timeout));
  return receiving.received;
}

StatusOr<at::Tensor> ProcessGroup::try_empty(at::IntArrayRef sizes, at::ScalarType type) const {
  if (handle_ == nullptr) return make_error(ErrorKind::kState, "there is no process group");
  WEFT_RETURN_IF_ERROR(internal::element_type_of(type).status());
  uint64_t bytes = c10::elementSize(type);
  for (const int64_t n : sizes) {
    if (n < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(n), &bytes)) {
      return make_error(ErrorKind::kInvalidArgument, "empty: no tensor has such sizes");
    }
  }
  const auto options = at::TensorOptions().dtype(type);
  if (internal::DeviceEngine* const device = handle_->core().device(); device != nullptr) {
    try {
      return at::empty(sizes,
                       options.device(c10::kCUDA, static_cast<c10::DeviceIndex>(device->device())));
    } catch (...) {
      return status_from_current_exception();
    }
  }
  WEFT_ASSIGN_OR_RETURN(std::shared_ptr<char> memory, handle_->core().engine().allocate(bytes));
  if (memory == nullptr) return at::empty(sizes, options);
  char* const data = memory.get();
  return at::from_blob(
      data, sizes, [memory = std::move(memory)](void*) {}, options);
}

StatusOr<ProcessGroup> ProcessGroup::try_new_group(const std::vector<int>& ranks,
                                                   const NewGroupOptions& options) const {
  if (handle_ == nullptr) return make_error(ErrorKind::kState, "there is no process group");
  ProcessGroupOptions child = handle_->options();
  child.size = static_cast<int>(ranks.size());
  child.rank = -1;
  std::string label = options.name;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const bool twice = std::count(ranks.begin(), ranks.end(), ranks[i]) > 1;
    if (ranks[i] < 0 || ranks[i] >= size() || twice) {
      return make_error(ErrorKind::kInvalidArgument,
                        internal::cat("new_group: rank ", ranks[i],
                                      twice ? " twice in the list" : " in a group of ",
                                      twice ? std::string() : std::to_string(size())));
    }
    if (ranks[i] == rank()) child.rank = static_cast<int>(i);
    if (options.name.empty()) internal::cat_to(&label, i == 0 ? "" : "-", ranks[i]);
  }
  if (child.rank < 0) {
    return make_error(ErrorKind::kInvalidArgument,
                      internal::cat("new_group: rank ", rank(), " is not in its list"));
  }
  child.name = internal::cat(name(), "/", label);
  child.workers = internal::workers_of_ranks(child.workers, ranks);
  if (options.timeout.is_set()) child.timeout = options.timeout;
  child.init_timeout = options.init_timeout;
  return try_init_process_group(child);
}

StatusOr<ProcessGroup> ProcessGroup::try_split(int color, int key, const NewGroupOptions& options) {
  if (handle_ == nullptr) return make_error(ErrorKind::kState, "there is no process group");
  const at::Tensor all = at::empty({size(), 2}, at::TensorOptions().dtype(at::kInt));
  int* const rows = all.mutable_data_ptr<int>();
  rows[2 * rank()] = color;
  rows[2 * rank() + 1] = key;
  Operation colors = operation(OpKind::kAllGather, "split", list_of(all), list_of(all[rank()]));
  WEFT_RETURN_IF_ERROR(run_on_host(&colors, options.init_timeout));
  if (color < 0) return ProcessGroup();
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r) {
    if (rows[2 * r] == color) ranks.push_back(r);
  }
  std::stable_sort(ranks.begin(), ranks.end(),
                   [rows](int a, int b) { return rows[2 * a + 1] < rows[2 * b + 1]; });
  NewGroupOptions named = options;
  named.name =
      internal::cat(options.name.empty() ? "split" : options.name, "-", sequence(), "-", color);
  return try_new_group(ranks, named);
}

void ProcessGroup::abort(std::string_view why) {
  if (handle_ == nullptr) return;
  internal::GroupCore& core = handle_->core();
  core.fail(make_error(
      ErrorKind::kCancelled,
      "the group was aborted at rank " + std::to_string(rank()) + ": " + std::string(why)));
}

std::string ProcessGroup::flight_record() const { return handle_->core().flight_record(); }

Status ProcessGroup::failure() const { return handle_->core().failure(); }

}  // namespace weft
