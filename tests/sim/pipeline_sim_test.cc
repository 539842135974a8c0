// The run is the simulation: the real runtime, with stages that wait instead of computing, on
// virtual time, takes exactly the predicted time in every action. And an error anywhere, in any
// order of messages, is one error everywhere, with nothing left over.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/common/mutex.h"
#include "weft/pipeline/schedule.h"
#include "weft/pipeline/simulator.h"
#include "weft/tests/sim/pipeline_world.h"
#include "weft/tests/testing/environment.h"
#include "weft/tests/testing/forwarding_runtime.h"
#include "weft/tests/testing/sanitizers.h"

namespace {

std::atomic<int64_t> allocations{0};

}  // namespace

// Not inline: the compiler would see free() of what it takes for the standard operator's.
__attribute__((noinline)) void* operator new(size_t size) {
  ++allocations;
  if (void* p = std::malloc(size == 0 ? 1 : size)) return p;
  throw std::bad_alloc();
}
__attribute__((noinline)) void* operator new(size_t size, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(size == 0 ? 1 : size);
}
__attribute__((noinline)) void operator delete(void* p) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace weft::testing {
namespace {

struct Woken {
  int64_t all = 0;
  int64_t writers = 0;  // the threads that write messages (RUN-10)
};

// Counts who is woken.
class CountingRuntime final : public ForwardingRuntime {
 public:
  CountingRuntime(std::shared_ptr<Runtime> inner, Woken* woken)
      : ForwardingRuntime(std::move(inner)), woken_(woken) {}
  std::unique_ptr<Thread> spawn(std::string_view name, Task body) override {
    if (name != "pipeline-put") return ForwardingRuntime::spawn(name, std::move(body));
    return ForwardingRuntime::spawn(name, [this, body = std::move(body)]() mutable {
      {
        MutexLock lock(&mutex_);
        writers_.insert(std::this_thread::get_id());
      }
      body();
      MutexLock lock(&mutex_);
      writers_.erase(std::this_thread::get_id());
    });
  }
  std::unique_ptr<Parker> make_parker() override {
    class Counted final : public Parker {
     public:
      Counted(std::unique_ptr<Parker> inner, Woken* woken, bool of_writer)
          : inner_(std::move(inner)), woken_(woken), of_writer_(of_writer) {}
      bool park_until(absl::Time deadline) override { return inner_->park_until(deadline); }
      absl::Time now() const override { return inner_->now(); }
      void unpark() override {
        ++woken_->all;
        woken_->writers += of_writer_ ? 1 : 0;
        inner_->unpark();
      }

     private:
      const std::unique_ptr<Parker> inner_;
      Woken* const woken_;
      const bool of_writer_;
    };
    MutexLock lock(&mutex_);
    const bool of_writer = writers_.count(std::this_thread::get_id()) > 0;
    return std::make_unique<Counted>(ForwardingRuntime::make_parker(), woken_, of_writer);
  }

 private:
  Woken* const woken_;
  Mutex mutex_;
  std::set<std::thread::id> writers_ ABSL_GUARDED_BY(mutex_);
};

TEST(PipelineSim, PP_3_TheRunIsTheSimulation) {
  const bool all = weft::testing::environment_number("WEFT_PIPELINE_SIM_ALL", 0) != 0;
  uint64_t seed = 0;
  for (const std::string& name : pipeline::schedule_names()) {
    for (int p : {2, 3, 4, 8}) {
      for (int m = 1; m <= 4 * p; ++m) {
        ++seed;
        // By default: a choice that covers every p, small, middle and large m, over all schedules.
        if (!all && (m * 7 + p * 3 + static_cast<int>(name.size())) % (fewer(3, 8) * p) != 0)
          continue;
        for (const pipeline::Ticks latency : {0, 200'000}) {
          if (!all && (seed + (latency > 0 ? 1 : 0)) % 2 == 0) continue;
          SCOPED_TRACE(absl::StrCat(name, " p=", p, " m=", m, " latency=", latency));
          Scenario s;
          s.plan = *pipeline::make_schedule(name, p, m);
          s.costs = costs_of(s.plan, seed % 3 != 0, latency, seed);
          s.seed = seed;
          s.latency = absl::Nanoseconds(latency);
          ASSERT_EQ(differs_from_simulation(s), "");
        }
      }
    }
  }
}

// Where stages share a weight, workers wait for each other's gradients before they step.
TEST(PipelineSim, PP_3_ReductionsAndSharedWeightsTakeWhatTheSimulationSays) {
  for (const std::string name : {"gpipe", "1f1b", "interleaved:2", "zb-h1", "zb-v"}) {
    for (const pipeline::Ticks latency : {0, 200'000}) {
      for (const bool shared : {false, true}) {
        SCOPED_TRACE(absl::StrCat(name, " latency=", latency, shared ? " shared" : ""));
        Scenario s;
        s.plan = *pipeline::make_schedule(name, 4, 6);
        const int last = s.plan.stages() - 1;
        s.plan = shared ? pipeline::with_tied(s.plan, {{0, last}, {1, 2}})
                        : pipeline::with_reductions(s.plan);
        s.costs = costs_of(s.plan, true, latency, 9 + last);
        s.steps = 3;
        s.latency = absl::Nanoseconds(latency);
        ASSERT_EQ(differs_from_simulation(s), "");
      }
    }
  }
}

// All stages step together, when the norm of all gradients is known.
TEST(PipelineSim, PP_3_TheBarrierOfTheNormTakesWhatTheSimulationSays) {
  for (const std::string name : {"gpipe", "1f1b", "interleaved:2", "zb-h1", "zb-v"}) {
    for (const pipeline::Ticks latency : {0, 200'000}) {
      SCOPED_TRACE(absl::StrCat(name, " latency=", latency));
      Scenario s;
      s.plan = *pipeline::make_schedule(name, 4, 6);
      if (name == "zb-h1") s.plan = pipeline::with_tied(s.plan, {{0, 3}});
      s.costs = costs_of(s.plan, true, latency, 17);
      s.costs.norm.latency = latency;
      s.steps = 3;
      s.latency = absl::Nanoseconds(latency);
      const auto without = pipeline::simulate(s.plan, s.costs, {.steps = s.steps});
      s.barrier = true;
      ASSERT_EQ(differs_from_simulation(s), "");
      const auto with = pipeline::simulate(s.plan, s.costs, {.steps = s.steps, .barrier = true});
      // Where the first and the last stage share a weight, they wait for each other anyway.
      EXPECT_GE(with.makespan, without.makespan + (s.plan.tied.empty() ? 1 : 0));
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
    EXPECT_EQ(differs_from_simulation(s), "");
  }
}

// Forwards stream: each micro-batch costs the time of the slowest stage, and nothing else but the way
// of the first one.
TEST(PipelineSim, PP_16_ForwardsStream) {
  for (const std::string name : {"1f1b", "zb-h2", "interleaved:2", "zb-v"}) {
    SCOPED_TRACE(name);
    // In a V, the way back of a call's last micro-batches comes before the next call's way out.
    const int m = name == "zb-v" ? 160 : 8;
    Scenario s;
    s.plan = *pipeline::make_schedule(name, 4, m);
    s.costs = pipeline::Costs::uniform(s.plan, 1'000'000, 1'000'000, 1'000'000, 0, 2);
    s.steps = 160 / m;
    s.forward_only = true;
    s.latency = absl::ZeroDuration();
    const Outcome got = run(s);
    EXPECT_EQ(got.wrong, "");
    EXPECT_EQ(got.left, 0);
    // 160 micro-batches of a millisecond of each worker.
    EXPECT_GE(absl::FDivDuration(160 * absl::Milliseconds(1), got.until_known), 0.97)
        << absl::FormatDuration(got.until_known);
  }
}

// A forward that runs again takes its time again, and holds an activation only from then on.
TEST(PipelineSim, PP_6_RecomputeTakesWhatTheSimulationSays) {
  const pipeline::Plan plain = pipeline::one_f_one_b(4, 8);
  for (const bool except_last : {false, true}) {
    Scenario s;
    s.plan = pipeline::with_recompute(plain, {}, except_last);
    s.costs = pipeline::Costs::uniform(s.plan, 1'000'000, 1'000'000, 1'000'000);
    s.latency = absl::ZeroDuration();
    EXPECT_EQ(differs_from_simulation(s), "");
    const auto again = pipeline::simulate(s.plan, s.costs);
    const auto once = pipeline::simulate(plain, s.costs);
    // At most a third more, F of F + B + W.
    EXPECT_GT(again.makespan, once.makespan);
    EXPECT_LE(again.makespan * 3, once.makespan * 4);
    for (int w = 0; w < 3; ++w) {
      EXPECT_EQ(again.workers[w].peak_memory, except_last ? 2 : 1) << w;
    }
  }
}

// A worker whose process ends, or that stops, at any time of a step: every other worker has an error
// that names it and what was done here, within the lease and two seconds.
TEST(PipelineSim, PP_9_ALostWorkerIsAnErrorEverywhere) {
  const int wanted = weft::testing::environment_number("WEFT_PIPELINE_SIM_LOSSES", 60);
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
    SCOPED_TRACE(absl::StrCat("loss ", k, ": ", to_text(s)));
    const Outcome got = run(s);
    ASSERT_EQ(wrong_with(s, got), "");
    ended += got.steps.back().ok() ? 0 : 1;
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

// A stage that takes longer than the step may: a worker that waits for it says what it waits for.
TEST(PipelineSim, BadInput_ASlotThatIsNeverFilled) {
  Scenario s;
  s.plan = pipeline::one_f_one_b(3, 2);
  s.costs = costs_of(s.plan, false, 0, 1);
  s.costs.stages[1].forward = absl::ToInt64Nanoseconds(absl::Seconds(100));
  const Outcome got = run(s);
  ASSERT_FALSE(got.steps[0].ok());
  EXPECT_EQ(error_kind(got.steps[0].status()), ErrorKind::kDeadline) << got.steps[0].status();
  const std::string why(got.steps[0].status().message());
  EXPECT_NE(why.find("the step's time of 1m is over, waiting for the "), std::string::npos) << why;
  EXPECT_NE(why.find("of stage 1, micro-batch 0, step 0, from worker 'w1'"), std::string::npos)
      << why;
  EXPECT_EQ(got.left, 0);
}

// What a step costs beside its computing, by message: allocations, in both processes and by the stages of
// the test, and threads that are woken.
struct CostOfMessages {
  int64_t allocated = 0;
  Woken woken{};
};

CostOfMessages cost_of(const pipeline::Plan& plan, int steps) {
  CostOfMessages cost;
  Scenario s;
  s.plan = plan;
  s.costs = costs_of(s.plan, false, 0, 1);
  s.steps = steps;
  s.latency = absl::ZeroDuration();
  s.wrap = [&cost](std::shared_ptr<Runtime> inner) {
    return std::make_shared<CountingRuntime>(std::move(inner), &cost.woken);
  };
  const int64_t before = allocations;
  EXPECT_EQ(run(s).wrong, "");
  cost.allocated = allocations - before;
  return cost;
}

TEST(PipelineSim, AMessageCostsFewAllocationsAndWakeUps) {
  for (const std::string name : {"1f1b", "zb-v"}) {
    const pipeline::Plan plan = *pipeline::make_schedule(name, 4, 8);
    (void)cost_of(plan, 1);  // what is made once
    const CostOfMessages few = cost_of(plan, 2);
    const CostOfMessages many = cost_of(plan, 10);
    // With those that begin a step, and their answers.
    const auto messages = static_cast<double>(8 * (pipeline::count_sends(plan) + 2 * 4));
    const double allocated = static_cast<double>(many.allocated - few.allocated) / messages;
    const double woken = static_cast<double>(many.woken.all - few.woken.all) / messages;
    std::printf("%s: a message costs %.1f allocations and %.2f wake-ups\n", name.c_str(), allocated,
                woken);
    EXPECT_LE(allocated, 110);
    EXPECT_LE(woken, 1.5);
  }
}

// RUN-10: a message is written by the second thread exactly where the next action of the list need not wait.
TEST(PipelineSim, MessagesAreWrittenBesideAnActionThatCanBegin) {
  const auto writers = [](const pipeline::Plan& plan, int steps) {
    return cost_of(plan, steps).woken.writers - cost_of(plan, 1).woken.writers;
  };
  // A worker has nothing to do until its message is answered by another one's.
  EXPECT_EQ(writers(pipeline::sequential(2, 8), 3), 0);
  // The first worker has all forwards to do, the last one all backwards; the last message of each meets a
  // wait or the end of the list.
  EXPECT_EQ(writers(pipeline::gpipe(2, 8), 3), 2 * (7 + 7));
}

// After every micro-batch a step, and nothing waits for a batch's end: between the first forwards of a plan
// and its last backwards a worker works all the time.
TEST(PipelineSim, PP_14_PipeDreamIsBusyInTheSteadyState) {
  for (const int p : {2, 3, 4, 8}) {
    SCOPED_TRACE(p);
    Scenario s;
    s.plan = pipeline::pipedream(p, 12 * p);
    s.costs = pipeline::Costs::uniform(s.plan, 1'000'000, 1'000'000, 1'000'000);
    s.latency = absl::ZeroDuration();
    const Outcome got = run(s);
    ASSERT_EQ(got.wrong, "");
    ASSERT_TRUE(got.steps[0].ok()) << got.steps[0].status();
    for (const auto& times : got.steps[0]->times) {  // start and end of each action
      const size_t actions = times.size() / 2;
      int64_t busy = 0;
      for (size_t k = actions / 4; k < actions * 3 / 4; ++k)
        busy += times[2 * k + 1] - times[2 * k];
      const int64_t whole = times[2 * (actions * 3 / 4) - 1] - times[2 * (actions / 4)];
      EXPECT_GE(static_cast<double>(busy) / static_cast<double>(whole), 0.97);
      EXPECT_GT(whole, int64_t{3'000'000} * 5 * p);
    }
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

}  // namespace
}  // namespace weft::testing
