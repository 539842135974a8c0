#include "weft/collectives/ddp/sync_batch_norm.h"

#include <ostream>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/custom_function.h>

#include "ATen/TensorOperators.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/batch_norm.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace weft {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// (features) as something that is multiplied with (batch, features, ...).
at::Tensor along(const at::Tensor& values, const at::Tensor& like) {
  std::vector<int64_t> sizes(static_cast<size_t>(like.dim()), 1);
  sizes[1] = values.numel();
  return values.view(sizes);
}

std::vector<int64_t> others(const at::Tensor& like) {
  std::vector<int64_t> dims = {0};
  for (int64_t d = 2; d < like.dim(); ++d) dims.push_back(d);
  return dims;
}

// Half types are added up in fp32.
at::ScalarType sums_of(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

struct Statistics {
  at::Tensor mean;
  at::Tensor var;  // biased
  double count = 0;
};

// Of all ranks: merged from means and variances, which loses no digits as sums of squares do.
Statistics statistics(ProcessGroup& group, const at::Tensor& input) {
  const int64_t features = input.size(1);
  const at::TensorOptions options = input.options().dtype(sums_of(input));
  const int64_t own = input.numel() / std::max<int64_t>(1, features);
  at::Tensor mine = at::zeros({2 * features + 1}, options);
  if (own > 0) {
    const at::Tensor x = input.to(sums_of(input));
    mine.narrow(0, 0, features).copy_(x.mean(others(input)));
    mine.narrow(0, features, features).copy_(x.var(others(input), /*unbiased=*/false));
    mine.narrow(0, 2 * features, 1).fill_(static_cast<double>(own));
  }
  const at::Tensor all = at::empty({group.size(), 2 * features + 1}, options);
  group.all_gather_into_tensor(all, mine);
  const at::Tensor counts = all.narrow(1, 2 * features, 1);
  const at::Tensor means = all.narrow(1, 0, features);
  Statistics out;
  out.count = counts.sum().item<double>();
  const at::Tensor shares = counts / std::max(out.count, 1.0);
  out.mean = (means * shares).sum(0);
  out.var = ((all.narrow(1, features, features) + (means - out.mean).square()) * shares).sum(0);
  return out;
}

class Normalize : public torch::autograd::Function<Normalize> {
 public:
  // LibTorch takes no undefined tensor as an argument of a function: those of a normalization that is not affine are none.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& its_weight,
                            const std::optional<at::Tensor>& its_bias, const Statistics& all,
                            double eps, const ProcessGroup& group) {
    const at::Tensor weight = its_weight.value_or(at::Tensor());
    const at::Tensor bias = its_bias.value_or(at::Tensor());
    const at::Tensor invstd = (all.var + eps).rsqrt();
    context->save_for_backward({input, weight, all.mean, invstd});
    context->saved_data["count"] = all.count;
    context->saved_data["affine"] = weight.defined();
    // Undefined gradients are those of outputs that nobody uses: the ranks still meet.
    group_of(context, group);
    const auto type = sums_of(input);
    at::Tensor out = (input.to(type) - along(all.mean, input)) * along(invstd, input);
    if (weight.defined()) out = out * along(weight.to(type), input) + along(bias.to(type), input);
    return out.to(input.scalar_type());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor& input = saved[0];
    const at::Tensor& weight = saved[1];
    const auto type = sums_of(input);
    const int64_t features = input.size(1);
    const at::Tensor dy = gradients[0].to(type);
    const at::Tensor xhat = (input.to(type) - along(saved[2], input)) * along(saved[3], input);
    const at::Tensor sums = at::cat({dy.sum(others(input)), (dy * xhat).sum(others(input))});
    variable_list out(6);
    if (weight.defined()) {
      out[1] = sums.narrow(0, features, features).to(weight.scalar_type()).clone();
      out[2] = sums.narrow(0, 0, features).to(weight.scalar_type()).clone();
    }
    // Also of a rank whose batch is empty, or whose input needs no gradient: the others count on it.
    const at::Tensor all = sums.clone();
    auto& group = static_cast<GroupHolder&>(*context->saved_data["group"].toCapsule()).group;
    group.all_reduce(all);
    const double count = context->saved_data["count"].toDouble();
    at::Tensor scale = saved[3];
    if (weight.defined()) scale = scale * weight.to(type);
    const at::Tensor mean_dy = all.narrow(0, 0, features) / count;
    const at::Tensor mean_dyx = all.narrow(0, features, features) / count;
    out[0] = (along(scale, input) * (dy - along(mean_dy, input) - xhat * along(mean_dyx, input)))
                 .to(input.scalar_type());
    return out;
  }

 private:
  struct GroupHolder : torch::CustomClassHolder {
    explicit GroupHolder(const ProcessGroup& of) : group(of) {}
    ProcessGroup group;
  };
  static void group_of(AutogradContext* context, const ProcessGroup& group) {
    context->saved_data["group"] =
        c10::IValue::make_capsule(c10::make_intrusive<GroupHolder>(group));
  }
};

Status too_few(double values) {
  return make_error(
      ErrorKind::kInvalidArgument,
      absl::StrCat("SyncBatchNorm: ", values,
                   " values for each feature over all ranks: that many have no variance"));
}

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(int64_t features, const SyncBatchNormOptions& options)
    : features_(features), options_(options) {
  if (features < 1 || !(options.eps >= 0)) {
    throw_error(
        make_error(ErrorKind::kInvalidArgument,
                   absl::StrCat("SyncBatchNorm: ", features, " features, eps ", options.eps)));
  }
  reset();
}

SyncBatchNormImpl::SyncBatchNormImpl(const ProcessGroup& group, int64_t features,
                                     const SyncBatchNormOptions& options)
    : SyncBatchNormImpl(features, options) {
  synchronize(group);
}

void SyncBatchNormImpl::synchronize(const ProcessGroup& group) {
  if (!group.valid()) {
    throw_error(make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("SyncBatchNorm of ", features_, " features: there is no process group")));
  }
  group_ = group;
}

void SyncBatchNormImpl::reset() {
  if (options_.affine) {
    weight = register_parameter("weight", at::ones({features_}));
    bias = register_parameter("bias", at::zeros({features_}));
  }
  if (options_.track_running_stats) {
    running_mean = register_buffer("running_mean", at::zeros({features_}));
    running_var = register_buffer("running_var", at::ones({features_}));
    num_batches_tracked = register_buffer("num_batches_tracked", at::zeros({}, at::kLong));
  }
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << "weft::SyncBatchNorm(" << features_ << ", eps=" << options_.eps
         << (is_synchronized() ? "" : ", no group") << ")";
}

double SyncBatchNormImpl::next_rate() {
  num_batches_tracked.add_(1);
  return options_.momentum.value_or(1.0 / num_batches_tracked.item<double>());
}

at::Tensor SyncBatchNormImpl::forward_alone(const at::Tensor& input) {
  const int64_t values = input.numel() / features_;
  if (values < 2) throw_error(too_few(static_cast<double>(values)));
  const bool record = is_training() && options_.track_running_stats;
  double rate = 0;
  if (record) {
    const c10::AutoGradMode no_grad(false);
    rate = next_rate();
  }
  const at::Tensor none;
  return at::batch_norm(input, weight, bias, record ? running_mean : none,
                        record ? running_var : none, /*training=*/true, rate, options_.eps,
                        /*cudnn_enabled=*/false);
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  if (input.dim() < 2 || input.size(1) != features_) {
    throw_error(make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("SyncBatchNorm of ", features_, " features: the input is [",
                     absl::StrJoin(input.sizes(), ", "), "], not [batch, ", features_, ", ...]")));
  }
  if (!is_training() && options_.track_running_stats) {
    return at::batch_norm(input, weight, bias, running_mean, running_var, /*training=*/false, 0,
                          options_.eps, /*cudnn_enabled=*/false);
  }
  if (!is_synchronized()) return forward_alone(input);
  Statistics all;
  {
    const c10::AutoGradMode no_grad(false);
    all = statistics(group_, input);
    if (all.count < 2) throw_error(too_few(all.count));  // on all ranks alike
    if (options_.track_running_stats && is_training()) {
      const double rate = next_rate();
      running_mean.mul_(1 - rate).add_(all.mean.to(running_mean.scalar_type()), rate);
      const double unbiased = all.count / (all.count - 1);
      running_var.mul_(1 - rate).add_(all.var.to(running_var.scalar_type()), rate * unbiased);
    }
  }
  const auto given = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  };
  return Normalize::apply(input, given(weight), given(bias), all, options_.eps, group_);
}

}  // namespace weft
