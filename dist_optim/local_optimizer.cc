#include "weft/dist_optim/local_optimizer.h"

#include <string>
#include <utility>

#include "ATen/ops/scalar_tensor.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "weft/dist_optim/update_rule.h"

namespace weft {

LocalOptimizer::LocalOptimizer() = default;
LocalOptimizer::~LocalOptimizer() = default;

StatusOr<std::unique_ptr<LocalOptimizer>> LocalOptimizer::make(std::string_view name,
                                                               std::vector<double> options,
                                                               std::vector<at::Tensor> parameters,
                                                               std::vector<std::string> names) {
  auto rule = make_update_rule(name);
  if (rule == nullptr) {
    return make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("no optimizer is called '", std::string(name.substr(0, 40)), "'"));
  }
  WEFT_RETURN_IF_ERROR(rule->check_options(options));
  if (!names.empty() && names.size() != parameters.size()) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat(names.size(), " names for ", parameters.size(), " parameters"));
  }
  std::unique_ptr<LocalOptimizer> made(new LocalOptimizer());
  made->rule_ = std::move(rule);
  made->options_ = std::move(options);
  made->parameters_ = std::move(parameters);
  made->names_ = std::move(names);
  for (size_t i = 0; i < made->parameters_.size(); ++i) {
    if (made->names_.size() == i) made->names_.push_back(absl::StrCat(i));
    made->states_.push_back(std::make_unique<ParameterState>());
  }
  return made;
}

Status LocalOptimizer::set_options(std::vector<double> options) {
  if (options.size() != options_.size()) {
    return make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat(options.size(), " options for the ", options_.size(), " of ", rule_->name()));
  }
  WEFT_RETURN_IF_ERROR(rule_->check_options(options));
  options_ = std::move(options);
  return absl::OkStatus();
}

Status LocalOptimizer::step(const std::vector<at::Tensor>& gradients) {
  if (gradients.size() != parameters_.size()) {
    return make_error(ErrorKind::kInvalidArgument, absl::StrCat(gradients.size(), " gradients for ",
                                                                parameters_.size(), " parameters"));
  }
  const c10::AutoGradMode off(false);
  try {
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined()) continue;
      ParameterState* const state = states_[i].get();
      if (!rule_->prepared(options_, *state)) rule_->prepare(options_, parameters_[i], state);
      rule_->update(options_, parameters_[i], gradients[i], state);
    }
  } catch (...) {
    return status_from_current_exception();
  }
  return absl::OkStatus();
}

std::map<std::string, at::Tensor> LocalOptimizer::state() const {
  std::map<std::string, at::Tensor> out;
  const c10::AutoGradMode off(false);
  for (size_t i = 0; i < states_.size(); ++i) {
    const ParameterState& state = *states_[i];
    if (!rule_->prepared(options_, state)) continue;
    out.emplace(absl::StrCat(names_[i], "/steps"),
                at::scalar_tensor(state.steps.load(), at::kLong));
    for (size_t k = 0; k < state.buffers.size(); ++k) {
      if (!state.buffers[k].defined()) continue;
      out.emplace(absl::StrCat(names_[i], "/", rule_->buffer_names()[k]), state.buffers[k].clone());
    }
  }
  return out;
}

Status LocalOptimizer::load_state(const std::map<std::string, at::Tensor>& state) {
  const auto wrong = [](const std::string& name, std::string_view what) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("the optimizer's '", name, "' ", std::string(what)));
  };
  const c10::AutoGradMode off(false);
  std::vector<std::unique_ptr<ParameterState>> fresh;
  size_t used = 0;
  try {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      ParameterState* const made = fresh.emplace_back(std::make_unique<ParameterState>()).get();
      const std::string steps = absl::StrCat(names_[i], "/steps");
      const auto has_stepped = state.find(steps);
      if (has_stepped == state.end()) continue;
      if (!has_stepped->second.defined() || has_stepped->second.numel() != 1) {
        return wrong(steps, "is no number");
      }
      rule_->prepare(options_, parameters_[i], made);
      made->steps = has_stepped->second.item<int64_t>();
      ++used;
      for (size_t k = 0; k < made->buffers.size(); ++k) {
        at::Tensor& buffer = made->buffers[k];
        if (!buffer.defined()) continue;
        const std::string name = absl::StrCat(names_[i], "/", rule_->buffer_names()[k]);
        const auto it = state.find(name);
        if (it == state.end()) return wrong(name, "is missing");
        if (!it->second.defined() || it->second.sizes() != buffer.sizes() ||
            it->second.scalar_type() != buffer.scalar_type()) {
          return wrong(name, "has another shape or type than its parameter");
        }
        buffer = it->second.to(buffer.device(), buffer.scalar_type(), false, /*copy=*/true);
        ++used;
      }
    }
  } catch (...) {
    return status_from_current_exception();
  }
  if (used != state.size()) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("the state of an optimizer has ", state.size(),
                                   " tensors, and this one knows ", used, " of them"));
  }
  states_.swap(fresh);
  return absl::OkStatus();
}

}  // namespace weft
