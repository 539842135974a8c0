// The process that is killed in arena_kill_test.cc: joins, and sends large tensors back and forth
// with "survivor", both as caller and as callee, until the test ends it.
//
//   arena_victim STORE_PATH RUN_ID NUMBER

#include <cstdlib>
#include <deque>
#include <iostream>
#include <random>
#include <string>

#include "ATen/Parallel.h"
#include "ATen/ops/full.h"
#include "weft/weft.h"

namespace {

at::Tensor echo(const at::Tensor& x) { return x; }

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: arena_victim STORE_PATH RUN_ID NUMBER\n";
    return 2;
  }
  at::set_num_threads(1);
  try {
    weft::Library library("kill");
    library.def("echo", &echo);
    weft::Worker worker = weft::join(
        {.name = "victim" + std::string(argv[3]),
         .dynamic = true,
         .library = library,
         .rendezvous = "file://" + std::string(argv[1]) + "?run_id=" + std::string(argv[2])});
    std::cout << "joined " << worker.name() << std::endl;
    std::mt19937 random(static_cast<unsigned>(std::atoi(argv[3])));
    std::deque<weft::Future<at::Tensor>> under_way;
    // A bound against running on alone: the test that started this process ends it long before.
    for (int i = 0; i < 1'000'000; ++i) {
      if (under_way.size() == 4) {
        under_way.front().wait();
        under_way.pop_front();
      }
      const int64_t elements = 30'000 + static_cast<int64_t>(random() % 1'000'000);
      under_way.push_back(rpc_async(worker, "survivor", &echo, at::full({elements}, 1.0)));
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
