#include "weft/dist_optim/update_rule.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/dist_optim/internal/rules_of_adagrad.h"
#include "weft/dist_optim/internal/rules_of_adam.h"
#include "weft/dist_optim/internal/rules_of_sgd.h"
#include "weft/dist_optim/optim.h"
#include "weft/dist_optim/user_rule.h"

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

namespace internal {
Status check_finite_option(const std::string& rule, const std::string& option, double value) {
  if (std::isfinite(value)) return absl::OkStatus();
  return out_of_range(rule, option, value, "finite");
}
}  // namespace internal

std::shared_ptr<const UpdateRule> make_update_rule(std::string_view name) {
  return first_of_all([name]<class Rule>() -> std::shared_ptr<const UpdateRule> {
    return Rule::kName == name ? std::make_shared<const RuleOf<Rule>>(&check_range) : nullptr;
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
