// measured_step(): a step that ran, in the words of a simulation.

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "weft/pipeline/timeline.h"

namespace weft::pipeline {
namespace {

// What goes over an edge, one way, for one micro-batch.
using MadeFor = std::tuple<int, int, bool>;

class StepReader {
 public:
  StepReader(const Plan& plan, const std::vector<std::vector<int64_t>>& times)
      : plan_(plan), times_(times), from_(edges_from(plan)), to_(edges_to(plan)) {}

  Simulation read() {
    find_zero();
    for (size_t w = 0; w < plan_.workers.size(); ++w) {
      for (size_t i = 0; i < plan_.workers[w].size(); ++i) note(plan_.workers[w][i], end(w, i));
    }
    for (size_t w = 0; w < plan_.workers.size(); ++w) out_.workers.push_back(timeline(w));
    for (const WorkerTimeline& w : out_.workers) {
      out_.makespan = std::max(out_.makespan, w.last_end);
    }
    out_.step_ends = {out_.makespan};
    const Ticks most = out_.max_busy();
    for (WorkerTimeline& w : out_.workers) {
      w.idle.drain = out_.makespan - w.last_end;
      wait(&w, WaitReason::kDrain, w.last_end, out_.makespan);
      w.idle.imbalance = std::min(w.idle.dependency, most - w.busy);
      w.idle.dependency -= w.idle.imbalance;
    }
    return std::move(out_);
  }

 private:
  Ticks start(size_t w, size_t i) const { return times_[w][2 * i] - zero_; }
  // Clocks of several hosts may differ; a time is never negative.
  Ticks end(size_t w, size_t i) const {
    return std::max(times_[w][2 * i + 1] - zero_, start(w, i));
  }

  // When the first action began that took time.
  void find_zero() {
    bool any = false;
    for (size_t w = 0; w < plan_.workers.size(); ++w) {
      for (size_t i = 0; i < plan_.workers[w].size(); ++i) {
        const int64_t began = times_[w][2 * i];
        if (is_transfer(plan_.workers[w][i].kind) || times_[w][2 * i + 1] <= began) continue;
        zero_ = any ? std::min(zero_, began) : began;
        any = true;
      }
    }
  }
  static bool is_backward(ActionKind kind) {
    return kind == ActionKind::kBackward || kind == ActionKind::kInputGrad;
  }
  void note(const Action& a, Ticks ended) {
    if (a.kind == ActionKind::kForward) {
      for (int e : from_[a.stage]) given_[{e, a.micro_batch, false}] = ended;
    } else if (is_backward(a.kind)) {
      for (int e : to_[a.stage]) given_[{e, a.micro_batch, true}] = ended;
    }
  }
  // When the last thing was made that it needs of another action; `otherwise`: it needs none.
  Ticks made(const Action& a, Ticks otherwise) const {
    const bool back = is_backward(a.kind);
    if (a.kind != ActionKind::kForward && !back) return otherwise;
    Ticks last = -1;
    for (int e : back ? from_[a.stage] : to_[a.stage]) {
      const auto it = given_.find({e, a.micro_batch, back});
      if (it != given_.end()) last = std::max(last, it->second);
    }
    return last < 0 ? otherwise : last;
  }
  static void wait(WorkerTimeline* t, WaitReason reason, Ticks from, Ticks until) {
    if (until > from) t->waits.push_back({reason, from, until});
  }

  WorkerTimeline timeline(size_t w) const {
    WorkerTimeline t;
    const std::vector<Action>& list = plan_.workers[w];
    // As they ran: with a barrier steps come last.
    std::vector<size_t> order(list.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return start(w, a) < start(w, b); });
    Ticks free_at = 0;
    for (const size_t i : order) {
      const Action& a = list[i];
      t.actions.push_back({a, 0, start(w, i), end(w, i)});
      if (is_transfer(a.kind)) continue;
      const Ticks began = std::max(start(w, i), free_at);
      const Ticks ended = std::max(end(w, i), began);
      if (t.busy == 0 && ended > began) {
        t.first_start = began;
        t.idle.warm_up = began;
        wait(&t, WaitReason::kWarmUp, 0, began);
      } else if (t.busy > 0 && began > free_at) {
        // A step that waits, waits for the norm of all gradients; what else needs nothing of others
        // was ready, and only the runtime lies between.
        const Ticks ready = a.kind == ActionKind::kStep ? began : free_at;
        const Ticks produced = std::clamp(made(a, ready), free_at, began);
        t.idle.dependency += produced - free_at;
        t.idle.transport += began - produced;
        wait(&t, WaitReason::kDependency, free_at, produced);
        wait(&t, WaitReason::kTransport, produced, began);
      }
      t.busy += ended - began;
      if (ended > began) t.last_end = ended;
      free_at = ended;
    }
    return t;
  }

  const Plan& plan_;
  const std::vector<std::vector<int64_t>>& times_;
  const std::vector<std::vector<int>> from_;
  const std::vector<std::vector<int>> to_;
  int64_t zero_ = 0;
  std::map<MadeFor, Ticks> given_;  // when it was made
  Simulation out_;
};

}  // namespace

Simulation measured_step(const Plan& plan, const std::vector<std::vector<int64_t>>& times) {
  const auto refuse = [](std::string_view what) {
    throw_error(make_error(ErrorKind::kInvalidArgument, what));
  };
  throw_if_error(check_indices(plan));
  if (times.size() != plan.workers.size()) {
    refuse(absl::StrCat("times of ", times.size(), " workers for a plan of ", plan.workers.size()));
  }
  for (size_t w = 0; w < times.size(); ++w) {
    if (times[w].size() == 2 * plan.workers[w].size()) continue;
    refuse(absl::StrCat("worker ", w, " has ", times[w].size(), " times for ",
                        plan.workers[w].size(), " actions"));
  }
  return StepReader(plan, times).read();
}

}  // namespace weft::pipeline
