// Backward through other workers, step by step: worker0 has the loss, worker1 and worker2 have
// parts of the model.
//   build/bin/weftrun -n 3 build/bin/autograd_tour

#include <iostream>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/ones.h"
#include "weft/weft.h"

// A part of a model, with a parameter that stays where it is.
class Scale {
 public:
  explicit Scale(double factor) : weight_((at::ones({3}) * factor).set_requires_grad(true)) {}
  torch::Tensor forward(torch::Tensor x) const { return weight_ * x; }
  // One step of gradient descent, in the context of the call.
  double step(weft::CallContext& context, double rate) {
    const auto id = weft::current_autograd_context(context.worker());
    if (!id.has_value()) return 0;
    for (const auto& [leaf, gradient] : weft::autograd_gradients(context.worker(), *id)) {
      if (leaf.is_same(weight_)) weight_.detach().sub_(gradient * rate);
    }
    return weight_.mean().item<double>();
  }

 private:
  torch::Tensor weight_;
};

torch::Tensor square(torch::Tensor x) { return x * x; }

weft::Library library() {
  weft::Library lib("tour");
  lib.class_<Scale>("Scale")
      .constructor<double>()
      .def("forward", &Scale::forward)
      .def("step", &Scale::step);
  lib.def("square", &square);
  return lib;
}

void lead(const weft::Worker& worker) {
  auto first = weft::remote<Scale>(worker, 1, 2.0);
  auto second = weft::remote<Scale>(worker, 2, 3.0);
  const torch::Tensor x = at::arange(1, 4).to(at::kFloat).set_requires_grad(true);

  for (int step = 1; step <= 3; ++step) {
    weft::DistAutogradContext context(worker);
    // Three hops; a call whose result is not used costs the backward nothing.
    const torch::Tensor hidden = first.rpc_sync(&Scale::forward, x);
    const torch::Tensor unused = weft::rpc_sync(worker, 2, &square, hidden);
    const torch::Tensor loss =
        weft::rpc_sync(worker, 1, &square, second.rpc_sync(&Scale::forward, hidden)).mean();
    context.backward({loss});
    std::cout << "step " << step << ": loss " << loss.item<double>() << ", gradient of the input "
              << context.gradient(x).sum().item<double>() << ", weights "
              << first.rpc_sync(&Scale::step, 0.002) << " and "
              << second.rpc_sync(&Scale::step, 0.002) << std::endl;
  }

  // An error is thrown where the loss is, wherever it happened.
  weft::DistAutogradContext context(worker);
  const auto error = context.try_backward({first.rpc_sync(&Scale::forward, x)});
  std::cout << "and an error: " << error.message() << std::endl;
}

int main() {
  auto worker = weft::join({.library = library()});
  if (worker.world_size() < 3) {
    std::cerr << "autograd_tour needs 3 processes: weftrun -n 3 build/bin/autograd_tour\n";
    return 2;
  }
  if (worker.rank() == 0) lead(worker);
  const auto result = worker.shutdown();
  if (!result.status.ok()) std::cerr << result.status << "\n";
  return result.status.ok() ? 0 : 1;
}
