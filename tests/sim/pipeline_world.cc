#include "weft/tests/sim/pipeline_world.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/common/sim.h"
#include "weft/pipeline/internal/service.h"
#include "weft/pipeline/schedule.h"
#include "weft/pipeline/service.h"
#include "weft/pipeline/timeline.h"
#include "weft/rpc/inspection.h"
#include "weft/rpc/worker.h"
#include "weft/rref/service.h"
#include "weft/store/delegating_store.h"
#include "weft/store/hash_store.h"
#include "weft/tests/sim/pipeline_exact.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/environment.h"
#include "weft/transport/faulty_transport.h"
#include "weft/transport/inproc_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT
using pipeline::Tensors;

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

// While steps run; what opens and closes a pipeline is not hit.
void add_faults(const Scenario& s, FaultPlan* plan) {
  if (s.disorder) {
    const absl::Duration late = absl::Milliseconds(1 + s.seed % 4);
    plan->add({.fault = Fault::kDelay, .probability = 0.2, .delay = late});
    plan->add({.fault = Fault::kReorder, .probability = 0.2, .delay = late});
    plan->add({.fault = Fault::kDuplicate, .probability = 0.15});
  }
  if (s.losses) {
    const auto request = FrameKind::kRequest;
    const auto response = FrameKind::kResponse;
    plan->add({.fault = Fault::kLoseUnsent, .kind = request, .times = 2, .probability = 0.1});
    plan->add({.fault = Fault::kFailAfter, .kind = request, .times = 2, .probability = 0.1});
    plan->add({.fault = Fault::kCut, .kind = response, .times = 2, .probability = 0.1});
  }
}

}  // namespace

Outcome run(const Scenario& s) {
  Outcome out;
  auto sim = std::make_shared<SimRuntime>(SimOptions{.seed = s.seed});
  const std::shared_ptr<Runtime> runtime = s.wrap != nullptr ? s.wrap(sim) : sim;
  const InprocOptions net{.seed = s.seed, .delay_min = s.latency, .delay_max = s.latency};
  auto network = std::make_shared<InprocNetwork>(net);
  const auto faults = std::make_shared<FaultPlan>(s.seed);
  const ExactModel model(s.plan);
  Ledger ledger{&model, {}, {}};
  for (int k = 0; k < s.steps; ++k) ledger.want.push_back(model.alone(k));
  const size_t n = s.plan.workers.size();
  const Status ended = sim->run([&] {
    auto store = std::make_shared<HashStore>(sim);
    std::vector<Worker> workers(n);
    std::vector<std::shared_ptr<Store>> clients(n);
    // One that does not give out others, so that interrupting it ends all that a worker does there.
    for (auto& client : clients) client = std::make_shared<DelegatingStore>(store->new_client());
    const bool loses = s.lost_worker >= 0;
    const auto make_compute = [&](const ServiceContext&, const pipeline::Plan& plan,
                                  int stage) -> std::shared_ptr<pipeline::StageCompute> {
      std::pair<int64_t, int> throws_at{-1, -1};
      if (stage == s.throw_stage) throws_at = {s.throw_step, s.throw_micro_batch};
      if (plan.asynchronous) {  // one process has other gradients
        return std::make_shared<VCompute>(sim, s.costs.stages[stage], throws_at, true);
      }
      return std::make_shared<VExact>(sim, s.costs.stages[stage], throws_at, stage, &ledger);
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
               .transport = faulty_transport(inproc_transport(network), faults),
               .services = {rref_service(),
                            pipeline_service({.make_compute = make_compute, .bug = s.bug})},
               .worker_threads = 2,
               .heartbeat_interval = loses ? 500ms : 60'000ms,
               .lease = loses ? std::chrono::milliseconds(absl::ToInt64Milliseconds(kLease)) : 600s,
               .runtime = runtime,
               .log_level = Severity::kOff,
               .environment = Environment{}});
        }));
      }
    }
    {
      std::vector<pipeline::Stage> stages;
      for (int w : s.plan.placement) stages.emplace_back(workers[w].info());
      pipeline::Pipeline pipe(workers[0], stages, s.plan,
                              {.clip_norm = s.barrier ? 1e9 : 0, .record = true});
      std::vector<Future<pipeline::StepResult>> begun;
      std::vector<Future<std::vector<Tensors>>> forwards;
      add_faults(s, faults.get());
      for (int k = 0; k < s.steps; ++k) {
        std::vector<Tensors> inputs;
        std::vector<at::Tensor> targets;
        std::vector<double> weights;
        for (int i = 0; i < s.plan.micro_batches; ++i) {
          inputs.push_back({whole(ExactModel::input(k, i))});
          targets.push_back(whole(ExactModel::target(k, i)));
          weights.push_back(ExactModel::weight(i));
        }
        if (s.forward_only) {
          forwards.push_back(pipe.forward_async(std::move(inputs)));
          continue;
        }
        begun.push_back(pipe.step_async(std::move(inputs), std::move(targets), std::move(weights)));
      }
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
      for (size_t k = 0; k < forwards.size() && out.wrong.empty(); ++k) {
        const auto given = forwards[k].try_wait();
        if (!given.ok()) out.wrong = given.status().ToString();
        for (size_t i = 0; out.wrong.empty() && i < ledger.want[k].outputs.size(); ++i) {
          const bool right = given->size() > i && (*given)[i].size() == 1 &&
                             value_of((*given)[i][0]) == ledger.want[k].outputs[i];
          if (!right) out.wrong = absl::StrCat("output ", i, " of step ", k);
        }
      }
      out.until_known = sim->now() - lost_at;
      out.faults = faults->hits();
      faults->clear();
      // What is told, or was late, has arrived.
      if (loses || s.disorder || s.losses) pass(*sim, absl::Seconds(1));
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
  if (out.wrong.empty()) out.wrong = ledger.wrong;
  for (size_t k = 0; k < out.steps.size() && out.wrong.empty(); ++k) {
    if (!out.steps[k].ok() || out.steps[k]->loss == ledger.want[k].loss) continue;
    if (s.plan.asynchronous) continue;
    out.wrong = absl::StrCat("step ", k, " has loss ", out.steps[k]->loss, ", one process ",
                             ledger.want[k].loss);
  }
  return out;
}

std::string differs_from(const pipeline::Plan& plan, const pipeline::Simulation& want,
                         const std::vector<StatusOr<pipeline::StepResult>>& steps, int64_t base) {
  for (size_t w = 0; w < plan.workers.size(); ++w) {
    const auto& list = plan.workers[w];
    const std::vector<pipeline::TimedAction>& timed = want.workers[w].actions;
    if (timed.size() != steps.size() * list.size()) return "the simulation has other actions";
    for (size_t step = 0; step < steps.size(); ++step) {
      const auto& times = steps[step]->times[w];
      if (times.size() != 2 * list.size()) return "not every action was timed";
      // The simulation has the actions of a step as they ran, the run has them as the list does.
      std::vector<bool> seen(list.size());
      for (size_t k = step * list.size(); k < (step + 1) * list.size(); ++k) {
        const pipeline::TimedAction& action = timed[k];
        size_t i = 0;
        while (i < list.size() && (seen[i] || list[i] != action.action)) ++i;
        if (i == list.size()) return "the simulation has another action";
        seen[i] = true;
        // What costs nothing before a worker's first action is done when its step begins.
        if (action.end == action.start) continue;
        if (times[2 * i] - base == action.start && times[2 * i + 1] - base == action.end) continue;
        return absl::StrCat("worker ", w, " ", pipeline::to_text(plan, action.action), " of step ",
                            step, " ran from ", times[2 * i] - base, " to ",
                            times[2 * i + 1] - base, ", and in the simulation from ", action.start,
                            " to ", action.end);
      }
    }
    if (steps[0]->peak_activations[w] != want.workers[w].peak_memory) {
      return absl::StrCat("worker ", w, " held ", steps[0]->peak_activations[w],
                          " activations, and in the simulation ", want.workers[w].peak_memory);
    }
  }
  return "";
}

std::string differs_from_simulation(const Scenario& s) {
  const pipeline::Simulation want =
      pipeline::simulate(s.plan, s.costs, {.steps = s.steps, .barrier = s.barrier});
  const Outcome got = run(s);
  for (const auto& step : got.steps) {
    if (!step.ok()) return step.status().ToString();
  }
  const int64_t base = got.steps[0]->times[s.plan.placement[0]][0];
  if (std::string wrong = differs_from(s.plan, want, got.steps, base); !wrong.empty()) return wrong;
  if (s.steps == 1 && s.plan.tied.empty() && !s.barrier) {
    const pipeline::Simulation ran = pipeline::measured_step(s.plan, got.steps[0]->times);
    for (size_t w = 0; w < ran.workers.size(); ++w) {
      const pipeline::IdleTime& a = ran.workers[w].idle;
      const pipeline::IdleTime& b = want.workers[w].idle;
      if (a.warm_up == b.warm_up && a.drain == b.drain && a.dependency == b.dependency &&
          a.transport == b.transport && a.imbalance == b.imbalance) {
        continue;
      }
      return absl::StrCat("worker ", w, " idled for other reasons than in the simulation");
    }
  }
  if (!got.wrong.empty()) return got.wrong;
  return got.left == 0 ? "" : absl::StrCat(got.left, " things are left");
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
    if (uneven) {  // what even costs are is in the tables
      c.reduce = draw();
      c.step = draw() / 4;
    }
    costs.stages.push_back(c);
  }
  costs.tied.assign(plan.tied.size(), {.latency = latency});
  costs.edges.assign(plan.edges.size(), {.latency = latency});
  return costs;
}

std::string to_text(const Scenario& s) {
  std::string out = absl::StrCat(s.plan.schedule, " of ", s.plan.workers.size(), ", ",
                                 s.plan.micro_batches, " micro-batches, ", s.plan.edges.size(),
                                 " edges, ", s.steps, " steps, seed ", s.seed);
  if (s.throw_stage >= 0) {
    absl::StrAppend(&out, ", stage ", s.throw_stage, " throws in step ", s.throw_step,
                    ", micro-batch ", s.throw_micro_batch);
  }
  if (s.lost_worker >= 0) {
    absl::StrAppend(&out, ", w", s.lost_worker, s.stops ? " stops" : " ends", " after ",
                    absl::FormatDuration(s.lost_after));
  }
  if (!s.plan.tied.empty()) absl::StrAppend(&out, ", tied");
  return absl::StrCat(out, s.disorder ? ", disorder" : "", s.losses ? ", losses" : "");
}

Scenario random_scenario(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); };
  const std::vector<std::string> names = {"sequential",    "gpipe",        "1f1b",
                                          "interleaved:2", "looped_bfs:2", "zb-h1",
                                          "zb-h2",         "zb-v",         "1f1b+split"};
  Scenario s;
  const std::string name = names[random() % names.size()];
  s.plan = *pipeline::make_schedule(name, 1 + below(4), 1 + below(6));
  const int n = s.plan.stages();
  if (n > 2 && below(2) == 0) {
    // Each edge of the chain takes output 0, and skips that, too, or one of their own.
    for (pipeline::Edge& e : s.plan.edges) e.output = 0;
    std::vector<int> outputs(static_cast<size_t>(n), 1);
    for (int k = 1 + below(3); k > 0; --k) {
      const int from = below(n - 2);
      const int to = from + 2 + below(n - from - 2);
      const pipeline::Edge edge{from, to, below(2) == 0 ? outputs[from]++ : 0};
      if (std::find(s.plan.edges.begin(), s.plan.edges.end(), edge) == s.plan.edges.end()) {
        s.plan.edges.push_back(edge);
      }
    }
    for (auto& list : s.plan.workers) {
      std::erase_if(list, [](const pipeline::Action& a) { return a.edge >= 0; });
    }
    throw_if_error(pipeline::insert_transfers(&s.plan));
  }
  if (n > 1 && below(4) == 0) {
    const int first = below(n - 1);
    s.plan.tied = {{first, first + 1 + below(n - first - 1)}};
  }
  if (!s.plan.tied.empty() || below(4) == 0) s.plan = pipeline::with_reductions(s.plan);
  s.costs = costs_of(s.plan, true, 0, random());
  s.steps = 1 + below(3);
  s.seed = random();
  const int trouble = below(8);
  if (trouble < 3) {
    s.throw_stage = below(n);
    s.throw_step = below(s.steps);
    s.throw_micro_batch = below(s.plan.micro_batches);
  } else if (trouble < 5 && s.plan.workers.size() > 1) {
    s.lost_worker = 1 + below(static_cast<int>(s.plan.workers.size()) - 1);
    s.stops = trouble == 4;
    const pipeline::Ticks whole = pipeline::simulate(s.plan, s.costs, {.steps = s.steps}).makespan;
    s.lost_after = absl::Nanoseconds(random() % static_cast<uint64_t>(whole));
  }
  s.disorder = below(2) == 0;
  s.losses = s.lost_worker < 0 && below(2) == 0;
  return s;
}

namespace {

std::string wrong_step(const Scenario& s, const Outcome& got, int64_t step) {
  const auto& result = got.steps[step];
  const std::string here = absl::StrCat("step ", step, ": ");
  if (s.throw_stage >= 0) {
    // A step before may be ended by the one after it, while it is under way.
    if (result.ok()) return step < s.throw_step ? "" : here + "ended well";
    const std::string want =
        absl::StrCat("pipeline step ", s.throw_step, ", worker 'w", s.plan.placement[s.throw_stage],
                     "', stage ", s.throw_stage, ", micro-batch ", s.throw_micro_batch,
                     ", action F", s.throw_stage, ".", s.throw_micro_batch);
    const bool right = error_kind(result.status()) == ErrorKind::kUser &&
                       std::string(result.status().message()).find(want) != std::string::npos;
    return right ? "" : here + result.status().ToString();
  }
  if (result.ok()) return "";
  const std::string lost = absl::StrCat("'w", s.lost_worker, "'");
  const bool right = s.lost_worker >= 0 && error_kind(result.status()) == ErrorKind::kPeerLost &&
                     std::string(result.status().message()).find(lost) != std::string::npos;
  return right ? "" : here + result.status().ToString();
}

}  // namespace

std::string wrong_with(const Scenario& s, const Outcome& got) {
  if (!got.wrong.empty()) return got.wrong;
  if (static_cast<int>(got.steps.size()) != s.steps) return "a step has no answer";
  for (int64_t step = 0; step < s.steps; ++step) {
    if (std::string wrong = wrong_step(s, got, step); !wrong.empty()) return wrong;
  }
  if (got.left != 0) return absl::StrCat(got.left, " things are left");
  if (s.throw_stage >= 0 && got.later.ok()) return "the error is forgotten";
  if (s.throw_stage < 0 && s.lost_worker < 0 && !got.later.ok()) return got.later.ToString();
  if (s.lost_worker < 0 || got.steps.back().ok()) return "";  // all was done before the loss
  if (got.until_known > kLease + absl::Seconds(2)) {
    return absl::StrCat("the loss was known after ", absl::FormatDuration(got.until_known));
  }
  for (size_t w = 0; w < s.plan.workers.size(); ++w) {
    if (static_cast<int>(w) == s.lost_worker) continue;
    for (const std::string& name :
         {absl::StrCat("'w", s.lost_worker, "'"), absl::StrCat("worker 'w", w, "'")}) {
      if (got.parts[w].find(name) != std::string::npos) continue;
      return absl::StrCat("the part of w", w, " does not name ", name, ": ", got.parts[w]);
    }
  }
  return "";
}

}  // namespace weft::testing
