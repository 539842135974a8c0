// A parameter server: the model lives at ps0, and two trainers run forward and backward through it.
//   build/bin/weftrun --role ps:1 --role trainer:2 build/bin/tutorial_parameter_server

#include <iostream>
#include <string>
#include <vector>

#include <torch/nn/modules/linear.h>

#include "ATen/ops/cross_entropy_loss.h"
#include "ATen/ops/index_select.h"
#include "ATen/ops/randint.h"
#include "ATen/ops/relu.h"
#include "weft/examples/async_ps/digits.h"
#include "weft/rref/remote_module.h"
#include "weft/weft.h"

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return output(at::relu(hidden(x))); }

  torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(64, 64));
  torch::nn::Linear output = register_module("output", torch::nn::Linear(64, 10));
};
TORCH_MODULE(Net);

// Runs at a trainer. The parameters stay at the server, and are updated there.
double train(weft::CallContext& call, const weft::RemoteModule<Net>& net, const at::Tensor& images,
             const at::Tensor& labels) {
  const weft::Worker& worker = call.worker();
  weft::DistributedOptimizer<weft::optim::Adam> optimizer(worker, net.parameters(), {.lr = 5e-3});
  double last = 0;
  for (int64_t step = 0; step < 300; ++step) {
    const at::Tensor batch = at::randint(images.size(0), {32}, at::kLong);
    weft::DistAutogradContext context(worker);
    const at::Tensor output = net.forward(at::index_select(images, 0, batch));
    const at::Tensor loss = at::cross_entropy_loss(output, at::index_select(labels, 0, batch));
    context.backward({loss});
    optimizer.step(context);
    last = loss.item<double>();
  }
  return last;
}

weft::Library library() {
  weft::Library lib("digits");
  weft::module_<Net>(lib, "Net").constructor<>().def("forward", &NetImpl::forward);
  lib.def("train", &train);
  return lib;
}

// Runs at the server: makes the model, and sends each trainer a reference to it.
bool lead(const weft::Worker& worker) {
  const auto input = [](const async_ps::Images& some) { return some.pixels.to(at::kFloat) / 16; };
  const async_ps::Split digits =
      async_ps::split_by_class(async_ps::read_digits(async_ps::default_digits()), 360, /*seed=*/1);
  const weft::RemoteModule<Net> net(worker, "ps0");
  std::vector<weft::Future<double>> losses;
  for (const async_ps::Images& share : async_ps::deal(digits.train, 2)) {
    const std::string trainer = "trainer" + std::to_string(losses.size());
    losses.push_back(weft::rpc_async(worker, trainer, {.deadline = weft::kInfinite}, &train, net,
                                     input(share), share.labels));
  }
  for (const double loss : weft::when_all(losses).wait(weft::kInfinite)) {
    std::cout << "a trainer's last loss: " << loss << std::endl;
  }
  const at::Tensor guess = net.forward(input(digits.test)).argmax(1);
  const auto accuracy = guess.eq(digits.test.labels).to(at::kFloat).mean().item<double>();
  std::cout << "parameter_server: " << (accuracy > 0.9 ? "ok" : "not learned")
            << " accuracy=" << accuracy << std::endl;
  return accuracy > 0.9;
}

int main() {
  const weft::Worker worker = weft::join({.library = library()});
  const bool learned = worker.name() != "ps0" || lead(worker);
  return worker.shutdown().status.ok() && learned ? 0 : 1;
}
