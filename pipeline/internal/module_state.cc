// What a stage keeps between steps: gradients, parameters, buffers, and the optimizer's.

#include <algorithm>
#include <string_view>
#include <utility>

#include <torch/nn/module.h>

#include "ATen/ops/empty.h"
#include "ATen/ops/linalg_vector_norm.h"
#include "ATen/ops/zeros_like.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "weft/pipeline/internal/module_call.h"
#include "weft/pipeline/internal/module_compute.h"
#include "weft/rpc/spi/device_order.h"

namespace weft::pipeline::internal {
namespace {

constexpr std::string_view kKept = "optimizer/";

}  // namespace

std::map<std::string, at::Tensor> ModuleCompute::gradients() const {
  std::map<std::string, at::Tensor> out;
  for (const auto& item : module_.module->named_parameters()) {
    if (item.value().grad().defined()) out.emplace(item.key(), item.value().grad().detach());
  }
  return out;
}

void ModuleCompute::zero_grad() {
  for (const at::Tensor& p : parameters_) p.mutable_grad() = at::Tensor();
}

void ModuleCompute::publish() const {
  std::vector<at::Tensor> all = module_.module->buffers();
  all.insert(all.end(), parameters_.begin(), parameters_.end());
  publish_here(*worker_, all);
}

std::map<std::string, at::Tensor> ModuleCompute::state() const {
  std::map<std::string, at::Tensor> out;
  for (const auto& [name, tensor] : weft::internal::state_dict_of(*module_.module)) {
    out.emplace(name, tensor.detach().clone());
  }
  if (optimizer_ == nullptr) return out;
  for (auto& [name, tensor] : optimizer_->state()) out.emplace(std::string(kKept) + name, tensor);
  return out;
}

std::map<std::string, at::Tensor> ModuleCompute::shapes() const {
  std::map<std::string, at::Tensor> out;
  for (const auto& [name, tensor] : weft::internal::state_dict_of(*module_.module)) {
    at::Tensor sizes = at::empty({tensor.dim()}, at::kLong);
    std::copy(tensor.sizes().begin(), tensor.sizes().end(), sizes.mutable_data_ptr<int64_t>());
    out.emplace(name, std::move(sizes));
  }
  return out;
}

Status ModuleCompute::load_state(const std::map<std::string, at::Tensor>& state) {
  StateDict of_module;
  std::map<std::string, at::Tensor> of_optimizer;
  for (const auto& [name, tensor] : state) {
    if (name.compare(0, kKept.size(), kKept) == 0) {
      of_optimizer.emplace(name.substr(kKept.size()), tensor);
    } else {
      of_module.emplace(name, tensor);
    }
  }
  if (optimizer_ == nullptr && !of_optimizer.empty()) {
    return cannot("a state with an optimizer's part for a stage without an optimizer");
  }
  try {
    // The optimizer's part last: it changes nothing when it fails, and the module's is put back.
    const StateDict before = weft::internal::state_dict_of(*module_.module);
    StateDict kept;
    for (const auto& [name, tensor] : before) kept.emplace(name, tensor.detach().clone());
    weft::internal::load_state_dict_into(*module_.module, of_module, /*strict=*/true);
    const Status status =
        optimizer_ == nullptr ? absl::OkStatus() : optimizer_->load_state(of_optimizer);
    if (!status.ok()) weft::internal::load_state_dict_into(*module_.module, kept, /*strict=*/true);
    // A step that was broken off has left gradients of some of its micro-batches.
    if (status.ok()) zero_grad();
    return status;
  } catch (...) {
    return status_from_current_exception();
  }
}

Status ModuleCompute::set_options(const std::vector<double>& options) {
  return optimizer_ == nullptr ? absl::OkStatus() : optimizer_->set_options(options);
}

StatusOr<double> ModuleCompute::squared_norm() {
  try {
    const c10::AutoGradMode off(false);
    double sum = 0;
    for (const at::Tensor& p : parameters_) {
      const bool counted = !options_.tied_elsewhere ||
                           std::none_of(tied_.begin(), tied_.end(),
                                        [&p](const at::Tensor& t) { return t.is_same(p); });
      if (!counted || !p.grad().defined()) continue;
      const double norm =
          at::linalg_vector_norm(p.grad(), 2, at::OptionalIntArrayRef(), false, at::kDouble)
              .item<double>();
      sum += norm * norm;
    }
    return sum;
  } catch (...) {
    return status_from_current_exception();
  }
}

Status ModuleCompute::scale_gradients(double factor) {
  try {
    const c10::AutoGradMode off(false);
    for (const at::Tensor& p : parameters_) {
      if (p.grad().defined()) p.mutable_grad().mul_(factor);
    }
    return absl::OkStatus();
  } catch (...) {
    return status_from_current_exception();
  }
}

void ModuleCompute::skip_step() {
  ended_ = 0;
  zero_grad();
}

StatusOr<Tensors> ModuleCompute::tied_gradients() {
  Tensors out;
  for (const at::Tensor& p : tied_) {
    out.push_back(p.grad().defined() ? p.grad().detach() : at::zeros_like(p.detach()));
  }
  return out;
}

Status ModuleCompute::set_tied_gradients(Tensors sums) {
  for (size_t i = 0; i < tied_.size(); ++i) {
    if (i < sums.size() && sums[i].defined() && sums[i].sizes() == tied_[i].sizes()) continue;
    return cannot(absl::StrCat("the sum of the gradients of '", options_.tied[i],
                               "' over its stages is of another shape"));
  }
  for (size_t i = 0; i < tied_.size(); ++i) tied_[i].mutable_grad() = std::move(sums[i]);
  return absl::OkStatus();
}

}  // namespace weft::pipeline::internal
