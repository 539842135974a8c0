#include "weft/pipeline/verifier.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/pipeline/internal/algebra.h"

namespace weft::pipeline {
namespace {

bool is_send(ActionKind k) {
  return k == ActionKind::kSendForward || k == ActionKind::kSendBackward;
}
bool is_receive(ActionKind k) {
  return k == ActionKind::kReceiveForward || k == ActionKind::kReceiveBackward;
}
bool is_backward(ActionKind k) {
  return k == ActionKind::kSendBackward || k == ActionKind::kReceiveBackward;
}

// What a transfer carries: edge, micro-batch, direction.
using Name = std::tuple<int, int, bool>;
Name name_of(const Action& a) { return {a.edge, a.micro_batch, is_backward(a.kind)}; }

std::string at(const Plan& plan, size_t worker, const Action& a) {
  return absl::StrCat("worker ", worker, ": ", to_text(plan, a));
}

// VERIFY-1.
std::optional<std::string> find_unpaired(const Plan& plan) {
  std::map<Name, std::pair<int, int>> count;  // sends, receives
  for (size_t w = 0; w < plan.workers.size(); ++w) {
    for (const Action& a : plan.workers[w]) {
      if (!is_send(a.kind) && !is_receive(a.kind)) continue;
      const Edge& e = plan.edges[a.edge];
      if (plan.placement[e.from] == plan.placement[e.to]) {
        return absl::StrCat(at(plan, w, a), ": both stages are at worker ", plan.placement[e.from]);
      }
      if (plan.placement[a.stage] != static_cast<int>(w)) {
        return absl::StrCat(at(plan, w, a), ": stage ", a.stage, " is at worker ",
                            plan.placement[a.stage]);
      }
      auto& [sends, receives] = count[name_of(a)];
      if (++(is_send(a.kind) ? sends : receives) > 1) {
        return absl::StrCat(at(plan, w, a), ": is there twice");
      }
    }
  }
  for (size_t w = 0; w < plan.workers.size(); ++w) {
    for (const Action& a : plan.workers[w]) {
      if (!is_send(a.kind) && !is_receive(a.kind)) continue;
      const auto& [sends, receives] = count[name_of(a)];
      if (sends != receives) {
        return absl::StrCat(at(plan, w, a),
                            is_send(a.kind) ? ": nobody receives it" : ": nobody sends it");
      }
    }
  }
  return std::nullopt;
}

// VERIFY-2: executes the transfers, each list in its order. `buffers`: messages that may be on
// their way from one worker to another before a send waits; -1: it never waits.
class Transfers {
 public:
  Transfers(const Plan& plan, int buffers) : plan_(plan), buffers_(buffers) {}

  // What waits for each other at the end.
  std::optional<std::string> find_deadlock() {
    at_.assign(plan_.workers.size(), 0);
    for (size_t w = 0; w < at_.size(); ++w) advance(w);
    for (size_t w = 0; w < at_.size(); ++w) {
      if (at_[w] < plan_.workers[w].size()) return describe(w);
    }
    return std::nullopt;
  }

 private:
  size_t peer_of(const Action& a) const {
    const Edge& e = plan_.edges[a.edge];
    const int stage = a.stage == e.from ? e.to : e.from;
    return plan_.placement[stage];
  }
  const Action* next(size_t w) const {
    return at_[w] < plan_.workers[w].size() ? &plan_.workers[w][at_[w]] : nullptr;
  }
  // Both ends stand at the same transfer.
  bool meets(const Action& a, const Action* other) const {
    return other != nullptr && name_of(a) == name_of(*other) &&
           ((is_send(a.kind) && is_receive(other->kind)) ||
            (is_receive(a.kind) && is_send(other->kind)));
  }
  // Runs `first` as far as it goes, and then the workers that this unblocks.
  void advance(size_t first) {
    std::vector<size_t> todo{first};
    while (!todo.empty()) {
      const size_t w = todo.back();
      todo.pop_back();
      while (const Action* a = next(w)) {
        if (is_send(a->kind) && !send(w, *a, &todo)) break;
        if (is_receive(a->kind) && !receive(w, *a, &todo)) break;
        ++at_[w];
      }
    }
  }
  bool send(size_t w, const Action& a, std::vector<size_t>* todo) {
    const size_t peer = peer_of(a);
    if (buffers_ == 0) {
      if (!meets(a, next(peer))) return false;
      ++at_[peer];  // both go on
    } else {
      auto& box = boxes_[{w, peer}];
      if (buffers_ > 0 && static_cast<int>(box.size()) >= buffers_) return false;
      box.insert(name_of(a));
    }
    todo->push_back(peer);
    return true;
  }
  bool receive(size_t w, const Action& a, std::vector<size_t>* todo) {
    const size_t peer = peer_of(a);
    if (buffers_ == 0) {
      if (!meets(a, next(peer))) return false;
      ++at_[peer];
    } else if (boxes_[{peer, w}].erase(name_of(a)) == 0) {
      return false;
    }
    todo->push_back(peer);
    return true;
  }
  // From worker to the one it waits for, until one comes twice.
  std::string describe(size_t w) const {
    std::vector<size_t> path;
    while (std::find(path.begin(), path.end(), w) == path.end()) {
      path.push_back(w);
      const Action* a = next(w);
      if (a == nullptr) break;  // it waits for one that has ended
      w = peer_of(*a);
    }
    const auto begin = std::find(path.begin(), path.end(), w);
    std::vector<std::string> parts;
    for (auto it = next(w) == nullptr ? path.begin() : begin; it != path.end(); ++it) {
      parts.push_back(next(*it) == nullptr ? absl::StrCat("worker ", *it, ", which has ended")
                                           : at(plan_, *it, *next(*it)));
    }
    const std::string rule = buffers_ < 0 ? "sends that never wait"
                                          : absl::StrCat("sends that wait and ", buffers_,
                                                         buffers_ == 1 ? " buffer" : " buffers");
    return absl::StrCat(
        "deadlock with ", rule, ": ", absl::StrJoin(parts, " waits for "),
        next(w) == nullptr ? "" : absl::StrCat(" waits for worker ", *begin, " again"));
  }

  const Plan& plan_;
  const int buffers_;
  std::vector<size_t> at_;
  std::map<std::pair<size_t, size_t>, std::set<Name>> boxes_;
};

// VERIFY-3: the order within each worker's list. What comes from others is there after its receive.
class Order {
 public:
  explicit Order(const Plan& plan)
      : plan_(plan),
        from_(edges_from(plan)),
        to_(edges_to(plan)),
        done_(),
        gradients_(plan.stages()) {}

  std::optional<std::string> find_wrong() {
    for (size_t w = 0; w < plan_.workers.size(); ++w) {
      for (const Action& a : plan_.workers[w]) {
        if (const std::string why = wrong(w, a); !why.empty()) {
          return absl::StrCat(at(plan_, w, a), ": ", why);
        }
        done_.insert(key(a));
      }
    }
    return find_missing();
  }

 private:
  static Action key(Action a) {
    if (a.edge >= 0) a.stage = 0;  // both ends alike
    return a;
  }
  bool done(ActionKind kind, int stage, int i) const { return done_.count({kind, stage, i}) > 0; }
  bool transferred(ActionKind kind, int edge, int i) const {
    return done_.count({kind, 0, i, edge}) > 0;
  }
  bool has_input_grad(int stage, int i) const {
    return done(ActionKind::kBackward, stage, i) || done(ActionKind::kInputGrad, stage, i);
  }
  bool remote(int edge) const {
    return plan_.placement[plan_.edges[edge].from] != plan_.placement[plan_.edges[edge].to];
  }

  std::string wrong(size_t w, const Action& a) {
    if (plan_.placement[a.stage] != static_cast<int>(w)) {
      return absl::StrCat("stage ", a.stage, " is at worker ", plan_.placement[a.stage]);
    }
    if (done_.count(key(a)) > 0) return "is there twice";
    const int s = a.stage;
    const int i = a.micro_batch;
    switch (a.kind) {
      case ActionKind::kForward: return wrong_forward(s, i);
      case ActionKind::kRecompute:
        if (!done(ActionKind::kForward, s, i)) return "its forward has not run";
        return has_input_grad(s, i) ? "its backward has run" : "";
      case ActionKind::kBackward:
        if (done(ActionKind::kWeightGrad, s, i)) return "the weights' gradient is there already";
        ++gradients_[s];
        return wrong_backward(s, i);
      case ActionKind::kInputGrad: return wrong_backward(s, i);
      case ActionKind::kWeightGrad:
        ++gradients_[s];
        if (done(ActionKind::kBackward, s, i)) return "a whole backward has run";
        if (!done(ActionKind::kInputGrad, s, i)) return "its input gradient has not run";
        return stepped(s) ? "its stage has stepped" : "";
      case ActionKind::kSendForward:
        return done(ActionKind::kForward, s, i) ? "" : "its forward has not run";
      case ActionKind::kSendBackward: return has_input_grad(s, i) ? "" : "its backward has not run";
      case ActionKind::kReceiveForward:
      case ActionKind::kReceiveBackward: return "";
      case ActionKind::kReduce:
        if (plan_.asynchronous) return "an asynchronous plan reduces nothing";
        if (stepped(s)) return "its stage has stepped";
        return complete(s) ? "" : incomplete(s);
      case ActionKind::kStep:
        if (plan_.asynchronous) {
          return done(ActionKind::kBackward, s, i) ? "" : "its backward has not run";
        }
        if (!complete(s)) return incomplete(s);
        return "";
    }
    return "";
  }
  std::string wrong_forward(int s, int i) const {
    for (int e : to_[s]) {
      const int from = plan_.edges[e].from;
      if (remote(e) ? !transferred(ActionKind::kReceiveForward, e, i)
                    : !done(ActionKind::kForward, from, i)) {
        return absl::StrCat("its input from stage ", from, " is not there");
      }
    }
    return !plan_.asynchronous && stepped(s) ? "its stage has stepped" : "";
  }
  std::string wrong_backward(int s, int i) const {
    if (!done(ActionKind::kForward, s, i)) return "its forward has not run";
    // The other of the two is a second backward.
    if (has_input_grad(s, i)) return "its input gradient has run";
    for (int e : from_[s]) {
      const int to = plan_.edges[e].to;
      if (remote(e) ? !transferred(ActionKind::kReceiveBackward, e, i) : !has_input_grad(to, i)) {
        return absl::StrCat("the gradient from stage ", to, " is not there");
      }
    }
    return !plan_.asynchronous && stepped(s) ? "its stage has stepped" : "";
  }
  bool tied(int s) const {
    return std::any_of(plan_.tied.begin(), plan_.tied.end(), [s](const std::vector<int>& group) {
      return std::count(group.begin(), group.end(), s) > 0;
    });
  }
  bool stepped(int s) const { return done(ActionKind::kStep, s, -1); }
  bool complete(int s) const { return gradients_[s] == plan_.micro_batches; }
  std::string incomplete(int s) const {
    return absl::StrCat("only ", gradients_[s], " of ", plan_.micro_batches, " gradients of stage ",
                        s, " are in");
  }
  std::optional<std::string> find_missing() const {
    for (int s = 0; s < plan_.stages(); ++s) {
      const std::string stage = absl::StrCat("worker ", plan_.placement[s], ": ");
      const auto lacks = [&](const Action& a) {
        return absl::StrCat(stage, to_text(plan_, a), " is missing");
      };
      for (int i = 0; i < plan_.micro_batches; ++i) {
        if (!done(ActionKind::kForward, s, i)) return lacks({ActionKind::kForward, s, i});
        if (!has_input_grad(s, i)) return lacks({ActionKind::kBackward, s, i});
        if (done(ActionKind::kInputGrad, s, i) && !done(ActionKind::kWeightGrad, s, i)) {
          return lacks({ActionKind::kWeightGrad, s, i});
        }
        if (plan_.asynchronous && !done(ActionKind::kStep, s, i)) {
          return lacks({ActionKind::kStep, s, i});
        }
      }
      if (!plan_.asynchronous && !stepped(s)) return lacks({ActionKind::kStep, s});
      if (tied(s) && !done(ActionKind::kReduce, s, -1)) return lacks({ActionKind::kReduce, s});
    }
    return std::nullopt;
  }

  const Plan& plan_;
  const std::vector<std::vector<int>> from_;
  const std::vector<std::vector<int>> to_;
  std::set<Action> done_;
  std::vector<int> gradients_;
};

// VERIFY-4.
std::vector<int64_t> peaks_of(const Plan& plan) {
  std::vector<int64_t> peaks;
  for (const auto& list : plan.workers) {
    int64_t live = 0;
    int64_t peak = 0;
    std::set<std::pair<int, int>> again;  // forwards that keep nothing
    for (const Action& a : list) {
      if (a.kind == ActionKind::kRecompute) again.insert({a.stage, a.micro_batch});
    }
    for (const Action& a : list) {
      const bool keeps =
          a.kind == ActionKind::kRecompute ||
          (a.kind == ActionKind::kForward && again.count({a.stage, a.micro_batch}) == 0);
      if (keeps) peak = std::max(peak, ++live);
      if (a.kind == ActionKind::kBackward || a.kind == ActionKind::kWeightGrad) --live;
    }
    peaks.push_back(peak);
  }
  return peaks;
}

}  // namespace

Status Verdict::status() const {
  if (ok()) return absl::OkStatus();
  return make_error(
      ErrorKind::kInvalidArgument,
      absl::StrCat("plan '", schedule, "' of ", stages, " stages and ", micro_batches,
                   " micro-batches is refused (", problems[0].rule, "): ", problems[0].text));
}

std::string Verdict::certificate() const {
  std::string out = absl::StrCat("plan ", schedule, ": ", stages, " stages, ", micro_batches,
                                 " micro-batches, ", actions, " actions, ", sends, " sends\n");
  if (!ok()) {
    for (const Problem& p : problems)
      absl::StrAppend(&out, "refused (", p.rule, "): ", p.text, "\n");
    return out;
  }
  absl::StrAppend(&out,
                  "VERIFY-1 every send has its receive\n"
                  "VERIFY-2 no deadlock with 0, 1 and any number of buffers\n"
                  "VERIFY-3 every gradient once, in order, before its reduction and step\n"
                  "VERIFY-4 live activations at most ",
                  absl::StrJoin(peak_activations, ", "),
                  " by worker\n"
                  "VERIFY-5 gradients equal those without a pipeline, over a prime field\n"
                  "accepted\n");
  return out;
}

Verdict verify(const Plan& plan, const VerifyOptions& options) {
  Verdict verdict;
  verdict.schedule = plan.schedule;
  verdict.stages = plan.stages();
  verdict.micro_batches = plan.micro_batches;
  const auto problem = [&](std::string_view rule, std::optional<std::string> text) {
    if (text.has_value()) verdict.problems.push_back({std::string(rule), *std::move(text)});
    return text.has_value();
  };
  if (const Status indices = check_indices(plan); !indices.ok()) {
    problem("VERIFY-1", std::string(indices.message()));
    return verdict;
  }
  verdict.sends = count_sends(plan);
  for (const auto& list : plan.workers) verdict.actions += static_cast<int64_t>(list.size());
  if (problem("VERIFY-1", find_unpaired(plan))) return verdict;
  // A deadlock that buffers do not cure is told before one that they do.
  for (const int buffers : {-1, 0, 1}) {
    if (problem("VERIFY-2", Transfers(plan, buffers).find_deadlock())) break;
  }
  const bool in_order = !problem("VERIFY-3", Order(plan).find_wrong());
  verdict.peak_activations = peaks_of(plan);
  for (size_t w = 0; options.memory_cap > 0 && w < verdict.peak_activations.size(); ++w) {
    if (verdict.peak_activations[w] <= options.memory_cap) continue;
    problem("VERIFY-4", absl::StrCat("worker ", w, " holds ", verdict.peak_activations[w],
                                     " activations, and may hold ", options.memory_cap));
    break;
  }
  if (in_order && verdict.ok())
    problem("VERIFY-5", internal::find_wrong_gradient(plan, options.seed));
  return verdict;
}

}  // namespace weft::pipeline
