// Getting started: two workers, a typed call, an error and a future.
//   build/bin/weftrun -n 2 build/bin/tutorial_getting_started

#include <iostream>
#include <stdexcept>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "weft/weft.h"

// Ordinary functions: nothing in them knows that they are called from elsewhere.
torch::Tensor scale(torch::Tensor x, double factor) { return x * factor; }

int64_t divide(int64_t a, int64_t b) {
  if (b == 0) throw std::invalid_argument("division by zero");
  return a / b;
}

// What other workers may call, and nothing else.
weft::Library library() {
  weft::Library lib("calc");
  lib.def("scale", &scale).def("divide", &divide);
  return lib;
}

void call(const weft::Worker& worker) {
  const torch::Tensor y = weft::rpc_sync(worker, "worker1", &scale, at::arange(4), 0.5);
  std::cout << "0 1 2 3 scaled by 0.5 sum to " << y.sum().item<double>() << std::endl;
}

void fail(const weft::Worker& worker) {
  try {
    weft::rpc_sync(worker, "worker1", &divide, 1, 0);
  } catch (const weft::Error& error) {
    std::cout << error.origin() << " threw: " << error.message() << std::endl;
  }
  // The same without exceptions: a value, or why there is none.
  const weft::StatusOr<int64_t> quotient = weft::try_rpc_sync(worker, "worker1", &divide, 1, 0);
  std::cout << "and returned: " << weft::kind_name(weft::error_kind(quotient.status()))
            << std::endl;
}

void wait_later(const weft::Worker& worker) {
  std::vector<weft::Future<int64_t>> quotients;
  for (int64_t b = 1; b <= 3; ++b) {
    quotients.push_back(weft::rpc_async(worker, "worker1", &divide, 60, b));
  }
  weft::Future<int64_t> sum = weft::when_all(quotients).then(
      [](const std::vector<int64_t>& all) { return all[0] + all[1] + all[2]; });
  std::cout << "60/1 + 60/2 + 60/3 = " << sum.wait() << std::endl;
}

int main() {
  const weft::Worker worker = weft::join({.library = library()});
  if (worker.name() == "worker0") {
    call(worker);
    fail(worker);
    wait_later(worker);
    std::cout << "getting_started: ok" << std::endl;
  }
  return worker.shutdown().status.ok() ? 0 : 1;
}
