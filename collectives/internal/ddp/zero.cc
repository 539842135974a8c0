#include <algorithm>
#include <numeric>
#include <set>

#include "ATen/core/grad_mode.h"
#include "absl/strings/str_cat.h"
#include "weft/collectives/ddp/zero_redundancy_optimizer.h"

namespace weft::internal {

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
