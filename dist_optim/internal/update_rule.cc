#include "weft/dist_optim/update_rule.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <type_traits>
#include <utility>

#include "ATen/Functions.h"
#include "absl/strings/str_cat.h"
#include "weft/dist_optim/optim.h"

namespace weft {
namespace {

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

at::Tensor signed_gradient(const at::Tensor& gradient, bool maximize) {
  return maximize ? gradient.neg() : gradient;
}
at::Tensor decayed(const at::Tensor& gradient, const at::Tensor& parameter, double weight_decay) {
  return weight_decay == 0 ? gradient : gradient.add(parameter, weight_decay);
}
at::Tensor sparse_like(const at::Tensor& gradient, const at::Tensor& values) {
  return at::_sparse_coo_tensor_unsafe(gradient._indices(), values, gradient.sizes());
}

// A number for each row, in the shape in which it goes beside the rows.
at::Tensor beside(const at::Tensor& by_row, const at::Tensor& rows) {
  std::vector<int64_t> shape(static_cast<size_t>(rows.dim()), 1);
  if (!shape.empty()) shape[0] = rows.size(0);
  return by_row.reshape(shape);
}

// Each of these names its buffers, says which of them it needs, and applies one step. The number of
// the step begins at 1.
struct SGDRule : optim::SGD {
  enum { kMomentum };
  static constexpr std::string_view kBuffers[] = {"momentum_buffer"};
  static bool needs(const Options& o, int) { return o.momentum != 0; }
  static bool takes_sparse(const Options& o) { return o.weight_decay == 0; }
  static std::optional<double> plain_step(const Options& o) {
    if (o.momentum != 0 || o.weight_decay != 0) return std::nullopt;
    return o.maximize ? o.lr : -o.lr;
  }
  static void apply(const Options& o, at::Tensor p, at::Tensor g, ParameterState* s, int64_t step) {
    g = signed_gradient(g, o.maximize);
    g = decayed(g, p, o.weight_decay);
    if (o.momentum != 0) {
      at::Tensor& buffer = s->buffers[kMomentum];
      // The first gradient that it takes, it takes as it is, whatever the dampening.
      const int64_t made_after = s->made_after.empty() ? 0 : s->made_after[kMomentum];
      if (step == made_after + 1) {
        buffer.zero_().add_(g);
      } else {
        buffer.mul_(o.momentum).add_(g, 1 - o.dampening);
      }
      if (!o.nesterov) {
        g = buffer;
      } else {  // a dense tensor takes a sparse one, and not the other way round
        g = g.is_sparse() ? buffer.mul(o.momentum).add_(g) : g.add(buffer, o.momentum);
      }
    }
    p.add_(g, -o.lr);
  }
};

template <class Tag>
struct AdamRule : Tag {
  using Options = typename Tag::Options;
  enum { kMean, kSquare, kMaximum };
  static constexpr std::string_view kBuffers[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  static bool needs(const Options& o, int buffer) { return buffer != kMaximum || o.amsgrad; }
  static void apply(const Options& o, at::Tensor p, at::Tensor g, ParameterState* s, int64_t step) {
    g = signed_gradient(g, o.maximize);
    if constexpr (std::is_same_v<Tag, optim::AdamW>) {
      p.mul_(1 - o.lr * o.weight_decay);
    } else {
      g = decayed(g, p, o.weight_decay);
    }
    const auto t = static_cast<double>(step);
    const double correction1 = 1 - std::pow(o.beta1, t);
    const double correction2 = 1 - std::pow(o.beta2, t);
    s->buffers[kMean].lerp_(g, 1 - o.beta1);
    s->buffers[kSquare].mul_(o.beta2).addcmul_(g, g, 1 - o.beta2);
    if (o.amsgrad) {
      at::maximum_out(s->buffers[kMaximum], s->buffers[kMaximum], s->buffers[kSquare]);
    }
    const at::Tensor& second = s->buffers[o.amsgrad ? kMaximum : kSquare];
    at::Tensor denominator = second.sqrt().div_(std::sqrt(correction2)).add_(o.eps);
    p.addcdiv_(s->buffers[kMean], denominator, -o.lr / correction1);
  }
};

struct AdagradRule : optim::Adagrad {
  enum { kSum };
  static constexpr std::string_view kBuffers[] = {"sum"};
  static bool needs(const Options&, int) { return true; }
  static bool takes_sparse(const Options& o) { return o.weight_decay == 0; }
  static double first(const Options& o, int) { return o.initial_accumulator_value; }
  static void apply(const Options& o, at::Tensor p, at::Tensor g, ParameterState* s, int64_t step) {
    g = signed_gradient(g, o.maximize);
    const double lr = o.lr / (1 + static_cast<double>(step - 1) * o.lr_decay);
    at::Tensor& sum = s->buffers[kSum];
    if (g.is_sparse()) {
      g = g.coalesce();  // the update is not linear: each row once
      const at::Tensor rows = g._indices()[0];
      const at::Tensor values = g._values();
      if (g.sparse_dim() == 1) {
        const at::Tensor fresh = sum.index_select(0, rows).addcmul_(values, values);
        sum.index_copy_(0, rows, fresh);
        p.index_add_(0, rows, values.div(fresh.sqrt().add_(o.eps)), -lr);
      } else {
        sum.add_(sparse_like(g, values.pow(2)));
        const at::Tensor deviation = sum.sparse_mask(g)._values().sqrt().add_(o.eps);
        p.add_(sparse_like(g, values.div(deviation)), -lr);
      }
      return;
    }
    g = decayed(g, p, o.weight_decay);
    sum.addcmul_(g, g);
    p.addcdiv_(g, sum.sqrt().add_(o.eps), -lr);
  }
};

// One number for each row: the mean of the squares of its gradients. A parameter of one dimension
// has rows of one element.
struct RowWiseAdagradRule : optim::RowWiseAdagrad {
  enum { kSum };
  static constexpr std::string_view kBuffers[] = {"sum"};
  static bool needs(const Options&, int) { return true; }
  static bool takes_sparse(const Options& o) { return o.weight_decay == 0; }
  static bool by_row(int) { return true; }
  static double first(const Options& o, int) { return o.initial_accumulator_value; }
  // The mean square of rows x anything, in the shape in which it divides the rows.
  static at::Tensor mean_square(const at::Tensor& rows) {
    const at::Tensor square = rows.mul(rows);
    if (rows.dim() <= 1) return square;
    return square.reshape({rows.size(0), -1}).mean(1);
  }
  static void apply(const Options& o, at::Tensor p, at::Tensor g, ParameterState* s, int64_t) {
    g = signed_gradient(g, o.maximize);
    at::Tensor& sum = s->buffers[kSum];
    if (g.is_sparse()) {
      g = g.coalesce();
      const at::Tensor rows = g._indices()[0];
      const at::Tensor values = g._values();
      const at::Tensor fresh = sum.index_select(0, rows).add_(mean_square(values));
      sum.index_copy_(0, rows, fresh);
      p.index_add_(0, rows, values.div(beside(fresh, values).sqrt().add_(o.eps)), -o.lr);
      return;
    }
    g = decayed(g, p, o.weight_decay);
    sum.add_(mean_square(g));
    p.addcdiv_(g, beside(sum, g).sqrt().add_(o.eps).expand_as(g), -o.lr);
  }
};

struct AdadeltaRule : optim::Adadelta {
  enum { kSquare, kDelta };
  static constexpr std::string_view kBuffers[] = {"square_avg", "acc_delta"};
  static bool needs(const Options&, int) { return true; }
  static void apply(const Options& o, at::Tensor p, at::Tensor g, ParameterState* s, int64_t) {
    g = decayed(signed_gradient(g, o.maximize), p, o.weight_decay);
    s->buffers[kSquare].mul_(o.rho).addcmul_(g, g, 1 - o.rho);
    const at::Tensor deviation = s->buffers[kSquare].add(o.eps).sqrt_();
    const at::Tensor delta = s->buffers[kDelta].add(o.eps).sqrt_().div_(deviation).mul_(g);
    s->buffers[kDelta].mul_(o.rho).addcmul_(delta, delta, 1 - o.rho);
    p.add_(delta, -o.lr);
  }
};

struct RMSpropRule : optim::RMSprop {
  enum { kSquare, kMean, kMomentum };
  static constexpr std::string_view kBuffers[] = {"square_avg", "grad_avg", "momentum_buffer"};
  static bool needs(const Options& o, int buffer) {
    return buffer == kSquare || (buffer == kMean && o.centered) ||
           (buffer == kMomentum && o.momentum > 0);
  }
  static void apply(const Options& o, at::Tensor p, at::Tensor g, ParameterState* s, int64_t) {
    g = decayed(signed_gradient(g, o.maximize), p, o.weight_decay);
    at::Tensor& square = s->buffers[kSquare];
    square.mul_(o.alpha).addcmul_(g, g, 1 - o.alpha);
    at::Tensor deviation;
    if (o.centered) {
      at::Tensor& mean = s->buffers[kMean];
      mean.lerp_(g, 1 - o.alpha);
      deviation = square.addcmul(mean, mean, -1).sqrt_().add_(o.eps);
    } else {
      deviation = square.sqrt().add_(o.eps);
    }
    if (o.momentum > 0) {
      at::Tensor& buffer = s->buffers[kMomentum];
      buffer.mul_(o.momentum).addcdiv_(g, deviation);
      p.add_(buffer, -o.lr);
    } else {
      p.addcdiv_(g, deviation, -o.lr);
    }
  }
};

struct AdamaxRule : optim::Adamax {
  enum { kMean, kInfinity };
  static constexpr std::string_view kBuffers[] = {"exp_avg", "exp_inf"};
  static bool needs(const Options&, int) { return true; }
  static void apply(const Options& o, at::Tensor p, at::Tensor g, ParameterState* s, int64_t step) {
    g = decayed(signed_gradient(g, o.maximize), p, o.weight_decay);
    s->buffers[kMean].lerp_(g, 1 - o.beta1);
    at::Tensor& infinity = s->buffers[kInfinity];
    at::maximum_out(infinity, infinity.mul_(o.beta2), g.abs().add_(o.eps));
    const double correction = 1 - std::pow(o.beta1, static_cast<double>(step));
    p.addcdiv_(s->buffers[kMean], infinity, -o.lr / correction);
  }
};

struct RpropRule : optim::Rprop {
  enum { kPrevious, kStepSize };
  static constexpr std::string_view kBuffers[] = {"prev", "step_size"};
  static bool needs(const Options&, int) { return true; }
  static double first(const Options& o, int buffer) { return buffer == kStepSize ? o.lr : 0; }
  static void apply(const Options& o, at::Tensor p, at::Tensor g, ParameterState* s, int64_t step) {
    g = signed_gradient(g, o.maximize).clone();
    const at::Tensor agreement = g.mul(s->buffers[kPrevious]).sign_();
    const at::Tensor turned = agreement.lt(0);
    at::Tensor factor = at::ones_like(g);
    factor.masked_fill_(agreement.gt(0), o.eta_plus).masked_fill_(turned, o.eta_minus);
    // The rate is that of the first step, and not of the moment at which its buffers were made.
    if (step == 1) s->buffers[kStepSize].fill_(o.lr);
    s->buffers[kStepSize].mul_(factor).clamp_(o.step_min, o.step_max);
    g.masked_fill_(turned, 0);
    p.addcmul_(g.sign(), s->buffers[kStepSize], -1);
    s->buffers[kPrevious].copy_(g);
  }
};

// The gradient of a row that a sparse one does not name is none, and not zero.
struct SparseAdamRule : optim::SparseAdam {
  enum { kMean, kSquare };
  static constexpr std::string_view kBuffers[] = {"exp_avg", "exp_avg_sq"};
  static constexpr bool kSparseOnly = true;
  static bool needs(const Options&, int) { return true; }
  static bool takes_sparse(const Options&) { return true; }
  static void apply(const Options& o, at::Tensor p, at::Tensor g, ParameterState* s, int64_t step) {
    g = signed_gradient(g, o.maximize);
    const auto t = static_cast<double>(step);
    const double size = o.lr * std::sqrt(1 - std::pow(o.beta2, t)) / (1 - std::pow(o.beta1, t));
    at::Tensor& mean = s->buffers[kMean];
    at::Tensor& square = s->buffers[kSquare];
    if (!g.is_sparse()) {  // rows of a table: all are named
      mean.lerp_(g, 1 - o.beta1);
      square.lerp_(g.mul(g), 1 - o.beta2);
      p.addcdiv_(mean, square.sqrt().add_(o.eps), -size);
      return;
    }
    g = g.coalesce();  // the update is not linear: each row once
    const at::Tensor values = g._values();
    if (values.numel() == 0) return;
    const auto moved = [&g](at::Tensor& average, const at::Tensor& towards, double weight) {
      const at::Tensor before = average.sparse_mask(g)._values();
      const at::Tensor by = towards.sub(before).mul_(weight);
      average.add_(sparse_like(g, by));
      return before.add(by);
    };
    const at::Tensor mean_now = moved(mean, values, 1 - o.beta1);
    const at::Tensor square_now = moved(square, values.mul(values), 1 - o.beta2);
    p.add_(sparse_like(g, mean_now.div(square_now.sqrt().add_(o.eps)).mul_(-size)));
  }
};

// Weight decay of either kind; gives the gradient to go on with.
template <class Options>
at::Tensor decayed_either_way(const Options& o, at::Tensor p, const at::Tensor& g) {
  if (!o.decoupled_weight_decay) return decayed(g, p, o.weight_decay);
  if (o.weight_decay != 0) p.mul_(1 - o.lr * o.weight_decay);
  return g;
}

struct NAdamRule : optim::NAdam {
  enum { kMean, kSquare, kProduct };
  static constexpr std::string_view kBuffers[] = {"exp_avg", "exp_avg_sq", "mu_product"};
  static bool needs(const Options&, int) { return true; }
  // A single number in PyTorch: rows of a table may have taken different numbers of steps.
  static bool by_row(int buffer) { return buffer == kProduct; }
  static double first(const Options&, int buffer) { return buffer == kProduct ? 1 : 0; }
  static double mu(const Options& o, double step) {
    return o.beta1 * (1 - 0.5 * std::pow(0.96, step * o.momentum_decay));
  }
  static void apply(const Options& o, at::Tensor p, at::Tensor g, ParameterState* s, int64_t step) {
    g = decayed_either_way(o, p, signed_gradient(g, o.maximize));
    const auto t = static_cast<double>(step);
    const double now = mu(o, t);
    const double next = mu(o, t + 1);
    const at::Tensor product = beside(s->buffers[kProduct].mul_(now), p);
    at::Tensor& mean = s->buffers[kMean];
    mean.lerp_(g, 1 - o.beta1);
    s->buffers[kSquare].mul_(o.beta2).addcmul_(g, g, 1 - o.beta2);
    const at::Tensor denominator =
        s->buffers[kSquare].div(1 - std::pow(o.beta2, t)).sqrt_().add_(o.eps);
    const auto over_rest = [](double rate, const at::Tensor& of) {
      return of.neg().add_(1).reciprocal_().mul_(rate);  // rate / (1 - of), by row
    };
    p.addcmul_(g.div(denominator), over_rest(-o.lr * (1 - now), product));
    p.addcmul_(mean.div(denominator), over_rest(-o.lr * next, product.mul(next)));
  }
};

struct RAdamRule : optim::RAdam {
  enum { kMean, kSquare };
  static constexpr std::string_view kBuffers[] = {"exp_avg", "exp_avg_sq"};
  static bool needs(const Options&, int) { return true; }
  static void apply(const Options& o, at::Tensor p, at::Tensor g, ParameterState* s, int64_t step) {
    g = decayed_either_way(o, p, signed_gradient(g, o.maximize));
    const auto t = static_cast<double>(step);
    s->buffers[kMean].lerp_(g, 1 - o.beta1);
    s->buffers[kSquare].mul_(o.beta2).addcmul_(g, g, 1 - o.beta2);
    const double correction1 = 1 - std::pow(o.beta1, t);
    const double correction2 = 1 - std::pow(o.beta2, t);
    const double most = 2 / (1 - o.beta2) - 1;
    const double length = most - 2 * t * std::pow(o.beta2, t) / correction2;
    if (length <= 5) {  // the variance is not known well enough
      p.add_(s->buffers[kMean], -o.lr / correction1);
      return;
    }
    const double rectified =
        std::sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length));
    p.addcdiv_(s->buffers[kMean], s->buffers[kSquare].sqrt().add_(o.eps),
               -o.lr * rectified * std::sqrt(correction2) / correction1);
  }
};

struct ASGDRule : optim::ASGD {
  enum { kAverage, kEta };
  static constexpr std::string_view kBuffers[] = {"ax", "eta"};
  static bool needs(const Options&, int) { return true; }
  // A single number in PyTorch: rows of a table may have taken different numbers of steps.
  static bool by_row(int buffer) { return buffer == kEta; }
  static double first(const Options& o, int buffer) { return buffer == kEta ? o.lr : 0; }
  static void apply(const Options& o, at::Tensor p, at::Tensor g, ParameterState* s, int64_t step) {
    g = decayed(signed_gradient(g, o.maximize), p, o.weight_decay);
    const auto t = static_cast<double>(step);
    at::Tensor& eta = s->buffers[kEta];
    // The rate is that of the first step, and not of the moment at which its buffers were made.
    if (step == 1) eta.fill_(o.lr);
    const at::Tensor rate = beside(eta, p);
    p.mul_(rate.mul(-o.lambd).add_(1));
    p.addcmul_(g, rate, -1);
    const double mu = step == 1 ? 1 : 1 / std::max(1.0, t - 1 - o.t0);
    at::Tensor& average = s->buffers[kAverage];
    if (mu == 1) {
      average.copy_(p);
    } else {
      average.lerp_(p, mu);
    }
    eta.fill_(o.lr / std::pow(1 + o.lambd * o.lr * t, o.alpha));
  }
};

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
    return absl::OkStatus();
  }

  Status check_sparse(const PackedOptions& packed) const override {
    const Options o = unpack(packed);
    if constexpr (requires { Rule::takes_sparse(o); }) {
      if (Rule::takes_sparse(o)) return absl::OkStatus();
    }
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("optimizer ", name(), " cannot take a sparse gradient with ",
                                   "these options; SparseAdam can, and SGD, Adagrad and "
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
                            SparseAdamRule, NAdamRule, RAdamRule, ASGDRule>());
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
