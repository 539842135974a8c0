#include "weft/dist_optim/local_optimizer.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "weft/dist_optim/update_rule.h"

namespace weft {

LocalOptimizer::LocalOptimizer() = default;
LocalOptimizer::~LocalOptimizer() = default;

StatusOr<std::unique_ptr<LocalOptimizer>> LocalOptimizer::make(std::string_view name,
                                                               std::vector<double> options,
                                                               std::vector<at::Tensor> parameters) {
  auto rule = make_update_rule(name);
  if (rule == nullptr) {
    return make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("no optimizer is called '", std::string(name.substr(0, 40)), "'"));
  }
  WEFT_RETURN_IF_ERROR(rule->check_options(options));
  std::unique_ptr<LocalOptimizer> made(new LocalOptimizer());
  made->rule_ = std::move(rule);
  made->options_ = std::move(options);
  made->parameters_ = std::move(parameters);
  for (size_t i = 0; i < made->parameters_.size(); ++i) {
    made->states_.push_back(std::make_unique<ParameterState>());
  }
  return made;
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

}  // namespace weft
