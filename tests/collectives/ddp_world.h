#ifndef WEFT_TESTS_COLLECTIVES_DDP_WORLD_H_
#define WEFT_TESTS_COLLECTIVES_DDP_WORLD_H_

// Ranks of a group in one process, each on a thread of its own.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/core/Tensor.h"
#include "ATen/ops/abs.h"
#include "gtest/gtest.h"
#include "weft/collectives/inproc_fabric.h"
#include "weft/collectives/process_group.h"
#include "weft/common/runtime.h"
#include "weft/store/hash_store.h"

namespace weft::testing {

// Runs `body` for each rank; what it throws is a failure of the test. `adjust`: the options of its
// group.
inline void run_ranks(int size, const std::shared_ptr<Runtime>& runtime,
                      const std::function<void(ProcessGroup&, InprocFabric&)>& body,
                      const std::function<void(ProcessGroupOptions&)>& adjust = nullptr) {
  const auto store = std::make_shared<HashStore>(runtime);
  const auto fabric = std::make_shared<InprocFabric>(runtime);
  std::vector<std::unique_ptr<Thread>> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.push_back(runtime->spawn("rank" + std::to_string(rank), [&, rank] {
      try {
        ProcessGroupOptions options{.store = store,
                                    .rank = rank,
                                    .size = size,
                                    .timeout = std::chrono::seconds(30),
                                    .runtime = runtime,
                                    .fabric = fabric};
        if (adjust != nullptr) adjust(options);
        ProcessGroup group = init_process_group(options);
        body(group, *fabric);
      } catch (const std::exception& e) {
        ADD_FAILURE() << "rank " << rank << ": " << e.what();
      }
    }));
  }
  for (const auto& one : threads) one->join();
}

inline void run_ranks(int size, const std::function<void(ProcessGroup&)>& body) {
  run_ranks(size, make_system_runtime(),
            [&body](ProcessGroup& group, InprocFabric&) { body(group); });
}

// Element by element.
inline void expect_near(const at::Tensor& got, const at::Tensor& want, double bound) {
  ASSERT_EQ(got.sizes(), want.sizes());
  if (got.numel() == 0) return;
  EXPECT_LE((got - want).abs().max().item<double>(), bound) << got << want;
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_COLLECTIVES_DDP_WORLD_H_
