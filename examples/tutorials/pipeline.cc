// A pipeline: the halves of a network at two workers, which work on parts of a batch at once.
//   build/bin/weftrun -n 2 build/bin/tutorial_pipeline

#include <iostream>

#include <torch/nn/modules/linear.h>

#include "ATen/Context.h"
#include "ATen/TensorOperators.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "ATen/ops/tanh.h"
#include "weft/examples/async_ps/digits.h"
#include "weft/pipeline/pipeline.h"
#include "weft/pipeline/schedule.h"
#include "weft/rref/remote_module.h"
#include "weft/weft.h"

struct FirstImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return at::tanh(layer(x)); }
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(64, 64));
};
TORCH_MODULE(First);

struct SecondImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return layer(x); }
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(64, 10));
};
TORCH_MODULE(Second);

at::Tensor loss(const at::Tensor& output, const at::Tensor& labels) {
  return at::cross_entropy_loss(output, labels);
}

weft::Library library() {
  weft::Library lib("halves");
  weft::module_<First>(lib, "First").constructor<>().def("forward", &FirstImpl::forward);
  weft::module_<Second>(lib, "Second").constructor<>().def("forward", &SecondImpl::forward);
  lib.def("loss", &loss);
  return lib;
}

at::Tensor input(const async_ps::Images& some) { return some.pixels.to(at::kFloat) / 16; }

bool train(const weft::Worker& worker) {
  const async_ps::Split digits =
      async_ps::split_by_class(async_ps::read_digits(async_ps::default_digits()), 360, /*seed=*/1);
  const weft::RemoteModule<First> first(worker, "worker0");
  const weft::RemoteModule<Second> second(worker, "worker1");

  weft::pipeline::Pipeline pipeline(
      worker, {first, second}, weft::pipeline::one_f_one_b(/*workers=*/2, /*micro_batches=*/8),
      {.loss = "halves.loss",
       .optimizer = weft::optimizer_choice<weft::optim::SGD>({.lr = 0.2, .momentum = 0.9})});
  double first_loss = 0;
  double last_loss = 0;
  for (int step = 0; step < 60; ++step) {
    const auto result = pipeline.step({input(digits.train)}, digits.train.labels);
    if (step == 0) first_loss = result.loss;
    last_loss = result.loss;
  }
  pipeline.close();

  const at::Tensor guess = second.forward(first.forward(input(digits.test))).argmax(1);
  const auto accuracy = guess.eq(digits.test.labels).to(at::kFloat).mean().item<double>();
  const bool learned = accuracy > 0.9;
  std::cout << "pipeline: " << (learned ? "ok" : "not learned") << " first_loss=" << first_loss
            << " last_loss=" << last_loss << " accuracy=" << accuracy << std::endl;
  return learned;
}

int main() {
  at::manual_seed(1);
  const weft::Worker worker = weft::join({.library = library()});
  const bool learned = worker.rank() != 0 || train(worker);
  return worker.shutdown().status.ok() && learned ? 0 : 1;
}
