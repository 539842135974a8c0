#include "weft/pipeline/profile.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

#include "ATen/ops/ones_like.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "c10/core/GradMode.h"
#include "weft/pipeline/internal/split.h"

namespace weft::pipeline {
namespace {

// Puts the gradients back.
class KeptGradients {
 public:
  explicit KeptGradients(const std::vector<at::Tensor>& parameters) : parameters_(parameters) {
    for (const at::Tensor& p : parameters_) {
      kept_.push_back(p.grad());
      p.mutable_grad() = at::Tensor();
    }
  }
  ~KeptGradients() {
    for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].mutable_grad() = kept_[i];
  }
  KeptGradients(const KeptGradients&) = delete;
  KeptGradients& operator=(const KeptGradients&) = delete;

 private:
  const std::vector<at::Tensor>& parameters_;
  std::vector<at::Tensor> kept_;
};

StatusOr<at::Tensor> measure(const ProfiledLayer& layer, const at::Tensor& sample, bool first,
                             const ProfileOptions& options, Runtime* runtime, LayerCost* cost) {
  const KeptGradients kept(layer.parameters);
  const auto since = [runtime](absl::Time* at) {
    const absl::Time now = runtime->now();
    return absl::ToInt64Nanoseconds(now - std::exchange(*at, now));
  };
  cost->forward = cost->input_grad = cost->weight_grad = std::numeric_limits<Ticks>::max();
  at::Tensor out;
  for (int k = 0; k < options.repeats; ++k) {
    at::Tensor x = sample.detach();
    if (!first) x.set_requires_grad(true);
    absl::Time at = runtime->now();
    const at::Tensor y = layer.forward(x);
    cost->forward = std::min(cost->forward, since(&at));
    if (!y.defined() || !y.is_floating_point()) {
      return make_error(ErrorKind::kInvalidArgument, "it gives no tensor of floating point");
    }
    out = y.detach();
    if (!y.requires_grad()) {  // nothing behind it learns
      cost->input_grad = cost->weight_grad = 0;
      continue;
    }
    const at::Tensor gradient = at::ones_like(out);
    at = runtime->now();
    internal::SplitBackward split({y}, {x});
    split.input_grads({gradient});
    cost->input_grad = std::min(cost->input_grad, since(&at));
    split.weight_grads();
    cost->weight_grad = std::min(cost->weight_grad, since(&at));
  }
  return out;
}

int64_t bytes_of(const at::Tensor& t) { return static_cast<int64_t>(t.nbytes()); }

}  // namespace

StatusOr<std::vector<LayerCost>> profile_layers(const std::vector<ProfiledLayer>& layers,
                                                at::Tensor sample, const ProfileOptions& options) {
  if (layers.empty() || !sample.defined() || options.repeats < 1 || options.bytes_per_byte < 1) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("a profile of ", layers.size(), " layers, ", options.repeats,
                                   " times, ", options.bytes_per_byte, " bytes per byte",
                                   sample.defined() ? "" : ", without a sample"));
  }
  const std::shared_ptr<Runtime> runtime =
      options.runtime != nullptr ? options.runtime : make_system_runtime();
  const c10::AutoGradMode grad(true);
  std::vector<LayerCost> out;
  for (size_t i = 0; i < layers.size(); ++i) {
    LayerCost cost;
    cost.name = layers[i].name;
    StatusOr<at::Tensor> next = at::Tensor();
    try {
      next = measure(layers[i], sample, i == 0, options, runtime.get(), &cost);
    } catch (const std::exception&) {
      next = status_from_current_exception();
    }
    if (!next.ok()) {
      return annotate(next.status(), absl::StrCat("layer ", i, " '", layers[i].name, "'"));
    }
    for (const at::Tensor& p : layers[i].parameters) {
      cost.parameters += bytes_of(p) * options.bytes_per_byte;
    }
    cost.output = bytes_of(*next);
    cost.activation = bytes_of(sample) + cost.output;
    sample = *std::move(next);
    out.push_back(std::move(cost));
  }
  return out;
}

}  // namespace weft::pipeline
