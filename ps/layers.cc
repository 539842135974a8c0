#include "weft/ps/layers.h"

#include <cmath>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/linear.h"
#include "ATen/ops/zeros_like.h"
#include "absl/strings/str_cat.h"
#include "weft/dist_autograd/context.h"
#include "weft/ps/internal/backward_push.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/internal/table_future.h"

namespace weft::ps {

Layer::Layer(Table table, const LayerOptions& options)
    : table_(std::move(table)), options_(options) {}
Layer::~Layer() { end_in_backward(); }

void Layer::end_in_backward() {
  if (const auto in_backward = std::exchange(in_backward_, nullptr)) in_backward->end();
}

namespace {

class OfContext final : public internal::LeafGradients {
 public:
  explicit OfContext(const DistAutogradContext& context) : context_(context) {}
  at::Tensor take(const at::Tensor& leaf) const override { return context_.gradient(leaf); }
  bool shared() const override { return true; }

 private:
  const DistAutogradContext& context_;
};

}  // namespace

Future<PushResult> Layer::step(const StepOptions& options) {
  return end_step(internal::GradFields(), options);
}
Future<PushResult> Layer::step(const DistAutogradContext& context, const StepOptions& options) {
  return end_step(OfContext(context), options);
}

Future<PushResult> Layer::end_step(const internal::LeafGradients& gradients,
                                   const StepOptions& options) {
  expect_computation();
  const auto in_backward = std::exchange(in_backward_, nullptr);
  if (in_backward == nullptr) return push(gradients, options);
  std::optional<Future<PushResult>> left = in_backward->end();
  return left.has_value() ? *std::move(left) : push(gradients, in_backward_options_);
}

void Layer::step_in_backward(const StepOptions& options) {
  check_open();
  in_backward_options_ = options;
  in_backward_ = std::make_shared<internal::BackwardPush>(
      internal::TableAccess::core(table_).service()->context().runtime.get(),
      [this](const internal::LeafGradients& gradients) {
        return push(gradients, in_backward_options_);
      });
  for (const at::Tensor& leaf : leaves()) in_backward_->watch(leaf);
}

void Layer::watch(const at::Tensor& leaf) const {
  if (in_backward_ != nullptr) in_backward_->watch(leaf);
}

void Layer::check_open() const {
  if (in_backward_ == nullptr || !in_backward_->has_left()) return;
  throw_error(make_error(
      ErrorKind::kState,
      absl::StrCat("table '", table_.name(),
                   "': the push of this step has left within the backward; "
                   "step() ends the step, and a forward or another step comes after it")));
}

void Layer::drop() {
  end_in_backward();
  forget();
}

void Layer::expect_computation() const {
  const auto& driver = internal::TableAccess::core(table_).service()->context().driver;
  if (driver != nullptr) driver->expect_computation();
}

// ---- Linear ------------------------------------------------------------------------------------

TableDefinition Linear::definition(int64_t inputs, int64_t outputs, RuleChoice rule, bool bias,
                                   uint64_t seed) {
  if (inputs < 1 || outputs < 1) {
    throw_error(make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("ps::Linear of ", inputs, " inputs and ", outputs, " outputs wants more")));
  }
  TableDefinition out = dense({(inputs + (bias ? 1 : 0)) * outputs}, std::move(rule));
  const double bound = 1 / std::sqrt(static_cast<double>(inputs));
  out.init = Init::uniform(-bound, bound, seed);
  return out;
}

Linear::Linear(Table table, int64_t inputs, int64_t outputs, bool bias, const LayerOptions& options)
    : Layer(std::move(table), options), inputs_(inputs), outputs_(outputs), has_bias_(bias) {
  const TableDefinition& d = table_.definition();
  const int64_t wanted = inputs < 1 || outputs < 1 ? -1 : (inputs + (bias ? 1 : 0)) * outputs;
  if (d.kind != TableKind::kDense || internal::element_count(d) != wanted) {
    throw_error(make_error(ErrorKind::kInvalidArgument,
                           absl::StrCat("ps::Linear of ", inputs, " inputs and ", outputs,
                                        " outputs", bias ? "" : " without bias",
                                        " wants a dense table of so many elements, and table '",
                                        table_.name(), "' is ", to_string(d))));
  }
}

Linear::~Linear() { end_in_backward(); }

void Linear::pull() {
  if (weight_.defined()) return;
  // One that has failed is not waited for again.
  const std::optional<Future<at::Tensor>> next = std::exchange(next_, std::nullopt);
  const at::Tensor values = next.has_value() && !next->has_error()
                                ? next->wait(kInfinite)
                                : table_.pull(options_.deadline).wait();
  const at::AutoGradMode no_grad(false);
  const at::Tensor flat = values.reshape({-1}).to(options_.device);
  const int64_t weights = inputs_ * outputs_;
  weight_ = flat.narrow(0, 0, weights).view({outputs_, inputs_}).detach().requires_grad_(true);
  if (has_bias_) bias_ = flat.narrow(0, weights, outputs_).detach().requires_grad_(true);
  for (const at::Tensor& leaf : leaves()) watch(leaf);
}

const at::Tensor& Linear::weight() {
  pull();
  return weight_;
}
const at::Tensor& Linear::bias() {
  pull();
  return bias_;
}

at::Tensor Linear::forward(const at::Tensor& inputs) {
  expect_computation();
  if (at::GradMode::is_enabled()) check_open();
  pull();
  return has_bias_ ? at::linear(inputs, weight_, bias_) : at::linear(inputs, weight_);
}

void Linear::forget() {
  weight_ = at::Tensor();
  bias_ = at::Tensor();
  next_.reset();
}

std::vector<at::Tensor> Linear::leaves() const {
  if (!weight_.defined()) return {};
  return has_bias_ ? std::vector{weight_, bias_} : std::vector{weight_};
}

Future<PushResult> Linear::push(const internal::LeafGradients& gradients,
                                const StepOptions& options) {
  const auto gradient_of = [&gradients](const at::Tensor& leaf) {
    return leaf.defined() ? gradients.take(leaf) : at::Tensor();
  };
  const at::Tensor weight = gradient_of(weight_);
  const at::Tensor bias = gradient_of(bias_);
  internal::Ask ask{.what = "step"};
  if (weight.defined() || bias.defined()) {
    const at::AutoGradMode no_grad(false);
    const auto flat = [](const at::Tensor& gradient, const at::Tensor& leaf) {
      return (gradient.defined() ? gradient : at::zeros_like(leaf)).reshape({-1});
    };
    at::Tensor all = flat(weight, weight_);
    if (has_bias_) {
      all = at::cat({all, flat(bias, bias_)});
    } else if (gradients.shared()) {
      all = all.clone();
    }
    ask.push = all.reshape(table_.definition().shape);
  }
  forget();
  ask.rate = options.rate;
  ask.max_norm = options.max_norm;
  ask.advance = options.advance;
  ask.position = options.position;
  ask.pull = true;
  auto [pushed, values] =
      internal::start_both(internal::TableAccess::core(table_), std::move(ask), options.deadline);
  next_ = std::move(values);
  return std::move(pushed);
}

}  // namespace weft::ps
