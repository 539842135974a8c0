// BSP, SSP and batches of K through real workers, in simulation: who waits for whom, and how stale
// what is read can be. In each test client i of n adds 1 to element i of a table in every step, so that
// values say which steps are in them.

#include <algorithm>
#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "torch/types.h"
#include "weft/ps/internal/table_future.h"
#include "weft/tests/ps/fixture.h"
#include "weft/transport/faulty_transport.h"

namespace weft::testing {
namespace {

using ps::Consistency;
using ps::Table;
using namespace std::chrono_literals;  // NOLINT

ps::TableDefinition counters_by(int64_t clients, const Consistency& consistency) {
  // SGD with rate `clients`: BSP divides by their number.
  const double rate = consistency.mode == ps::Mode::kBsp ? static_cast<double>(clients) : 1;
  auto out = ps::dense({clients}, ps::rule<optim::SGD>({.lr = rate}));
  out.dtype = torch::kFloat64;
  out.consistency = consistency;
  return out;
}
at::Tensor mark(int64_t clients, int64_t mine) {
  at::Tensor out = torch::zeros({clients}, torch::kFloat64);
  out[mine] = -1;
  return out;
}
uint64_t at(const at::Tensor& values, int64_t i) {
  return static_cast<uint64_t>(values[i].item<double>());
}

class PsConsistency : public PsTest {
 protected:
  // Each client does `steps`, sleeping up to 40 ms of virtual time in each, and calls
  // `look(client, step, values)` with what it pulls after each.
  static void train(
      PsJob& job, SimRuntime& sim, const Consistency& consistency, uint64_t steps,
      const std::function<void(int64_t client, uint64_t step, const at::Tensor& values)>& look) {
    const auto n = static_cast<int64_t>(job.clients.size());
    std::vector<std::function<void()>> bodies;
    for (int64_t c = 0; c < n; ++c) {
      bodies.emplace_back([&, c] {
        const Table t =
            job.clients[static_cast<size_t>(c)].open_table("t", counters_by(n, consistency));
        for (uint64_t step = 0; step < steps; ++step) {
          sim.sleep(absl::Milliseconds(static_cast<int64_t>(sim.random().below(40))));
          look(c, step, t.push_pull(mark(n, c), {.advance = true}).wait());
        }
        if (consistency.mode == ps::Mode::kSsp) {
          EXPECT_LE(t.stats().most_lag, consistency.bound);
        }
      });
    }
    side_by_side(sim, std::move(bodies));
  }
};

TEST_F(PsConsistency, BspSeesTheStepsBeforeAndNothingElse) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    in_simulation(seed, [](const std::shared_ptr<SimRuntime>& sim) {
      PsJob job(2, 3, Net::kInproc, sim);
      int64_t looks = 0;
      train(job, *sim, Consistency::bsp(3), 10, [&](int64_t, uint64_t step, const at::Tensor& v) {
        EXPECT_TRUE(
            torch::equal(v, torch::full({3}, static_cast<double>(step + 1), torch::kFloat64)))
            << v << " after step " << step;
        ++looks;
      });
      EXPECT_EQ(looks, 30);
    });
  }
}

// The same pushes in another order of arrival: the same bits.
TEST_F(PsConsistency, PS_2_BspDoesNotDependOnTheOrderOfArrival) {
  std::vector<at::Tensor> results;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    in_simulation(seed, [&](const std::shared_ptr<SimRuntime>& sim) {
      PsJob job(2, 4, Net::kInproc, sim);
      auto definition = ps::dense({33}, ps::rule<optim::Adam>({.lr = 0.1}));
      definition.init = ps::Init::uniform(-1, 1, 3);
      definition.consistency = Consistency::bsp(4);
      std::vector<std::function<void()>> bodies;
      for (int c = 0; c < 4; ++c) {
        bodies.emplace_back([&, c] {
          const Table t = job.clients[static_cast<size_t>(c)].open_table("t", definition);
          at::Tensor w = t.pull().wait();
          for (int step = 0; step < 5; ++step) {
            sim->sleep(absl::Milliseconds(static_cast<int64_t>(sim->random().below(30))));
            w = t.push_pull((w * (c + 1)).sin(), {.advance = true}).wait();
          }
          if (c == 0) results.push_back(w);
        });
      }
      side_by_side(*sim, std::move(bodies));
    });
  }
  ASSERT_EQ(results.size(), 20U);
  for (const at::Tensor& result : results) EXPECT_TRUE(torch::equal(result, results[0]));
}

TEST_F(PsConsistency, PS_2_SspIsNeverStalerThanItsBoundAndReachesIt) {
  constexpr uint64_t kOfASeed = 4 * 4 * 25;  // reads: bounds, clients, steps
  const char* const wanted = std::getenv("WEFT_PS_READS");
  const uint64_t seeds = wanted != nullptr ? std::stoull(wanted) / kOfASeed : 4;
  for (const uint64_t bound : {0, 1, 3, 10}) {
    uint64_t worst = 0;
    for (uint64_t seed = 1; seed <= seeds; ++seed) {
      in_simulation(seed, [&](const std::shared_ptr<SimRuntime>& sim) {
        PsJob job(2, 4, Net::kInproc, sim);
        train(job, *sim, Consistency::ssp(bound, 4), 25,
              [&](int64_t client, uint64_t step, const at::Tensor& v) {
                EXPECT_EQ(at(v, client), step + 1) << "its own";
                for (int64_t other = 0; other < 4; ++other) {
                  const uint64_t seen = at(v, other);
                  EXPECT_GE(seen + bound, step + 1) << "bound " << bound;
                  if (seen < step + 1) worst = std::max(worst, step + 1 - seen);
                }
              });
      });
    }
    EXPECT_LE(worst, bound);
    EXPECT_TRUE(bound > 3 || worst == bound) << "no client ever waited: " << worst;
  }
}

TEST_F(PsConsistency, AspWaitsForNobody) {
  in_simulation(3, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(1, 2, Net::kInproc, sim);
    const Table slow = job.clients[0].open_table("t", counters_by(2, Consistency::asp()));
    const Table fast = job.clients[1].open_table("t", counters_by(2, Consistency::asp()));
    for (uint64_t step = 1; step <= 50; ++step) {
      EXPECT_EQ(at(fast.push_pull(mark(2, 1), {.advance = true}).wait(), 1), step);
    }
    EXPECT_EQ(fast.stats().most_lag, 50U);
    EXPECT_EQ(at(slow.pull().wait(), 1), 50U);
  });
}

// A step has the first K of N, and what comes later is dropped and said to be.
TEST_F(PsConsistency, ABatchTakesTheFirstK) {
  in_simulation(5, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(1, 3, Net::kInproc, sim);
    auto definition = counters_by(3, Consistency::batch(2, 3));
    definition.rule = ps::rule<optim::SGD>({.lr = 2});
    std::vector<Table> t;
    for (auto& client : job.clients) t.push_back(client.open_table("t", definition));
    const Future<at::Tensor> first = t[0].push_pull(mark(3, 0));
    sim->sleep(absl::Seconds(1));
    EXPECT_FALSE(first.done()) << "one of two is there";
    EXPECT_EQ(t[1].push_pull(mark(3, 1)).wait().sum().item<double>(), 2);
    EXPECT_EQ(first.wait().sum().item<double>(), 2);
    EXPECT_TRUE(t[2].push(mark(3, 2)).wait().dropped);
    EXPECT_EQ(t[2].stats().dropped, 1U);
    const at::Tensor now = t[2].pull().wait();
    EXPECT_EQ(at(now, 2), 0U);
    EXPECT_FALSE(t[2].push(mark(3, 2)).wait().dropped) << "computed with what is there";
  });
}

// A worker that stops holds a step up for as long as its lease, and no longer; one that leaves, not at
// all.
TEST_F(PsConsistency, PSR_8_ADeadClientHoldsNobodyUpBeyondItsLease) {
  for (const Consistency& consistency :
       {Consistency::bsp(2), Consistency::ssp(0, 2), Consistency::batch(2, 2)}) {
    in_simulation(9, [&](const std::shared_ptr<SimRuntime>& sim) {
      PsJob job(2, 2, Net::kInproc, sim);
      const Table lives = job.clients[0].open_table("t", counters_by(2, consistency));
      auto dies =
          std::make_unique<Table>(job.clients[1].open_table("t", counters_by(2, consistency)));
      const Future<at::Tensor> waits = lives.push_pull(mark(2, 0), {.advance = true});
      sim->sleep(absl::Seconds(1));
      EXPECT_FALSE(waits.done());
      const absl::Time then = sim->now();
      (void)job.worker(1).shutdown({.graceful = false});
      EXPECT_EQ(waits.wait().size(0), 2);
      EXPECT_LE(sim->now() - then, absl::Seconds(6)) << "the lease is 5 s";
      EXPECT_EQ(lives.push_pull(mark(2, 0), {.advance = true}).wait().size(0), 2);
      dies.reset();
      job.cluster->shutdown_all({.graceful = false});
      job.cluster->forget();
    });
  }
}

// A client that leaves while a server cannot be reached: its worker goes on, so no death tells the server.
TEST_F(PsConsistency, PSR_8_AServerThatIsOutOfReachHearsLaterThatAClientHasLeft) {
  in_simulation(8, [](const std::shared_ptr<SimRuntime>& sim) {
    const auto plan = std::make_shared<FaultPlan>(8);
    PsJob job(1, 2, Net::kInproc, sim,
              [&](int, JoinOptions* o) { o->transport = faulty_transport(o->transport, plan); });
    auto definition = ps::dense({3}, ps::rule<optim::SGD>({.lr = 1.0}));
    definition.consistency = Consistency::bsp(2);
    std::vector<Table> leaves;
    leaves.push_back(job.clients[0].open_table("w", definition));
    const Table stays = job.clients[1].open_table("w", definition);
    plan->add({.fault = Fault::kDrop, .kind = FrameKind::kRequest, .from = "c0", .to = "ps0"});
    leaves.clear();
    sim->sleep(absl::Seconds(40));
    plan->clear();
    const at::Tensor values =
        stays.push_pull(torch::ones({3}), {.advance = true, .deadline = 30s}).wait();
    EXPECT_TRUE(torch::equal(values, -torch::ones({3}))) << values;
  });
}

// One that comes later begins where the others are.
TEST_F(PsConsistency, WhoComesLaterTakesPartFromTheStepThatIsOpen) {
  in_simulation(11, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(2, 2, Net::kInproc, sim);
    const auto definition = counters_by(2, Consistency::bsp(1));
    const Table first = job.clients[0].open_table("t", definition);
    for (int i = 0; i < 7; ++i) (void)first.push_pull(mark(2, 0), {.advance = true}).wait();
    const Table later = job.clients[1].open_table("t", definition);
    EXPECT_EQ(later.clock(), 7U);
    const Future<at::Tensor> waits = first.push_pull(mark(2, 0), {.advance = true});
    sim->sleep(absl::Seconds(1));
    EXPECT_FALSE(waits.done());
    (void)later.push_pull(mark(2, 1), {.advance = true}).wait();
    EXPECT_EQ(waits.wait()[1].item<double>(), 1);
  });
}

// A client whose step has lost its answer: it ends after the time of an attempt. Its operations are too large to wait for
// each other's messages.
struct LateStep {
  LateStep(const std::shared_ptr<SimRuntime>& sim, const Consistency& consistency,
           int64_t answers_lost = 1)
      : job(1, 1, Net::kInproc, sim,
            [&](int, JoinOptions* o) { o->transport = faulty_transport(o->transport, plan); }) {
    auto definition = ps::sparse(kLength, ps::rule<optim::SGD>({.lr = 1.0}));
    definition.consistency = consistency;
    t.push_back(job.clients[0].open_table("t", definition));
    plan->add(
        {.fault = Fault::kDrop, .kind = FrameKind::kResponse, .to = "c0", .times = answers_lost});
    begun = sim->now();
    step.push_back(t[0].push_rows(keys, -torch::ones({keys.numel(), kLength}),
                                  {.advance = true, .deadline = 1min}));
  }
  Future<at::Tensor> pull(Timeout deadline) const { return t[0].pull_rows(keys, deadline); }

  static constexpr int64_t kLength = 64;
  const at::Tensor keys = torch::arange(200, torch::kLong);
  const std::shared_ptr<FaultPlan> plan = std::make_shared<FaultPlan>(13);
  PsJob job;
  std::vector<Table> t;
  absl::Time begun;
  std::vector<Future<ps::PushResult>> step;
};

TEST_F(PsConsistency, CLIENT_3_OnlyAPullOfAnAsynchronousTableLeavesBeforeAStepHasEnded) {
  for (const Consistency& consistency : {Consistency::asp(), Consistency::bsp(1),
                                         Consistency::ssp(1, 1), Consistency::batch(1, 1)}) {
    in_simulation(13, [&](const std::shared_ptr<SimRuntime>& sim) {
      LateStep late(sim, consistency);
      const at::Tensor values = late.pull(1min).wait();
      EXPECT_TRUE(torch::equal(values, torch::ones_like(values)));
      if (consistency.mode == ps::Mode::kAsp) {
        EXPECT_FALSE(late.step[0].done());
        EXPECT_LE(sim->now() - late.begun, absl::Milliseconds(1));
      } else {
        EXPECT_TRUE(late.step[0].done());
      }
      late.step[0].wait();
      EXPECT_GE(sim->now() - late.begun, absl::Seconds(1));
      EXPECT_TRUE(torch::equal(late.pull(1min).wait(), values));
    });
  }
}

// Its deadline is far away when it has ended, and its values may be large.
TEST_F(PsConsistency, WhatHasWaitedForAStepHoldsNothingOnceItHasEnded) {
  in_simulation(14, [](const std::shared_ptr<SimRuntime>& sim) {
    LateStep late(sim, Consistency::bsp(1));
    std::vector<Future<at::Tensor>> pulls;
    for (int i = 0; i < 100; ++i) pulls.push_back(late.pull(10min));
    for (Future<at::Tensor>& pull : pulls) {
      const at::Tensor values = pull.wait();
      pull = Future<at::Tensor>();
      EXPECT_EQ(values.use_count(), 1U);
    }
    EXPECT_LE(sim->now() - late.begun, absl::Minutes(1));
  });
}

TEST_F(PsConsistency, CLIENT_1_EachOfThoseThatWaitForAStepEndsAtItsOwnDeadline) {
  in_simulation(15, [](const std::shared_ptr<SimRuntime>& sim) {
    LateStep late(sim, Consistency::bsp(1), /*answers_lost=*/1000);
    std::vector<Future<at::Tensor>> pulls;
    const std::vector<int> seconds = {3, 1, 2, 40, 1, 3};
    for (const int s : seconds) {
      pulls.push_back(late.pull(std::chrono::seconds(s)));
    }
    for (const size_t i : {1, 4, 2, 0, 5, 3}) {
      const Status why = ps_error_of([&] { pulls[i].wait(); });
      expect_ps_error(why, ErrorKind::kDeadline, {"table 't'", "waited for the step before it"});
      EXPECT_EQ(sim->now() - late.begun, absl::Seconds(seconds[i])) << i;
    }
    expect_ps_error(ps_error_of([&] { late.step[0].wait(); }), ErrorKind::kDeadline, {"table 't'"});
    EXPECT_EQ(sim->now() - late.begun, absl::Minutes(1));
    late.plan->clear();
  });
}

// close() has ended what waited, and the step is still under way.
TEST_F(PsConsistency, WhatComesBehindAStepWhenTheWorkerLeavesEndsAtOnce) {
  in_simulation(16, [](const std::shared_ptr<SimRuntime>& sim) {
    LateStep late(sim, Consistency::bsp(1));
    ps::internal::TableAccess::core(late.t[0]).close(
        make_error(ErrorKind::kState, "the worker leaves"));
    expect_ps_error(ps_error_of([&] { late.pull(1min).wait(); }), ErrorKind::kState,
                    {"table 't'", "the worker leaves"});
    EXPECT_LE(sim->now() - late.begun, absl::Milliseconds(1));
    late.step[0].wait();
  });
}

// An observer reads what is there and holds nobody up.
TEST_F(PsConsistency, AnObserverWaitsForNobodyAndIsNotWaitedFor) {
  in_simulation(12, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(1, 2, Net::kInproc, sim);
    const Table t = job.clients[0].open_table("t", counters_by(1, Consistency::bsp(1)));
    const Table eye = job.clients[1].open_table("t", {.observer = true});
    for (uint64_t i = 1; i <= 3; ++i) {
      (void)t.push_pull(mark(1, 0), {.advance = true}).wait();
      EXPECT_EQ(at(eye.pull().wait(), 0), i);
    }
    expect_ps_error(ps_error_of([&] { eye.push(mark(1, 0)).wait(); }), ErrorKind::kState,
                    {"observer", "push"});
  });
}

}  // namespace
}  // namespace weft::testing
