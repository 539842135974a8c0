// Optimizers of stages: one of weft::optim, and one of LibTorch's.

#include <algorithm>
#include <sstream>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "torch/optim/optimizer.h"
#include "torch/serialize/input-archive.h"
#include "torch/serialize/output-archive.h"
#include "weft/pipeline/stage_optimizer.h"

namespace weft::pipeline {
namespace {

constexpr const char* kArchiveName = "archive";

class TorchOptimizer final : public StageOptimizer {
 public:
  explicit TorchOptimizer(std::unique_ptr<torch::optim::Optimizer> inner)
      : inner_(std::move(inner)) {}

  Status step(const std::vector<at::Tensor>& gradients) override {
    (void)gradients;  // where the class looks for them
    return guarded([&] { inner_->step(); });
  }
  Status set_options(const std::vector<double>& options) override {
    if (options.empty()) return absl::OkStatus();
    return guarded([&] {
      for (auto& group : inner_->param_groups()) group.options().set_lr(options[0]);
    });
  }
  std::map<std::string, at::Tensor> state() const override {
    torch::serialize::OutputArchive archive;
    inner_->save(archive);
    std::ostringstream stream;
    archive.save_to(stream);
    const std::string bytes = stream.str();
    at::Tensor out = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
    std::copy(bytes.begin(), bytes.end(), out.data_ptr<uint8_t>());
    return {{kArchiveName, std::move(out)}};
  }
  Status load_state(const std::map<std::string, at::Tensor>& state) override {
    const auto it = state.find(kArchiveName);
    if (it == state.end() || state.size() != 1 || !it->second.defined() ||
        it->second.scalar_type() != at::kByte) {
      return make_error(ErrorKind::kInvalidArgument,
                        absl::StrCat("the state of an optimizer of LibTorch is one archive of "
                                     "bytes, not ",
                                     state.size(), " tensors"));
    }
    return guarded([&] {
      const at::Tensor bytes = it->second.contiguous();
      std::istringstream stream(
          std::string(reinterpret_cast<const char*>(bytes.data_ptr<uint8_t>()),
                      static_cast<size_t>(bytes.numel())));
      torch::serialize::InputArchive archive;
      archive.load_from(stream);
      inner_->load(archive);
    });
  }

 private:
  template <class F>
  static Status guarded(F f) {
    try {
      f();
    } catch (...) {
      return status_from_current_exception();
    }
    return absl::OkStatus();
  }
  const std::unique_ptr<torch::optim::Optimizer> inner_;
};

}  // namespace

std::shared_ptr<StageOptimizer> torch_optimizer(std::unique_ptr<torch::optim::Optimizer> inner) {
  if (inner == nullptr) {
    throw_error(make_error(ErrorKind::kInvalidArgument, "torch_optimizer: there is no optimizer"));
  }
  return std::make_shared<TorchOptimizer>(std::move(inner));
}

}  // namespace weft::pipeline
