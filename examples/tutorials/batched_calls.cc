// Batched calls: the server answers no trainer before all have sent their gradients.
//   build/bin/weftrun --role ps:1 --role trainer:3 build/bin/tutorial_batched_calls

#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "weft/examples/async_ps/digits.h"
#include "weft/weft.h"

constexpr int kTrainers = 3;
constexpr int kSteps = 100;

// Calls on one object run one at a time, so it needs no lock.
class Server {
 public:
  torch::Tensor weights() const { return weights_; }

  // Returns a future: a trainer that is early waits, and no thread of the server does.
  weft::Future<torch::Tensor> update_and_fetch(weft::CallContext& call, torch::Tensor gradient) {
    weft::Future<torch::Tensor> answer = answer_.future();
    gradients_[call.caller().name] = std::move(gradient);
    if (gradients_.size() == kTrainers) {
      torch::Tensor sum = at::zeros_like(weights_);
      for (const auto& [trainer, one] : std::exchange(gradients_, {})) sum += one;
      weights_ = weights_ - sum * (kRate / kTrainers);
      ++updates_;
      std::exchange(answer_, weft::Promise<torch::Tensor>()).try_set(weights_);
    }
    return answer;
  }
  int64_t updates() const { return updates_; }

 private:
  static constexpr double kRate = 0.5;

  torch::Tensor weights_ = at::zeros({64, 10});
  std::map<std::string, torch::Tensor> gradients_;  // by trainer: their order decides nothing
  weft::Promise<torch::Tensor> answer_;             // of the batch that is being gathered
  int64_t updates_ = 0;
};

torch::Tensor input(const async_ps::Images& some) { return some.pixels.to(at::kFloat) / 16; }

// Runs at a trainer.
void train(const weft::RRef<Server>& server, const torch::Tensor& images,
           const torch::Tensor& labels) {
  torch::Tensor weights = server.rpc_sync(&Server::weights);
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor leaf = weights.detach().set_requires_grad(true);
    at::cross_entropy_loss(images.matmul(leaf), labels).backward();
    weights = server.rpc_sync(&Server::update_and_fetch, leaf.grad());
  }
}

weft::Library library() {
  weft::Library lib("batched");
  lib.class_<Server>("Server")
      .def("weights", &Server::weights)
      .def("update_and_fetch", &Server::update_and_fetch)
      .def("updates", &Server::updates);
  lib.def("train", &train);
  return lib;
}

bool lead(const weft::Worker& worker) {
  const async_ps::Split digits =
      async_ps::split_by_class(async_ps::read_digits(async_ps::default_digits()), 360, /*seed=*/1);
  const auto server = weft::RRef<Server>::local(worker, std::make_shared<Server>());
  std::vector<weft::Future<void>> trainers;
  for (const async_ps::Images& share : async_ps::deal(digits.train, kTrainers)) {
    const std::string trainer = "trainer" + std::to_string(trainers.size());
    trainers.push_back(weft::rpc_async(worker, trainer, {.deadline = weft::kInfinite}, &train,
                                       server, input(share), share.labels));
  }
  weft::when_all(trainers).wait(weft::kInfinite);
  const torch::Tensor guess =
      input(digits.test).matmul(server.rpc_sync(&Server::weights)).argmax(1);
  const auto accuracy = guess.eq(digits.test.labels).to(at::kFloat).mean().item<double>();
  std::cout << "batched_calls: " << (accuracy > 0.85 ? "ok" : "not learned")
            << " calls=" << kTrainers * kSteps << " updates=" << server.rpc_sync(&Server::updates)
            << " accuracy=" << accuracy << std::endl;
  return accuracy > 0.85;
}

int main() {
  const weft::Worker worker = weft::join({.library = library()});
  const bool learned = worker.name() != "ps0" || lead(worker);
  return worker.shutdown().status.ok() && learned ? 0 : 1;
}
