// LibTorch's process group on Gloo, driven from C++: the commands of driver.h.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <chrono>
#include <string>
#include <vector>

#include "torch/csrc/distributed/c10d/TCPStore.hpp"
#include "torch/csrc/distributed/c10d/Types.hpp"
#include "torch/csrc/distributed/c10d/Work.hpp"
#include "weft/bench/collectives/driver.h"
#include "weft/bench/line_protocol.h"
#include "weft/tests/testing/gloo_group.h"

namespace weft::bench {
namespace {

constexpr std::chrono::hours kTimeout{1};

int run(int argc, char** argv) {
  at::set_num_threads(1);
  touch_memory(std::stoll(option(argc, argv, "--touch", "0")));
  const int rank = std::stoi(option(argc, argv, "--rank", "0"));
  const int size = std::stoi(option(argc, argv, "--world", "2"));
  c10d::TCPStoreOptions meet;
  meet.port = static_cast<uint16_t>(std::stoi(option(argc, argv, "--port", "0")));
  meet.isServer = rank == 0;
  meet.numWorkers = static_cast<size_t>(size);
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", meet);
  const auto group = testing::make_gloo_group(store, rank, size, kTimeout);
  CollectiveOperations operations;
  operations.broadcast = [&](const at::Tensor& t) {
    std::vector<at::Tensor> tensors{t};
    group->broadcast(tensors)->wait();
  };
  operations.all_reduce = [&](const at::Tensor& t) {
    std::vector<at::Tensor> tensors{t};
    group->allreduce(tensors)->wait();
  };
  operations.reduce_scatter = [&](const at::Tensor& to, const at::Tensor& from) {
    at::Tensor output = to;
    at::Tensor input = from;
    group->_reduce_scatter_base(output, input)->wait();
  };
  operations.make = [](int64_t floats, bool) { return at::empty({floats}); };
  CollectiveDriver(rank, size, std::move(operations)).run();
  say("{\"bye\":true}");
  return 0;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  return weft::bench::driver_main("gloo", &weft::bench::run, argc, argv);
}
