#ifndef WEFT_COMMON_SIM_H_
#define WEFT_COMMON_SIM_H_

// SimRuntime: a Runtime in which everything runs one at a time, in an order drawn from a seed, on
// virtual time. The same seed gives the same order, hash for hash, in every process, so a bug found
// once under a seed stays found.
//
//   SimRuntime sim({.seed = 42});
//   Status s = sim.run([&] { ... start workers, make calls, wait for futures ... });
//   EXPECT_EQ(sim.trace_hash(), ...);
//
// SIM-1: exactly one task or thread makes progress at any time; the next one is drawn from those
//        that are ready, in an order of names and sequence numbers, never of addresses or hashes.
// SIM-2: time stands still while anything is ready; then it jumps to the next timer or deadline.
// SIM-3: when nothing is ready and no timer is set while run()'s body has not ended, that is a
//        deadlock: run() returns an error that names the waiting tasks and threads.
//
// Loops and timers run on the scheduler's stack. Code that may block (pool tasks, spawned threads)
// does so too until it waits; then its thread keeps the stack and hands the scheduler to another
// thread. So a task that does not wait costs no switch between threads.
//
// Threads: run() from outside; everything else from inside run()'s body and what it starts.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/runtime.h"

namespace weft {

namespace internal {
class SimCore;
}

struct SimOptions {  // how a simulation is made
  uint64_t seed = 1;
  // Steps after which run() gives up with an error, as a bound against a livelock.
  uint64_t max_steps = 20'000'000;
  // Keeps the last events as text, for a failing seed: 0 keeps none.
  size_t keep_events = 0;
};

class WEFT_API SimRuntime : public Runtime {
 public:
  explicit SimRuntime(const SimOptions& options);
  ~SimRuntime() override;

  // Runs `body` as a thread of the simulation and everything it starts; returns when the body has
  // ended and nothing more is ready (pending timers are dropped). Not OK: a deadlock or too many
  // steps; then every wait fails as if its time had come, so that the program can unwind, and the
  // object must not be used further.
  absl::Status run(Task body);

  // Waits for `d` of virtual time. For scenarios inside run().
  void sleep(absl::Duration d);

  // A hash over every scheduling decision and every trace() event so far.
  uint64_t trace_hash() const;
  uint64_t steps() const;
  std::vector<std::string> last_events() const;

  const Clock& clock() const override;
  Random& random() override;
  Files& files() override;
  std::shared_ptr<Executor> make_loop(std::string_view name) override;
  std::shared_ptr<Executor> make_pool(const PoolOptions& options) override;
  std::unique_ptr<Parker> make_parker() override;
  std::unique_ptr<Timer> make_timer(Task on_fire) override;
  std::unique_ptr<Thread> spawn(std::string_view name, Task body) override;
  bool simulated() const override { return true; }
  void trace(const char* label, uint64_t a, uint64_t b) override;

 private:
  const std::shared_ptr<internal::SimCore> core_;
};

}  // namespace weft

#endif  // WEFT_COMMON_SIM_H_
