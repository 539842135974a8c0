// The plan itself: indices, counts, and where transfers go.

#include "weft/pipeline/plan.h"

#include <algorithm>
#include <queue>
#include <set>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace weft::pipeline {
namespace {

Status bad(std::string_view what) { return make_error(ErrorKind::kInvalidArgument, what); }

// The stage at this end of a transfer.
int stage_of_transfer(const Edge& edge, ActionKind kind) {
  return kind == ActionKind::kSendForward || kind == ActionKind::kReceiveBackward ? edge.from
                                                                                  : edge.to;
}

Status check_action(const Plan& plan, size_t worker, const Action& action) {
  const std::string where = absl::StrCat("worker ", worker, ": ");
  const bool transfer = is_transfer(action.kind);
  if (transfer != (action.edge >= 0) || action.edge >= static_cast<int>(plan.edges.size())) {
    return bad(absl::StrCat(where, "an action with edge ", action.edge, " of ", plan.edges.size()));
  }
  if (action.stage < 0 || action.stage >= plan.stages()) {
    return bad(absl::StrCat(where, "an action of stage ", action.stage, " of ", plan.stages()));
  }
  if (transfer && action.stage != stage_of_transfer(plan.edges[action.edge], action.kind)) {
    return bad(absl::StrCat(where, "a transfer over edge ", action.edge, " at stage ", action.stage,
                            ", which is not its end"));
  }
  const bool may_lack = action.kind == ActionKind::kReduce ||
                        (action.kind == ActionKind::kStep && !plan.asynchronous);
  if (may_lack ? action.micro_batch != -1
               : action.micro_batch < 0 || action.micro_batch >= plan.micro_batches) {
    return bad(absl::StrCat(where, "an action of stage ", action.stage, " with micro-batch ",
                            action.micro_batch, " of ", plan.micro_batches));
  }
  return absl::OkStatus();
}

// Runs the lists in unit time and notes in which order they meet.
class Inserter {
 public:
  explicit Inserter(Plan* plan)
      : plan_(*plan),
        from_(edges_from(plan_)),
        to_(edges_to(plan_)),
        forward_(plan_.edges.size() * plan_.micro_batches),
        backward_(forward_.size()),
        at_(plan_.workers.size()),
        running_(plan_.workers.size()),
        lists_(plan_.workers.size()) {}

  Status run() {
    for (size_t w = 0; w < lists_.size(); ++w) start(w);
    while (!ends_.empty()) {
      const auto [when, number, worker] = ends_.top();
      ends_.pop();
      now_ = when;
      end(worker);
      // What ends at one time has ended before anything starts.
      if (!ends_.empty() && std::get<0>(ends_.top()) == now_) continue;
      for (size_t w = 0; w < lists_.size(); ++w) start(w);
    }
    std::vector<std::string> stuck;
    for (size_t w = 0; w < lists_.size(); ++w) {
      if (at_[w] < plan_.workers[w].size()) {
        stuck.push_back(
            absl::StrCat("worker ", w, " at ", to_text(plan_, plan_.workers[w][at_[w]])));
      }
    }
    if (!stuck.empty()) {
      return bad(absl::StrCat("the actions of this plan wait for each other: ",
                              absl::StrJoin(stuck, ", ")));
    }
    return absl::OkStatus();
  }
  std::vector<std::vector<Action>> take() { return std::move(lists_); }

 private:
  size_t slot(int edge, int micro_batch) const {
    return static_cast<size_t>(edge) * plan_.micro_batches + micro_batch;
  }
  bool ready(const Action& a) const {
    const bool backward = a.kind == ActionKind::kBackward || a.kind == ActionKind::kInputGrad;
    if (a.kind != ActionKind::kForward && !backward) return true;
    for (int e : backward ? from_[a.stage] : to_[a.stage]) {
      if (!(backward ? backward_ : forward_)[slot(e, a.micro_batch)]) return false;
    }
    return true;
  }
  void start(size_t w) {
    if (running_[w] || at_[w] == plan_.workers[w].size()) return;
    const Action& a = plan_.workers[w][at_[w]];
    if (!ready(a)) return;
    running_[w] = true;
    lists_[w].push_back(a);
    ends_.emplace(now_ + (a.kind == ActionKind::kBackward ? 2 : 1), number_++, w);
  }
  void end(size_t w) {
    const Action& a = plan_.workers[w][at_[w]++];
    running_[w] = false;
    const bool backward = a.kind == ActionKind::kBackward || a.kind == ActionKind::kInputGrad;
    if (a.kind != ActionKind::kForward && !backward) return;
    for (int e : backward ? to_[a.stage] : from_[a.stage]) {
      (backward ? backward_ : forward_)[slot(e, a.micro_batch)] = true;
      const int peer = backward ? plan_.edges[e].from : plan_.edges[e].to;
      const int other = plan_.placement[peer];
      if (other == static_cast<int>(w)) continue;
      lists_[w].push_back({backward ? ActionKind::kSendBackward : ActionKind::kSendForward, a.stage,
                           a.micro_batch, e});
      lists_[other].push_back(
          {backward ? ActionKind::kReceiveBackward : ActionKind::kReceiveForward, peer,
           a.micro_batch, e});
    }
  }

  const Plan& plan_;
  const std::vector<std::vector<int>> from_;
  const std::vector<std::vector<int>> to_;
  std::vector<bool> forward_;
  std::vector<bool> backward_;
  std::vector<size_t> at_;
  std::vector<bool> running_;
  std::vector<std::vector<Action>> lists_;
  int64_t now_ = 0;
  uint64_t number_ = 0;
  using End = std::tuple<int64_t, uint64_t, size_t>;
  std::priority_queue<End, std::vector<End>, std::greater<>> ends_;
};

}  // namespace

Status check_indices(const Plan& plan) {
  if (plan.stages() < 1 || plan.stages() > kMaxStages) {
    return bad(absl::StrCat("a plan of ", plan.stages(), " stages: 1 to ", kMaxStages));
  }
  if (plan.micro_batches < 1 || plan.micro_batches > kMaxMicroBatches) {
    return bad(
        absl::StrCat("a plan of ", plan.micro_batches, " micro-batches: 1 to ", kMaxMicroBatches));
  }
  const int workers = static_cast<int>(plan.workers.size());
  for (int s = 0; s < plan.stages(); ++s) {
    if (plan.placement[s] < 0 || plan.placement[s] >= workers) {
      return bad(absl::StrCat("stage ", s, " is at worker ", plan.placement[s], " of ", workers));
    }
  }
  std::set<Edge> seen;
  for (const Edge& e : plan.edges) {
    const std::string name = absl::StrCat("edge ", e.from, ">", e.to);
    if (e.from < 0 || e.to >= plan.stages() || e.from >= e.to || e.output < -1 ||
        e.output >= kMaxStages) {
      return bad(absl::StrCat(name, " does not go from a stage to a later one of ", plan.stages()));
    }
    if (!seen.insert(e).second) return bad(absl::StrCat(name, " is there twice"));
  }
  for (const std::vector<int>& group : plan.tied) {
    for (int s : group) {
      if (s < 0 || s >= plan.stages())
        return bad(absl::StrCat("stage ", s, " is tied, of ", plan.stages()));
    }
  }
  size_t actions = 0;
  for (size_t w = 0; w < plan.workers.size(); ++w) {
    actions += plan.workers[w].size();
    if (actions > kMaxActions) return bad(absl::StrCat("more than ", kMaxActions, " actions"));
    for (const Action& a : plan.workers[w]) WEFT_RETURN_IF_ERROR(check_action(plan, w, a));
  }
  return absl::OkStatus();
}

int64_t count_sends(const Plan& plan) {
  int64_t sends = 0;
  for (const auto& list : plan.workers) {
    for (const Action& a : list) {
      if (a.kind == ActionKind::kSendForward || a.kind == ActionKind::kSendBackward) ++sends;
    }
  }
  return sends;
}

std::vector<std::vector<int>> edges_from(const Plan& plan) {
  std::vector<std::vector<int>> out(plan.placement.size());
  for (size_t e = 0; e < plan.edges.size(); ++e) {
    out[plan.edges[e].from].push_back(static_cast<int>(e));
  }
  return out;
}

std::vector<std::vector<int>> edges_to(const Plan& plan) {
  std::vector<std::vector<int>> out(plan.placement.size());
  for (size_t e = 0; e < plan.edges.size(); ++e) {
    out[plan.edges[e].to].push_back(static_cast<int>(e));
  }
  return out;
}

Status insert_transfers(Plan* plan) {
  WEFT_RETURN_IF_ERROR(check_indices(*plan));
  for (const auto& list : plan->workers) {
    for (const Action& a : list) {
      if (is_transfer(a.kind)) {
        return bad(absl::StrCat("the plan has transfers already: ", to_text(*plan, a)));
      }
    }
  }
  Inserter inserter(plan);
  WEFT_RETURN_IF_ERROR(inserter.run());
  plan->workers = inserter.take();
  return absl::OkStatus();
}

}  // namespace weft::pipeline
