// The gradients of a stage that is a module: backwards, whole and in two parts, and their reduction.

#include <utility>

#include "ATen/ops/ones_like.h"
#include "absl/strings/str_cat.h"
#include "torch/csrc/autograd/engine.h"
#include "weft/pipeline/internal/module_call.h"
#include "weft/pipeline/internal/module_compute.h"

namespace weft::pipeline::internal {

StatusOr<Tensors> ModuleCompute::roots(const Live& live, Tensors gradients) const {
  if (live.call.is_last) return Tensors{at::ones_like(live.outputs[0])};
  if (gradients.size() != live.outputs.size()) {
    return cannot(
        absl::StrCat(gradients.size(), " gradients for ", live.outputs.size(), " outputs"));
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined() && gradients[i].sizes() != live.outputs[i].sizes()) {
      return cannot(absl::StrCat("the gradient of output ", i, " is ", shape_text(gradients[i]),
                                 " and the output ", shape_text(live.outputs[i])));
    }
  }
  return gradients;
}

StatusOr<Tensors> ModuleCompute::backward(int64_t step, int micro_batch, Tensors gradients) {
  try {
    const Key key{step, micro_batch};
    auto node = live_.extract(key);
    if (node.empty()) return make_error(ErrorKind::kInternal, "its forward is not kept");
    Live& live = node.mapped();
    WEFT_ASSIGN_OR_RETURN(const Tensors grads, roots(live, std::move(gradients)));
    if (hooks_ != nullptr) {
      Tensors captured = whole_backward(live.outputs, live.inputs, grads, parameters_);
      ended_one(key);
      return captured;
    }
    const std::unique_ptr<WeightVersions::Use> weights = weights_of(key);
    torch::autograd::edge_list edges;
    Tensors incoming;
    for (size_t i = 0; i < live.outputs.size(); ++i) {
      if (!grads[i].defined() || !live.outputs[i].requires_grad()) continue;
      edges.push_back(torch::autograd::impl::gradient_edge(live.outputs[i]));
      incoming.push_back(grads[i]);
    }
    if (!edges.empty()) {
      torch::autograd::Engine::get_default_engine().execute(
          edges, incoming, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true);
    }
    Tensors out;
    for (const at::Tensor& t : live.inputs) out.push_back(t.defined() ? t.grad() : at::Tensor());
    ended_one(key);
    return out;
  } catch (...) {
    return status_from_current_exception();
  }
}

StatusOr<Tensors> ModuleCompute::input_grad(int64_t step, int micro_batch, Tensors gradients) {
  try {
    const auto it = live_.find({step, micro_batch});
    if (it == live_.end()) return make_error(ErrorKind::kInternal, "its forward is not kept");
    Live& live = it->second;
    WEFT_ASSIGN_OR_RETURN(const Tensors grads, roots(live, std::move(gradients)));
    const std::unique_ptr<WeightVersions::Use> weights = weights_of({step, micro_batch});
    live.split = std::make_unique<SplitBackward>(live.outputs, live.inputs);
    return live.split->input_grads(grads);
  } catch (...) {
    return status_from_current_exception();
  }
}

Status ModuleCompute::weight_grad(int64_t step, int micro_batch) {
  try {
    const Key key{step, micro_batch};
    auto node = live_.extract(key);
    if (node.empty() || node.mapped().split == nullptr) {
      return make_error(ErrorKind::kInternal, "its input gradient is not kept");
    }
    const std::unique_ptr<WeightVersions::Use> weights = weights_of(key);
    SplitBackward::OnReady on_ready;
    // What is reduced leaves while the rest is computed.
    if (reduces() && ended_ + 1 == options_.micro_batches) {
      on_ready = [this](const at::Tensor& p) { ready(p); };
    }
    node.mapped().split->weight_grads(on_ready);
    ended_one(key);
    return absl::OkStatus();
  } catch (...) {
    return status_from_current_exception();
  }
}

Status ModuleCompute::weight_grads(int64_t step, const std::vector<int>& micro_batches,
                                   absl::FunctionRef<Status(int micro_batch)> at) {
  const auto count = static_cast<int>(micro_batches.size());
  if (!reduces() || versions_ != nullptr || ended_ + count != options_.micro_batches) {
    return StageCompute::weight_grads(step, micro_batches, at);
  }
  try {
    std::vector<SplitBackward*> graphs;
    for (const int i : micro_batches) {
      const auto it = live_.find({step, i});
      if (it == live_.end() || it->second.split == nullptr) {
        WEFT_RETURN_IF_ERROR(at(i));
        return make_error(ErrorKind::kInternal, "its input gradient is not kept");
      }
      graphs.push_back(it->second.split.get());
    }
    WEFT_RETURN_IF_ERROR(SplitBackward::weight_grads(
        graphs, [this](const at::Tensor& p) { ready(p); },
        [&](size_t k) { return at(micro_batches[k]); }));
    for (const int i : micro_batches) {
      live_.erase({step, i});
      ended_one({step, i});
    }
    return absl::OkStatus();
  } catch (...) {
    return status_from_current_exception();
  }
}

std::unique_ptr<WeightVersions::Use> ModuleCompute::weights_of(const Key& key) const {
  if (versions_ == nullptr) return nullptr;
  return std::make_unique<WeightVersions::Use>(versions_.get(), key);
}

void ModuleCompute::ended_one(const Key& key) {
  ++ended_;
  if (versions_ != nullptr) versions_->done(key);
}

void ModuleCompute::ready(const at::Tensor& parameter) {
  if (!parameter.grad().defined() || !ready_.insert(parameter.unsafeGetTensorImpl()).second) return;
  if (options_.reducer != nullptr && reduced_.ok()) {
    reduced_ = options_.reducer->ready(parameter.grad());
  }
  if (hooks_ != nullptr) hooks_->ready(parameter);
}

Status ModuleCompute::reduce(int64_t step, absl::Duration time_left) {
  (void)step;
  try {
    for (auto p = parameters_.rbegin(); p != parameters_.rend(); ++p) ready(*p);
    ready_.clear();
    Status status = std::exchange(reduced_, absl::OkStatus());
    if (status.ok() && options_.reducer != nullptr) status = options_.reducer->finish(time_left);
    if (status.ok() && hooks_ != nullptr) status = hooks_->finish(time_left);
    return status;
  } catch (...) {
    return status_from_current_exception();
  }
}

}  // namespace weft::pipeline::internal
