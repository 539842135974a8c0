// The orders of docs/pipeline.md, as code.

#include "weft/pipeline/schedule.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/pipeline/internal/planted.h"

namespace weft::pipeline {
namespace {

using List = std::vector<Action>;
using internal::ScheduleBug;

Action F(int stage, int i) { return {ActionKind::kForward, stage, i}; }
Action B(int stage, int i) { return {ActionKind::kBackward, stage, i}; }
Action I(int stage, int i) { return {ActionKind::kInputGrad, stage, i}; }
Action W(int stage, int i) { return {ActionKind::kWeightGrad, stage, i}; }

void check_sizes(std::string_view name, int p, int m, int chunks) {
  // A forward and an input gradient, a weights' one, and four transfers of each.
  const int64_t actions = int64_t{p} * chunks * m * 8;
  if (p < 1 || m < 1 || chunks < 1 || int64_t{p} * chunks > kMaxStages || m > kMaxMicroBatches ||
      actions > static_cast<int64_t>(kMaxActions)) {
    throw_error(make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("schedule ", std::string(name), ": ", p, " workers with ", chunks,
                     " stages each and ", m, " micro-batches; 1 to ", kMaxStages, " stages, 1 to ",
                     kMaxMicroBatches, " micro-batches and up to ", kMaxActions, " actions")));
  }
}

// A chain of p * chunks stages, looped over the workers, without actions.
Plan chain(std::string name, int p, int m, int chunks = 1) {
  check_sizes(name, p, m, chunks);
  Plan plan;
  plan.schedule = std::move(name);
  plan.micro_batches = m;
  plan.workers.resize(p);
  for (int s = 0; s < p * chunks; ++s) {
    plan.placement.push_back(s % p);
    if (s > 0) plan.edges.push_back({s - 1, s});
  }
  return plan;
}

// Each stage steps after its own last gradient; transfers are put in.
Plan finish(Plan plan, ScheduleBug bug = ScheduleBug::kNone) {
  for (List& list : plan.workers) {
    if (plan.asynchronous) {
      List with;
      for (const Action& a : list) {
        with.push_back(a);
        if (a.kind == ActionKind::kBackward) {
          with.push_back({ActionKind::kStep, a.stage, a.micro_batch});
        }
      }
      list = std::move(with);
      continue;
    }
    std::vector<int> left(plan.placement.size(),
                          plan.micro_batches - (bug == ScheduleBug::kStepsEarly ? 1 : 0));
    List with;
    for (const Action& a : list) {
      with.push_back(a);
      if ((a.kind == ActionKind::kBackward || a.kind == ActionKind::kWeightGrad) &&
          --left[a.stage] == 0) {
        with.push_back({ActionKind::kStep, a.stage});
      }
    }
    list = std::move(with);
  }
  throw_if_error(insert_transfers(&plan));
  return plan;
}

void one_f_one_b_list(List* list, int stage, int m, int warm) {
  int f = 0;
  int b = 0;
  while (f < warm) list->push_back(F(stage, f++));
  while (f < m) {
    list->push_back(F(stage, f++));
    list->push_back(B(stage, b++));
  }
  while (b < m) list->push_back(B(stage, b++));
}

// ZB-H1 and ZB-H2: `warm` forwards, then per micro-batch the input gradient, a weights' one when
// more than `pending` wait, and the next forward.
void zb_h_list(List* list, int stage, int m, int warm, int pending) {
  int f = 0;
  int w = 0;
  while (f < std::min(m, warm)) list->push_back(F(stage, f++));
  for (int i = 0; i < m; ++i) {
    list->push_back(I(stage, i));
    if (i + 1 - w > pending) list->push_back(W(stage, w++));
    if (f < m) list->push_back(F(stage, f++));
  }
  while (w < m) list->push_back(W(stage, w++));
}

// One worker of ZB-V: its stage of the way down (0) and of the way up (1).
class VList {
 public:
  VList(List* list, int down, int up, int m) : list_(list), stage_{down, up}, m_(m) {}

  // Left out once there is no such micro-batch.
  void f(int chunk) { put(&F, chunk, &f_[chunk]); }
  void i(int chunk) { put(&I, chunk, &i_[chunk]); }
  void w(int chunk) { put(&W, chunk, &w_[chunk]); }
  bool forwards_left() const { return f_[0] < m_ || f_[1] < m_; }
  void rest() {
    while (i_[1] < m_) i(1);
    while (i_[0] < m_) i(0);
    while (w_[1] < m_) w(1);
    while (w_[0] < m_) w(0);
  }

 private:
  void put(Action (*make)(int, int), int chunk, int* next) {
    if (*next < m_) list_->push_back(make(stage_[chunk], (*next)++));
  }

  List* const list_;
  const int stage_[2];
  const int m_;
  int f_[2] = {0, 0};
  int i_[2] = {0, 0};
  int w_[2] = {0, 0};
};

Plan one_f_one_b_with(ScheduleBug bug, int p, int m, int extra) {
  if (extra < 0 || extra > kMaxMicroBatches) {
    throw_error(make_error(ErrorKind::kInvalidArgument,
                           absl::StrCat("schedule 1f1b+", extra, ": 0 to ", kMaxMicroBatches)));
  }
  Plan plan = chain(extra == 0 ? "1f1b" : absl::StrCat("1f1b+", extra), p, m);
  for (int r = 0; r < p; ++r) {
    int warm = r == p - 1 ? 0 : std::min(m, p - 1 - r + extra);
    if (bug == ScheduleBug::kExtraOnTheLast) warm = std::min(m, p - 1 - r + extra);
    if (bug == ScheduleBug::kShortWarmUp) warm = std::max(0, warm - 1);
    one_f_one_b_list(&plan.workers[r], r, m, warm);
  }
  return finish(std::move(plan), bug);
}

Plan interleaved_with(ScheduleBug bug, int p, int m, int v) {
  Plan plan = chain(absl::StrCat("interleaved:", v), p, m, v);
  // The last round is filled with micro-batches that are not run.
  const int rounds = (m + p - 1) / p;
  const int total = rounds * p * v;
  for (int r = 0; r < p; ++r) {
    List& list = plan.workers[r];
    const auto put = [&](bool forward, int k) {
      const int chunk = k % (p * v) / p;
      int i = k / (p * v) * p + k % p;
      if (i >= m && bug == ScheduleBug::kPaddingRuns) i = m - 1;
      if (i >= m) return;
      list.push_back(forward ? F(chunk * p + r, i) : B((v - 1 - chunk) * p + r, i));
    };
    const int warm = std::min(total, 2 * (p - 1 - r) + (v - 1) * p);
    int f = 0;
    int b = 0;
    while (f < warm) put(true, f++);
    while (f < total) {
      put(true, f++);
      put(false, b++);
    }
    while (b < total) put(false, b++);
  }
  return finish(std::move(plan), bug);
}

Plan zb_h1_with(ScheduleBug bug, int p, int m) {
  Plan plan = chain("zb-h1", p, m);
  const int more = bug == ScheduleBug::kOneMorePending ? 1 : 0;
  for (int r = 0; r < p; ++r) zb_h_list(&plan.workers[r], r, m, p - r, r + more);
  return finish(std::move(plan), bug);
}

}  // namespace

Plan sequential(int p, int m) {
  Plan plan = chain("sequential", p, m);
  for (int r = 0; r < p; ++r) one_f_one_b_list(&plan.workers[r], r, m, 0);
  return finish(std::move(plan));
}

Plan gpipe(int p, int m) {
  Plan plan = chain("gpipe", p, m);
  for (int r = 0; r < p; ++r) one_f_one_b_list(&plan.workers[r], r, m, m);
  return finish(std::move(plan));
}

Plan one_f_one_b(int p, int m, int extra) {
  return one_f_one_b_with(ScheduleBug::kNone, p, m, extra);
}

Plan interleaved(int p, int m, int v) { return interleaved_with(ScheduleBug::kNone, p, m, v); }

Plan looped_bfs(int p, int m, int v) {
  Plan plan = chain(absl::StrCat("looped_bfs:", v), p, m, v);
  for (int r = 0; r < p; ++r) {
    for (int c = 0; c < v; ++c) {
      for (int i = 0; i < m; ++i) plan.workers[r].push_back(F(c * p + r, i));
    }
    for (int c = v - 1; c >= 0; --c) {
      for (int i = 0; i < m; ++i) plan.workers[r].push_back(B(c * p + r, i));
    }
  }
  return finish(std::move(plan));
}

Plan zb_h1(int p, int m) { return zb_h1_with(ScheduleBug::kNone, p, m); }

Plan zb_h2(int p, int m) {
  Plan plan = chain("zb-h2", p, m);
  for (int r = 0; r < p; ++r) zb_h_list(&plan.workers[r], r, m, 2 * (p - r) - 1, 2 * r);
  return finish(std::move(plan));
}

Plan zb_v(int p, int m) {
  Plan plan = chain("zb-v", p, m, 2);
  for (int s = p; s < 2 * p; ++s) plan.placement[s] = 2 * p - 1 - s;
  for (int r = 0; r < p; ++r) {
    VList list(&plan.workers[r], r, 2 * p - 1 - r, m);
    for (int k = 0; k < 2 * (p - r) - 1; ++k) list.f(0);
    for (int k = 0; k < r; ++k) list.f(1), list.f(0);
    for (int k = 0; k < p - r; ++k) list.f(1), list.i(1), list.w(1);
    while (list.forwards_left()) {
      list.f(0), list.i(0), list.w(0);
      list.f(1), list.i(1), list.w(1);
    }
    for (int k = 0; k < r; ++k) list.i(0), list.i(1);
    for (int k = 0; k < p - r; ++k) list.i(0), list.w(0);
    list.rest();
  }
  return finish(std::move(plan));
}

Plan pipedream(int p, int m) {
  Plan plan = chain("pipedream", p, m);
  plan.asynchronous = true;
  for (int r = 0; r < p; ++r) one_f_one_b_list(&plan.workers[r], r, m, std::min(m, p - 1 - r));
  return finish(std::move(plan));
}

std::vector<std::string> schedule_names() {
  return {"sequential",   "gpipe", "1f1b",  "1f1b+1", "1f1b+split", "interleaved:2",
          "looped_bfs:2", "zb-h1", "zb-h2", "zb-v",   "pipedream"};
}

StatusOr<Plan> make_schedule(std::string_view name, int p, int m) {
  return internal::make_schedule_with(ScheduleBug::kNone, name, p, m);
}

StatusOr<Plan> internal::make_schedule_with(ScheduleBug bug, std::string_view name, int p, int m) {
  std::string_view rest = name;
  int number = 0;
  const auto numbered = [&](std::string_view prefix) {
    rest = name;
    if (rest.substr(0, prefix.size()) != prefix) return false;
    rest.remove_prefix(prefix.size());
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), number);
    return error == std::errc() && end == rest.data() + rest.size();
  };
  try {
    constexpr std::string_view kSplit = "+split";
    const std::string_view whole =
        name.substr(0, name.size() - std::min(name.size(), kSplit.size()));
    if (name.ends_with(kSplit) && !whole.ends_with(kSplit)) {
      WEFT_ASSIGN_OR_RETURN(Plan plan, make_schedule_with(bug, whole, p, m));
      return with_split_backwards(std::move(plan));
    }
    if (name == "sequential") return sequential(p, m);
    if (name == "gpipe") return gpipe(p, m);
    if (name == "1f1b") return one_f_one_b_with(bug, p, m, 0);
    if (numbered("1f1b+")) return one_f_one_b_with(bug, p, m, number);
    if (name == "interleaved") return interleaved_with(bug, p, m, 2);
    if (numbered("interleaved:")) return interleaved_with(bug, p, m, number);
    if (name == "looped_bfs") return looped_bfs(p, m);
    if (numbered("looped_bfs:")) return looped_bfs(p, m, number);
    if (name == "zb-h1") return zb_h1_with(bug, p, m);
    if (name == "zb-h2") return zb_h2(p, m);
    if (name == "zb-v") return zb_v(p, m);
    if (name == "pipedream") return pipedream(p, m);
  } catch (const Error& error) {
    return error.status();
  }
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("no schedule is called '", std::string(name.substr(0, 40)),
                                 "'; there are ", absl::StrJoin(schedule_names(), ", ")));
}

}  // namespace weft::pipeline
