// The verifier: every schedule is accepted, plans of bug reports are refused, and mutated plans are
// judged as an executor judges that tries every order.
#include "weft/pipeline/verifier.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/pipeline/schedule.h"
#include "weft/tests/pipeline/refused_plans.h"
#include "weft/tests/testing/environment.h"

namespace weft::pipeline {
namespace {

using ::testing::HasSubstr;

Plan parse(const std::string& text) { return value_or_throw(plan_from_text(text)); }

TEST(Verifier, PP_1_AcceptsEverySchedule) {
  for (const std::string& name : schedule_names()) {
    for (int p : {1, 2, 3, 4, 8}) {
      for (int m = 1; m <= 4 * p; ++m) {
        if (p == 8 && m % 5 != 1) continue;
        const Verdict v = verify(*make_schedule(name, p, m));
        EXPECT_TRUE(v.ok()) << name << " " << p << " " << m << " " << v.certificate();
      }
    }
  }
  const Verdict v = verify(one_f_one_b(4, 8), {.memory_cap = 4});
  EXPECT_THAT(v.certificate(), HasSubstr("live activations at most 4, 3, 2, 1 by worker"));
  EXPECT_TRUE(v.status().ok());
}

TEST(Verifier, PP_1_SkipsAndTies) {
  Plan plan;
  plan.schedule = "by-hand";
  plan.micro_batches = 3;
  plan.placement = {0, 1, 2};
  plan.edges = {{0, 1, 0}, {0, 2, 1}, {1, 2}};
  plan.tied = {{0, 2}};
  for (int s = 0; s < 3; ++s) {
    auto& list = plan.workers.emplace_back();
    for (int i = 0; i < 3; ++i) list.push_back({ActionKind::kForward, s, i});
    for (int i = 0; i < 3; ++i) list.push_back({ActionKind::kBackward, s, i});
    list.push_back({ActionKind::kReduce, s});
    list.push_back({ActionKind::kStep, s});
  }
  throw_if_error(insert_transfers(&plan));
  EXPECT_TRUE(verify(plan).ok()) << verify(plan).certificate();
  // Each that lacks one of its actions is refused.
  for (size_t w = 0; w < 3; ++w) {
    for (size_t k = 0; k < plan.workers[w].size(); ++k) {
      Plan less = plan;
      less.workers[w].erase(less.workers[w].begin() + static_cast<int64_t>(k));
      const bool optional = plan.workers[w][k] == Action{ActionKind::kReduce, 1};
      EXPECT_EQ(verify(less).ok(), optional) << to_text(plan, plan.workers[w][k]);
    }
  }
}

// Bug reports, as plans. Their sends wait for their receivers.
TEST(Verifier, RefusesSendsThatMeetNobody) {  // pytorch#172668, before
  const Plan plan = parse(weft::testing::kSendsThatMeetNobody);
  const Verdict v = verify(plan);
  ASSERT_FALSE(v.ok());
  EXPECT_EQ(v.problems[0].rule, "VERIFY-2");
  EXPECT_THAT(v.problems[0].text,
              HasSubstr("deadlock with sends that wait and 0 buffers: worker 0: SF0>1.1 waits for "
                        "worker 1: SF1>2.0 waits for worker 0 again"));
  EXPECT_EQ(error_kind(v.status()), ErrorKind::kInvalidArgument);
}

TEST(Verifier, RefusesSwappedReceivesToo) {  // pytorch#172668, after
  const Plan plan = parse(weft::testing::kSwappedReceives);
  const Verdict v = verify(plan);
  ASSERT_FALSE(v.ok());
  EXPECT_EQ(v.problems[0].rule, "VERIFY-2");
  EXPECT_THAT(v.problems[0].text, HasSubstr("worker 0: SF0>1.2 waits for worker 1: SB3>2.0"));
}

TEST(Verifier, RefusesEveryWorkerSendingFirst) {  // Megatron-LM#5100
  const Plan plan = parse(weft::testing::kEveryWorkerSendsFirst);
  const Verdict v = verify(plan);
  ASSERT_FALSE(v.ok());
  EXPECT_EQ(v.problems[0].rule, "VERIFY-2");
  EXPECT_THAT(v.problems[0].text,
              HasSubstr("deadlock with sends that wait and 0 buffers: worker 0: SF0>1.0 waits for "
                        "worker 1: SB1>0.0 waits for worker 0 again"));
}

TEST(Verifier, RefusesASendBehindWhatWaitsForIt) {  // ray-project/ray#60954
  const Plan plan = parse(weft::testing::kASendBehindWhatWaitsForIt);
  const Verdict v = verify(plan);
  ASSERT_FALSE(v.ok());
  EXPECT_THAT(v.problems[0].text,
              HasSubstr("deadlock with sends that never wait: worker 0: RB1>0.0 waits for worker "
                        "1: RF0>1.0 waits for worker 0 again"));
}

TEST(Verifier, BadInput_PlansThatAreWrong) {
  const Plan good = one_f_one_b(2, 2);
  const auto refusal = [&](std::string_view from, std::string_view to, std::string_view more = "",
                           std::string_view more_to = "") {
    std::string text = to_text(good);
    for (const auto& [a, b] : {std::pair(from, to), std::pair(more, more_to)}) {
      if (a.empty()) continue;
      const size_t at = text.find(a);
      EXPECT_NE(at, std::string::npos) << a;
      text.replace(at, a.size(), b);
    }
    const Verdict v = verify(parse(text));
    EXPECT_FALSE(v.ok()) << text;
    return v.ok() ? "" : v.problems[0].rule + " " + v.problems[0].text;
  };
  EXPECT_THAT(refusal(" SF0>1.1", ""), HasSubstr("VERIFY-1 worker 1: RF0>1.1: nobody sends it"));
  EXPECT_THAT(refusal(" RF0>1.1", ""), HasSubstr("VERIFY-1 worker 0: SF0>1.1: nobody receives it"));
  EXPECT_THAT(refusal("F0.0", "F0.0 F0.0"), HasSubstr("VERIFY-3 worker 0: F0.0: is there twice"));
  EXPECT_THAT(refusal(" U0", ""), HasSubstr("VERIFY-3 worker 0: U0 is missing"));
  EXPECT_THAT(refusal(" B1.1", "", " SB1>0.1", ""), HasSubstr("VERIFY-1"));
  EXPECT_THAT(refusal(" B0.1", "", " U0", ""), HasSubstr("VERIFY-3 worker 0: B0.1 is missing"));
  EXPECT_THAT(refusal(" B0.1", ""),
              HasSubstr("VERIFY-3 worker 0: U0: only 1 of 2 gradients of stage 0 are in"));
  EXPECT_THAT(refusal("B1.0", "I1.0"), HasSubstr("VERIFY-3 worker 1: U1: only 1 of 2"));
  EXPECT_THAT(refusal("F1.0", "W1.0 F1.0"), HasSubstr("its input gradient has not run"));
  const Verdict v = verify(good, {.memory_cap = 1});
  EXPECT_THAT(v.certificate(),
              HasSubstr("refused (VERIFY-4): worker 0 holds 2 activations, and may hold 1"));
}

TEST(Verifier, PP_1_LargePlansAreQuick) {
  // Counts, not time: a proof looks at every action a bounded number of times; here it ends.
  const Verdict v = verify(interleaved(16, 128, 2));
  EXPECT_TRUE(v.ok());
  EXPECT_EQ(v.sends, 2 * 31 * 128);
}

// ---- against an executor that tries every order
// --------------------------------------------------

// Runs a plan in every order that workers and buffers allow, with values that name what they are,
// and says whether each one ends, with the right gradients.
class Executor {
 public:
  Executor(const Plan& plan, int buffers) : plan_(plan), buffers_(buffers) {}

  bool right() {
    State state;
    state.at.resize(plan_.workers.size());
    state.gradients.resize(plan_.placement.size());
    state.stepped.resize(plan_.placement.size());
    return explore(state);
  }

 private:
  struct State {
    std::vector<size_t> at;
    std::set<std::string> values;  // "y0.1@2": the result of stage 0 for micro-batch 1, at worker 2
    std::map<std::pair<int, int>, std::multiset<std::string>> boxes;
    std::vector<std::multiset<int>> gradients;
    std::vector<bool> stepped;
    auto operator<=>(const State&) const = default;
  };

  bool explore(const State& state) {
    if (!seen_.insert(state.at).second) return true;  // another order reaches the same
    bool moved = false;
    bool ended = true;
    for (size_t w = 0; w < plan_.workers.size(); ++w) {
      if (state.at[w] == plan_.workers[w].size()) continue;
      ended = false;
      State next = state;
      const int outcome = step(static_cast<int>(w), &next);
      if (outcome < 0) return false;
      if (outcome == 0) continue;
      moved = true;
      if (!explore(next)) return false;
    }
    if (!ended) return moved;
    for (size_t s = 0; s < plan_.placement.size(); ++s) {
      std::multiset<int> all;
      for (int i = 0; i < plan_.micro_batches; ++i) all.insert(i);
      if (!state.stepped[s] || state.gradients[s] != all) return false;
    }
    for (const auto& [pair, box] : state.boxes) {
      if (!box.empty()) return false;
    }
    return true;
  }

  static std::string name(const char* what, int s, int i) { return absl::StrCat(what, s, ".", i); }
  // 1: done, 0: waits, -1: wrong.
  int step(int w, State* st) {
    const Action& a = plan_.workers[w][st->at[w]];
    if (plan_.placement[a.stage] != w) return -1;
    const int s = a.stage;
    const int i = a.micro_batch;
    const auto here = [&](const std::string& value) {
      return st->values.count(absl::StrCat(value, "@", w)) > 0;
    };
    const auto put = [&](const std::string& value) {
      return st->values.insert(absl::StrCat(value, "@", w)).second;
    };
    const bool backward =
        a.kind == ActionKind::kSendBackward || a.kind == ActionKind::kReceiveBackward;
    switch (a.kind) {
      case ActionKind::kForward:
        for (const Edge& e : plan_.edges) {
          if (e.to == s && !here(name("y", e.from, i))) return -1;
        }
        if (st->stepped[s] || !put(name("y", s, i))) return -1;
        break;
      case ActionKind::kBackward:
      case ActionKind::kInputGrad:
        for (const Edge& e : plan_.edges) {
          if (e.from == s && !here(name("d", e.to, i))) return -1;
        }
        if (st->stepped[s] || !here(name("y", s, i)) || !put(name("d", s, i))) return -1;
        if (a.kind == ActionKind::kBackward) {
          if (!put(name("w", s, i))) return -1;
          st->gradients[s].insert(i);
        }
        break;
      case ActionKind::kWeightGrad:
        if (st->stepped[s] || !here(name("d", s, i)) || !put(name("w", s, i))) return -1;
        st->gradients[s].insert(i);
        break;
      case ActionKind::kStep:
        if (st->stepped[s] || static_cast<int>(st->gradients[s].size()) != plan_.micro_batches) {
          return -1;
        }
        st->stepped[s] = true;
        break;
      case ActionKind::kSendForward:
      case ActionKind::kSendBackward: {
        const Edge& e = plan_.edges[a.edge];
        const int peer = plan_.placement[backward ? e.from : e.to];
        if (peer == w || !here(name(backward ? "d" : "y", s, i))) return -1;
        if (buffers_ == 0) {
          const auto& list = plan_.workers[peer];
          if (st->at[peer] == list.size() || !matches(a, list[st->at[peer]])) return 0;
          ++st->at[peer];
          if (!deliver(a, peer, st)) return -1;
          break;
        }
        auto& box = st->boxes[{w, peer}];
        if (buffers_ > 0 && static_cast<int>(box.size()) >= buffers_) return 0;
        box.insert(key(a));
        break;
      }
      case ActionKind::kReceiveForward:
      case ActionKind::kReceiveBackward: {
        const Edge& e = plan_.edges[a.edge];
        const int peer = plan_.placement[backward ? e.to : e.from];
        if (peer == w) return -1;
        if (buffers_ == 0) return 0;  // its sender does it
        auto& box = st->boxes[{peer, w}];
        const auto it = box.find(key(a));
        if (it == box.end()) return 0;
        box.erase(it);
        if (!deliver(a, w, st)) return -1;
        break;
      }
      default: return -1;
    }
    ++st->at[w];
    return 1;
  }
  static std::string key(const Action& a) {
    const bool backward =
        a.kind == ActionKind::kSendBackward || a.kind == ActionKind::kReceiveBackward;
    return absl::StrCat(a.edge, ".", a.micro_batch, backward ? "b" : "f");
  }
  static bool matches(const Action& send, const Action& other) {
    return (other.kind == ActionKind::kReceiveForward ||
            other.kind == ActionKind::kReceiveBackward) &&
           key(send) == key(other);
  }
  // False: a second time, which no slot takes.
  bool deliver(const Action& a, int to, State* st) {
    const bool backward =
        a.kind == ActionKind::kSendBackward || a.kind == ActionKind::kReceiveBackward;
    const Edge& e = plan_.edges[a.edge];
    const int from = backward ? e.to : e.from;
    return st->values.insert(absl::StrCat(name(backward ? "d" : "y", from, a.micro_batch), "@", to))
        .second;
  }

  const Plan& plan_;
  const int buffers_;
  std::set<std::vector<size_t>> seen_;
};

bool executes(const Plan& plan) {
  return Executor(plan, 0).right() && Executor(plan, 1).right() && Executor(plan, -1).right();
}

// One random change: drop, double, swap, move to another worker, another micro-batch or kind.
void mutate(Plan* plan, std::mt19937_64* random) {
  const auto below = [&](size_t n) { return static_cast<size_t>((*random)() % n); };
  auto& list = plan->workers[below(plan->workers.size())];
  if (list.empty()) return;
  const size_t k = below(list.size());
  const auto at = list.begin() + static_cast<int64_t>(k);
  switch (below(7)) {
    case 0: list.erase(at); break;
    case 1:
      list.insert(list.begin() + static_cast<int64_t>(below(list.size() + 1)), list[k]);
      break;
    case 2: std::swap(list[k], list[below(list.size())]); break;
    case 3:
    case 4:  // a neighbour: often nothing changes
      if (k + 1 < list.size()) std::swap(list[k], list[k + 1]);
      break;
    case 5: {
      auto& other = plan->workers[below(plan->workers.size())];
      const Action a = list[k];
      list.erase(at);
      other.insert(other.begin() + static_cast<int64_t>(below(other.size() + 1)), a);
      break;
    }
    default:
      if (list[k].micro_batch >= 0) {
        list[k].micro_batch = static_cast<int>(below(static_cast<size_t>(plan->micro_batches)));
      }
  }
}

TEST(Verifier, PP_1_MutationsAreJudgedAsByEveryOrder) {
  const int wanted = weft::testing::environment_number("WEFT_PIPELINE_MUTATIONS", 10'000);
  const int from = weft::testing::environment_number("WEFT_PIPELINE_MUTATIONS_FROM", 0);
  int accepted = 0;
  for (int n = from; n < from + wanted; ++n) {
    // A long run tells how far it is: one that is ended can be continued.
    if (n > from && n % 50'000 == 0) {
      std::printf("mutations %d to %d\n", from, n - 1);
      std::fflush(stdout);
    }
    std::mt19937_64 random(static_cast<uint64_t>(n) + 1);
    const std::vector<std::string> names = {"sequential", "gpipe", "1f1b", "interleaved:2",
                                            "zb-h1",      "zb-h2", "zb-v", "1f1b+split"};
    const int p = 1 + static_cast<int>(random() % 3);
    const int m = 1 + static_cast<int>(random() % 3);
    Plan plan = *make_schedule(names[random() % names.size()], p, m);
    ASSERT_TRUE(executes(plan)) << to_text(plan);
    for (uint64_t k = 0; k < 1 + random() % 3; ++k) mutate(&plan, &random);
    const Verdict v = verify(plan);
    ASSERT_EQ(v.ok(), executes(plan)) << "mutation " << n << "\n"
                                      << to_text(plan) << v.certificate();
    accepted += v.ok() ? 1 : 0;
  }
  // Both verdicts come often, or the comparison shows nothing.
  EXPECT_GT(accepted, wanted / 10);
  EXPECT_LT(accepted, wanted / 2);
}

}  // namespace
}  // namespace weft::pipeline
