#include "weft/examples/async_ps/model.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/TensorOperators.h"
#include "ATen/core/grad_mode.h"
#include "ATen/core/ivalue.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "ATen/ops/linear.h"
#include "ATen/ops/randn.h"
#include "ATen/ops/relu.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/csrc/jit/serialization/pickle.h"

namespace async_ps {
namespace {

constexpr int64_t kInputs = 64;
constexpr int64_t kHidden = 64;
constexpr int64_t kClasses = 10;

constexpr AdamSettings kAdam;
constexpr double kEpsilon = 1e-8;

at::Tensor logits(const Parameters& p, const at::Tensor& pixels) {
  const at::Tensor x = inputs({pixels, {}});
  return at::linear(at::relu(at::linear(x, p[0], p[1])), p[2], p[3]);
}

}  // namespace

const std::vector<std::string>& parameter_names() {
  static const std::vector<std::string> names = {"hidden.weight", "hidden.bias", "output.weight",
                                                 "output.bias"};
  return names;
}

Parameters initial_parameters(uint64_t seed) {
  const at::Generator random = at::make_generator<at::CPUGeneratorImpl>(seed);
  return {at::randn({kHidden, kInputs}, random) * std::sqrt(2.0 / kInputs), at::zeros({kHidden}),
          at::randn({kClasses, kHidden}, random) * std::sqrt(2.0 / kHidden), at::zeros({kClasses})};
}

at::Tensor inputs(const Images& batch) { return batch.pixels.to(at::kFloat) / 16; }

at::Tensor loss_of(const at::Tensor& logits, const Images& batch) {
  return at::cross_entropy_loss(logits, batch.labels);
}

LossAndGradients loss_and_gradients(const Parameters& parameters, const Images& batch) {
  at::AutoGradMode grad(true);
  Parameters leaves;
  leaves.reserve(parameters.size());
  for (const at::Tensor& p : parameters) leaves.push_back(p.detach().requires_grad_());
  const at::Tensor loss = loss_of(logits(leaves, batch.pixels), batch);
  return {loss.item<double>(), torch::autograd::grad({loss}, leaves)};
}

double accuracy(const Parameters& parameters, const Images& images) {
  at::NoGradGuard no_grad;
  const at::Tensor guess = logits(parameters, images.pixels).argmax(1);
  return guess.eq(images.labels).to(at::kDouble).mean().item<double>();
}

void save(const Parameters& parameters, const std::string& path) {
  // Pairs, because LibTorch writes a dictionary with a type tag that Python's safe loader refuses.
  std::vector<c10::IValue> pairs;
  for (size_t i = 0; i < parameters.size(); ++i) {
    pairs.emplace_back(c10::ivalue::Tuple::create({parameter_names()[i], parameters[i]}));
  }
  const std::vector<char> bytes =
      torch::jit::pickle_save(c10::ivalue::Tuple::create(std::move(pairs)));
  // Beside the file and then into its place: an interrupted run leaves the checkpoint of the last
  // one.
  const std::string part = path + ".part";
  std::ofstream file(part, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(part, path, error);
  if (!file || error) {
    throw std::runtime_error("cannot write the checkpoint " + path +
                             (error ? ": " + error.message() : ""));
  }
}

Adam::Adam(const Parameters& like, int64_t steps) : steps_(steps) {
  for (const at::Tensor& p : like) {
    mean_.push_back(at::zeros_like(p));
    square_.push_back(at::zeros_like(p));
  }
}

Parameters Adam::step(const Parameters& parameters, const std::vector<at::Tensor>& gradients) {
  at::NoGradGuard no_grad;
  const double rate =
      kAdam.rate * std::max(0.0, 1 - static_cast<double>(taken_) / static_cast<double>(steps_));
  ++taken_;
  const double bias1 = 1 - std::pow(kAdam.beta1, static_cast<double>(taken_));
  const double bias2 = 1 - std::pow(kAdam.beta2, static_cast<double>(taken_));
  Parameters next;
  next.reserve(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& g = gradients[i];
    mean_[i].mul_(kAdam.beta1).add_(g, 1 - kAdam.beta1);
    square_[i].mul_(kAdam.beta2).addcmul_(g, g, 1 - kAdam.beta2);
    const at::Tensor scale = (square_[i] / bias2).sqrt_().add_(kEpsilon);
    next.push_back(
        (parameters[i] * (1 - rate * kAdam.weight_decay)).addcdiv_(mean_[i], scale, -rate / bias1));
  }
  return next;
}

}  // namespace async_ps
