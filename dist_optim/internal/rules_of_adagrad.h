#ifndef WEFT_DIST_OPTIM_INTERNAL_RULES_OF_ADAGRAD_H_
#define WEFT_DIST_OPTIM_INTERNAL_RULES_OF_ADAGRAD_H_

// Rates by sums and means of squares. Threads: see update_rule.h.

#include <cstdint>
#include <string_view>

#include "ATen/Functions.h"
#include "weft/dist_optim/internal/rule_parts.h"
#include "weft/dist_optim/optim.h"
#include "weft/dist_optim/update_rule.h"

namespace weft::internal {

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

// `linear` is z of the paper: the sum of gradients, less what the values so far make of it. It begins as what the first
// values follow from.
struct FTRLRule : optim::FTRL {
  enum { kLinear, kSum };
  static constexpr std::string_view kBuffers[] = {"linear", "sum"};
  static bool needs(const Options&, int) { return true; }
  static bool takes_sparse(const Options&) { return true; }
  static Status check(const Options& o) {
    if (o.lr != 0) return absl::OkStatus();
    return make_error(ErrorKind::kInvalidArgument, "optimizer FTRL: lr is 0, it must be above 0");
  }
  static double first(const Options& o, int buffer) {
    return buffer == kSum ? o.initial_accumulator_value : 0;
  }
  static at::Tensor strength(const Options& o, const at::Tensor& sum) {
    return sum.sqrt().add_(o.beta).div_(o.lr).add_(o.l2);
  }
  static at::Tensor values_of(const Options& o, const at::Tensor& linear, const at::Tensor& sum) {
    const at::Tensor pull = linear.sign().mul_(o.l1).sub_(linear).div_(strength(o, sum));
    return at::where(linear.abs().le(o.l1), at::zeros_like(linear), pull);
  }
  static void apply(const Options& o, at::Tensor p, at::Tensor g, ParameterState* s, int64_t step) {
    g = signed_gradient(g, o.maximize);
    at::Tensor& linear = s->buffers[kLinear];
    at::Tensor& sum = s->buffers[kSum];
    if (step == 1) linear.copy_(strength(o, sum).mul_(p).add_(p.sign(), o.l1).neg_());
    const auto sigma = [&o](const at::Tensor& before, const at::Tensor& now) {
      return now.sqrt().sub_(before.sqrt()).div_(o.lr);
    };
    if (!g.is_sparse()) {
      const at::Tensor now = sum.addcmul(g, g);
      linear.add_(g).sub_(sigma(sum, now).mul_(p));
      sum.copy_(now);
      p.copy_(values_of(o, linear, sum));
      return;
    }
    g = g.coalesce();  // the update is not linear: each element once
    const at::Tensor values = g._values();
    if (values.numel() == 0) return;
    const auto masked = [&g](const at::Tensor& of) { return of.sparse_mask(g)._values(); };
    const at::Tensor before = masked(sum);
    const at::Tensor now = before.addcmul(values, values);
    const at::Tensor weights = masked(p);
    const at::Tensor by = values.sub(sigma(before, now).mul_(weights));
    const at::Tensor fresh = values_of(o, masked(linear).add_(by), now);
    linear.add_(sparse_like(g, by));
    sum.add_(sparse_like(g, now.sub(before)));
    p.add_(sparse_like(g, fresh.sub(weights)));
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

}  // namespace weft::internal

#endif  // WEFT_DIST_OPTIM_INTERNAL_RULES_OF_ADAGRAD_H_
