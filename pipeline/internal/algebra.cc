#include "weft/pipeline/internal/algebra.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace weft::pipeline::internal {
namespace {

constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;

uint64_t mul(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b % kPrime);
}
uint64_t add(uint64_t a, uint64_t b) { return (a + b) % kPrime; }

// A number for what it is asked for: neither zero nor equal for two questions, but by chance.
uint64_t draw(uint64_t seed, uint64_t what, uint64_t a, uint64_t b) {
  uint64_t x = seed * 0x9E3779B97F4A7C15u + what * 0xBF58476D1CE4E5B9u + a * 0x94D049BB133111EBu +
               b * 0xD6E8FEB86659FD93u;
  for (int round = 0; round < 3; ++round) {
    x ^= x >> 32;
    x *= 0xD6E8FEB86659FD93u;
  }
  x ^= x >> 32;
  return x % (kPrime - 1) + 1;
}
enum What : uint64_t { kWeight, kBias, kInput, kFactor, kLoss };

// The stages and their weights.
class Model {
 public:
  Model(const Plan& plan, uint64_t seed) : seed_(seed), weight_of_(plan.stages()) {
    for (int s = 0; s < plan.stages(); ++s) weight_of_[s] = s;
    for (const auto& group : plan.tied) {
      for (int s : group) weight_of_[s] = weight_of_[group[0]];
    }
  }
  int weight_of(int s) const { return weight_of_[s]; }
  uint64_t a(int s) const { return draw(seed_, kWeight, weight_of_[s], 0); }
  uint64_t b(int s) const { return draw(seed_, kBias, s, 0); }
  uint64_t input(int s, int i) const { return draw(seed_, kInput, s, i); }
  uint64_t factor(int e) const { return draw(seed_, kFactor, e, 0); }
  uint64_t loss(int s, int i) const { return draw(seed_, kLoss, s, i); }

 private:
  const uint64_t seed_;
  std::vector<int> weight_of_;
};

class Execution {
 public:
  Execution(const Plan& plan, uint64_t seed)
      : plan_(plan),
        model_(plan, seed),
        from_(edges_from(plan)),
        to_(edges_to(plan)),
        at_(plan.workers.size()),
        cells_(size_t{1} * plan.stages() * plan.micro_batches),
        slots_(2 * plan.edges.size() * plan.micro_batches),
        gradient_(plan.stages()),
        at_step_(plan.stages()),
        group_of_(plan.stages(), nullptr),
        reduced_(plan.stages()) {
    for (const auto& group : plan.tied) {
      for (int s : group) group_of_[s] = &group;
    }
  }

  std::optional<std::string> run() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (size_t w = 0; w < at_.size(); ++w) {
        while (at_[w] < plan_.workers[w].size()) {
          const Action& a = plan_.workers[w][at_[w]];
          if (!perform(a)) break;
          ++at_[w];
          moved = true;
        }
      }
    }
    // A worker that waits for a shared weight is the cause, if there is one.
    std::string stuck;
    for (size_t w = 0; w < at_.size(); ++w) {
      if (at_[w] == plan_.workers[w].size()) continue;
      const Action& a = plan_.workers[w][at_[w]];
      const std::string why = waits_for(a);
      if (!stuck.empty() && why.empty()) continue;
      stuck = absl::StrCat("worker ", w, " cannot execute ", to_text(plan_, a), why);
      if (!why.empty()) break;
    }
    if (!stuck.empty()) return stuck;
    return compare();
  }

 private:
  struct Cell {  // of a stage and a micro-batch
    std::optional<uint64_t> x;
    std::optional<uint64_t> y;
    std::optional<uint64_t> dy;
    std::optional<uint64_t> dx;
  };
  Cell& cell(int s, int i) { return cells_[size_t{1} * s * plan_.micro_batches + i]; }
  std::optional<uint64_t>& slot(int e, int i, bool backward) {
    return slots_[2 * (size_t{1} * e * plan_.micro_batches + i) + (backward ? 1 : 0)];
  }
  bool local(int e) const {
    return plan_.placement[plan_.edges[e].from] == plan_.placement[plan_.edges[e].to];
  }

  // False: what it needs is not there.
  bool perform(const Action& a) {
    const int s = a.stage;
    const int i = a.micro_batch;
    switch (a.kind) {
      case ActionKind::kForward: return forward(s, i);
      case ActionKind::kRecompute: return cell(s, i).x.has_value();
      case ActionKind::kBackward: return input_grad(s, i) && weight_grad(s, i);
      case ActionKind::kInputGrad: return input_grad(s, i);
      case ActionKind::kWeightGrad: return weight_grad(s, i);
      case ActionKind::kSendForward: return copy(cell(s, i).y, &slot(a.edge, i, false));
      case ActionKind::kSendBackward: return copy(cell(s, i).dx, &slot(a.edge, i, true));
      case ActionKind::kReceiveForward: return slot(a.edge, i, false).has_value();
      case ActionKind::kReceiveBackward: return slot(a.edge, i, true).has_value();
      case ActionKind::kReduce: return reduce(s);
      case ActionKind::kStep:
        if (!waits_for(a).empty()) return false;
        at_step_[s] = gradient_[s];
        return true;
    }
    return false;
  }
  // A weight's gradients are summed when all of its stages have theirs; a worker with several of them
  // waits with the last one.
  bool reduce(int s) {
    reduced_[s] = true;
    if (group_of_[s] == nullptr) return true;
    for (int other : *group_of_[s]) {
      if (!reduced_[other] && plan_.placement[other] == plan_.placement[s]) return true;
    }
    return waits_for({ActionKind::kReduce, s}).empty();
  }
  std::string waits_for(const Action& a) const {
    if (group_of_[a.stage] == nullptr) return "";
    if (a.kind != ActionKind::kReduce && a.kind != ActionKind::kStep) return "";
    for (int other : *group_of_[a.stage]) {
      if (!reduced_[other]) {
        return absl::StrCat(": stage ", other, ", which has the same weight, has not been reduced");
      }
    }
    return "";
  }
  static bool copy(const std::optional<uint64_t>& from, std::optional<uint64_t>* to) {
    *to = from;
    return from.has_value();
  }
  bool forward(int s, int i) {
    uint64_t x = to_[s].empty() ? model_.input(s, i) : 0;
    for (int e : to_[s]) {
      const auto& y = local(e) ? cell(plan_.edges[e].from, i).y : slot(e, i, false);
      if (!y.has_value()) return false;
      x = add(x, mul(model_.factor(e), *y));
    }
    cell(s, i).x = x;
    cell(s, i).y = add(mul(model_.a(s), x), model_.b(s));
    return true;
  }
  bool input_grad(int s, int i) {
    uint64_t dy = from_[s].empty() ? model_.loss(s, i) : 0;
    for (int e : from_[s]) {
      const auto& dx = local(e) ? cell(plan_.edges[e].to, i).dx : slot(e, i, true);
      if (!dx.has_value()) return false;
      dy = add(dy, mul(model_.factor(e), *dx));
    }
    cell(s, i).dy = dy;
    cell(s, i).dx = mul(model_.a(s), dy);
    return true;
  }
  bool weight_grad(int s, int i) {
    const Cell& c = cell(s, i);
    if (!c.x.has_value() || !c.dy.has_value()) return false;
    gradient_[s] = add(gradient_[s], mul(*c.dy, *c.x));
    return true;
  }

  // With the model without a pipeline, one micro-batch after the other.
  std::optional<std::string> compare() {
    const int n = plan_.stages();
    std::vector<uint64_t> want(n);
    for (int i = 0; i < plan_.micro_batches; ++i) {
      std::vector<uint64_t> x(n);
      std::vector<uint64_t> y(n);
      std::vector<uint64_t> dx(n);
      for (int s = 0; s < n; ++s) {
        x[s] = to_[s].empty() ? model_.input(s, i) : 0;
        for (int e : to_[s]) x[s] = add(x[s], mul(model_.factor(e), y[plan_.edges[e].from]));
        y[s] = add(mul(model_.a(s), x[s]), model_.b(s));
      }
      for (int s = n - 1; s >= 0; --s) {
        uint64_t dy = from_[s].empty() ? model_.loss(s, i) : 0;
        for (int e : from_[s]) dy = add(dy, mul(model_.factor(e), dx[plan_.edges[e].to]));
        dx[s] = mul(model_.a(s), dy);
        want[model_.weight_of(s)] = add(want[model_.weight_of(s)], mul(dy, x[s]));
      }
    }
    std::vector<uint64_t> got(n);
    for (int s = 0; s < n; ++s) {
      got[model_.weight_of(s)] = add(got[model_.weight_of(s)], at_step_[s]);
    }
    for (int s = 0; s < n; ++s) {
      if (got[s] != want[s]) {
        return absl::StrCat("the gradient of stage ", s,
                            " at its step is not that of the model without a pipeline");
      }
    }
    return std::nullopt;
  }

  const Plan& plan_;
  const Model model_;
  const std::vector<std::vector<int>> from_;
  const std::vector<std::vector<int>> to_;
  std::vector<size_t> at_;
  std::vector<Cell> cells_;
  std::vector<std::optional<uint64_t>> slots_;
  std::vector<uint64_t> gradient_;
  std::vector<uint64_t> at_step_;
  std::vector<const std::vector<int>*> group_of_;  // null: not tied
  std::vector<bool> reduced_;
};

}  // namespace

std::optional<std::string> find_wrong_gradient(const Plan& plan, uint64_t seed) {
  return Execution(plan, seed).run();
}

}  // namespace weft::pipeline::internal
