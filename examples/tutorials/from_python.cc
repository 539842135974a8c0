// From Python to C++: what a program of torch.distributed.rpc does, page by page of its documentation.
//   build/bin/weftrun --role ps:1 --role trainer:1 build/bin/tutorial_from_python

#include <chrono>
#include <iostream>
#include <memory>
#include <utility>
#include <vector>

#include <torch/nn/modules/linear.h>

#include "ATen/TensorOperators.h"
#include "ATen/ops/ones.h"
#include "weft/rref/remote_module.h"
#include "weft/weft.h"

torch::Tensor add(torch::Tensor a, torch::Tensor b) { return a + b; }

class Counter {
 public:
  explicit Counter(int64_t start) : value_(start) {}
  int64_t increase(int64_t by) { return value_ += by; }

 private:
  int64_t value_;
};

// A handler may answer later, from a future: no thread waits in it.
weft::Future<torch::Tensor> add_chained(weft::CallContext& call, torch::Tensor a, torch::Tensor b,
                                        torch::Tensor c) {
  weft::Future<torch::Tensor> sum = weft::rpc_async(call.worker(), call.caller(), &add, a, b);
  return sum.then([c](torch::Tensor x) { return x + c; });
}

weft::Library library() {
  weft::Library lib("guide");
  lib.def("add", &add).def("add_chained", &add_chained);
  lib.class_<Counter>("Counter").constructor<int64_t>().def("increase", &Counter::increase);
  weft::module_<torch::nn::Linear>(lib, "Linear")
      .constructor<int64_t, int64_t>()
      .def("forward", &torch::nn::LinearImpl::forward);
  lib.aten({"aten::mul.Tensor"});
  return lib;
}

void calls(const weft::Worker& worker) {
  using namespace std::chrono_literals;  // NOLINT
  const torch::Tensor one = at::ones({2});

  torch::Tensor sum = weft::rpc_sync(worker, "ps0", &add, one, one);

  weft::Future<torch::Tensor> later =
      weft::rpc_async(worker, "ps0", {.deadline = 5s}, &add, one, one);
  sum = later.wait();

  const weft::WorkerInfo ps = worker.get_worker_info("ps0");
  sum = weft::rpc_sync(worker, ps, &add, one, one);

  sum = weft::rpc_sync(worker, "ps0", &add_chained, one, one, one);

  const weft::FunctionRef<torch::Tensor(torch::Tensor, torch::Tensor)> mul("aten::mul.Tensor");
  sum = weft::rpc_sync(worker, "ps0", mul, sum, sum);
  std::cout << "calls: " << sum.sum().item<double>() << std::endl;
}

void references(const weft::Worker& worker) {
  const torch::Tensor one = at::ones({2});

  const weft::RRef<torch::Tensor> sum = weft::remote(worker, "ps0", &add, one, one);
  const torch::Tensor copy = sum.to_here();

  const weft::RRef<Counter> counter = weft::remote<Counter>(worker, "ps0", 40);
  const int64_t value = counter.rpc_sync(&Counter::increase, 1);
  const weft::Future<int64_t> next = counter.rpc_async(&Counter::increase, 1);
  next.wait();
  const weft::RRef<int64_t> kept = counter.remote(&Counter::increase, 1);

  const weft::RRef<Counter> own = weft::RRef<Counter>::local(worker, std::make_shared<Counter>(0));
  const std::shared_ptr<Counter> object = own.local_value();

  std::cout << "references: " << copy.sum().item<double>() << " " << value << " " << next.wait()
            << " " << kept.to_here() << " at " << counter.owner_name() << ", "
            << object->increase(1) << " here: " << std::boolalpha << own.is_owner() << std::endl;
}

void training(const weft::Worker& worker) {
  const weft::RemoteModule<torch::nn::Linear> layer(worker, "ps0/cpu", 3, 1);
  std::vector<weft::RRef<at::Tensor>> parameters = layer.parameters();

  const at::Tensor scale = at::ones({1}).set_requires_grad(true);
  parameters.push_back(weft::RRef<at::Tensor>::local(worker, scale));

  weft::DistributedOptimizer<weft::optim::SGD> optimizer(worker, parameters, {.lr = 0.05});

  double loss_value = 0;
  double norm = 0;
  for (int step = 0; step < 40; ++step) {
    weft::DistAutogradContext context(worker);
    const at::Tensor loss = (layer.forward(at::ones({4, 3})) * scale - 2.0).pow(2).mean();
    context.backward({loss});
    for (const auto& [leaf, gradient] : context.gradients()) norm = gradient.norm().item<double>();
    optimizer.step(context);
    loss_value = loss.item<double>();
  }
  std::cout << "training: loss below 0.001: " << std::boolalpha << (loss_value < 1e-3)
            << ", gradient below 0.1: " << (norm < 0.1) << std::endl;
}

int main() {
  weft::JoinOptions options{.library = library()};
  options.worker_threads = 8;
  options.rpc_timeout = absl::Seconds(30);
  const weft::Worker worker = weft::join(std::move(options));

  if (worker.name() == "trainer0") {
    calls(worker);
    references(worker);
    training(worker);
    std::cout << "from_python: ok" << std::endl;
  }

  const weft::ShutdownResult left = worker.shutdown();
  if (!left.status.ok()) std::cerr << left.status << "\n";
  return left.status.ok() ? 0 : 1;
}
