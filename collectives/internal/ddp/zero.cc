#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "absl/strings/str_cat.h"
#include "weft/collectives/ddp/zero_redundancy_optimizer.h"
#include "weft/collectives/internal/ddp/join_session.h"

namespace weft::internal {
namespace {

class ZeroJoinable final : public Joinable {
 public:
  ZeroJoinable(const ProcessGroup& group, std::vector<at::Tensor> parameters,
               std::function<void()> step)
      : group_(group), parameters_(std::move(parameters)), step_(std::move(step)) {}
  const ProcessGroup& join_group() const override { return group_; }
  std::shared_ptr<JoinSession> join() const override { return join_; }
  void set_join(std::shared_ptr<JoinSession> session, size_t index) override {
    if (session != nullptr && join_ != nullptr) {
      throw_error(make_error(ErrorKind::kState,
                             "Join: the ZeroRedundancyOptimizer is in another Join, which lives"));
    }
    join_ = std::move(session);
    part_ = index;
  }
  void shadow(JoinStep, const JoinActive&) override { step_(); }
  std::vector<at::Tensor> join_state() const override { return parameters_; }
  void announce() {
    if (join_ != nullptr) join_->settle(join_->announce(part_, JoinStep::kOptimize));
  }

 private:
  const ProcessGroup group_;
  const std::vector<at::Tensor> parameters_;
  const std::function<void()> step_;
  std::shared_ptr<JoinSession> join_;
  size_t part_ = 0;
};

}  // namespace

std::shared_ptr<Joinable> make_zero_joinable(const ProcessGroup& group,
                                             std::vector<at::Tensor> parameters,
                                             std::function<void()> step) {
  return std::make_shared<ZeroJoinable>(group, std::move(parameters), std::move(step));
}

bool zero_is_joined(const Joinable* joinable) {
  return joinable != nullptr && joinable->join() != nullptr;
}

void zero_announce(Joinable* joinable) {
  if (joinable != nullptr) static_cast<ZeroJoinable*>(joinable)->announce();
}

std::vector<std::vector<size_t>> zero_partition(const std::vector<at::Tensor>& parameters,
                                                int ranks) {
  std::set<const void*> seen;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& one = parameters[i];
    if (one.defined() && one.is_leaf() && seen.insert(one.unsafeGetTensorImpl()).second) continue;
    throw_error(
        make_error(ErrorKind::kInvalidArgument,
                   absl::StrCat("ZeroRedundancyOptimizer: parameter ", i, " of ", parameters.size(),
                                !one.defined()   ? " is undefined"
                                : !one.is_leaf() ? " is no leaf"
                                                 : " was given before")));
  }
  if (parameters.empty()) {
    throw_error(make_error(ErrorKind::kInvalidArgument,
                           "ZeroRedundancyOptimizer: there are no parameters"));
  }
  std::vector<size_t> order(parameters.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&parameters](size_t a, size_t b) {
    return parameters[a].numel() > parameters[b].numel();
  });
  std::vector<std::vector<size_t>> shards(static_cast<size_t>(ranks));
  std::vector<int64_t> sums(shards.size());
  for (const size_t i : order) {
    const auto least =
        static_cast<size_t>(std::min_element(sums.begin(), sums.end()) - sums.begin());
    shards[least].push_back(i);
    sums[least] += parameters[i].numel();
  }
  return shards;
}

void zero_exchange(ProcessGroup& group, const std::vector<at::Tensor>& parameters,
                   const std::vector<std::vector<size_t>>& shards) {
  const c10::AutoGradMode no_grad(false);
  std::vector<Work> works;
  for (size_t rank = 0; rank < shards.size(); ++rank) {
    TensorList batch;
    const auto send = [&] {
      if (batch.empty()) return;
      works.push_back(group.broadcast_coalesced_async(batch, {.root = static_cast<int>(rank)}));
      batch.clear();
    };
    for (const size_t i : shards[rank]) {
      // One operation is of tensors of one type.
      if (!batch.empty() && batch.back().scalar_type() != parameters[i].scalar_type()) send();
      batch.push_back(parameters[i].detach());
    }
    send();
  }
  for (const Work& one : works) one.wait();
}

void zero_clear(const std::vector<at::Tensor>& parameters, bool set_to_none) {
  const c10::AutoGradMode no_grad(false);
  for (const at::Tensor& one : parameters) {
    at::Tensor& grad = one.mutable_grad();
    if (!grad.defined()) continue;
    if (set_to_none) {
      grad.reset();
    } else {
      grad.zero_();
    }
  }
}

}  // namespace weft::internal
