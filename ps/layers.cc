#include "weft/ps/layers.h"

#include <cmath>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/linear.h"
#include "ATen/ops/zeros_like.h"
#include "absl/strings/str_cat.h"
#include "weft/dist_autograd/context.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/internal/table_future.h"

namespace weft::ps {

Layer::Layer(Table table, const LayerOptions& options)
    : table_(std::move(table)), options_(options) {}
Layer::~Layer() = default;

Future<PushResult> Layer::step(const StepOptions& options) {
  expect_computation();
  return push(nullptr, options);
}
Future<PushResult> Layer::step(const DistAutogradContext& context, const StepOptions& options) {
  expect_computation();
  return push(&context, options);
}

void Layer::expect_computation() const {
  const auto& driver = internal::TableAccess::core(table_).service()->context().driver;
  if (driver != nullptr) driver->expect_computation();
}

at::Tensor Layer::gradient_of(const at::Tensor& leaf, const DistAutogradContext* context) {
  if (!leaf.defined()) return {};
  if (context != nullptr) return context->gradient(leaf);
  at::Tensor& gradient = leaf.mutable_grad();
  // That of a recorded backward leads back to its leaf: neither would ever be freed.
  if (gradient.defined() && gradient.requires_grad()) gradient = gradient.detach();
  return gradient;
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
  pull();
  return has_bias_ ? at::linear(inputs, weight_, bias_) : at::linear(inputs, weight_);
}

void Linear::drop() {
  weight_ = at::Tensor();
  bias_ = at::Tensor();
  next_.reset();
}

Future<PushResult> Linear::push(const DistAutogradContext* context, const StepOptions& options) {
  const at::Tensor weight = gradient_of(weight_, context);
  const at::Tensor bias = gradient_of(bias_, context);
  internal::Ask ask{.what = "step"};
  if (weight.defined() || bias.defined()) {
    const at::AutoGradMode no_grad(false);
    const auto flat = [](const at::Tensor& gradient, const at::Tensor& leaf) {
      return (gradient.defined() ? gradient : at::zeros_like(leaf)).reshape({-1});
    };
    at::Tensor all = flat(weight, weight_);
    if (has_bias_) all = at::cat({all, flat(bias, bias_)});
    ask.push = all.reshape(table_.definition().shape);
  }
  drop();
  ask.rate = options.rate;
  ask.advance = options.advance;
  ask.position = options.position;
  ask.pull = true;
  auto [pushed, values] =
      internal::start_both(internal::TableAccess::core(table_), std::move(ask), options.deadline);
  next_ = std::move(values);
  return std::move(pushed);
}

}  // namespace weft::ps
