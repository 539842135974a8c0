// The program of the README: every worker asks its neighbour to do some arithmetic.
//   build/bin/weftrun -n 2 build/bin/hello_rpc

#include <iostream>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "weft/weft.h"

torch::Tensor twice(torch::Tensor x) { return x + x; }

std::string greet(weft::CallContext& context, std::string_view what) {
  return context.worker().name() + " greets " + context.caller().name + ": " + std::string(what);
}

int main() {
  weft::Library library("hello");  // everything that others may call, and nothing else
  library.def("twice", &twice).def("greet", &greet);

  auto worker = weft::join({.library = library});  // name, rank and store from the launcher
  int neighbour = (worker.rank() + 1) % worker.world_size();

  // Typed where it is called; returns at once.
  weft::Future<torch::Tensor> y = weft::rpc_async(worker, neighbour, &twice, at::arange(4));
  std::cout << weft::rpc_sync(worker, neighbour, &greet, "hello") << "\n";
  std::cout << "0 1 2 3 doubled and summed: " << y.wait().sum().item<int64_t>() << std::endl;

  return worker.shutdown().status.ok() ? 0 : 1;  // drains, and names who is missing
}
