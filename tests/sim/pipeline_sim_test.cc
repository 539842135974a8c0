// The run is the simulation: the real runtime, with stages that wait instead of computing, on
// virtual time, takes exactly the predicted time in every action. And an error anywhere, in any
// order of messages, is one error everywhere, with nothing left over.

#include <cstdlib>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/common/sim.h"
#include "weft/pipeline/internal/service.h"
#include "weft/pipeline/pipeline.h"
#include "weft/pipeline/schedule.h"
#include "weft/pipeline/service.h"
#include "weft/pipeline/simulator.h"
#include "weft/rpc/inspection.h"
#include "weft/rpc/worker.h"
#include "weft/rref/service.h"
#include "weft/store/delegating_store.h"
#include "weft/store/hash_store.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/vcompute.h"
#include "weft/transport/faulty_transport.h"
#include "weft/transport/inproc_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT
using ::testing::AllOf;
using ::testing::HasSubstr;

struct Scenario {
  pipeline::Plan plan;
  pipeline::Costs costs;
  int steps = 1;
  uint64_t seed = 1;
  // Each frame is under way for so long; unset: 10 to 500 us, by the seed.
  std::optional<absl::Duration> latency{};
  // A stage, step and micro-batch whose forward fails; -1: none.
  int throw_stage = -1;
  int64_t throw_step = 0;
  int throw_micro_batch = 0;
  // A worker (not the maker, which is the first) whose process ends, or stops, so long after the
  // first step has begun; -1: none.
  int lost_worker = -1;
  absl::Duration lost_after{};
  bool stops = false;  // it neither ends nor is heard of
  // All connections break so often, evenly over the first step.
  int cuts = 0;
};

constexpr absl::Duration kLease = absl::Seconds(3);

struct Outcome {
  std::vector<StatusOr<pipeline::StepResult>> steps;
  Status later;
  int64_t left = 0;                // slots and parts, at all workers that are there
  std::vector<std::string> parts;  // what ended the part of each worker, or what it does
  int cut = 0;                     // connections
  absl::Duration until_known{};    // from the loss to the end of the last step
  uint64_t hash = 0;
};

std::string part_of(const Worker& w) {
  Inspection seen(100);
  w.service<pipeline::internal::PipelineService>()->put_inspection(&seen);
  return seen.text();
}

void pass(SimRuntime& sim, absl::Duration time) {
  const auto parker = sim.make_parker();
  const absl::Time until = sim.now() + time;
  while (sim.now() < until) (void)parker->park_until(until);
}

Outcome run(const Scenario& s) {
  Outcome out;
  auto sim = std::make_shared<SimRuntime>(SimOptions{.seed = s.seed});
  const InprocOptions net{.seed = s.seed, .delay_min = s.latency, .delay_max = s.latency};
  auto network = std::make_shared<InprocNetwork>(net);
  const size_t n = s.plan.workers.size();
  const Status ended = sim->run([&] {
    auto store = std::make_shared<HashStore>(sim);
    std::vector<Worker> workers(n);
    std::vector<std::shared_ptr<Store>> clients(n);
    // One that does not give out others, so that interrupting it ends all that a worker does there.
    for (auto& client : clients) client = std::make_shared<DelegatingStore>(store->new_client());
    const bool loses = s.lost_worker >= 0;
    const auto make_compute = [&](const ServiceContext&, const pipeline::Plan&, int stage) {
      std::pair<int64_t, int> throws_at{-1, -1};
      if (stage == s.throw_stage) throws_at = {s.throw_step, s.throw_micro_batch};
      return std::make_shared<VCompute>(sim, s.costs.stages[stage], throws_at);
    };
    {
      std::vector<std::unique_ptr<Thread>> joins;
      for (size_t i = 0; i < n; ++i) {
        joins.push_back(sim->spawn("join", [&, i] {
          workers[i] = Worker::join(
              {.name = absl::StrCat("w", i),
               .rank = static_cast<int>(i),
               .world_size = static_cast<int>(n),
               .store = clients[i],
               .transport = inproc_transport(network),
               .services = {rref_service(), pipeline_service({.make_compute = make_compute})},
               .worker_threads = 2,
               .heartbeat_interval = loses ? 500ms : 60'000ms,
               .lease = loses ? std::chrono::milliseconds(absl::ToInt64Milliseconds(kLease)) : 600s,
               .runtime = sim,
               .log_level = Severity::kOff,
               .environment = Environment{}});
        }));
      }
    }
    {
      std::vector<pipeline::Stage> stages;
      for (int w : s.plan.placement) stages.emplace_back(workers[w].info());
      pipeline::Pipeline pipe(workers[0], stages, s.plan, {.record = true});
      std::vector<Future<pipeline::StepResult>> begun;
      const std::vector<pipeline::Tensors> inputs(s.plan.micro_batches, {at::zeros({1})});
      const std::vector<double> weights(s.plan.micro_batches, 1.0);
      for (int k = 0; k < s.steps; ++k) begun.push_back(pipe.step_async(inputs, {}, weights));
      for (int k = 0; k < s.cuts; ++k) {
        pass(*sim, s.lost_after);
        for (size_t i = 0; i < n; ++i) {
          for (size_t j = 0; j < i; ++j) {
            out.cut += network->cut(absl::StrCat("w", i), absl::StrCat("w", j));
          }
        }
      }
      const absl::Time lost_at = sim->now() + s.lost_after;
      if (loses) {
        pass(*sim, s.lost_after);
        if (s.stops) {
          for (size_t i = 0; i < n; ++i) {
            if (static_cast<int>(i) == s.lost_worker) continue;
            network->partition(absl::StrCat("w", i), absl::StrCat("w", s.lost_worker));
          }
        } else {
          network->kill(absl::StrCat("w", s.lost_worker));
        }
        clients[s.lost_worker]->interrupt();
      }
      for (auto& f : begun) out.steps.push_back(f.try_wait());
      out.until_known = sim->now() - lost_at;
      if (loses) pass(*sim, absl::Seconds(1));  // what is told has arrived
      out.later = pipe.status();
      const auto there = [&](size_t i) { return static_cast<int>(i) != s.lost_worker; };
      for (size_t i = 0; i < n; ++i) {
        out.parts.push_back(part_of(workers[i]));
        if (there(i)) out.left += counter(workers[i], "pipeline_slots");
      }
      pipe.close();
      for (size_t i = 0; i < n; ++i) {
        if (!there(i)) continue;
        out.left += counter(workers[i], "pipelines") + counter(workers[i], "pipeline_slots");
      }
    }
    std::vector<std::unique_ptr<Thread>> leaves;
    for (Worker& w : workers) {
      leaves.push_back(sim->spawn("leave", [&w, loses] { w.shutdown({.graceful = !loses}); }));
    }
  });
  EXPECT_TRUE(ended.ok()) << ended;
  out.hash = sim->trace_hash();
  return out;
}

void expect_as_simulated(const Scenario& s) {
  const pipeline::Simulation want = pipeline::simulate(s.plan, s.costs, {.steps = s.steps});
  const Outcome got = run(s);
  ASSERT_EQ(static_cast<int>(got.steps.size()), s.steps);
  for (const auto& step : got.steps) ASSERT_TRUE(step.ok()) << step.status();
  const int64_t base = got.steps[0]->times[s.plan.placement[0]][0];
  for (size_t w = 0; w < s.plan.workers.size(); ++w) {
    size_t k = 0;
    for (int step = 0; step < s.steps; ++step) {
      const auto& times = got.steps[step]->times[w];
      ASSERT_EQ(times.size(), 2 * s.plan.workers[w].size());
      for (size_t i = 0; i < s.plan.workers[w].size(); ++i, ++k) {
        const pipeline::TimedAction& action = want.workers[w].actions[k];
        // What costs nothing before a worker's first action is done when its step begins.
        if (action.end == action.start) continue;
        ASSERT_EQ(times[2 * i] - base, action.start)
            << "worker " << w << " " << pipeline::to_text(s.plan, action.action) << " of step "
            << step;
        ASSERT_EQ(times[2 * i + 1] - base, action.end)
            << "worker " << w << " " << pipeline::to_text(s.plan, action.action) << " of step "
            << step;
      }
    }
    EXPECT_EQ(got.steps[0]->peak_activations[w], want.workers[w].peak_memory);
  }
  EXPECT_EQ(got.left, 0);
}

int env(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

pipeline::Costs costs_of(const pipeline::Plan& plan, bool uneven, pipeline::Ticks latency,
                         uint64_t seed) {
  pipeline::Costs costs;
  std::mt19937_64 random(seed);
  const auto draw = [&] {
    return uneven ? 500'000 + static_cast<pipeline::Ticks>(random() % 1'000'000) : 1'000'000;
  };
  for (int s = 0; s < plan.stages(); ++s) {
    pipeline::StageCost c;
    c.forward = draw();
    c.input_grad = draw();
    c.weight_grad = draw();
    costs.stages.push_back(c);
  }
  costs.edges.assign(plan.edges.size(), {.latency = latency});
  return costs;
}

TEST(PipelineSim, PP_3_TheRunIsTheSimulation) {
  const bool all = env("WEFT_PIPELINE_SIM_ALL", 0) != 0;
  uint64_t seed = 0;
  for (const std::string& name : pipeline::schedule_names()) {
    if (name == "pipedream") continue;
    for (int p : {2, 3, 4, 8}) {
      for (int m = 1; m <= 4 * p; ++m) {
        ++seed;
        // By default: a choice that covers every p, small, middle and large m, over all schedules.
        if (!all && (m * 7 + p * 3 + static_cast<int>(name.size())) % (3 * p) != 0) continue;
        for (const pipeline::Ticks latency : {0, 200'000}) {
          if (!all && (seed + (latency > 0 ? 1 : 0)) % 2 == 0) continue;
          SCOPED_TRACE(absl::StrCat(name, " p=", p, " m=", m, " latency=", latency));
          Scenario s;
          s.plan = *pipeline::make_schedule(name, p, m);
          s.costs = costs_of(s.plan, seed % 3 != 0, latency, seed);
          s.seed = seed;
          s.latency = absl::Nanoseconds(latency);
          expect_as_simulated(s);
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

// Steps that overlap have the periods of the simulator, among them the pure work of those without a
// bubble.
TEST(PipelineSim, PP_3_OverlappedSteps) {
  for (const std::string name : {"1f1b", "zb-h2", "zb-v"}) {
    SCOPED_TRACE(name);
    Scenario s;
    s.plan = *pipeline::make_schedule(name, 4, 8);
    // One activation for each stage, as the runtime counts them.
    const int64_t share = s.plan.stages() / static_cast<int64_t>(s.plan.workers.size());
    s.costs = pipeline::Costs::uniform(s.plan, 1'000'000, 1'000'000, 1'000'000, 0, share);
    s.steps = 6;
    s.latency = absl::ZeroDuration();
    expect_as_simulated(s);
  }
}

// A worker whose process ends, or that stops, at any time of a step: every other worker has an error
// that names it and what was done here, within the lease and two seconds.
TEST(PipelineSim, PP_9_ALostWorkerIsAnErrorEverywhere) {
  const int wanted = env("WEFT_PIPELINE_SIM_LOSSES", 60);
  const std::vector<std::string> names = {"gpipe", "1f1b", "interleaved:2", "zb-h1", "zb-v"};
  int ended = 0;
  for (int k = 0; k < wanted; ++k) {
    std::mt19937_64 random(static_cast<uint64_t>(k) + 1);
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); };
    Scenario s;
    const std::string name = names[random() % names.size()];
    const int p = 2 + below(3);
    s.plan = *pipeline::make_schedule(name, p, 1 + below(6));
    s.costs = costs_of(s.plan, true, 0, random());
    s.steps = 1 + below(2);
    s.seed = random();
    s.lost_worker = 1 + below(p - 1);
    s.stops = below(2) == 0;
    const pipeline::Ticks whole = pipeline::simulate(s.plan, s.costs, {.steps = s.steps}).makespan;
    s.lost_after = absl::Nanoseconds(random() % static_cast<uint64_t>(whole));
    SCOPED_TRACE(absl::StrCat("loss ", k, ": ", name, " of ", p, ", ", s.plan.micro_batches,
                              " micro-batches, w", s.lost_worker, s.stops ? " stops" : " ends",
                              " after ", absl::FormatDuration(s.lost_after), ", seed ", s.seed));
    const Outcome got = run(s);
    EXPECT_EQ(got.left, 0);
    const std::string lost = absl::StrCat("'w", s.lost_worker, "'");
    for (const auto& step : got.steps) {
      if (step.ok()) continue;
      EXPECT_EQ(error_kind(step.status()), ErrorKind::kPeerLost) << step.status();
      EXPECT_THAT(std::string(step.status().message()), HasSubstr(lost));
    }
    EXPECT_LE(got.until_known, kLease + absl::Seconds(2));
    if (got.steps.back().ok()) continue;  // all was done before
    ++ended;
    for (int w = 0; w < p; ++w) {
      if (w == s.lost_worker) continue;
      EXPECT_THAT(got.parts[w],
                  AllOf(HasSubstr(lost), HasSubstr(absl::StrCat("worker 'w", w, "'"))));
    }
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(ended, wanted / 2);
}

// What was under way is sent again, and runs once.
TEST(PipelineSim, AConnectionThatBreaksEndsNothing) {
  for (const std::string name : {"1f1b", "zb-v"}) {
    SCOPED_TRACE(name);
    Scenario s;
    s.plan = *pipeline::make_schedule(name, 3, 6);
    s.costs = costs_of(s.plan, true, 0, 3);
    s.steps = 3;
    s.cuts = 10;
    s.lost_after = absl::Nanoseconds(
        pipeline::simulate(s.plan, s.costs, {.steps = s.steps}).makespan / s.cuts);
    const Outcome got = run(s);
    for (const auto& step : got.steps) EXPECT_TRUE(step.ok()) << step.status();
    EXPECT_GT(got.cut, 10);
    EXPECT_EQ(got.left, 0);
  }
}

TEST(PipelineSim, EqualSeedsEqualHashes) {
  Scenario s;
  s.plan = pipeline::zb_v(3, 5);
  s.costs = costs_of(s.plan, true, 0, 5);
  s.steps = 2;
  s.seed = 11;
  EXPECT_EQ(run(s).hash, run(s).hash);
  Scenario other = s;
  other.seed = 12;
  EXPECT_NE(run(s).hash, run(other).hash);
}

// Messages in any order, and a stage that fails somewhere: the steps before it are whole, and all
// from it on end with that one error.
TEST(PipelineSim, Schedules) {
  const int wanted = env("WEFT_PIPELINE_SIM_SCHEDULES", 150);
  for (int k = 0; k < wanted; ++k) {
    std::mt19937_64 random(static_cast<uint64_t>(k) + 1);
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); };
    const std::vector<std::string> names = {"sequential",   "gpipe", "1f1b",  "interleaved:2",
                                            "looped_bfs:2", "zb-h1", "zb-h2", "zb-v"};
    Scenario s;
    const std::string name = names[random() % names.size()];
    s.plan = *pipeline::make_schedule(name, 1 + below(4), 1 + below(6));
    s.costs = costs_of(s.plan, true, 0, random());
    s.steps = 1 + below(3);
    s.seed = random();
    if (below(3) > 0) {
      s.throw_stage = below(s.plan.stages());
      s.throw_step = below(s.steps);
      s.throw_micro_batch = below(s.plan.micro_batches);
    }
    SCOPED_TRACE(absl::StrCat("schedule ", k, ": ", name, " of ", s.plan.workers.size(), ", ",
                              s.plan.micro_batches, " micro-batches, seed ", s.seed));
    const Outcome got = run(s);
    EXPECT_EQ(got.left, 0);
    for (int64_t step = 0; step < s.steps; ++step) {
      const auto& result = got.steps[step];
      if (s.throw_stage < 0 || step < s.throw_step) {
        // A step before may be ended by one after it, while it is under way.
        if (s.throw_stage < 0) {
          EXPECT_TRUE(result.ok()) << result.status();
        }
        if (result.ok()) continue;
      }
      EXPECT_EQ(error_kind(result.status()), ErrorKind::kUser) << result.status();
      EXPECT_THAT(std::string(result.status().message()),
                  HasSubstr(absl::StrCat("pipeline step ", s.throw_step, ", worker 'w",
                                         s.plan.placement[s.throw_stage], "', stage ",
                                         s.throw_stage, ", micro-batch ", s.throw_micro_batch,
                                         ", action F", s.throw_stage, ".", s.throw_micro_batch)));
    }
    EXPECT_EQ(got.later.ok(), s.throw_stage < 0) << got.later;
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace weft::testing
