// The simulator against closed forms and golden tables: exact, in whole ticks.
#include "weft/pipeline/simulator.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/common/event_sim.h"
#include "weft/pipeline/schedule.h"
#include "weft/pipeline/verifier.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::pipeline {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr Ticks kU = 1200;  // a unit: divides by 2, 4, 5

Simulation units(const Plan& plan, SimulateOptions options = {}) {
  return simulate(plan, Costs::uniform(plan, kU, kU, kU, 0, kU), options);
}

TEST(EventSim, OrderAndLinks) {
  EventSim sim;
  std::vector<int> order;
  SimLink link(&sim, /*latency=*/7, /*bytes_per_kilotick=*/1000);
  sim.at(5, [&] {
    order.push_back(1);
    sim.at(0, [&] { order.push_back(3); });                                // EVENT-2
    link.send(10, [&] { order.push_back(static_cast<int>(sim.now())); });  // 5 + 10 + 7
    link.send(10, [&] { order.push_back(static_cast<int>(sim.now())); });
  });
  sim.at(5, [&] { order.push_back(2); });  // EVENT-1
  sim.run();
  EXPECT_THAT(order, ElementsAre(1, 2, 3, 22, 32));
}

struct Golden {
  std::string schedule;
  int p;
  int m;
  double makespan;
  double span_bubble;  // percent, to a tenth
  double peak;
};

TEST(Simulator, PP_2_GoldenTable) {
  const std::vector<Golden> table = {{"gpipe", 4, 8, 33, 27.3, 8},
                                     {"1f1b", 4, 8, 33, 27.3, 4},
                                     {"interleaved:2", 4, 8, 28.5, 15.8, 5.5},
                                     {"interleaved:4", 4, 8, 26.25, 8.6, 4.75},
                                     {"zb-h1", 4, 8, 27, 11.1, 4},
                                     {"zb-h2", 4, 8, 27, 0, 7},
                                     {"zb-v", 4, 8, 25.5, 0, 4},
                                     {"looped_bfs:2", 4, 8, 28.5, 15.8, 8},
                                     {"gpipe", 4, 16, 57, 15.8, 16},
                                     {"1f1b", 4, 16, 57, 15.8, 4},
                                     {"interleaved:2", 4, 16, 52.5, 8.6, 5.5},
                                     {"interleaved:4", 4, 16, 50.25, 4.5, 4.75},
                                     {"zb-h1", 4, 16, 51, 5.9, 4},
                                     {"zb-h2", 4, 16, 51, 0, 7},
                                     {"zb-v", 4, 16, 49.5, 0, 4},
                                     {"gpipe", 8, 16, 69, 30.4, 16},
                                     {"1f1b", 8, 16, 69, 30.4, 8},
                                     {"interleaved:2", 8, 16, 58.5, 17.9, 11.5},
                                     {"interleaved:4", 8, 16, 53.25, 9.9, 9.75},
                                     {"zb-h1", 8, 16, 55, 12.7, 8},
                                     {"zb-h2", 8, 16, 55, 0, 15},
                                     {"zb-v", 8, 16, 51.5, 0, 8},
                                     {"gpipe", 8, 32, 117, 17.9, 32},
                                     {"1f1b", 8, 32, 117, 17.9, 8},
                                     {"interleaved:2", 8, 32, 106.5, 9.9, 11.5},
                                     {"interleaved:4", 8, 32, 101.25, 5.2, 9.75},
                                     {"zb-h1", 8, 32, 103, 6.8, 8},
                                     {"zb-h2", 8, 32, 103, 0, 15},
                                     {"zb-v", 8, 32, 99.5, 0, 8}};
  for (const Golden& g : table) {
    SCOPED_TRACE(g.schedule + " " + std::to_string(g.p) + " " + std::to_string(g.m));
    const Simulation s = units(*make_schedule(g.schedule, g.p, g.m));
    EXPECT_EQ(s.makespan, static_cast<Ticks>(g.makespan * kU));
    EXPECT_NEAR(s.span_bubble() * 100, g.span_bubble, 0.0501);
    EXPECT_EQ(s.peak_memory(), static_cast<int64_t>(g.peak * kU));
    EXPECT_EQ(s.max_busy(), 3 * g.m * kU);
  }
}

// With split backwards the drain is p-1 input gradients instead of p-1 whole backwards, and all else stays.
TEST(Simulator, PP_2_SplitBackwardsShortenTheDrain) {
  constexpr Ticks kF = 100, kI = 120, kW = 80;
  for (const std::string name :
       {"sequential", "gpipe", "1f1b", "1f1b+1", "interleaved:2", "looped_bfs:2"}) {
    const int chunks = name.find(':') == std::string::npos ? 1 : 2;
    for (int p : {1, 2, 3, 4, 8}) {
      for (int m : {p, 2 * p, 4 * p}) {
        SCOPED_TRACE(name + " " + std::to_string(p) + " " + std::to_string(m));
        const Plan whole = *make_schedule(name, p, m);
        const Plan split = *make_schedule(name + "+split", p, m);
        EXPECT_EQ(split.schedule, name + "+split");
        EXPECT_EQ(split, with_split_backwards(whole));
        EXPECT_EQ(count_sends(split), count_sends(whole));
        const Verdict verdict = verify(split);
        EXPECT_TRUE(verdict.ok()) << verdict.certificate();
        const Simulation before = simulate(whole, Costs::uniform(whole, kF, kI, kW, 0, 4));
        const Simulation after = simulate(split, Costs::uniform(split, kF, kI, kW, 0, 4));
        for (int w = 0; w < p; ++w) {
          EXPECT_EQ(after.workers[w].peak_memory, before.workers[w].peak_memory);
          EXPECT_EQ(after.workers[w].busy, before.workers[w].busy);
        }
        // A micro-batch after the other: the weights' gradients of one run beside the rest of its way back.
        if (name == "sequential") {
          EXPECT_EQ(before.makespan, m * p * (kF + kI + kW));
          EXPECT_LE(after.makespan, before.makespan - (p - 1) * kW);
          continue;
        }
        EXPECT_EQ(before.makespan - after.makespan, (p - 1) * kW / chunks);
        if (name != "1f1b+1") {
          EXPECT_EQ(after.makespan, m * (kF + kI + kW) + (p - 1) * (kF + kI) / chunks);
        }
      }
    }
  }
}

// Each action as before, in its order, and a weights' gradient behind its input gradient.
TEST(Simulator, PP_2_SplitBackwardsKeepTheOrder) {
  const Plan whole = with_reductions(with_recompute(gpipe(3, 4), {1}));
  const Plan split = with_split_backwards(whole);
  for (size_t w = 0; w < 3; ++w) {
    std::vector<Action> joined;
    for (const Action& a : split.workers[w]) {
      if (is_transfer(a.kind)) continue;
      if (a.kind == ActionKind::kWeightGrad) {
        EXPECT_EQ(joined.back(), (Action{ActionKind::kInputGrad, a.stage, a.micro_batch}));
        joined.back().kind = ActionKind::kBackward;
      } else {
        joined.push_back(a);
      }
    }
    std::vector<Action> want;
    for (const Action& a : whole.workers[w]) {
      if (!is_transfer(a.kind)) want.push_back(a);
    }
    EXPECT_EQ(joined, want) << "worker " << w;
  }
  // No other worker waits for what the first one's backwards give.
  for (const Action& a : split.workers[0]) EXPECT_NE(a.kind, ActionKind::kWeightGrad);
}

TEST(Simulator, PP_2_PeaksPerWorker) {
  const auto peaks = [](const std::string& name) {
    std::vector<double> out;
    for (const auto& w : units(*make_schedule(name, 4, 8)).workers) {
      out.push_back(static_cast<double>(w.peak_memory) / kU);
    }
    return out;
  };
  EXPECT_THAT(peaks("1f1b"), ElementsAre(4, 3, 2, 1));
  EXPECT_THAT(peaks("interleaved:2"), ElementsAre(5.5, 4.5, 3.5, 2.5));
  EXPECT_THAT(peaks("interleaved:4"), ElementsAre(4.75, 4.25, 3.75, 3.25));
  EXPECT_THAT(peaks("gpipe"), ElementsAre(8, 8, 8, 8));
  EXPECT_THAT(peaks("looped_bfs:2"), ElementsAre(8, 8, 8, 8));
  EXPECT_THAT(peaks("zb-h1"), ElementsAre(4, 4, 4, 4));
  EXPECT_THAT(peaks("zb-v"), ElementsAre(4, 4, 4, 4));
  EXPECT_THAT(peaks("zb-h2"), ElementsAre(7, 7, 7, 7));
}

TEST(Simulator, PP_2_SmallZbV) {
  std::vector<double> makespans;
  for (int m = 1; m <= 7; ++m) {
    makespans.push_back(static_cast<double>(units(zb_v(4, m)).makespan) / kU);
  }
  EXPECT_THAT(makespans, ElementsAre(9, 10.5, 12, 14.5, 17, 19.5, 22.5));
}

// The period of overlapped steps 10 to 20: the makespan, or the pure work where nothing idles.
TEST(Simulator, PP_2_PeriodsOfOverlappedSteps) {
  const auto period = [](const std::string& name, int p, int m) {
    const Simulation s = units(*make_schedule(name, p, m), {.steps = 20});
    EXPECT_EQ((s.step_ends[19] - s.step_ends[9]) % 10, 0);
    EXPECT_EQ(s.peak_memory(), units(*make_schedule(name, p, m)).peak_memory()) << name;
    return static_cast<double>((s.step_ends[19] - s.step_ends[9]) / 10) / kU;
  };
  EXPECT_EQ(period("gpipe", 4, 8), 33);
  EXPECT_EQ(period("1f1b", 4, 8), 33);
  EXPECT_EQ(period("interleaved:2", 4, 8), 28.5);
  EXPECT_EQ(period("zb-h1", 4, 8), 27);
  for (const std::string name : {"zb-h2", "zb-v"}) {
    EXPECT_EQ(period(name, 4, 8), 24);
    EXPECT_EQ(period(name, 4, 16), 48);
    EXPECT_EQ(period(name, 8, 16), 48);
    EXPECT_EQ(period(name, 8, 32), 96);
  }
}

// Section by section: F = 1, B = 1.2, W = 0.8, four workers and eight micro-batches.
TEST(Simulator, PP_2_LatencyAndUnevenStages) {
  struct Case {
    double first;
    double last;
    double latency;
    std::vector<double> makespans;  // gpipe, 1f1b, zb-h1, zb-h2
  };
  const std::vector<Case> cases = {{1, 1, 0, {33.0, 33.0, 28.2, 27.0}},
                                   {1, 1, 0.2, {34.2, 36.2, 30.6, 27.6}},
                                   {1, 1.5, 0, {45.0, 45.0, 39.0, 39.0}},
                                   {1.3, 1.3, 0.2, {42.3, 42.3, 36.5, 35.1}}};
  const std::vector<std::string> names = {"gpipe", "1f1b", "zb-h1", "zb-h2"};
  const auto costs = [](const Plan& plan, double first, double last, double latency) {
    Costs c = Costs::uniform(plan, 1000, 1200, 800, static_cast<Ticks>(latency * 1000), 2);
    const auto scale = [](StageCost* s, double by) {
      s->forward = static_cast<Ticks>(std::lround(static_cast<double>(s->forward) * by));
      s->input_grad = static_cast<Ticks>(std::lround(static_cast<double>(s->input_grad) * by));
      s->weight_grad = static_cast<Ticks>(std::lround(static_cast<double>(s->weight_grad) * by));
    };
    scale(&c.stages.front(), first);
    scale(&c.stages.back(), last);
    return c;
  };
  for (const Case& c : cases) {
    for (size_t i = 0; i < names.size(); ++i) {
      const Plan plan = *make_schedule(names[i], 4, 8);
      const Simulation s = simulate(plan, costs(plan, c.first, c.last, c.latency));
      // The table has one digit behind the point.
      EXPECT_NEAR(static_cast<double>(s.makespan) / 1000, c.makespans[i], 0.0501)
          << names[i] << " " << c.first << " " << c.last << " " << c.latency;
      if (c.first == 1) {
        EXPECT_EQ(s.makespan, std::lround(c.makespans[i] * 1000)) << names[i];
      }
    }
  }
  const Plan plus = one_f_one_b(4, 8, 1);
  const Simulation s = simulate(plus, costs(plus, 1, 1, 0.2));
  EXPECT_EQ(s.makespan, 34200);
  EXPECT_EQ(s.peak_memory(), 5 * 2);
  const Plan two = interleaved(4, 8, 2);
  EXPECT_EQ(simulate(two, costs(two, 1, 1, 0)).makespan, 28500);
  EXPECT_EQ(simulate(two, costs(two, 1, 1, 0.2)).makespan, 31300);
  const Plan v = zb_v(4, 8);
  EXPECT_EQ(simulate(v, costs(v, 1, 1, 0)).makespan, 25800);
  EXPECT_EQ(simulate(v, costs(v, 1, 1, 0.2)).makespan, 28400);
}

// The closed forms, on their whole domains by grid and by chance.
TEST(Simulator, PP_2_ClosedForms) {
  std::mt19937_64 random(7);
  for (int p : {2, 4, 8, 16}) {
    for (int k = 0; k < 24; k += testing::fewer(1, 7)) {
      const int m = k < 8 ? p * (k + 1) : 1 + static_cast<int>(random() % (4 * p));
      const Ticks f = 4 * (1 + static_cast<Ticks>(random() % 50));
      const Ticks b = 4 * (1 + static_cast<Ticks>(random() % 50));
      Ticks w = 4 * (1 + static_cast<Ticks>(random() % 50));
      const auto run = [&](const Plan& plan, Ticks weight) {
        return simulate(plan, Costs::uniform(plan, f, b, weight, 0, 4));
      };
      const Ticks work = m * (f + b + w);
      const Ticks drain = (p - 1) * (f + b + w);
      EXPECT_EQ(run(gpipe(p, m), w).makespan, work + drain);
      EXPECT_EQ(run(gpipe(p, m), w).peak_memory(), 4 * m);
      EXPECT_EQ(run(one_f_one_b(p, m), w).makespan, work + drain);
      for (int r = 0; r < p; ++r) {
        EXPECT_EQ(run(one_f_one_b(p, m), w).workers[r].peak_memory, 4 * std::min(m, p - r));
      }
      for (int v : {2, 4}) {
        if (p > 8) continue;
        if (m % p == 0) {
          EXPECT_EQ(run(interleaved(p, m, v), w).makespan, work + drain / v);
        }
        if (m >= p) {
          EXPECT_EQ(run(looped_bfs(p, m, v), w).makespan, work + drain / v);
        }
      }
      w = std::min({w, f, b});
      const Ticks less = m * (f + b + w);
      if (m >= p) {
        EXPECT_EQ(run(zb_h1(p, m), w).makespan, less + (p - 1) * (f + b - w)) << p << " " << m;
        EXPECT_EQ(run(zb_h1(p, m), w).peak_memory(), 4 * p);
      }
      if (m >= 2 * p - 1) {
        const Simulation s = run(zb_h2(p, m), w);
        EXPECT_EQ(s.makespan, less + (p - 1) * std::max(f, f + b - 2 * w));
        EXPECT_EQ(s.max_span(), less + (p - 1) * std::max<Ticks>(0, f + b - 2 * w));
        EXPECT_EQ(s.peak_memory(), 4 * (2 * p - 1));
        if (p <= 8) {
          const Plan plan = zb_v(p, m);
          const Simulation z = simulate(plan, Costs::uniform(plan, f, f, f, 0, 4));
          EXPECT_EQ(z.makespan, 3 * m * f + (p - 1) * f / 2);
          EXPECT_EQ(z.max_span(), 3 * m * f);
          EXPECT_EQ(z.peak_memory(), 4 * p);
        }
      }
    }
  }
}

TEST(Simulator, IdleTimeIsChargedWholly) {
  std::mt19937_64 random(3);
  for (const std::string& name : schedule_names()) {
    const Plan plan = *make_schedule(name, 4, 9);
    Costs costs = Costs::uniform(plan, 100, 120, 80, 20, 4);
    for (StageCost& s : costs.stages) s.forward += static_cast<Ticks>(random() % 50);
    const Simulation s = simulate(plan, costs, {.steps = 3});
    for (const WorkerTimeline& w : s.workers) {
      EXPECT_EQ(w.busy + w.idle.total(), s.makespan) << name;
    }
  }
  // All of the wait of a forward for a message under way is the transport's.
  const Plan two = gpipe(2, 1);
  const Simulation s = simulate(two, Costs::uniform(two, 100, 100, 100, 30));
  EXPECT_EQ(s.workers[0].idle.dependency + s.workers[0].idle.imbalance, 330);
  EXPECT_EQ(s.workers[0].idle.transport, 30);
  EXPECT_EQ(s.workers[1].idle.warm_up, 130);
}

// An interleaved warm-up whose receives stand before sends that are ready (pytorch#188833): no
// deadlock, but with receives that wait, time that is charged to the receive.
TEST(Simulator, ReceivesBeforeReadySendsIdle) {
  const auto plan = plan_from_text(
      "weft-plan 1\nschedule early-receive\nmicro_batches 2\nplacement 0 1 2\nedges 0>1 1>2\n"
      "worker 0: F0.0 SF0>1.0 F0.1 SF0>1.1 RB1>0.0 B0.0 RB1>0.1 B0.1 U0\n"
      "worker 1: RF0>1.0 F1.0 RF0>1.1 SF1>2.0 F1.1 SF1>2.1 RB2>1.0 B1.0 SB1>0.0 RB2>1.1 B1.1 "
      "SB1>0.1 U1\n"
      "worker 2: RF1>2.0 F2.0 B2.0 SB2>1.0 RF1>2.1 F2.1 B2.1 SB2>1.1 U2\n");
  ASSERT_TRUE(plan.ok()) << plan.status();
  Costs costs = Costs::uniform(*plan, 100, 100, 100, 0);
  costs.stages[0].forward = 300;
  const Simulation slots = simulate(*plan, costs);
  const Simulation waits = simulate(*plan, costs, {.blocking_receives = true});
  EXPECT_EQ(waits.workers[2].first_start - slots.workers[2].first_start, 200);
  EXPECT_GT(waits.makespan, slots.makespan);
  EXPECT_GT(waits.workers[1].idle.dependency + waits.workers[1].idle.imbalance, 0);
}

const TimedAction& reduction_of(const Simulation& s, int stage) {
  for (const WorkerTimeline& w : s.workers) {
    for (const TimedAction& a : w.actions) {
      if (a.action.kind == ActionKind::kReduce && a.action.stage == stage) return a;
    }
  }
  throw std::logic_error("no reduction");
}

TEST(Simulator, StagesThatShareAWeightWaitForItsGradient) {
  const Plan plan = with_tied(gpipe(2, 1), {{0, 1}});
  Costs costs = Costs::uniform(plan, 100, 100, 100);
  for (StageCost& s : costs.stages) {
    s.reduce = 7;
    s.step = 3;
  }
  costs.tied = {{.latency = 10}};
  const Simulation s = simulate(plan, costs);
  // The last stage gives its gradient at 407; the first one has its own at 607, and gives the sum.
  EXPECT_EQ(reduction_of(s, 1).start, 400);
  EXPECT_EQ(reduction_of(s, 1).end, 617);
  EXPECT_EQ(reduction_of(s, 0).start, 600);
  EXPECT_EQ(reduction_of(s, 0).end, 607);
  EXPECT_EQ(s.makespan, 620);
  EXPECT_EQ(s.workers[1].busy, 310);
  EXPECT_EQ(s.workers[1].idle.transport, 10);
  for (const WorkerTimeline& w : s.workers) EXPECT_EQ(w.busy + w.idle.total(), s.makespan);
}

TEST(Simulator, ReplicasWaitForEachOther) {
  for (const std::string name : {"1f1b", "zb-v"}) {
    const Plan plan = with_reductions(*make_schedule(name, 2, 4));
    std::vector<Costs> costs;
    for (const Ticks u : {100, 160, 120}) {
      costs.push_back(Costs::uniform(plan, u, u, u, 0, 2));
      for (StageCost& s : costs.back().stages) s.reduce = u / 2;
    }
    const std::vector<Simulation> all = simulate_replicas(plan, costs, {.steps = 2});
    ASSERT_EQ(all.size(), 3u);
    for (int stage = 0; stage < plan.stages(); ++stage) {
      Ticks latest = 0;
      for (const Simulation& s : all) latest = std::max(latest, reduction_of(s, stage).start);
      for (const Simulation& s : all) EXPECT_EQ(reduction_of(s, stage).end, latest + 80);
    }
    for (const Simulation& s : all) {
      for (const WorkerTimeline& w : s.workers) EXPECT_EQ(w.busy + w.idle.total(), s.makespan);
      EXPECT_EQ(s.workers.size(), 2u);
    }
    // One replica waits for nothing.
    const Simulation alone = simulate(plan, costs[1]);
    const Simulation one = simulate_replicas(plan, {costs[1]}).front();
    EXPECT_EQ(one.makespan, alone.makespan);
    // All as slow as the slowest: as one of it.
    EXPECT_EQ(simulate_replicas(plan, {costs[1], costs[1]}).back().makespan, alone.makespan);
  }
}

TEST(Simulator, BandwidthIsTakenInTurn) {
  const Plan plan = gpipe(2, 4);
  Costs costs = Costs::uniform(plan, 10, 10, 10, 5);
  costs.edges[0].bytes = 100;
  costs.edges[0].bytes_per_kilotick = 1000;  // 100 ticks for each
  const Simulation s = simulate(plan, costs);
  EXPECT_EQ(s.workers[1].first_start, 10 + 100 + 5);
  // The fourth activation leaves when three have left before it.
  EXPECT_EQ(s.workers[1].actions[s.workers[1].actions.size() - 1].step, 0);
  EXPECT_GE(s.makespan, 10 + 400 + 5 + 10 + 20);
}

TEST(Simulator, BadInput_CostsAndPlans) {
  const Plan plan = gpipe(2, 2);
  Costs costs = Costs::uniform(plan, 1, 1, 1);
  costs.stages.pop_back();
  EXPECT_THROW(simulate(plan, costs), Error);
  costs = Costs::uniform(plan, 1, 1, 1);
  costs.stages[1].forward = -1;
  EXPECT_THROW(simulate(plan, costs), Error);
  EXPECT_THROW(simulate(plan, Costs::uniform(plan, 1, 1, 1), {.steps = 0}), Error);
  EXPECT_THROW(Costs::uniform(interleaved(2, 2, 2), 3, 2, 2), Error);
  Plan broken = plan;
  broken.workers[1].clear();
  try {
    simulate(broken, Costs::uniform(plan, 1, 1, 1));
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("worker 0 waits at B0."));
  }
}

}  // namespace
}  // namespace weft::pipeline
