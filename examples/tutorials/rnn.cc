// A recurrent network over two workers: embedding and decoder at ps0, the LSTM at trainer0.
//   build/bin/weftrun --role ps:1 --role trainer:1 build/bin/tutorial_rnn

#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>

#include "ATen/Context.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "ATen/ops/tensor.h"
#include "weft/rref/remote_module.h"
#include "weft/weft.h"

using Embedding = torch::nn::EmbeddingImpl;
using Linear = torch::nn::LinearImpl;

constexpr char kText[] = "the quick brown fox jumps over the lazy dog, and the dog sleeps on; ";

// What the server lets others make and call: two modules of LibTorch, as they are.
weft::Library library() {
  weft::Library lib("rnn");
  weft::module_<Embedding>(lib, "Embedding")
      .constructor<int64_t, int64_t>()
      .def("forward", &Embedding::forward);
  weft::module_<Linear>(lib, "Linear")
      .constructor<int64_t, int64_t>()
      .def("forward", &Linear::forward);
  return lib;
}

struct Model {
  explicit Model(const weft::Worker& worker)
      : embedding(worker, "ps0", 128, 32), lstm(32, 64), decoder(worker, "ps0", 64, 128) {}

  // Characters (time x 1) to logits of those that follow (time x 1 x 128).
  at::Tensor forward(const at::Tensor& characters) {
    const auto [hidden, state] = lstm->forward(embedding.forward(characters));
    return decoder.forward(hidden);
  }

  // References to all parameters, wherever they are.
  std::vector<weft::RRef<at::Tensor>> parameters(const weft::Worker& worker) const {
    std::vector<weft::RRef<at::Tensor>> all = embedding.parameters();
    for (auto& theirs : decoder.parameters()) all.push_back(std::move(theirs));
    for (const at::Tensor& own : lstm->parameters()) {
      all.push_back(weft::RRef<at::Tensor>::local(worker, own));
    }
    return all;
  }

  weft::RemoteModule<Embedding> embedding;
  torch::nn::LSTM lstm;
  weft::RemoteModule<Linear> decoder;
};

bool train(const weft::Worker& worker) {
  const std::vector<int64_t> codes(std::begin(kText), std::end(kText) - 1);
  const auto n = static_cast<int64_t>(codes.size());
  const at::Tensor text = at::tensor(codes).unsqueeze(1);
  Model model(worker);
  weft::DistributedOptimizer<weft::optim::Adam> optimizer(worker, model.parameters(worker),
                                                          {.lr = 1e-2});
  double first = 0;
  double last = 0;
  for (int step = 0; step < 150; ++step) {
    weft::DistAutogradContext context(worker);
    const at::Tensor logits = model.forward(text.narrow(0, 0, n - 1)).flatten(0, 1);
    const at::Tensor loss = at::cross_entropy_loss(logits, text.narrow(0, 1, n - 1).flatten());
    context.backward({loss});
    context.clip_grad_norm(1.0);  // of the gradients at both workers, as of one vector
    optimizer.step(context);
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  const bool learned = last < 0.2;
  std::cout << "rnn: " << (learned ? "ok" : "not learned") << " first_loss=" << first
            << " last_loss=" << last << std::endl;
  return learned;
}

int main() {
  at::manual_seed(1);
  const weft::Worker worker = weft::join({.library = library()});
  const bool learned = worker.name() != "trainer0" || train(worker);
  return worker.shutdown().status.ok() && learned ? 0 : 1;
}
