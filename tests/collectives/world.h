#ifndef WEFT_TESTS_COLLECTIVES_WORLD_H_
#define WEFT_TESTS_COLLECTIVES_WORLD_H_

// Ranks of a process group as threads of a test.

#include <functional>
#include <memory>
#include <string>

#include "weft/collectives/process_group.h"
#include "weft/common/runtime.h"
#include "weft/store/hash_store.h"

namespace weft::testing {

// What the ranks of one world share.
struct World {
  explicit World(Backend backend, int size, std::shared_ptr<Runtime> runtime = nullptr);

  ProcessGroupOptions options(int rank) const;
  // Runs `body` on every rank at once, each on a thread of its own with a group of its own.
  void run(const std::function<void(ProcessGroup&)>& body) const;
  void run(const std::function<void(ProcessGroupOptions&)>& change,
           const std::function<void(ProcessGroup&)>& body) const;
  // Without groups.
  void run_ranks(const std::function<void(int rank)>& body) const;

  const Backend backend;
  const int size;
  const std::shared_ptr<Runtime> runtime;
  const std::shared_ptr<HashStore> store;
  const std::shared_ptr<InprocFabric> fabric;
};

std::string backend_text(Backend backend);
// Does not own it.
std::shared_ptr<Runtime> borrowed(Runtime* runtime);
// `s` is of this kind and its message has all of `words` in it.
void expect_error(const Status& s, ErrorKind kind, const std::vector<std::string>& words);

}  // namespace weft::testing

#endif  // WEFT_TESTS_COLLECTIVES_WORLD_H_
