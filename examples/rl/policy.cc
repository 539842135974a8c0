#include "weft/examples/rl/policy.h"

#include <cmath>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/TensorOperators.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/log_softmax.h"
#include "ATen/ops/mse_loss.h"
#include "ATen/ops/sigmoid.h"
#include "ATen/ops/tanh.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/utils/clip_grad.h"
#include "torch/optim/adam.h"

namespace rl {
namespace {

constexpr int64_t kHidden = 64;
constexpr double kRate = 0.01;
constexpr double kMaxGradient = 0.5;
// Returns reach 87 with a discount of 0.99; the network works with numbers near 1.
constexpr double kReturnScale = 20;

struct Network : torch::nn::Module {
  explicit Network(uint64_t seed)
      : hidden(register_module("hidden", torch::nn::Linear(4, kHidden))),
        output(register_module("output", torch::nn::Linear(kHidden, 3))) {
    // From a generator of its own: the default one belongs to the whole process.
    at::NoGradGuard no_grad;
    const at::Generator random = at::make_generator<at::CPUGeneratorImpl>(seed);
    hidden->weight.uniform_(-0.5, 0.5, random);
    hidden->bias.uniform_(-0.5, 0.5, random);
    // Small, so that it begins by trying both actions everywhere.
    const double bound = 0.01 / std::sqrt(static_cast<double>(kHidden));
    output->weight.uniform_(-bound, bound, random);
    output->bias.zero_();
  }

  at::Tensor forward(const at::Tensor& states) { return output(at::tanh(hidden(states))); }

  torch::nn::Linear hidden;
  torch::nn::Linear output;
};

}  // namespace

struct Policy::Parts {
  explicit Parts(uint64_t seed)
      : network(std::make_shared<Network>(seed)),
        optimizer(network->parameters(), torch::optim::AdamOptions(kRate)) {}

  const std::shared_ptr<Network> network;
  torch::optim::Adam optimizer;
};

Policy::Policy(uint64_t seed) : parts_(std::make_unique<Parts>(seed)) {}
Policy::~Policy() = default;

at::Tensor Policy::right(const at::Tensor& states) const {
  at::NoGradGuard no_grad;
  const at::Tensor out = parts_->network->forward(states);
  return at::sigmoid(out.select(1, 1) - out.select(1, 0));
}

void Policy::learn(const at::Tensor& states, const at::Tensor& actions, const at::Tensor& returns) {
  at::AutoGradMode grad(true);
  const at::Tensor out = parts_->network->forward(states);
  const at::Tensor baseline = out.select(1, 2);
  const at::Tensor target = returns / kReturnScale;
  at::Tensor advantage = target - baseline.detach();
  // How good an action was, among those of this batch.
  advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6);
  const at::Tensor chosen =
      at::log_softmax(out.narrow(1, 0, 2), 1).gather(1, actions.unsqueeze(1)).squeeze(1);
  const at::Tensor loss = -(chosen * advantage).mean() + 0.5 * at::mse_loss(baseline, target);
  parts_->optimizer.zero_grad();
  loss.backward();
  torch::nn::utils::clip_grad_norm_(parts_->network->parameters(), kMaxGradient);
  parts_->optimizer.step();
}

}  // namespace rl
