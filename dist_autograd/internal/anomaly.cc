#include "weft/dist_autograd/internal/anomaly.h"

#include <string>

#include "ATen/ops/isnan.h"
#include "absl/strings/str_cat.h"
#include "c10/util/Exception.h"
#include "torch/csrc/autograd/anomaly_mode.h"

namespace weft::internal {
namespace {

using torch::autograd::AnomalyMode;

// Maximum length of the text that an error carries to all workers.
constexpr size_t kMostText = 8 << 10;

// LibTorch tells where a node was made in no other way than by a warning.
class Heard final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { text += warning.msg(); }
  std::string text{};
};

bool has_nan(const at::Tensor& gradient) {
  if (!gradient.defined()) return false;
  const at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
  return at::isnan(values).any().item<bool>();
}

}  // namespace

Status with_forward_calls(Node* node, Status why) {
  if (!AnomalyMode::is_enabled()) return why;
  Heard heard;
  {
    const c10::WarningUtils::WarningHandlerGuard guard(&heard);
    node->metadata()->print_stack(node->name());
  }
  if (heard.text.size() > kMostText) heard.text.resize(kMostText);
  return with_details(
      Status(why.code(), absl::StrCat(std::string(why.message()), "\n", heard.text)),
      error_details(why));
}

void check_nan(const Node& node, const torch::autograd::variable_list& gradients) {
  if (!AnomalyMode::is_enabled() || !AnomalyMode::should_check_nan()) return;
  const c10::AutoGradMode no_grad(false);
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!has_nan(gradients[i])) continue;
    throw_error(make_error(
        ErrorKind::kUser,
        absl::StrCat("function '", node.name(), "' returned nan values in its ", i, "th output")));
  }
}

}  // namespace weft::internal
