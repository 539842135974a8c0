#ifndef WEFT_DIST_OPTIM_INTERNAL_RULES_OF_ADAM_H_
#define WEFT_DIST_OPTIM_INTERNAL_RULES_OF_ADAM_H_

// Adam and its relatives. Threads: see update_rule.h.

#include <cmath>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "ATen/Functions.h"
#include "weft/dist_optim/internal/rule_parts.h"
#include "weft/dist_optim/optim.h"
#include "weft/dist_optim/update_rule.h"

namespace weft::internal {

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

}  // namespace weft::internal

#endif  // WEFT_DIST_OPTIM_INTERNAL_RULES_OF_ADAM_H_
