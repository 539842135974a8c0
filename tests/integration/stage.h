#ifndef WEFT_TESTS_INTEGRATION_STAGE_H_
#define WEFT_TESTS_INTEGRATION_STAGE_H_

// What the workers of the integration tests offer each other, and a record of what was run.
// Threads: any.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/condition.h"
#include "weft/common/future.h"
#include "weft/common/mutex.h"
#include "weft/rpc/call_context.h"
#include "weft/rpc/library.h"
#include "weft/rpc/spi/function_ref.h"

namespace weft::integration {

// Counts a run of `id` and returns how often it has run here.
inline const FunctionRef<int64_t(int64_t)> kBump{"stage.bump"};
// The same, then waits until the test has opened the gate up to `id`.
inline const FunctionRef<int64_t(int64_t)> kHold{"stage.hold"};

at::Tensor echo(at::Tensor x);
// Goes `depth` hops along `ring`, with blocking calls, and returns how many hops there were. With
// `meet` the last of them passes a barrier.
int64_t ring_sync(CallContext& context, std::vector<std::string> ring, int64_t depth, bool meet);
Future<int64_t> ring_async(CallContext& context, std::vector<std::string> ring, int64_t depth);

class Stage {
 public:
  explicit Stage(std::shared_ptr<Runtime> runtime);

  void open(int64_t up_to);
  int64_t bump(int64_t id);
  int64_t hold(int64_t id);
  // "runs", "runs_of_one" (the most), "ids", "held" (handlers that have come to the gate).
  std::map<std::string, int64_t> counts() const;
  void forget();

  Library library{"stage"};

 private:
  const std::shared_ptr<Runtime> runtime_;
  mutable Mutex mutex_;
  Condition changed_;
  int64_t open_ ABSL_GUARDED_BY(mutex_) = -1;
  int64_t held_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, int64_t> runs_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::integration

#endif  // WEFT_TESTS_INTEGRATION_STAGE_H_
