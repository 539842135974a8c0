#ifndef WEFT_TESTS_SIM_AUTOGRAD_WORLD_H_
#define WEFT_TESTS_SIM_AUTOGRAD_WORLD_H_

// One schedule of autograd_sim_test.cc: some workers under the seeded scheduler record a random
// computation, run passes over it, and leave, while faults of the seed's choice happen to them.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "weft/common/error.h"
#include "weft/common/runtime.h"
#include "weft/rpc/library.h"
#include "weft/rpc/worker.h"
#include "weft/tests/sim/autograd_audit.h"
#include "weft/transport/faulty_transport.h"

namespace weft::testing {

enum class Trouble : uint8_t {
  kNone,     // only the order of things
  kOrder,    // frames come late, in another order, twice: passes succeed nevertheless
  kNetwork,  // frames are lost, connections and links break
  kThrow,    // a hook on a node throws
  kTime,     // nodes and frames are slow, deadlines short
  kRelease,  // the context is released while passes run
  kKill,     // a worker leaves while passes run
};
constexpr int kTroubles = 7;
const char* name_of(Trouble trouble);
// Each seed has one; every third has none.
Trouble trouble_of(uint64_t seed);

struct Outcome {
  Status status;  // not OK: an invariant is broken
  uint64_t hash = 0;
  int64_t hits = 0;    // frames with a fault
  int64_t passes = 0;  // that succeeded, and whose gradients and messages were right
  int64_t failed = 0;  // with an error that says what happened
  int64_t messages = 0;
  int64_t closes = 0;
  int64_t runs = 0;    // of sends and recvs
  bool acted = false;  // what the trouble is has happened
  std::vector<std::string> events;
};

// Workers "w0", "w1", ... of one process, whose passes `audit` sees. In a thread of the simulation.
StatusOr<std::vector<Worker>> join_in_simulation(const std::shared_ptr<Runtime>& runtime, int size,
                                                 const Library& library,
                                                 const std::shared_ptr<FaultPlan>& plan,
                                                 Audit* audit, int worker_threads = 2);

// `keep_events`: how many of the last events are returned as text.
Outcome run_autograd_schedule(uint64_t seed, size_t keep_events = 0);

}  // namespace weft::testing

#endif  // WEFT_TESTS_SIM_AUTOGRAD_WORLD_H_
