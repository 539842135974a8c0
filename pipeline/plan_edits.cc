// Plans with actions put into them.

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/pipeline/schedule.h"

namespace weft::pipeline {

namespace {

// The gradients of tied stages, or of all.
Plan put_reductions(Plan plan, bool all) {
  if (plan.asynchronous) {
    throw_error(
        make_error(ErrorKind::kInvalidArgument, "an asynchronous plan reduces no gradients"));
  }
  throw_if_error(check_indices(plan));
  std::set<int> tied;
  for (const auto& group : plan.tied) tied.insert(group.begin(), group.end());
  std::set<int> reduced;
  for (const auto& list : plan.workers) {
    for (const Action& a : list) {
      if (a.kind == ActionKind::kReduce) reduced.insert(a.stage);
    }
  }
  for (size_t w = 0; w < plan.workers.size(); ++w) {
    std::vector<Action> with;
    for (const Action& a : plan.workers[w]) {
      const bool moves =
          tied.count(a.stage) > 0 && (a.kind == ActionKind::kReduce || a.kind == ActionKind::kStep);
      if (moves) continue;
      if (all && a.kind == ActionKind::kStep && reduced.count(a.stage) == 0) {
        with.push_back({ActionKind::kReduce, a.stage});
      }
      with.push_back(a);
    }
    // Group by group on every worker, when nothing is left that another worker could wait for.
    for (const ActionKind kind : {ActionKind::kReduce, ActionKind::kStep}) {
      for (const auto& group : plan.tied) {
        for (int s : group) {
          if (plan.placement[s] == static_cast<int>(w)) with.push_back({kind, s});
        }
      }
    }
    plan.workers[w] = std::move(with);
  }
  return plan;
}

}  // namespace

Plan with_reductions(Plan plan) { return put_reductions(std::move(plan), /*all=*/true); }

Plan with_tied(Plan plan, std::vector<std::vector<int>> groups) {
  plan.tied = std::move(groups);
  return put_reductions(std::move(plan), /*all=*/false);
}

Plan with_recompute(Plan plan, const std::vector<int>& stages, bool except_last) {
  std::vector<bool> again(plan.placement.size(), stages.empty());
  for (int s : stages) {
    if (s < 0 || s >= plan.stages()) {
      throw_error(make_error(ErrorKind::kInvalidArgument,
                             absl::StrCat("with_recompute: stage ", s, " of ", plan.stages())));
    }
    again[s] = true;
  }
  const std::vector<std::vector<int>> from = edges_from(plan);
  for (auto& list : plan.workers) {
    std::vector<Action> with;
    for (const Action& a : list) {
      const bool backward = a.kind == ActionKind::kBackward || a.kind == ActionKind::kInputGrad;
      // A stage that ends the model has its backward directly after its forward.
      if (backward && again[a.stage] && !from[a.stage].empty() &&
          !(except_last && a.micro_batch == plan.micro_batches - 1)) {
        with.push_back({ActionKind::kRecompute, a.stage, a.micro_batch});
      }
      if (a.kind == ActionKind::kRecompute && again[a.stage]) continue;
      with.push_back(a);
    }
    list = std::move(with);
  }
  return plan;
}

Plan with_split_backwards(Plan plan) {
  if (plan.asynchronous) {
    throw_error(
        make_error(ErrorKind::kInvalidArgument,
                   "with_split_backwards: the backwards of an asynchronous plan are whole"));
  }
  throw_if_error(check_indices(plan));
  // Stages whose gradients another worker waits for.
  std::vector<bool> waited_for(plan.placement.size());
  for (const Edge& e : plan.edges) {
    if (plan.placement[e.from] != plan.placement[e.to]) waited_for[e.to] = true;
  }
  bool whole = false;
  for (auto& list : plan.workers) {
    std::vector<Action> with;
    for (const Action& a : list) {
      if (is_transfer(a.kind)) continue;
      const bool backward = a.kind == ActionKind::kBackward;
      whole |= backward;
      if (backward && waited_for[a.stage]) {
        with.push_back({ActionKind::kInputGrad, a.stage, a.micro_batch});
        with.push_back({ActionKind::kWeightGrad, a.stage, a.micro_batch});
      } else {
        with.push_back(a);
      }
    }
    list = std::move(with);
  }
  if (!whole) {
    throw_error(make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("with_split_backwards: the plan ", plan.schedule, " has no whole backward")));
  }
  plan.schedule += "+split";
  throw_if_error(insert_transfers(&plan));
  return plan;
}

}  // namespace weft::pipeline
