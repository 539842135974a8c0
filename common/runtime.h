#ifndef WEFT_COMMON_RUNTIME_H_
#define WEFT_COMMON_RUNTIME_H_

// Runtime: everything that weft needs of the world around it. Whatever waits, tells the time,
// starts a thread, draws a random number or touches a file does it through here, so that the same
// code runs on the system (make_system_runtime) or, many workers at once, under the seeded
// scheduler with virtual time (common/sim.h).
//
// Threads: all methods from anywhere. The Runtime outlives what it made.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/executor.h"

namespace weft {

// A steady clock.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time now() const = 0;  // never goes back
};

// Uniform random bits. In simulation a function of the seed.
class Random {
 public:
  virtual ~Random() = default;
  virtual uint64_t next() = 0;  // 64 uniform bits
  // Uniform in [0, bound). REQUIRES: bound > 0.
  uint64_t below(uint64_t bound) { return next() % bound; }
  // Uniform in [0, 1).
  double unit() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
};

class Files;  // common/files.h

// One callback at a time to come. The callback runs on a thread of the runtime and must be short:
// it posts. Destroying a Timer waits for a callback that is running now.
class Timer {
 public:
  virtual ~Timer() = default;
  // Replaces the time set before. A time in the past fires at once (not inside arm()).
  virtual void arm(absl::Time when) = 0;
  virtual void disarm() = 0;
};

// A thread of its own, for code that blocks. The destructor joins.
class Thread {
 public:
  virtual ~Thread() = default;
  virtual void join() = 0;  // waits until its body has returned
};

struct PoolOptions {          // how a pool of threads is made
  std::string name = "pool";  // of its threads, in debuggers
  // Tasks that may run (not wait) at once.
  int threads = 4;
  // Tasks that may wait at once; one more fails its wait with resource_exhausted.
  int max_blocked = 4096;
};

class Runtime {
 public:
  virtual ~Runtime() = default;

  virtual const Clock& clock() const = 0;           // steady time
  absl::Time now() const { return clock().now(); }  // on that clock
  virtual Random& random() = 0;
  virtual Files& files() = 0;  // of this machine, or in memory

  virtual std::shared_ptr<Executor> make_loop(std::string_view name) = 0;       // one thread
  virtual std::shared_ptr<Executor> make_pool(const PoolOptions& options) = 0;  // several
  virtual std::unique_ptr<Parker> make_parker() = 0;            // one waiting thread
  virtual std::unique_ptr<Timer> make_timer(Task on_fire) = 0;  // not armed yet
  virtual std::unique_ptr<Thread> spawn(std::string_view name, Task body) = 0;  // runs now

  virtual bool simulated() const { return false; }  // virtual time, one thread
  // Adds an event to the trace that a simulation hashes; nothing elsewhere. `label` is a literal.
  virtual void trace(const char* label, uint64_t a, uint64_t b) { (void)label, (void)a, (void)b; }
};

// Real threads, the steady clock, the system's random device and file system.
WEFT_API std::shared_ptr<Runtime> make_system_runtime();

}  // namespace weft

#endif  // WEFT_COMMON_RUNTIME_H_
