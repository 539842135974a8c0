#ifndef WEFT_DIST_OPTIM_INTERNAL_RULES_OF_SGD_H_
#define WEFT_DIST_OPTIM_INTERNAL_RULES_OF_SGD_H_

// SGD and what follows the gradient with rates of its own making. Threads: see update_rule.h.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "ATen/Functions.h"
#include "weft/dist_optim/internal/rule_parts.h"
#include "weft/dist_optim/optim.h"
#include "weft/dist_optim/update_rule.h"

namespace weft::internal {

struct SGDRule : optim::SGD {
  enum { kMomentum };
  static constexpr std::string_view kBuffers[] = {"momentum_buffer"};
  static bool needs(const Options& o, int) { return o.momentum != 0; }
  static bool takes_sparse(const Options& o) { return o.weight_decay == 0; }
  static Status check(const Options& o) {
    if (!o.nesterov || (o.momentum > 0 && o.dampening == 0)) return absl::OkStatus();
    return make_error(ErrorKind::kInvalidArgument,
                      "optimizer SGD: nesterov needs a momentum, and no dampening");
  }
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

struct DelayCompensatedSGDRule : optim::DelayCompensatedSGD {
  enum { kPrevious, kSquare };
  static constexpr std::string_view kBuffers[] = {"previous", "square_avg"};
  static constexpr bool kCompensatesDelay = true;
  static bool needs(const Options& o, int buffer) {
    return buffer == kPrevious ? o.own_state : o.alpha > 0;
  }
  // `then`: undefined where it is not known.
  static void apply(const Options& o, at::Tensor p, at::Tensor g, ParameterState* s, int64_t step,
                    at::Tensor then) {
    g = signed_gradient(g, o.maximize);
    const at::Tensor square = g.mul(g);
    if (o.alpha > 0) s->buffers[kSquare].mul_(o.alpha).add_(square, 1 - o.alpha);
    const int64_t made_after = s->made_after.empty() ? 0 : s->made_after[kPrevious];
    if (!then.defined() && o.own_state && step > made_after + 1) then = s->buffers[kPrevious];
    at::Tensor all = decayed(g, p, o.weight_decay);
    if (then.defined()) {
      at::Tensor by = p.sub(then).mul_(square);
      if (o.alpha > 0) by.div_(s->buffers[kSquare].add(o.eps).sqrt_());
      all = all.add(by, o.lambd);
    }
    p.add_(all, -o.lr);
    if (o.own_state) s->buffers[kPrevious].copy_(p);
  }
  static void apply(const Options& o, at::Tensor p, at::Tensor g, ParameterState* s, int64_t step) {
    apply(o, std::move(p), std::move(g), s, step, at::Tensor());
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

}  // namespace weft::internal

#endif  // WEFT_DIST_OPTIM_INTERNAL_RULES_OF_SGD_H_
