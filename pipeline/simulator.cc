#include "weft/pipeline/simulator.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/common/event_sim.h"

namespace weft::pipeline {
namespace {

[[noreturn]] void refuse(std::string_view what) {
  throw_error(make_error(ErrorKind::kInvalidArgument, what));
}

bool gives_input_grad(ActionKind kind) {
  return kind == ActionKind::kBackward || kind == ActionKind::kInputGrad;
}

class Run {
 public:
  // `replicas`: so many copies of a plan stand one after the other in `plan`.
  // `norms`: of each of them, what a part of the norm costs; none without a barrier, with which
  // steps are the last actions of their workers.
  Run(const Plan& plan, const Costs& costs, const SimulateOptions& options, int replicas = 1,
      std::vector<EdgeCost> norms = {})
      : replicas_(replicas),
        plan_(plan),
        costs_(costs),
        options_(options),
        from_(edges_from(plan)),
        to_(edges_to(plan)),
        slots_(plan.edges.size() * plan.micro_batches * options.steps * 2),
        workers_(plan.workers.size()) {
    for (const EdgeCost& cost : norms) norms_.push_back({cost, {}, {}, {}});
    out_.workers.resize(workers_.size());
    out_.step_ends.resize(options.steps);
    for (const auto& list : plan.workers) {
      for (const Action& a : list) {
        if (a.kind == ActionKind::kRecompute) recomputed_[{a.stage, a.micro_batch}] = true;
      }
    }
    ties_.resize(plan.tied.size());
    for (size_t g = 0; g < plan.tied.size(); ++g) add_tie(g);
    meetings_.resize(plan.placement.size() / static_cast<size_t>(replicas));
  }

  Simulation run() {
    for (size_t w = 0; w < workers_.size(); ++w) advance(w);
    sim_.run();
    check_ended();
    for (size_t w = 0; w < workers_.size(); ++w) {
      out_.makespan = std::max(out_.makespan, out_.workers[w].last_end);
    }
    const Ticks most = out_.max_busy();
    for (WorkerTimeline& w : out_.workers) {
      w.idle.warm_up = w.first_start;
      w.idle.drain = out_.makespan - w.last_end;
      if (w.busy > 0) {
        w.waits.insert(w.waits.begin(), {WaitReason::kWarmUp, 0, w.first_start});
        w.waits.push_back({WaitReason::kDrain, w.last_end, out_.makespan});
      } else {  // it never begins
        w.waits = {{WaitReason::kDrain, 0, out_.makespan}};
      }
      w.waits.erase(std::remove_if(w.waits.begin(), w.waits.end(),
                                   [](const TimedWait& wait) { return wait.start == wait.end; }),
                    w.waits.end());
      w.idle.imbalance = std::min(w.idle.dependency, most - w.busy);
      w.idle.dependency -= w.idle.imbalance;
    }
    return std::move(out_);
  }

 private:
  // What goes over an edge, one way, for one micro-batch of one step.
  struct Slot {
    Ticks produced = -1;
    Ticks arrived = -1;
  };
  struct State {
    int step = 0;
    size_t at = 0;
    bool running = false;
    size_t tie = 0;               // of those of a reduction that runs
    bool gave = false;            // its gradient to this tie
    Ticks reduced = -1;           // when the reduction alone had ended; -1: it has not
    bool gave_norm = false;       // its part of this step
    bool passed_barrier = false;  // of this step
    Ticks free_at = 0;
    int64_t memory = 0;
  };

  Slot& slot(int step, int edge, int micro_batch, bool backward) {
    const size_t i =
        (static_cast<size_t>(step) * plan_.edges.size() + edge) * plan_.micro_batches + micro_batch;
    return slots_[2 * i + (backward ? 1 : 0)];
  }
  SimLink& link(int edge, bool backward) {
    const Edge& e = plan_.edges[edge];
    const int a = plan_.placement[backward ? e.to : e.from];
    const int b = plan_.placement[backward ? e.from : e.to];
    const EdgeCost& cost = costs_.edges[edge];
    // Edges between the same workers with the same costs share the wire.
    const auto key = std::tuple(a, b, cost.latency, cost.bytes_per_kilotick);
    return links_.try_emplace(key, &sim_, cost.latency, cost.bytes_per_kilotick).first->second;
  }

  // Stages that share a weight, and their gradients in the step that runs there.
  struct Tie {
    size_t root = 0;            // the worker of the first of them
    std::set<size_t> others{};  // the other workers
    std::map<size_t, size_t>
        at{};  // by worker: its last reduction of one of the stages, in its list
    EdgeCost cost{};
    std::map<int, size_t> given{};                  // by step: how many have arrived at the root
    std::map<int, Slot> latest{};                   // by step: the last of these
    std::map<std::pair<int, size_t>, Slot> back{};  // by step and worker: the sum
  };
  void add_tie(size_t g) {
    const auto& stages = plan_.tied[g];
    if (stages.empty()) return;
    Tie& tie = ties_[g];
    tie.root =
        static_cast<size_t>(plan_.placement[*std::min_element(stages.begin(), stages.end())]);
    if (g < costs_.tied.size()) tie.cost = costs_.tied[g];
    for (size_t w = 0; w < plan_.workers.size(); ++w) {
      for (size_t i = 0; i < plan_.workers[w].size(); ++i) {
        const Action& a = plan_.workers[w][i];
        const bool of_group = std::find(stages.begin(), stages.end(), a.stage) != stages.end();
        if (a.kind == ActionKind::kReduce && of_group) tie.at[w] = i;
      }
      if (tie.at.count(w) > 0 && w != tie.root) tie.others.insert(w);
    }
  }
  SimLink& link_between(size_t from, size_t to, const EdgeCost& cost) {
    const auto key = std::tuple(static_cast<int>(from), static_cast<int>(to), cost.latency,
                                cost.bytes_per_kilotick);
    return links_.try_emplace(key, &sim_, cost.latency, cost.bytes_per_kilotick).first->second;
  }
  SimLink& tie_link(const Tie& tie, size_t from, size_t to) {
    return link_between(from, to, tie.cost);
  }

  // The norm of all gradients of a replica, of the steps that are under way.
  struct Norm {
    EdgeCost cost{};
    std::map<int, size_t> given{};                  // by step: parts that have arrived
    std::map<int, Slot> latest{};                   // by step: the last of these
    std::map<std::pair<int, size_t>, Slot> back{};  // by step and worker: the whole
  };
  // False: the worker waits.
  bool pass_barrier(size_t w) {
    const size_t size = workers_.size() / static_cast<size_t>(replicas_);
    const size_t first = w / size * size;
    Norm* const norm = &norms_[w / size];
    State& s = workers_[w];
    const int step = s.step;
    const Ticks made = sim_.now();
    if (w == first) {
      if (norm->given[step] + 1 < size) return false;
      charge(w, norm->latest[step], false);
      for (size_t other = first + 1; other < first + size; ++other) {
        link_between(w, other, norm->cost).send(norm->cost.bytes, [this, norm, step, other, made] {
          norm->back[{step, other}] = {made, sim_.now()};
          advance(other);
        });
      }
      return true;
    }
    if (!s.gave_norm) {
      s.gave_norm = true;
      link_between(w, first, norm->cost).send(norm->cost.bytes, [this, norm, step, first, made] {
        norm->latest[step] = {made, sim_.now()};
        ++norm->given[step];
        advance(first);
      });
    }
    const auto back = norm->back.find({step, w});
    if (back == norm->back.end()) return false;
    charge(w, back->second, false);
    return true;
  }
  // What is left of a reduction whose own work is done; false: it waits.
  bool pass_ties(size_t w) {
    State& s = workers_[w];
    for (; s.tie < ties_.size(); ++s.tie, s.gave = false) {
      Tie& tie = ties_[s.tie];
      const auto at = tie.at.find(w);
      if (at == tie.at.end() || at->second != s.at || tie.others.empty()) continue;
      const int step = s.step;
      Tie* const t = &tie;
      if (w == tie.root) {
        if (tie.given[step] < tie.others.size()) return false;
        charge_tie(w, tie.latest[step]);
        const Ticks made = sim_.now();
        for (size_t other : tie.others) {
          tie_link(tie, w, other).send(tie.cost.bytes, [this, t, step, other, made] {
            t->back[{step, other}] = {made, sim_.now()};
            advance(other);
          });
        }
        continue;
      }
      if (!s.gave) {
        s.gave = true;
        const Ticks made = sim_.now();
        tie_link(tie, w, tie.root).send(tie.cost.bytes, [this, t, step, made] {
          t->latest[step] = {made, sim_.now()};
          ++t->given[step];
          advance(t->root);
        });
      }
      const auto back = tie.back.find({step, w});
      if (back == tie.back.end()) return false;
      charge_tie(w, back->second);
    }
    return true;
  }
  void charge_tie(size_t w, const Slot& latest) { charge(w, latest, false); }

  // Replicas of a stage that have come to its reduction, of one step: they take as long as the one
  // that takes longest, from when the last has come.
  struct Meeting {
    std::vector<size_t> workers{};
    size_t arrived = 0;  // those of which the first replica's worker knows
    Ticks cost = 0;
  };
  void meet(size_t w, const Action& a) {
    const size_t stages = meetings_.size();
    const size_t which = static_cast<size_t>(a.stage) % stages;
    Meeting& meeting = meetings_[which];
    meeting.workers.push_back(w);
    meeting.cost = std::max(meeting.cost, cost(a));
    workers_[w].running = true;
    const size_t first = w % (workers_.size() / static_cast<size_t>(replicas_));
    if (w == first) return arrive(which, first);
    link_between(w, first, costs_.replicas).send(costs_.replicas.bytes, [this, which, first] {
      arrive(which, first);
    });
  }
  void arrive(size_t which, size_t first) {
    Meeting& meeting = meetings_[which];
    if (++meeting.arrived < static_cast<size_t>(replicas_)) return;
    const Meeting met = std::exchange(meeting, {});
    const Ticks made = sim_.now();
    for (size_t one : met.workers) {
      if (one == first) {
        reduce_together(one, made, met.cost);
        continue;
      }
      const Ticks cost = met.cost;
      link_between(first, one, costs_.replicas)
          .send(costs_.replicas.bytes,
                [this, one, made, cost] { reduce_together(one, made, cost); });
    }
  }
  void reduce_together(size_t w, Ticks made, Ticks cost) {
    const Ticks came = workers_[w].free_at;
    charge(w, {made, sim_.now()}, cost > 0);
    sim_.at(sim_.now() + cost, [this, w, came] { end_reduction(w, came); });
  }
  void end_reduction(size_t w, Ticks start) {
    State& s = workers_[w];
    s.running = false;
    s.reduced = start;
    s.tie = 0;
    s.gave = false;
    WorkerTimeline& t = out_.workers[w];
    const Ticks worked = sim_.now() - s.free_at;
    t.busy += worked;
    s.free_at = sim_.now();
    if (worked > 0) t.last_end = sim_.now();
    advance(w);
  }

  // The inputs of an action: the latest of them, or nothing when one is not there.
  std::optional<Slot> inputs(int step, const Action& a) {
    Slot latest{0, 0};
    const auto use = [&](int e, bool backward) {
      const Slot& s = slot(step, e, a.micro_batch, backward);
      if (s.arrived < 0) return false;
      if (s.arrived > latest.arrived) latest = s;
      return true;
    };
    if (a.kind == ActionKind::kReceiveForward || a.kind == ActionKind::kReceiveBackward) {
      if (options_.blocking_receives && !use(a.edge, a.kind == ActionKind::kReceiveBackward)) {
        return std::nullopt;
      }
    } else if (a.kind == ActionKind::kForward) {
      for (int e : to_[a.stage]) {
        if (!use(e, false)) return std::nullopt;
      }
    } else if (gives_input_grad(a.kind)) {
      for (int e : from_[a.stage]) {
        if (!use(e, true)) return std::nullopt;
      }
    }
    return latest;
  }
  Ticks cost(const Action& a) const {
    const StageCost& c = costs_.stages[a.stage];
    switch (a.kind) {
      case ActionKind::kForward:
      case ActionKind::kRecompute: return c.forward;
      case ActionKind::kBackward: return c.input_grad + c.weight_grad;
      case ActionKind::kInputGrad: return c.input_grad;
      case ActionKind::kWeightGrad: return c.weight_grad;
      case ActionKind::kReduce: return c.reduce;
      case ActionKind::kStep: return c.step;
      default: return 0;
    }
  }

  // Starts what may start; actions without cost end at once.
  void advance(size_t w) {
    State& s = workers_[w];
    const auto& list = plan_.workers[w];
    while (!s.running && s.step < options_.steps && !list.empty()) {
      const Action& a = list[s.at];
      if (a.kind == ActionKind::kReduce && (replicas_ > 1 || !ties_.empty())) {
        if (s.reduced < 0) {
          if (replicas_ > 1) return meet(w, a);
          const Ticks start = s.free_at;
          charge(w, {0, 0}, cost(a) > 0);
          s.running = true;
          sim_.at(sim_.now() + cost(a), [this, w, start] { end_reduction(w, start); });
          return;
        }
        if (!pass_ties(w)) return;
        finish(w, a, std::exchange(s.reduced, -1), /*worked=*/false);
        continue;
      }
      if (a.kind == ActionKind::kStep && !norms_.empty() && !s.passed_barrier) {
        if (!pass_barrier(w)) return;
        s.passed_barrier = true;
        continue;
      }
      const auto ready = inputs(s.step, a);
      if (!ready.has_value()) return;
      charge(w, *ready, cost(a) > 0);
      const Ticks start = sim_.now();
      const Ticks end = start + cost(a);
      if (end == start) {
        finish(w, a, start);
        continue;
      }
      s.running = true;
      sim_.at(end, [this, w, a, start] {
        workers_[w].running = false;
        finish(w, a, start);
        advance(w);
      });
    }
  }
  // Time since the last action, to what it was spent on.
  void charge(size_t w, const Slot& latest, bool costs) {
    State& s = workers_[w];
    WorkerTimeline& t = out_.workers[w];
    const Ticks now = sim_.now();
    if (t.busy == 0 && costs) t.first_start = now;
    if (now == s.free_at) return;
    if (t.busy > 0) {  // before that it is warm-up
      const Ticks produced = std::clamp(latest.produced, s.free_at, now);
      t.idle.dependency += produced - s.free_at;
      t.idle.transport += now - produced;
      t.waits.push_back({WaitReason::kDependency, s.free_at, produced});
      t.waits.push_back({WaitReason::kTransport, produced, now});
    }
    s.free_at = now;
  }
  // `worked`: all the time since; not of a reduction, which counts its own.
  void finish(size_t w, const Action& a, Ticks start, bool worked = true) {
    State& s = workers_[w];
    WorkerTimeline& t = out_.workers[w];
    const Ticks now = sim_.now();
    t.actions.push_back({a, s.step, start, now});
    if (now > start && (worked || t.busy > 0)) {
      t.busy += worked ? now - start : 0;
      t.last_end = now;
    }
    s.free_at = now;
    hold(w, a);
    const int step = s.step;
    if (++s.at == plan_.workers[w].size()) {
      s.at = 0;
      ++s.step;
      s.gave_norm = s.passed_barrier = false;
      out_.step_ends[step] = std::max(out_.step_ends[step], now);
    }
    produce(w, step, a);
  }
  void hold(size_t w, const Action& a) {
    State& s = workers_[w];
    const StageCost& c = costs_.stages[a.stage];
    const bool again = recomputed_.count({a.stage, a.micro_batch}) > 0;
    switch (a.kind) {
      case ActionKind::kForward: s.memory += again ? 0 : c.activation; break;
      case ActionKind::kRecompute: s.memory += c.activation; break;
      case ActionKind::kInputGrad: s.memory -= c.activation - c.weight_activation; break;
      case ActionKind::kWeightGrad: s.memory -= c.weight_activation; break;
      case ActionKind::kBackward: s.memory -= c.activation; break;
      default: break;
    }
    out_.workers[w].peak_memory = std::max(out_.workers[w].peak_memory, s.memory);
  }
  void produce(size_t w, int step, const Action& a) {
    const bool back = gives_input_grad(a.kind);
    if (a.kind == ActionKind::kForward || back) {
      for (int e : back ? to_[a.stage] : from_[a.stage]) {
        Slot& s = slot(step, e, a.micro_batch, back);
        s.produced = sim_.now();
        const int peer = back ? plan_.edges[e].from : plan_.edges[e].to;
        if (plan_.placement[peer] == static_cast<int>(w)) s.arrived = sim_.now();
      }
    } else if (a.kind == ActionKind::kSendForward || a.kind == ActionKind::kSendBackward) {
      const bool backward = a.kind == ActionKind::kSendBackward;
      const Edge& e = plan_.edges[a.edge];
      const size_t peer = plan_.placement[backward ? e.from : e.to];
      link(a.edge, backward).send(costs_.edges[a.edge].bytes, [this, step, a, backward, peer] {
        slot(step, a.edge, a.micro_batch, backward).arrived = sim_.now();
        advance(peer);
      });
    }
  }
  void check_ended() const {
    std::vector<std::string> stuck;
    for (size_t w = 0; w < workers_.size(); ++w) {
      const State& s = workers_[w];
      if (s.step < options_.steps && !plan_.workers[w].empty()) {
        stuck.push_back(
            absl::StrCat("worker ", w, " waits at ", to_text(plan_, plan_.workers[w][s.at])));
      }
    }
    if (!stuck.empty()) {
      refuse(absl::StrCat("the plan does not run to its end: ", absl::StrJoin(stuck, ", ")));
    }
  }

  const int replicas_;
  const Plan& plan_;
  const Costs& costs_;
  const SimulateOptions options_;
  const std::vector<std::vector<int>> from_;
  const std::vector<std::vector<int>> to_;
  EventSim sim_;
  std::map<std::tuple<int, int, Ticks, int64_t>, SimLink> links_;
  std::map<std::pair<int, int>, bool> recomputed_;
  std::vector<Tie> ties_;
  std::vector<Meeting> meetings_;  // by stage of one replica
  std::vector<Norm> norms_;        // by replica; none without a barrier
  std::vector<Slot> slots_;
  std::vector<State> workers_;
  Simulation out_;
};

void check_costs(const Plan& plan, const Costs& costs, const SimulateOptions& options) {
  throw_if_error(check_indices(plan));
  if (costs.stages.size() != plan.placement.size() || costs.edges.size() != plan.edges.size()) {
    refuse(absl::StrCat("costs of ", costs.stages.size(), " stages and ", costs.edges.size(),
                        " edges for a plan of ", plan.placement.size(), " and ",
                        plan.edges.size()));
  }
  if (costs.tied.size() > plan.tied.size()) {
    refuse(absl::StrCat("costs of ", costs.tied.size(),
                        " groups of stages that share a weight, for ", plan.tied.size()));
  }
  for (const StageCost& c : costs.stages) {
    if (c.forward < 0 || c.input_grad < 0 || c.weight_grad < 0 || c.reduce < 0 || c.step < 0) {
      refuse("a stage with a negative cost");
    }
  }
  if (options.barrier && plan.asynchronous) {
    refuse("a barrier before the steps of an asynchronous plan, which are taken one by one");
  }
  if (options.steps < 1 || options.steps > 10000) {
    refuse(absl::StrCat("a simulation of ", options.steps, " steps: 1 to 10000"));
  }
}

// With a barrier steps come at the end of every list.
Plan steps_last(Plan plan) {
  for (auto& list : plan.workers) {
    std::stable_partition(list.begin(), list.end(),
                          [](const Action& a) { return a.kind != ActionKind::kStep; });
  }
  return plan;
}

// The plan `count` times, one behind the other.
Plan repeated(const Plan& plan, int count) {
  Plan out = plan;
  const int workers = static_cast<int>(plan.workers.size());
  const int edges = static_cast<int>(plan.edges.size());
  for (int r = 1; r < count; ++r) {
    for (int w : plan.placement) out.placement.push_back(w + r * workers);
    for (Edge e : plan.edges) {
      e.from += r * plan.stages();
      e.to += r * plan.stages();
      out.edges.push_back(e);
    }
    for (auto list : plan.workers) {
      for (Action& a : list) {
        a.stage += r * plan.stages();
        if (a.edge >= 0) a.edge += r * edges;
      }
      out.workers.push_back(std::move(list));
    }
    for (auto group : plan.tied) {
      for (int& s : group) s += r * plan.stages();
      out.tied.push_back(std::move(group));
    }
  }
  return out;
}

}  // namespace

Simulation simulate(const Plan& plan, const Costs& costs, SimulateOptions options) {
  check_costs(plan, costs, options);
  if (!options.barrier) return Run(plan, costs, options).run();
  return Run(steps_last(plan), costs, options, 1, {costs.norm}).run();
}

std::vector<Simulation> simulate_replicas(const Plan& plan, const std::vector<Costs>& costs,
                                          SimulateOptions options) {
  if (costs.empty() || costs.size() > 64) {
    refuse(absl::StrCat("a simulation of ", costs.size(), " replicas: 1 to 64"));
  }
  const int count = static_cast<int>(costs.size());
  Costs all;
  all.replicas = costs[0].replicas;
  std::vector<EdgeCost> norms;
  for (const Costs& one : costs) {
    if (options.barrier) norms.push_back(one.norm);
    check_costs(plan, one, options);
    all.stages.insert(all.stages.end(), one.stages.begin(), one.stages.end());
    all.edges.insert(all.edges.end(), one.edges.begin(), one.edges.end());
    for (size_t g = 0; g < plan.tied.size(); ++g) {
      all.tied.push_back(g < one.tied.size() ? one.tied[g] : EdgeCost{});
    }
  }
  const Plan whole = repeated(options.barrier ? steps_last(plan) : plan, count);
  Simulation together = Run(whole, all, options, count, std::move(norms)).run();
  std::vector<Simulation> out(costs.size());
  const size_t workers = plan.workers.size();
  for (size_t r = 0; r < out.size(); ++r) {
    out[r].makespan = together.makespan;
    out[r].step_ends = together.step_ends;
    for (size_t w = 0; w < workers; ++w) {
      WorkerTimeline& one =
          out[r].workers.emplace_back(std::move(together.workers[r * workers + w]));
      for (TimedAction& a : one.actions) {
        a.action.stage -= static_cast<int>(r) * plan.stages();
        if (a.action.edge >= 0) {
          a.action.edge -= static_cast<int>(r * plan.edges.size());
        }
      }
    }
  }
  return out;
}

}  // namespace weft::pipeline
