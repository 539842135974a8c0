// Deadlines of calls under virtual time (DEF of the inventory).

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/ops/ones.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/common/sim.h"
#include "weft/rpc/call.h"
#include "weft/rpc/worker.h"
#include "weft/store/hash_store.h"
#include "weft/transport/faulty_transport.h"
#include "weft/transport/inproc_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

class Slow {
 public:
  explicit Slow(Runtime* runtime) : runtime_(runtime) {}
  int64_t hold(int64_t seconds) {
    runtime_->make_parker()->park_until(runtime_->now() + absl::Seconds(seconds));
    return seconds;
  }
  int64_t take(const at::Tensor& x) {
    ++taken;
    return x.numel();
  }
  int taken = 0;

 private:
  Runtime* const runtime_;
};

// Two workers, of which the second has a Slow; `test` runs on a thread of the simulation.
void with_two(const std::function<void(Worker&, Slow&, FaultPlan&, SimRuntime&)>& test) {
  auto sim = std::make_shared<SimRuntime>(SimOptions{.seed = 11});
  auto network = std::make_shared<InprocNetwork>();
  auto plan = std::make_shared<FaultPlan>(3);
  const auto slow = std::make_shared<Slow>(sim.get());
  const Status ended = sim->run([&] {
    auto store = std::make_shared<HashStore>(sim);
    std::vector<Worker> workers(2);
    {
      std::vector<std::unique_ptr<Thread>> joins;
      for (size_t i = 0; i < 2; ++i) {
        joins.push_back(sim->spawn("join", [&, i] {
          Library lib("sim");
          lib.class_<Slow>("Slow").def("hold", &Slow::hold).def("take", &Slow::take);
          lib.instance("slow", slow);
          workers[i] = Worker::join({.name = absl::StrCat("w", i),
                                     .rank = static_cast<int>(i),
                                     .world_size = 2,
                                     .library = std::move(lib),
                                     .store = store->new_client(),
                                     .transport = faulty_transport(inproc_transport(network), plan),
                                     .worker_threads = 1,
                                     .lease = 60s,
                                     .runtime = sim,
                                     .log_level = Severity::kOff,
                                     .environment = Environment{}});
        }));
      }
    }
    test(workers[0], *slow, *plan, *sim);
    auto other = sim->spawn("leave", [&] { workers[1].shutdown(); });
    workers[0].shutdown();
    other->join();
  });
  EXPECT_TRUE(ended.ok()) << ended;
}

TEST(CallsFoundSim, DEF_3_the_caller_hears_that_its_call_never_started) {
  with_two([](Worker& w, Slow& slow, FaultPlan&, SimRuntime&) {
    const Future<int64_t> holds = rpc_async(w, "w1", on("slow", &Slow::hold), 5);
    const Status late =
        try_rpc_sync(w, "w1", {.deadline = 1s}, on("slow", &Slow::take), at::ones({4})).status();
    EXPECT_EQ(error_kind(late), ErrorKind::kDeadline) << late;
    for (const char* part : {"it never started", "the turn of its object", "worker 'w1'"}) {
      EXPECT_NE(std::string(late.message()).find(part), std::string::npos) << part << ": " << late;
    }
    EXPECT_EQ(holds.wait(), 5);
    EXPECT_EQ(slow.taken, 0);
  });
}

TEST(CallsFoundSim, DEF_3_the_deadline_counts_from_the_first_frame) {
  with_two([](Worker& w, Slow& slow, FaultPlan& plan, SimRuntime& sim) {
    EXPECT_EQ(rpc_sync(w, "w1", on("slow", &Slow::take), at::ones({4})), 4);
    // The chunks come after the deadline, and no cancel at all.
    plan.add({.fault = Fault::kDrop, .kind = FrameKind::kCancel});
    plan.add(
        {.fault = Fault::kDelay, .kind = FrameKind::kChunk, .times = 1, .delay = absl::Seconds(3)});
    const Status late =
        try_rpc_sync(w, "w1", {.deadline = 2s}, on("slow", &Slow::take), at::ones({1 << 18}))
            .status();
    EXPECT_EQ(error_kind(late), ErrorKind::kDeadline) << late;
    sim.make_parker()->park_until(sim.now() + absl::Seconds(10));
    EXPECT_EQ(slow.taken, 1) << "a call has run after its deadline";
  });
}

}  // namespace
}  // namespace weft::testing
