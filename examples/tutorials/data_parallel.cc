// Data parallelism: each process has a replica of the model and a part of every epoch.
//   build/bin/weftrun -n 2 build/bin/tutorial_data_parallel

#include <iostream>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "ATen/Context.h"
#include "ATen/TensorOperators.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/collectives/ddp/distributed_sampler.h"
#include "weft/collectives/process_group.h"
#include "weft/examples/async_ps/digits.h"

at::Tensor input(const async_ps::Images& some) { return some.pixels.to(at::kFloat) / 16; }

int main() {
  // A process group alone: no Worker, and no calls.
  weft::ProcessGroup group = weft::init_process_group();
  const async_ps::Split digits =
      async_ps::split_by_class(async_ps::read_digits(async_ps::default_digits()), 360, /*seed=*/1);

  // Replicas begin apart: wrapping gives all of them the parameters of rank 0.
  at::manual_seed(static_cast<uint64_t>(group.rank()));
  torch::nn::Sequential net(torch::nn::Linear(64, 64), torch::nn::ReLU(),
                            torch::nn::Linear(64, 10));
  weft::DistributedDataParallel ddp(net, group);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));

  weft::DistributedSampler sampler(static_cast<size_t>(digits.train.size()),
                                   {.rank = group.rank(), .size = group.size(), .seed = 1});
  for (int64_t epoch = 0; epoch < 10; ++epoch) {
    sampler.set_epoch(epoch);
    while (const auto rows = sampler.next(32)) {
      const async_ps::Images batch = async_ps::select(digits.train, {rows->begin(), rows->end()});
      ddp.zero_grad();
      at::cross_entropy_loss(ddp.forward(input(batch)), batch.labels).backward();
      optimizer.step();  // the gradients are means over the ranks: replicas stay equal
    }
  }

  const at::NoGradGuard no_grad;
  const at::Tensor right = net->forward(input(digits.test)).argmax(1).eq(digits.test.labels);
  const at::Tensor mine = right.to(at::kDouble).mean();
  at::Tensor all = mine.clone();
  group.all_reduce(all);
  const bool equal = all.item<double>() == mine.item<double>() * group.size();
  const bool learned = mine.item<double>() > 0.94 && equal;
  if (group.rank() == 0) {
    std::cout << "data_parallel: " << (learned ? "ok" : "not learned") << " ranks=" << group.size()
              << " accuracy=" << mine.item<double>()
              << (equal ? " on every rank" : " on this rank alone") << std::endl;
  }
  return learned ? 0 : 1;
}
