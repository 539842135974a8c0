#include "weft/dist_optim/update_rule.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <type_traits>
#include <utility>

#include "ATen/ops/full.h"
#include "ATen/ops/full_like.h"
#include "absl/strings/str_cat.h"
#include "weft/dist_optim/internal/rules_of_adagrad.h"
#include "weft/dist_optim/internal/rules_of_adam.h"
#include "weft/dist_optim/internal/rules_of_sgd.h"
#include "weft/dist_optim/optim.h"

namespace weft {
namespace {

using namespace internal;  // NOLINT: the rules

Status out_of_range(const std::string& rule, const std::string& option, double value,
                    const char* range) {
  return make_error(
      ErrorKind::kInvalidArgument,
      absl::StrCat("optimizer ", rule, ": ", option, " is ", value, ", it must be ", range));
}

// What an option of this name may be, whatever the optimizer.
Status check_range(const std::string& rule, const std::string& name, double value) {
  const bool fraction = name == "beta1" || name == "beta2";
  if (fraction && !(value >= 0 && value < 1)) return out_of_range(rule, name, value, "in [0, 1)");
  if ((name == "rho" || (name == "alpha" && rule != optim::ASGD::kName)) &&
      !(value >= 0 && value <= 1)) {
    return out_of_range(rule, name, value, "in [0, 1]");
  }
  if (name == "eta_minus" && !(value > 0 && value < 1)) {
    return out_of_range(rule, name, value, "in (0, 1)");
  }
  if (name == "eta_plus" && !(value > 1 && std::isfinite(value))) {
    return out_of_range(rule, name, value, "above 1");
  }
  const bool any_sign = name == "dampening";
  if (!std::isfinite(value) || (!any_sign && value < 0)) {
    return out_of_range(rule, name, value, any_sign ? "finite" : "finite and not negative");
  }
  return absl::OkStatus();
}

template <class Rule>
class RuleOf final : public UpdateRule {
 public:
  using Options = typename Rule::Options;
  RuleOf() {
    Options defaults;
    Rule::visit(defaults, [this](const char* name, auto&) { options_.emplace_back(name); });
    for (const std::string_view name : Rule::kBuffers) buffers_.emplace_back(name);
  }

  std::string name() const override { return std::string(Rule::kName); }
  const std::vector<std::string>& option_names() const override { return options_; }
  const std::vector<std::string>& buffer_names() const override { return buffers_; }

  Status check_options(const PackedOptions& packed) const override {
    if (packed.size() != options_.size()) {
      return make_error(ErrorKind::kInvalidArgument,
                        absl::StrCat("optimizer ", name(), ": ", packed.size(), " options, it has ",
                                     options_.size()));
    }
    for (size_t i = 0; i < packed.size(); ++i) {
      WEFT_RETURN_IF_ERROR(check_range(name(), options_[i], packed[i]));
    }
    if constexpr (std::is_same_v<Rule, SGDRule>) {
      const Options o = unpack(packed);
      if (o.nesterov && (o.momentum <= 0 || o.dampening != 0)) {
        return make_error(ErrorKind::kInvalidArgument,
                          "optimizer SGD: nesterov needs a momentum, and no dampening");
      }
    }
    if constexpr (std::is_same_v<Rule, FTRLRule>) {
      if (unpack(packed).lr == 0) return out_of_range(name(), "lr", 0, "above 0");
    }
    return absl::OkStatus();
  }

  Status check_sparse(const PackedOptions& packed) const override {
    const Options o = unpack(packed);
    if constexpr (requires { Rule::takes_sparse(o); }) {
      if (Rule::takes_sparse(o)) return absl::OkStatus();
    }
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("optimizer ", name(), " cannot take a sparse gradient with ",
                                   "these options; SparseAdam and FTRL can, and SGD, Adagrad and "
                                   "RowWiseAdagrad without weight decay"));
  }

  Status check_dense(const PackedOptions&) const override {
    if constexpr (requires { Rule::kSparseOnly; }) {
      return make_error(ErrorKind::kInvalidArgument,
                        absl::StrCat("optimizer ", name(),
                                     " takes sparse gradients alone, and this "
                                     "one is dense; use Adam"));
    }
    return absl::OkStatus();
  }

  bool prepared(const PackedOptions& packed, const ParameterState& state) const override {
    const Options o = unpack(packed);
    // The first step sets up what others read.
    if (state.steps.load(std::memory_order_acquire) == 0) return false;
    for (size_t i = 0; i < buffers_.size(); ++i) {
      if (Rule::needs(o, static_cast<int>(i)) && !state.buffers[i].defined()) return false;
    }
    return true;
  }

  void prepare(const PackedOptions& packed, const at::Tensor& parameter,
               ParameterState* state) const override {
    const Options o = unpack(packed);
    state->buffers.resize(buffers_.size());
    state->made_after.resize(buffers_.size());
    for (size_t i = 0; i < buffers_.size(); ++i) {
      if (!Rule::needs(o, static_cast<int>(i)) || state->buffers[i].defined()) continue;
      const double first = *first_value(packed, i);
      state->made_after[i] = state->steps.load(std::memory_order_relaxed);
      if (by_row(i)) {
        const int64_t rows = parameter.dim() == 0 ? 1 : parameter.size(0);
        state->buffers[i] = at::full({rows}, first, parameter.options());
      } else {
        state->buffers[i] = at::full_like(parameter, first, at::MemoryFormat::Preserve);
      }
    }
  }

  bool by_row(size_t buffer) const override {
    if constexpr (requires { Rule::by_row(0); }) return Rule::by_row(static_cast<int>(buffer));
    return false;
  }
  std::optional<double> first_value(const PackedOptions& packed, size_t buffer) const override {
    const Options o = unpack(packed);
    const int i = static_cast<int>(buffer);
    if (!Rule::needs(o, i)) return std::nullopt;
    if constexpr (requires { Rule::first(o, i); }) return Rule::first(o, i);
    return 0;
  }

  void update(const PackedOptions& packed, at::Tensor parameter, at::Tensor gradient,
              ParameterState* state) const override {
    const int64_t step = state->steps.load(std::memory_order_relaxed) + 1;
    Rule::apply(unpack(packed), std::move(parameter), std::move(gradient), state, step);
    state->steps.fetch_add(1, std::memory_order_release);
  }

  bool compensates_delay() const override {
    return requires { Rule::kCompensatesDelay; };
  }
  void update_delayed(const PackedOptions& packed, at::Tensor parameter, at::Tensor gradient,
                      const at::Tensor& then, ParameterState* state) const override {
    if constexpr (requires { Rule::kCompensatesDelay; }) {
      const int64_t step = state->steps.load(std::memory_order_relaxed) + 1;
      Rule::apply(unpack(packed), std::move(parameter), std::move(gradient), state, step, then);
      state->steps.fetch_add(1, std::memory_order_release);
    } else {
      update(packed, std::move(parameter), std::move(gradient), state);
    }
  }

  std::optional<double> plain_step(const PackedOptions& packed) const override {
    if constexpr (requires { Rule::plain_step(Options()); })
      return Rule::plain_step(unpack(packed));
    return std::nullopt;
  }

 private:
  static Options unpack(const PackedOptions& packed) {
    return internal::unpack_options<Rule>(packed);
  }

  std::vector<std::string> options_;
  std::vector<std::string> buffers_;
};

// Calls `f` with each, until it gives something.
template <class F>
auto first_of_all(const F& f) {
  const auto or_else = [&f]<class... Rules>(std::tuple<Rules...>) {
    decltype(f.template operator()<SGDRule>()) found{};
    (void)((found = f.template operator()<Rules>()) || ...);
    return found;
  };
  return or_else(std::tuple<SGDRule, AdamRule<optim::Adam>, AdamRule<optim::AdamW>, AdagradRule,
                            RowWiseAdagradRule, AdadeltaRule, RMSpropRule, AdamaxRule, RpropRule,
                            SparseAdamRule, NAdamRule, RAdamRule, ASGDRule, FTRLRule,
                            DelayCompensatedSGDRule>());
}

}  // namespace

std::shared_ptr<const UpdateRule> make_update_rule(std::string_view name) {
  return first_of_all([name]<class Rule>() -> std::shared_ptr<const UpdateRule> {
    return Rule::kName == name ? std::make_shared<const RuleOf<Rule>>() : nullptr;
  });
}

std::vector<std::string> update_rule_names() {
  std::vector<std::string> out;
  first_of_all([&out]<class Rule>() {
    out.emplace_back(Rule::kName);
    return false;
  });
  return out;
}

}  // namespace weft
