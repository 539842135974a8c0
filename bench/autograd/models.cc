#include "weft/bench/autograd/models.h"

#include <torch/nn/modules/rnn.h>

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "weft/dist_autograd/context.h"
#include "weft/dist_optim/optimizer.h"
#include "weft/dist_optim/service.h"
#include "weft/rpc/call.h"
#include "weft/rref/rref.h"

namespace weft::bench {
namespace {

constexpr char kServer[] = "w1";
constexpr double kRate = 1e-4;
constexpr int64_t kBatch = 8;
constexpr int64_t kWidth = 16;
// Sizes of the LSTM and what is around it, as in PyTorch's tutorial of distributed autograd.
constexpr int64_t kSymbols = 10;
constexpr int64_t kInput = 2;
constexpr int64_t kHidden = 4;
constexpr int64_t kLayers = 2;
constexpr int64_t kTime = 3;
constexpr int64_t kStreams = 5;
// Sizes of the table.
constexpr int64_t kRows = 100'000;
constexpr int64_t kColumns = 64;
constexpr int64_t kIds = 1024;

using Parameters = std::vector<at::Tensor>;

at::Tensor parameter(at::IntArrayRef sizes) { return at::rand(sizes).set_requires_grad(true); }

// A function of the server, and "NAME_parameters": references to what it computes with.
template <class F>
void def(Library* lib, const std::string& name, const Parameters& parameters, F f) {
  lib->def(name, std::move(f));
  lib->def(name + "_parameters", [parameters](CallContext& context) {
    std::vector<RRef<at::Tensor>> out;
    for (const at::Tensor& one : parameters) {
      out.push_back(RRef<at::Tensor>::local(context.worker(), one));
    }
    return out;
  });
}

class Model {
 public:
  explicit Model(const Worker& worker) : worker_(worker) {}
  virtual ~Model() = default;

  StepHow how{};

  void step() {
    DistAutogradContext context(worker_);
    if (optimizer_ != nullptr && !how.apart) {
      optimizer_->backward_and_step(context, {loss()}, {.mode = how.mode});
      return;
    }
    context.backward({loss()}, {.mode = how.mode});
    if (optimizer_ != nullptr) {
      optimizer_->step(context);
    } else if (context.gradients().empty()) {
      throw std::runtime_error("gradients are missing");
    }
  }

 protected:
  virtual at::Tensor loss() = 0;
  at::Tensor there(const char* function, const at::Tensor& x) const {
    return rpc_sync(worker_, kServer, FunctionRef<at::Tensor(at::Tensor)>{function}, x);
  }
  // Over those of the server's functions and these.
  void optimize(const std::vector<std::string>& functions, const Parameters& here) {
    std::vector<RRef<at::Tensor>> all;
    for (const std::string& name : functions) {
      const FunctionRef<std::vector<RRef<at::Tensor>>()> parameters{name + "_parameters"};
      for (auto& one : rpc_sync(worker_, kServer, parameters)) all.push_back(std::move(one));
    }
    for (const at::Tensor& one : here) all.push_back(RRef<at::Tensor>::local(worker_, one));
    optimizer_ = std::make_unique<DistributedOptimizer<optim::SGD>>(
        worker_, all, optim::SGD::Options{.lr = kRate});
  }

 private:
  const Worker& worker_;
  std::unique_ptr<DistributedOptimizer<optim::SGD>> optimizer_;
};

class Layers final : public Model {
 public:
  Layers(const Worker& worker, bool optimized)
      : Model(worker),
        x_(at::rand({kBatch, kWidth})),
        target_(at::zeros({kBatch, 1})),
        first_(parameter({kWidth, kWidth})),
        last_(parameter({1, kWidth})) {
    if (optimized) optimize({"bench.forward"}, {first_, last_});
  }

 private:
  at::Tensor loss() override {
    const at::Tensor y = there("bench.forward", at::linear(x_, first_));
    return at::mse_loss(at::linear(y, last_), target_);
  }
  const at::Tensor x_;
  const at::Tensor target_;
  const at::Tensor first_;
  const at::Tensor last_;
};

class Rnn final : public Model {
 public:
  explicit Rnn(const Worker& worker)
      : Model(worker),
        lstm_(torch::nn::LSTMOptions(kInput, kHidden).num_layers(kLayers)),
        characters_(at::randint(kSymbols, {kTime, kStreams}, at::kLong)),
        targets_(at::randint(kSymbols, {kTime * kStreams}, at::kLong)) {
    optimize({"bench.encode", "bench.decode"}, lstm_->parameters());
  }

 private:
  at::Tensor loss() override {
    const at::Tensor output = std::get<0>(lstm_->forward(there("bench.encode", characters_)));
    return at::cross_entropy_loss(there("bench.decode", output).reshape({-1, kSymbols}), targets_);
  }
  torch::nn::LSTM lstm_;
  const at::Tensor characters_;
  const at::Tensor targets_;
};

class Embedding final : public Model {
 public:
  explicit Embedding(const Worker& worker)
      : Model(worker),
        ids_(at::randint(kRows, {kIds}, at::kLong)),
        dense_(parameter({kWidth, kColumns})),
        target_(at::zeros({kIds, kWidth})) {
    optimize({"bench.lookup"}, {dense_});
  }

 private:
  at::Tensor loss() override {
    return at::mse_loss(at::linear(there("bench.lookup", ids_), dense_), target_);
  }
  const at::Tensor ids_;
  const at::Tensor dense_;
  const at::Tensor target_;
};

}  // namespace

Library models_library() {
  Library lib("bench");
  const at::Tensor w = parameter({kWidth, kWidth});
  const at::Tensor b = parameter({kWidth});
  const at::Tensor v = parameter({kWidth, kWidth});
  def(&lib, "forward", {w, b, v}, [w, b, v](const at::Tensor& x) {
    return at::relu(at::linear(at::relu(at::linear(x, w, b)), v));
  });
  const at::Tensor symbols = parameter({kSymbols, kInput});
  def(&lib, "encode", {symbols},
      [symbols](const at::Tensor& x) { return at::embedding(symbols, x); });
  const at::Tensor weight = parameter({kSymbols, kHidden});
  const at::Tensor bias = parameter({kSymbols});
  def(&lib, "decode", {weight, bias},
      [weight, bias](const at::Tensor& x) { return at::linear(x, weight, bias); });
  const at::Tensor table = parameter({kRows, kColumns});
  def(&lib, "lookup", {table}, [table](const at::Tensor& ids) {
    return at::embedding(table, ids, -1, false, /*sparse=*/true);
  });
  lib.merge(dist_optim_library());
  return lib;
}

std::function<void()> make_model(const Worker& worker, std::string_view name, const StepHow& how) {
  std::shared_ptr<Model> model;
  if (name == "pass" || name == "step") model = std::make_shared<Layers>(worker, name == "step");
  if (name == "rnn") model = std::make_shared<Rnn>(worker);
  if (name == "embed") model = std::make_shared<Embedding>(worker);
  if (model == nullptr) throw std::invalid_argument("unknown function: " + std::string(name));
  model->how = how;
  return [model] { model->step(); };
}

}  // namespace weft::bench
