#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <utility>

#include <torch/nn/module.h>

#include "ATen/core/grad_mode.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/collectives/internal/ddp/group_io.h"
#include "weft/collectives/internal/ddp/join_session.h"
#include "weft/collectives/internal/ddp/model.h"
#include "weft/collectives/internal/ddp/reducer.h"

namespace weft::internal {
namespace {

constexpr int64_t kMiB = 1 << 20;
// Of one operation that gives all ranks what rank 0 has.
constexpr int64_t kBroadcastBytes = 250 * kMiB;

int64_t bytes(double mib, std::string_view name) {
  if (!(mib > 0) || mib > 1e6) {
    throw_error(make_error(ErrorKind::kInvalidArgument,
                           absl::StrCat("DistributedDataParallel: ", std::string(name), " = ", mib,
                                        "; it is above 0, in MiB")));
  }
  return std::max<int64_t>(1, static_cast<int64_t>(std::llround(mib * kMiB)));
}

std::vector<at::Tensor> tensors_of(std::initializer_list<const std::vector<ModelTensor>*> lists) {
  std::vector<at::Tensor> out;
  for (const auto* list : lists) {
    for (const ModelTensor& one : *list) out.push_back(one.tensor.detach());
  }
  return out;
}

}  // namespace

class DdpCore final : public Joinable {
 public:
  DdpCore(torch::nn::Module& module, const ProcessGroup& group,
          const DistributedDataParallelOptions& options)
      : group_(group), options_(options), module_name_(module.name()) {
    if (!group_.valid()) {
      throw_error(make_error(ErrorKind::kInvalidArgument,
                             "DistributedDataParallel: there is no process group"));
    }
    ReducerOptions reduce;
    reduce.bucket_bytes = bytes(options.bucket_cap_mb, "bucket_cap_mb");
    reduce.first_bucket_bytes =
        std::min(bytes(options.first_bucket_mb, "first_bucket_mb"), reduce.bucket_bytes);
    reduce.static_graph = options.static_graph;
    reduce.find_unused = options.find_unused_parameters && !options.static_graph;
    reduce.bucket_view = options.gradient_as_bucket_view;
    reduce.timeout = options.timeout;
    Model model = model_of(module, options.ignored_parameters);
    if (options.init_sync) {
      std::vector<std::string> mine = describe_model(model);
      mine.push_back(absl::StrCat(
          "options find_unused_parameters=", options.find_unused_parameters,
          " static_graph=", options.static_graph, " broadcast_buffers=", options.broadcast_buffers,
          " bucket_bytes=", reduce.first_bucket_bytes, ",", reduce.bucket_bytes));
      throw_if_error(compare_models(all_gather_lines(group_, mine, options.timeout)));
      const c10::AutoGradMode no_grad(false);
      broadcast_all(group_, tensors_of({&model.parameters, &model.frozen, &model.buffers}), 0,
                    kBroadcastBytes, options.timeout);
    }
    if (options.broadcast_buffers) buffers_ = tensors_of({&model.buffers});
    state_ = tensors_of({&model.parameters, &model.frozen, &model.buffers});
    parameters_ = tensors_of({&model.parameters});
    synced_norms_ = names_of_synced_norms(module);
    reduce.module = module_name_;
    reducer_ = std::make_shared<Reducer>(std::move(model.parameters), group_, reduce);
    reducer_->attach();
  }

  bool before_forward() {
    if (no_sync_ > 0 || !c10::GradMode::is_enabled()) {
      if (no_sync_ > 0) synced_ = false;
      return false;
    }
    reducer_->check_parameters();
    forward_begun_ = reducer_->watch_of().now();
    // After forwards without reduction buffers are those of this rank's own batches until the next.
    if (std::exchange(synced_, true) && !buffers_.empty()) {
      sync_buffers_from(join_ == nullptr ? 0 : announce(JoinStep::kSyncBuffers).highest);
    }
    ticket_ = reducer_->next_ticket(std::exchange(number_, 0));
    alone_at_.reset();
    if (join_ != nullptr && reducer_->is_idle()) alone_at_ = group_.sequence();
    return true;
  }
  void after_forward(const std::vector<at::Tensor*>& outputs) {
    if (alone_at_.has_value() && reducer_->is_idle() && group_.sequence() != *alone_at_) {
      throw_error(make_error(
          ErrorKind::kState,
          absl::StrCat("Join: the forward of module ", module_name_, " ran ",
                       group_.sequence() - *alone_at_, " operations of group '", group_.name(),
                       "': a rank that has no batches left does not answer them; give the module a "
                       "group of its own, or all ranks equally many batches")));
    }
    reducer_->watch(ticket_, outputs);
    reducer_->watch_of().forward_ended(forward_begun_);
  }
  void sync_buffers() { sync_buffers_from(0); }
  void no_sync(int change) { no_sync_ += change; }
  void iteration(int64_t number) {
    if (number < 1) {
      throw_error(make_error(ErrorKind::kInvalidArgument,
                             absl::StrCat("DistributedDataParallel: iteration(", number,
                                          "); the first one has number 1")));
    }
    number_ = number;
  }
  Reducer& reducer() const { return *reducer_; }
  DdpLoggingData logging_data() const;

  // ---- Joinable ----
  const ProcessGroup& join_group() const override { return group_; }
  std::shared_ptr<JoinSession> join() const override { return join_; }
  void set_join(std::shared_ptr<JoinSession> session, size_t index) override {
    if (session != nullptr && join_ != nullptr) {
      throw_error(make_error(ErrorKind::kState,
                             "Join: the DistributedDataParallel is in another Join, which lives"));
    }
    if (session != nullptr && !synced_norms_.empty()) {
      throw_error(make_error(
          ErrorKind::kInvalidArgument,
          absl::StrCat("Join: module '", absl::StrJoin(synced_norms_, "', '"),
                       "' is a SyncBatchNorm, whose forward all ranks are to take part in; a rank "
                       "that has no batches left does not: give all ranks equally many batches, or "
                       "use a BatchNorm")));
    }
    reducer_->set_join(session, index);
    join_ = std::move(session);
    join_part_ = index;
  }
  void shadow(JoinStep step, const JoinActive& active) override {
    if (step == JoinStep::kSyncBuffers) return sync_buffers_from(active.highest);
    reducer_->shadow(active);
  }
  std::vector<at::Tensor> join_state() const override { return state_; }

 private:
  JoinActive announce(JoinStep step) { return join_->settle(join_->announce(join_part_, step)); }
  void sync_buffers_from(int rank) {
    if (buffers_.empty()) return;
    const c10::AutoGradMode no_grad(false);
    broadcast_all(group_, buffers_, rank, kBroadcastBytes, options_.timeout);
  }

  ProcessGroup group_;
  const DistributedDataParallelOptions options_;
  const std::string module_name_;
  std::vector<std::string> synced_norms_;  // names of modules with operations of their own
  std::vector<at::Tensor> buffers_;
  std::vector<at::Tensor> state_;       // all that is the same on all ranks
  std::vector<at::Tensor> parameters_;  // of these, what is trained
  std::shared_ptr<Reducer> reducer_;
  std::shared_ptr<JoinSession> join_;
  size_t join_part_ = 0;
  // The group's operation count at the start of a forward under a Join, with none under way.
  std::optional<uint64_t> alone_at_;
  int no_sync_ = 0;
  bool synced_ = true;
  int64_t number_ = 0;
  ForwardTicket ticket_{};
  absl::Time forward_begun_{};
};

DdpLoggingData DdpCore::logging_data() const {
  const Reducer::Sight sight = reducer_->sight();
  const ReductionTimes last = reducer_->watch_of().last();
  const ReductionTimes sums = reducer_->watch_of().sums();
  int64_t bytes = 0;
  std::set<std::string> dtypes;
  for (const at::Tensor& one : parameters_) {
    bytes += static_cast<int64_t>(one.nbytes());
    dtypes.insert(c10::toString(one.scalar_type()));
  }
  DdpLoggingData out = {
      {"world_size", int64_t{group_.size()}},
      {"rank", int64_t{group_.rank()}},
      {"module_name", module_name_},
      {"backend_name", std::string(group_.backend())},
      {"iteration", sight.reductions},
      {"num_parameter_tensors", static_cast<int64_t>(parameters_.size())},
      {"total_parameter_size_bytes", bytes},
      {"dtypes", absl::StrJoin(dtypes, ", ")},
      {"bucket_cap_bytes", static_cast<int64_t>(options_.bucket_cap_mb * 1024 * 1024)},
      {"bucket_sizes", absl::StrJoin(sight.first_bytes, ", ")},
      {"rebuilt_bucket_sizes",
       absl::StrJoin(sight.rebuilt ? sight.bucket_bytes : std::vector<int64_t>(), ", ")},
      {"has_rebuilt_buckets", int64_t{sight.rebuilt}},
      {"num_buckets_reduced", static_cast<int64_t>(sight.buckets.size())},
      {"num_buckets_launched_early", sight.launched_early},
      {"unused_parameters", absl::StrJoin(sight.unused, ", ")},
      {"unused_parameter_size", sight.unused_bytes},
      {"prev_iteration_grad_ready_order_indices", absl::StrJoin(sight.order, ", ")},
      {"comm_hook", std::string(sight.hooked ? "registered" : "none")},
      {"has_sync_bn", int64_t{!synced_norms_.empty()}},
      {"broadcast_buffers", int64_t{options_.broadcast_buffers}},
      {"find_unused_parameters", int64_t{options_.find_unused_parameters}},
      {"gradient_as_bucket_view", int64_t{options_.gradient_as_bucket_view}},
      {"static_graph", int64_t{options_.static_graph}}};
  const auto put = [&](const std::string& name, absl::Duration ReductionTimes::*which) {
    out[name] = absl::ToInt64Nanoseconds(last.*which);
    out["avg_" + name] =
        absl::ToInt64Nanoseconds(sums.*which / std::max<int64_t>(1, sight.reductions));
  };
  put("forward_compute_time", &ReductionTimes::forward);
  put("backward_compute_time", &ReductionTimes::backward);
  put("backward_comm_time", &ReductionTimes::reducing);
  put("backward_compute_comm_overlap_time", &ReductionTimes::overlap);
  put("backward_comm_exposed_time", &ReductionTimes::exposed);
  return out;
}

DdpHandle::DdpHandle(torch::nn::Module& module, const ProcessGroup& group,
                     const DistributedDataParallelOptions& options)
    : core_(std::make_unique<DdpCore>(module, group, options)) {}
DdpHandle::DdpHandle(DdpHandle&&) noexcept = default;
DdpHandle& DdpHandle::operator=(DdpHandle&&) noexcept = default;
DdpHandle::~DdpHandle() = default;

bool DdpHandle::before_forward() { return core_->before_forward(); }
void DdpHandle::after_forward(const std::vector<at::Tensor*>& outputs) {
  core_->after_forward(outputs);
}

void ddp_no_sync(DdpCore& core, int change) { core.no_sync(change); }
void ddp_next_iteration(DdpCore& core, int64_t number) { core.iteration(number); }
void ddp_comm_hook(DdpCore& core, CommHook hook) { core.reducer().set_hook(std::move(hook)); }
void ddp_zero_grad(DdpCore& core, bool set_to_none) { core.reducer().zero_grad(set_to_none); }
void ddp_sync_buffers(DdpCore& core) { core.sync_buffers(); }
Joinable& ddp_joinable(DdpCore& core) { return core; }
DdpLoggingData ddp_logging_data(const DdpCore& core) { return core.logging_data(); }
DdpSight ddp_sight(const DdpCore& core) {
  Reducer::Sight from = core.reducer().sight();
  return {std::move(from.buckets), from.reductions, from.launched_early, from.written_early,
          from.rebuilt};
}

}  // namespace weft::internal
