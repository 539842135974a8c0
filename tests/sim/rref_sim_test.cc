// RRefs under the seeded scheduler, with faults: three workers create, share, return, fetch and
// drop. For every schedule:
//   a use gives the right value, or an error of the transport or of its deadline; it ends
//   RREF-1, RREF-6  when all handles are dropped and all have left, no object, fork, handle,
//                   pending child or unacknowledged item is left anywhere, and every value was
//                   destroyed
//   SIM-3           no deadlock
// A seed that fails is printed; WEFT_SIM_SEED=<seed> runs it alone, with the last events.

#include <atomic>
#include <cstdio>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/common/sim.h"
#include "weft/rpc/worker.h"
#include "weft/rref/rref.h"
#include "weft/store/hash_store.h"
#include "weft/tests/testing/environment.h"
#include "weft/tests/testing/sanitizers.h"
#include "weft/transport/faulty_transport.h"
#include "weft/transport/inproc_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

using IntRef = RRef<int64_t>;

class Cell {
 public:
  explicit Cell(int64_t n) : n_(n) { ++alive(); }
  ~Cell() { --alive(); }
  Cell(const Cell&) = delete;
  int64_t get() const { return n_; }
  static std::atomic<int>& alive() {
    static std::atomic<int> count{0};
    return count;
  }

 private:
  const int64_t n_;
};
using CellRef = RRef<Cell>;

int64_t plus(int64_t a, int64_t b) { return a + b; }
int64_t fetch(IntRef x) { return x.to_here(); }
int64_t get_of(CellRef x) { return x.rpc_sync(&Cell::get); }
IntRef give_back(IntRef x) { return x; }
IntRef make_at(CallContext& context, std::string at, int64_t n) {
  return remote(context.worker(), at, &plus, n, 1);
}

struct Schedule {
  Status status;
  uint64_t hash = 0;
  int64_t right = 0;
  int64_t failed = 0;
  int64_t hits = 0;
  std::vector<std::string> events;

  void fail(const Status& why) {
    if (status.ok()) status = why;
  }
};

void add_faults(uint64_t seed, FaultPlan* plan) {
  static constexpr std::pair<Fault, FrameKind> kChoices[] = {
      {Fault::kFailAfter, FrameKind::kRequest},  {Fault::kFailBefore, FrameKind::kRequest},
      {Fault::kCut, FrameKind::kRequest},        {Fault::kLoseUnsent, FrameKind::kRequest},
      {Fault::kFailAfter, FrameKind::kResponse}, {Fault::kCut, FrameKind::kResponse},
      {Fault::kDelay, FrameKind::kRequest},      {Fault::kDelay, FrameKind::kResponse},
      {Fault::kDrop, FrameKind::kRequest},       {Fault::kDrop, FrameKind::kResponse},
  };
  for (uint64_t i = 0; i < seed % 5; ++i) {
    const auto& [fault, kind] = kChoices[(seed / 5 + i * 3) % std::size(kChoices)];
    plan->add({.fault = fault,
               .kind = kind,
               .skip = static_cast<int64_t>((seed / 11 + 3 * i) % 7),
               .times = 1 + static_cast<int64_t>(seed / 3 % 2),
               .delay = absl::Milliseconds(40)});
  }
}

// One worker's program.
void work(const Worker& w, int i, uint64_t seed, Schedule* out) {
  const std::string next = absl::StrCat("w", (i + 1) % 3);
  const std::string other = absl::StrCat("w", (i + 2) % 3);
  const CallOptions brief{.deadline = 3s};
  const auto check = [&](const StatusOr<int64_t>& got, int64_t want) {
    if (!got.ok()) {
      ++out->failed;
      const ErrorKind kind = error_kind(got.status());
      if (kind == ErrorKind::kProtocol || kind == ErrorKind::kInternal ||
          kind == ErrorKind::kState || kind == ErrorKind::kNone || kind == ErrorKind::kSignature) {
        out->fail(annotate(got.status(), "not what a lost message leads to"));
      }
    } else if (*got == want) {
      ++out->right;
    } else {
      out->fail(make_error(ErrorKind::kInternal, absl::StrCat(*got, " instead of ", want)));
    }
  };
  for (int k = 0; k < 4; ++k) {
    const int64_t n = 100 * i + k;
    switch ((seed / 2 + static_cast<uint64_t>(i + k)) % 6) {
      case 0: {
        const IntRef x = remote(w, next, brief, &plus, n, 1);
        check(x.try_to_here(brief), n + 1);
        break;
      }
      case 1: {
        const IntRef x = remote(w, next, brief, &plus, n, 1);
        check(try_rpc_sync(w, other, brief, &fetch, x), n + 1);
        break;
      }
      case 2: {
        const StatusOr<IntRef> x = try_rpc_sync(w, next, brief, &make_at, other, n);
        check(x.ok() ? x->try_to_here(brief) : StatusOr<int64_t>(x.status()), n + 1);
        break;
      }
      case 3: {
        const CellRef cell = remote<Cell>(w, next, brief, n);
        check(cell.try_rpc_sync(brief, &Cell::get), n);
        check(try_rpc_sync(w, other, brief, &get_of, cell), n);
        break;
      }
      case 4: {
        const IntRef mine = IntRef::local(w, n);
        const StatusOr<IntRef> back = try_rpc_sync(w, next, brief, &give_back, mine);
        check(back.ok() ? back->try_to_here(brief) : StatusOr<int64_t>(back.status()), n);
        break;
      }
      default: {
        remote<Cell>(w, other, brief, n);  // dropped before it is there
        const IntRef x = remote(w, other, brief, &plus, n, 1);
        check(try_rpc_sync(w, next, {.deadline = 3s, .retry = Retry::kAtMostOnce}, &fetch, x),
              n + 1);
        break;
      }
    }
  }
}

struct World {
  SimRuntime* sim;
  FaultPlan* plan;
  std::vector<Worker> workers{3};
  Schedule out{};

  void each(const char* name, const std::function<void(int)>& body) {
    std::vector<std::unique_ptr<Thread>> threads;
    for (int i = 0; i < 3; ++i) threads.push_back(sim->spawn(name, [&body, i] { body(i); }));
  }
};

// Three workers join, `body` has them, they leave, and nothing may be left.
Schedule run_world(uint64_t seed, size_t keep_events, const std::function<void(World*)>& body) {
  auto sim = std::make_shared<SimRuntime>(SimOptions{.seed = seed, .keep_events = keep_events});
  auto network = std::make_shared<InprocNetwork>();
  auto plan = std::make_shared<FaultPlan>(seed);
  World world{.sim = sim.get(), .plan = plan.get()};
  Schedule& out = world.out;
  const Status ended = sim->run([&] {
    auto store = std::make_shared<HashStore>(sim);
    std::vector<Worker>& workers = world.workers;
    world.each("join", [&](int i) {
      JoinOptions o;
      o.name = absl::StrCat("w", i);
      o.rank = i;
      o.world_size = 3;
      Library library("sim");
      library.def("plus", &plus, {.inline_ok = true})
          .def("fetch", &fetch)
          .def("get_of", &get_of)
          .def("give_back", &give_back)
          .def("make_at", &make_at);
      library.class_<Cell>("Cell").constructor<int64_t>().def("get", &Cell::get);
      o.library = library;
      o.store = store->new_client();
      o.transport = faulty_transport(inproc_transport(network), plan);
      o.services = {rref_service({.fail_on_leak = true})};
      o.worker_threads = 1 + static_cast<int>(seed % 3);
      o.shutdown_timeout = 300s;
      o.runtime = sim;
      o.log_level = Severity::kOff;
      o.environment = Environment{};
      StatusOr<Worker> w = Worker::try_join(std::move(o));
      if (w.ok()) workers[static_cast<size_t>(i)] = *std::move(w);
      if (!w.ok()) out.fail(annotate(w.status(), "join"));
    });
    if (!out.status.ok()) return;
    body(&world);
    world.each("leave", [&](int i) {
      const ShutdownResult r = workers[static_cast<size_t>(i)].shutdown();
      if (!r.status.ok()) out.fail(annotate(r.status, absl::StrCat("shutdown of w", i)));
    });
    for (const Worker& w : workers) {
      const auto info = w.debug_info();
      for (const char* name :
           {"rref_owners", "rref_forks", "rref_users", "rref_pending_users",
            "rref_pending_children", "rref_parked_uses", "rref_arrivals", "rref_unacknowledged",
            "rref_values", "rref_faults", "calls_pending", "handlers_running"}) {
        if (info.at(name) != 0) {
          out.fail(make_error(ErrorKind::kInternal,
                              absl::StrCat(w.name(), " has ", name, " = ", info.at(name))));
        }
      }
    }
  });
  if (!ended.ok()) out.status = ended;
  if (Cell::alive() != 0) {
    out.fail(
        make_error(ErrorKind::kInternal, absl::StrCat(Cell::alive().load(), " objects are left")));
  }
  Cell::alive() = 0;
  out.hash = sim->trace_hash();
  out.hits = plan->hits();
  out.events = sim->last_events();
  return std::move(world.out);
}

Schedule run_schedule(uint64_t seed, size_t keep_events = 0) {
  return run_world(seed, keep_events, [seed](World* world) {
    add_faults(seed, world->plan);
    world->each("work",
                [&](int i) { work(world->workers[static_cast<size_t>(i)], i, seed, &world->out); });
    world->plan->clear();
  });
}

TEST(RRefSim, RandomSchedulesWithFaultsLeaveNothing) {
  const uint64_t only = weft::testing::environment_number<uint64_t>("WEFT_SIM_SEED", 0);
  if (only != 0) {
    const Schedule out = run_schedule(only, 600);
    for (const std::string& event : out.events) std::printf("%s\n", event.c_str());
    ASSERT_TRUE(out.status.ok()) << "seed " << only << ": " << out.status;
    return;
  }
  const uint64_t schedules =
      weft::testing::environment_number<uint64_t>("WEFT_RREF_SIM_SCHEDULES", 1'000);
  Schedule sum;
  for (uint64_t seed = 1; seed <= schedules; ++seed) {
    const Schedule out = run_schedule(seed);
    ASSERT_TRUE(out.status.ok()) << "seed " << seed << ": " << out.status;
    sum.right += out.right;
    sum.failed += out.failed;
    sum.hits += out.hits;
    if (seed % 100 == 0) {
      ASSERT_EQ(run_schedule(seed).hash, out.hash) << "seed " << seed;
    }
  }
  std::printf("%d schedules, %d uses right, %d failed, %d faults hit\n",
              static_cast<int>(schedules), static_cast<int>(sum.right),
              static_cast<int>(sum.failed), static_cast<int>(sum.hits));
  EXPECT_GT(sum.hits, static_cast<int64_t>(schedules));
  EXPECT_GT(sum.right, static_cast<int64_t>(schedules) * 8);
}

// SRV-4, and at the owner one look serves all creations of its span.
TEST(RRefSim, SRV_4_a_worker_that_makes_and_drops_objects_says_so_now_and_then) {
  constexpr int kLives = fewer(5'000, 1'000);
  constexpr absl::Duration kBetween = absl::Microseconds(20);
  const Schedule out = run_world(1, 0, [&](World* world) {
    const Worker& maker = world->workers[0];
    const Worker& owner = world->workers[1];
    const absl::Time begin = world->sim->now();
    for (int i = 0; i < kLives; ++i) {
      EXPECT_EQ(remote<Cell>(maker, "w1", i).rpc_sync(&Cell::get), i);
      world->sim->sleep(kBetween);
    }
    const double ms = absl::ToDoubleMilliseconds(world->sim->now() - begin);
    EXPECT_GE(ms, kLives * absl::ToDoubleMilliseconds(kBetween));
    auto made = maker.debug_info();
    EXPECT_LE(made["rref_control_batches"], ms + 1) << ms << " ms";
    EXPECT_GT(made["rref_control_batches"], ms / 2);
    EXPECT_GT(made["rref_control_items"], kLives * 9 / 10);
    EXPECT_LE(owner.debug_info()["rref_looks"], ms / 10 + 1) << ms << " ms";
    EXPECT_LT(Cell::alive(), 100);
  });
  EXPECT_TRUE(out.status.ok()) << out.status;
}

}  // namespace
}  // namespace weft::testing
