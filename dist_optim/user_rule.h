#ifndef WEFT_DIST_OPTIM_USER_RULE_H_
#define WEFT_DIST_OPTIM_USER_RULE_H_

// user_rule(): an update rule of your own for tables (weft/ps), from a struct as those of weft::optim are:
//
//   struct Signum {                                                    // Bernstein et al. (2018)
//     static constexpr std::string_view kName = "Signum";
//     struct Options {
//       double lr = 1e-3, momentum = 0.9;
//     };
//     template <class O, class F>                                      // f(name, value) for each option
//     static void visit(O& o, F f) { f("lr", o.lr), f("momentum", o.momentum); }
//     static constexpr std::string_view kBuffers[] = {"average"};      // shaped as the parameter, 0 at first
//     static void apply(const Options& o, at::Tensor p, at::Tensor g, weft::ParameterState* s, int64_t step) {
//       s->buffers[0].lerp_(g, 1 - o.momentum);
//       p.add_(s->buffers[0].sign(), -o.lr);
//     }
//   };
//   weft::ps::Server server(worker, {.rules = {weft::user_rule<Signum>()}});        // at every server
//   weft::ps::Client client(worker, {.servers = servers, .rules = {weft::user_rule<Signum>()}});
//   client.open_table("w", weft::ps::dense({10}, weft::ps::rule<Signum>({.lr = 1e-2})));
//
// apply() updates `p`, whose gradient is `g`, with grad mode off; `step` counts from 1. A dense table is cut between any two
// elements, and rows of a table are updated together where they have seen equally many steps: so an element must not depend on
// another one of another row, nor of a dense table on any. It must depend on nothing else either, since a backup does the
// same again. An option named "lr" is what a push's own rate replaces.
//
// Optional members:
//   bool needs(const Options&, int buffer)        whether these options need it; all
//   double first(const Options&, int buffer)      what its elements are at first; 0
//   bool by_row(int buffer)                       one number for each row instead; then for sparse tables only
//   bool takes_sparse(const Options&)             of a sparse gradient (Hogwild); false
//   Status check(const Options&)                  kind invalid_argument; options are finite in any case

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ATen/ops/full.h"
#include "ATen/ops/full_like.h"
#include "absl/strings/str_cat.h"
#include "weft/common/api.h"
#include "weft/dist_optim/update_rule.h"

namespace weft {
namespace internal {

using CheckOption = Status (*)(const std::string& rule, const std::string& option, double value);
WEFT_API Status check_finite_option(const std::string& rule, const std::string& option,
                                    double value);

template <class Rule>
class RuleOf final : public UpdateRule {
 public:
  using Options = typename Rule::Options;
  explicit RuleOf(CheckOption check) : check_(check) {
    Options defaults;
    Rule::visit(defaults, [this](const char* name, auto&) { options_.emplace_back(name); });
    if constexpr (requires { Rule::kBuffers; }) {
      for (const std::string_view name : Rule::kBuffers) buffers_.emplace_back(name);
    }
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
      WEFT_RETURN_IF_ERROR(check_(name(), options_[i], packed[i]));
    }
    if constexpr (requires { Rule::check(Options()); }) return Rule::check(unpack(packed));
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
      if (needs(o, static_cast<int>(i)) && !state.buffers[i].defined()) return false;
    }
    return true;
  }

  void prepare(const PackedOptions& packed, const at::Tensor& parameter,
               ParameterState* state) const override {
    const Options o = unpack(packed);
    state->buffers.resize(buffers_.size());
    state->made_after.resize(buffers_.size());
    for (size_t i = 0; i < buffers_.size(); ++i) {
      if (!needs(o, static_cast<int>(i)) || state->buffers[i].defined()) continue;
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
    if (!needs(o, i)) return std::nullopt;
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
  static bool needs(const Options& o, int buffer) {
    if constexpr (requires { Rule::needs(o, 0); }) return Rule::needs(o, buffer);
    return true;
  }
  static Options unpack(const PackedOptions& packed) { return unpack_options<Rule>(packed); }

  const CheckOption check_;
  std::vector<std::string> options_;
  std::vector<std::string> buffers_;
};

}  // namespace internal

// The update rule that `Rule` describes. Its kName is the name of no rule of weft::optim. Threads: any.
template <class Rule>
std::shared_ptr<const UpdateRule> user_rule() {
  return std::make_shared<const internal::RuleOf<Rule>>(&internal::check_finite_option);
}

}  // namespace weft

#endif  // WEFT_DIST_OPTIM_USER_RULE_H_
