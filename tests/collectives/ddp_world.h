#ifndef WEFT_TESTS_COLLECTIVES_DDP_WORLD_H_
#define WEFT_TESTS_COLLECTIVES_DDP_WORLD_H_

// Ranks of a group in one process, each on a thread of its own.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "weft/collectives/inproc_fabric.h"
#include "weft/collectives/process_group.h"
#include "weft/common/runtime.h"
#include "weft/store/hash_store.h"

namespace weft::testing {

// Runs `body` for each rank; what it throws is a failure of the test.
inline void run_ranks(int size, const std::shared_ptr<Runtime>& runtime,
                      const std::function<void(ProcessGroup&, InprocFabric&)>& body) {
  const auto store = std::make_shared<HashStore>(runtime);
  const auto fabric = std::make_shared<InprocFabric>(runtime);
  std::vector<std::unique_ptr<Thread>> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.push_back(runtime->spawn("rank" + std::to_string(rank), [&, rank] {
      try {
        ProcessGroup group = init_process_group({.store = store,
                                                 .rank = rank,
                                                 .size = size,
                                                 .timeout = std::chrono::seconds(30),
                                                 .runtime = runtime,
                                                 .fabric = fabric});
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

}  // namespace weft::testing

#endif  // WEFT_TESTS_COLLECTIVES_DDP_WORLD_H_
