#include "weft/collectives/ddp/mixed_precision.h"

#include <cmath>

#include "ATen/autocast_mode.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/_amp_foreach_non_finite_check_and_unscale.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace weft {
namespace {

[[noreturn]] void refuse(ErrorKind kind, std::string_view what) {
  throw_error(make_error(kind, absl::StrCat("GradScaler: ", std::string(what))));
}

// Multiplies all of one device and type by `factor`. True: all are finite.
bool unscale_alike(const std::vector<at::Tensor>& values, double factor) {
  const at::TensorOptions kind = at::device(values.front().device()).dtype(at::kFloat);
  at::Tensor found = at::zeros({1}, kind);
  at::_amp_foreach_non_finite_check_and_unscale_(values, found, at::full({1}, factor, kind));
  return found.item<float>() == 0;
}

}  // namespace

Autocast::Autocast(at::DeviceType device, at::ScalarType dtype, bool enabled)
    : device_(device),
      dtype_before_(at::autocast::get_autocast_dtype(device)),
      enabled_before_(at::autocast::is_autocast_enabled(device)) {
  if (enabled && device == at::kCPU && dtype != at::kBFloat16 && dtype != at::kHalf) {
    throw_error(make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("Autocast: ", c10::toString(dtype), " on a CPU; it has BFloat16 and Half")));
  }
  at::autocast::set_autocast_dtype(device, dtype);
  at::autocast::set_autocast_enabled(device, enabled);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  // Casts of parameters are kept for the region: after it they may be stepped.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, enabled_before_);
  at::autocast::set_autocast_dtype(device_, dtype_before_);
}

GradScaler::GradScaler(const ProcessGroup& group, const GradScalerOptions& options)
    : group_(group), options_(options), scale_(static_cast<float>(options.init_scale)) {
  if (!(options.init_scale > 0) || !std::isfinite(scale_)) {
    refuse(ErrorKind::kInvalidArgument, absl::StrCat("init_scale is ", options.init_scale));
  }
  if (!(options.growth_factor > 1) || !(options.backoff_factor < 1) ||
      !(options.backoff_factor > 0) || options.growth_interval < 1) {
    refuse(ErrorKind::kInvalidArgument,
           absl::StrCat("growth_factor is ", options.growth_factor, ", backoff_factor ",
                        options.backoff_factor, ", growth_interval ", options.growth_interval,
                        "; they are above 1, between 0 and 1, and at least 1"));
  }
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  if (!options_.enabled) return loss;
  // A factor of fp32: a loss of fp16 would overflow.
  return loss.mul(at::full({}, scale_, at::device(loss.device()).dtype(at::kFloat)));
}

bool GradScaler::unscale_as(const void* key, const std::vector<at::Tensor>& gradients) {
  if (!options_.enabled) return true;
  Entry& entry = entries_[key];
  if (entry.stage != Stage::kReady) {
    refuse(ErrorKind::kState, entry.stage == Stage::kUnscaled
                                  ? "unscale() was called for these since the last update()"
                                  : "unscale() after step(): call update() before");
  }
  const at::NoGradGuard no_grad;
  const double factor = 1.0 / static_cast<double>(scale_);
  std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>> alike;
  for (const at::Tensor& one : gradients) {
    at::Tensor values = one;
    if (one.is_sparse()) {
      // Several values of one row may overflow in their sum.
      if (!one.is_coalesced() && one.scalar_type() == at::kHalf) one.set_data(one.coalesce());
      values = one._values();
    }
    alike[{values.device().str(), values.scalar_type()}].push_back(values);
  }
  bool finite = true;
  for (const auto& [kind, values] : alike) finite = unscale_alike(values, factor) && finite;
  // DDP's own gradients are the same on all ranks, others are not.
  const at::Tensor found = at::zeros({1});
  found.fill_(finite ? 0 : 1);
  group_.all_reduce(found, {.op = ReduceOp::kMax});
  entry = {Stage::kUnscaled, found.item<float>() == 0};
  return entry.finite;
}

bool GradScaler::step_as(const void* key, const std::function<std::vector<at::Tensor>()>& gradients,
                         const std::function<void()>& step) {
  if (!options_.enabled) {
    step();
    return true;
  }
  const auto before = entries_.find(key);
  if (before != entries_.end() && before->second.stage == Stage::kStepped) {
    refuse(ErrorKind::kState, "step() was called for this optimizer since the last update()");
  }
  if (before == entries_.end() || before->second.stage == Stage::kReady) {
    unscale_as(key, gradients());
  }
  Entry& entry = entries_[key];
  entry.stage = Stage::kStepped;
  if (entry.finite) step();
  return entry.finite;
}

void GradScaler::update() {
  if (!options_.enabled) return;
  if (entries_.empty()) refuse(ErrorKind::kState, "update(), and no gradient was unscaled before");
  bool finite = true;
  for (const auto& [key, entry] : entries_) finite = finite && entry.finite;
  entries_.clear();
  // As LibTorch's _amp_update_scale_.
  if (!finite) {
    scale_ = static_cast<float>(static_cast<double>(scale_) * options_.backoff_factor);
    growth_tracker_ = 0;
    return;
  }
  if (++growth_tracker_ < options_.growth_interval) return;
  const auto grown = static_cast<float>(static_cast<double>(scale_) * options_.growth_factor);
  if (std::isfinite(grown)) scale_ = grown;
  growth_tracker_ = 0;
}

std::string GradScaler::state() const {
  return absl::StrFormat("%.9g %d", scale_, growth_tracker_);
}

void GradScaler::load_state(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, ' ');
  float scale = 0;
  int64_t tracker = 0;
  if (parts.size() != 2 || !absl::SimpleAtof(parts[0], &scale) || !std::isfinite(scale) ||
      !(scale > 0) || !absl::SimpleAtoi(parts[1], &tracker) || tracker < 0) {
    refuse(ErrorKind::kInvalidArgument, absl::StrCat("'", text, "' is no state of a scaler"));
  }
  scale_ = scale;
  growth_tracker_ = tracker;
  entries_.clear();
}

}  // namespace weft
