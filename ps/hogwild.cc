#include "weft/ps/hogwild.h"

#include <atomic>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/common/mutex.h"
#include "weft/dist_optim/update_rule.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/internal/part_data.h"
#include "weft/ps/internal/shared_memory.h"
#include "weft/rpc/plain_tensor.h"

namespace weft::ps {
namespace {

Status bad_push(size_t parameter, std::string_view why) {
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("Hogwild: parameter ", parameter, ": ", std::string(why)));
}

// As it is applied.
StatusOr<at::Tensor> accept_gradient(const UpdateRule& rule, const PackedOptions& options,
                                     size_t index, const at::Tensor& parameter,
                                     const at::Tensor& gradient) {
  const bool sparse = gradient.layout() == at::kSparse;
  const bool right = (sparse || gradient.layout() == at::kStrided) && gradient.device().is_cpu() &&
                     gradient.scalar_type() == parameter.scalar_type() &&
                     gradient.sizes() == parameter.sizes();
  if (!right) {
    return bad_push(index, absl::StrCat("its gradient is ", gradient.toString(), " [",
                                        absl::StrJoin(gradient.sizes(), ", "), "], and it is ",
                                        parameter.toString(), " [",
                                        absl::StrJoin(parameter.sizes(), ", "), "]"));
  }
  const Status taken = sparse ? rule.check_sparse(options) : rule.check_dense(options);
  if (!taken.ok()) return annotate(taken, absl::StrCat("Hogwild: parameter ", index));
  const at::Tensor detached = gradient.detach();
  const at::Tensor values = plain(sparse ? detached._values() : detached);
  const Status finite = internal::check_finite(values, 1);
  if (!finite.ok()) return annotate(finite, absl::StrCat("Hogwild: parameter ", index));
  return sparse ? detached : values;
}

}  // namespace

struct Hogwild::State {
  std::shared_ptr<const UpdateRule> rule;
  PackedOptions options;
  std::vector<at::Tensor> parameters;
  std::vector<std::unique_ptr<ParameterState>> states;
  std::shared_ptr<internal::SharedRegion> region;  // null: of this process alone
  std::atomic<uint64_t> updates{0};                // without region
  Mutex first;                                     // of pushes that make what the rule keeps

  static std::shared_ptr<State> make(std::vector<at::Tensor> parameters, const RuleChoice& choice,
                                     const UserRules& rules) {
    auto out = std::make_shared<State>();
    throw_if_error(annotate(internal::check_rules(rules), "Hogwild"));
    out->rule = internal::find_rule(choice.name, rules);
    if (out->rule == nullptr) {
      throw_error(
          make_error(ErrorKind::kInvalidArgument,
                     absl::StrCat("Hogwild: there is no update rule '", choice.name,
                                  "'; there are ", absl::StrJoin(update_rule_names(), ", "))));
    }
    throw_if_error(out->rule->check_options(choice.options));
    if (out->rule->compensates_delay()) {
      throw_error(make_error(ErrorKind::kInvalidArgument,
                             absl::StrCat("Hogwild: rule ", choice.name,
                                          " wants the values that a gradient was computed with, "
                                          "which Hogwild does not keep")));
    }
    if (parameters.empty()) {
      throw_error(make_error(ErrorKind::kInvalidArgument, "Hogwild: there are no parameters"));
    }
    out->options = choice.options;
    out->parameters = std::move(parameters);
    for (size_t i = 0; i < out->parameters.size(); ++i) {
      const at::Tensor& one = out->parameters[i];
      throw_if_error(internal::check_updated_in_place(absl::StrCat("Hogwild: parameter ", i), one));
      out->states.push_back(std::make_unique<ParameterState>());
      out->rule->prepare(out->options, one.detach(), out->states.back().get());
    }
    return out;
  }
};

Hogwild::Hogwild(std::vector<at::Tensor> parameters, const RuleChoice& rule, const UserRules& rules)
    : state_(State::make(std::move(parameters), rule, rules)) {}

Hogwild::Hogwild(const SharedMemory& memory, const RuleChoice& rule, const UserRules& rules)
    : state_(State::make(memory.region_->parameters, rule, rules)) {
  state_->region = memory.region_;
}

StatusOr<uint64_t> Hogwild::try_push(const std::vector<at::Tensor>& gradients,
                                     std::optional<double> rate) const {
  State& s = *state_;
  if (gradients.size() != s.parameters.size()) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("Hogwild: ", gradients.size(), " gradients for ",
                                   s.parameters.size(), " parameters"));
  }
  const PackedOptions options = internal::options_with_rate(*s.rule, s.options, rate);
  WEFT_RETURN_IF_ERROR(s.rule->check_options(options));
  std::vector<at::Tensor> accepted(gradients.size());
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    WEFT_ASSIGN_OR_RETURN(accepted[i],
                          accept_gradient(*s.rule, options, i, s.parameters[i], gradients[i]));
  }
  const at::AutoGradMode no_grad(false);
  for (size_t i = 0; i < accepted.size(); ++i) {
    if (!accepted[i].defined()) continue;
    ParameterState* const state = s.states[i].get();
    // Shares memory, and has a version of its own: a backward elsewhere is not refused for this.
    const at::Tensor parameter = s.parameters[i].variable_data();
    if (s.rule->prepared(options, *state)) {
      s.rule->update(options, parameter, accepted[i], state);
    } else {
      MutexLock lock(&s.first);
      s.rule->prepare(options, parameter, state);
      s.rule->update(options, parameter, accepted[i], state);
    }
  }
  return s.region != nullptr ? s.region->updates().fetch_add(1, std::memory_order_relaxed)
                             : s.updates.fetch_add(1, std::memory_order_relaxed);
}

uint64_t Hogwild::push(const std::vector<at::Tensor>& gradients, std::optional<double> rate) const {
  return value_or_throw(try_push(gradients, rate));
}

uint64_t Hogwild::push_grads(std::optional<double> rate) const {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& one : state_->parameters) gradients.push_back(one.grad());
  return push(gradients, rate);
}

uint64_t Hogwild::updates() const {
  const State& s = *state_;
  return s.region != nullptr ? s.region->updates().load(std::memory_order_relaxed)
                             : s.updates.load(std::memory_order_relaxed);
}

}  // namespace weft::ps
