// Evaluates one set of weights on every other worker of this host, without copying a byte of them:
// they lie in memory that all of them see (docs/arena.md).
//   build/bin/weftrun -n 3 build/bin/shared_weights

#include <iostream>
#include <vector>

#include "ATen/ops/ones.h"
#include "weft/weft.h"

constexpr int64_t kSize = 2048;  // 16 MiB of weights
constexpr int kRounds = 20;

// `weights` lies where the sender put it: reading is free, to write it one takes a clone() first.
double evaluate(torch::Tensor weights, torch::Tensor x) {
  return weights.matmul(x).sum().item<double>();
}

int main() {
  weft::Library library("shared_weights");
  library.def("evaluate", &evaluate);
  auto worker = weft::join({.library = library});

  if (worker.rank() == 0) {
    // Made in shared memory at once; weft::move_to_arena() copies a tensor that exists already.
    torch::Tensor weights = weft::arena_tensor(worker, {kSize, kSize});
    for (int round = 1; round <= kRounds; ++round) {
      // No worker reads them now: all answers of the round before are there.
      weights.fill_(round);
      std::vector<weft::Future<double>> all;
      for (int other = 1; other < worker.world_size(); ++other) {
        all.push_back(weft::rpc_async(worker, other, &evaluate, weights, at::ones({kSize})));
      }
      for (const weft::Future<double>& sum : all) {
        if (sum.wait() != static_cast<double>(round) * kSize * kSize) {
          std::cerr << "round " << round << ": the sum is " << sum.wait() << std::endl;
          return 1;
        }
      }
    }
    // Which workers share memory is settled beside the first call; until then weights go by the
    // socket. With a worker of another host, or of another user, they always do.
    const auto info = worker.debug_info();
    std::cout << "weights sent " << (worker.world_size() - 1) * kRounds << " times, "
              << info.at("arena_zero_copies") << " of them without a copy" << std::endl;
  }

  return worker.shutdown().status.ok() ? 0 : 1;
}
