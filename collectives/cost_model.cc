#include "weft/collectives/cost_model.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "absl/strings/str_cat.h"
#include "weft/collectives/internal/schedule.h"
#include "weft/collectives/internal/schedule_sim.h"
#include "weft/common/internal/text.h"

namespace weft {
namespace {

using internal::Blocks;
using internal::Schedule;

constexpr double kTicksPerSecond = 1e15;
constexpr double kLongest = 3600;  // seconds

// What a formula is made of. Bytes and times are of the whole operation.
struct Terms {
  double p = 0;
  double n = 0;  // bytes
  CostParameters cost;

  double lg_up() const { return std::ceil(std::log2(p)); }
  double q() const { return std::exp2(std::floor(std::log2(p))); }
  bool folds() const { return p > q(); }
  // Time of one message of that many bytes.
  double message(double bytes) const { return cost.alpha + bytes * cost.beta; }
  double reduced(double bytes) const { return bytes * cost.gamma; }
  // The ranks above a power of two hand their elements over first, and get the result last.
  double fold() const { return folds() ? 2 * message(n) + reduced(n) : 0; }
};

double ring(const Terms& t) {
  return 2 * (t.p - 1) * t.message(t.n / t.p) + (t.p - 1) * t.reduced(t.n / t.p);
}

// `messages`: of a round; the two halves of a mesh go at the same time.
double torus(const Terms& t, int dimensions, int messages) {
  double steps = 0;
  for (const int x : internal::torus_dimensions(static_cast<int>(t.p), dimensions)) {
    steps += 2 * (x - 1);
  }
  // A prime number of ranks has a ring, whose buffer is not halved.
  const bool is_ring = internal::torus_dimensions(static_cast<int>(t.p), 2).size() == 1;
  return steps * (is_ring ? 1 : messages) * t.cost.alpha +
         (t.p - 1) / t.p * (2 * t.n * t.cost.beta + t.reduced(t.n));
}

struct Row {
  Algorithm algorithm;
  bool exact;
  double (*formula)(const Terms&);
};

// reference: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005, and docs/collectives.md. A segmented
// ring could hide the reduction of one segment behind the transfer of the next; the engine reduces
// before it goes on, so that its time is within 5 % of the formula while gamma is at most beta / 8.
constexpr Row kAllReduce[] = {
    {Algorithm::kNaive, true,
     [](const Terms& t) { return (t.p - 1) * (t.message(t.n) + t.reduced(t.n)); }},
    {Algorithm::kStar, true,
     [](const Terms& t) { return 2 * (t.p - 1) * t.message(t.n) + (t.p - 1) * t.reduced(t.n); }},
    {Algorithm::kReduceBroadcast, true,
     [](const Terms& t) { return t.lg_up() * (2 * t.message(t.n) + t.reduced(t.n)); }},
    {Algorithm::kRecursiveDoubling, true,
     [](const Terms& t) {
       return std::log2(t.q()) * (t.message(t.n) + t.reduced(t.n)) + t.fold();
     }},
    {Algorithm::kHalvingDoubling, true,
     [](const Terms& t) {
       const double part = (t.q() - 1) / t.q() * t.n;
       return 2 * std::log2(t.q()) * t.cost.alpha + 2 * part * t.cost.beta + t.reduced(part) +
              t.fold();
     }},
    {Algorithm::kRing, true, ring},
    {Algorithm::kSegmentedRing, false,
     [](const Terms& t) {
       constexpr double kSegments = 4;
       const double segment = t.n / (t.p * kSegments);
       return 2 * (t.p - 1) * kSegments * t.message(segment) + (t.p - 1) * t.reduced(segment);
     }},
    {Algorithm::kTorus, true, [](const Terms& t) { return torus(t, 2, 1); }},
    {Algorithm::kTorus3D, true, [](const Terms& t) { return torus(t, 3, 1); }},
    {Algorithm::kMesh, true, [](const Terms& t) { return torus(t, 2, 2); }},
};

struct OperationRow {
  std::string_view name;
  std::string_view algorithm;
  double (*formula)(const Terms&);
  Schedule (*schedule)(int rank, int size, uint64_t elements);
};

constexpr OperationRow kOperations[] = {
    {"broadcast", "binomial tree", [](const Terms& t) { return t.lg_up() * t.message(t.n); },
     [](int rank, int size, uint64_t n) { return internal::broadcast_schedule(rank, size, n, 0); }},
    {"reduce", "binomial tree",
     [](const Terms& t) { return t.lg_up() * (t.message(t.n) + t.reduced(t.n)); },
     [](int rank, int size, uint64_t n) { return internal::reduce_schedule(rank, size, n, 0); }},
    {"all_gather", "ring", [](const Terms& t) { return (t.p - 1) * t.message(t.n / t.p); },
     [](int rank, int size, uint64_t n) {
       return internal::all_gather_schedule(rank, size, Blocks::even(n, size));
     }},
    {"reduce_scatter", "ring",
     [](const Terms& t) { return (t.p - 1) * (t.message(t.n / t.p) + t.reduced(t.n / t.p)); },
     [](int rank, int size, uint64_t n) {
       return internal::reduce_scatter_schedule(rank, size, Blocks::even(n, size));
     }},
    {"all_to_all", "pairwise", [](const Terms& t) { return (t.p - 1) * t.message(t.n / t.p); },
     [](int rank, int size, uint64_t n) {
       return internal::all_to_all_schedule(rank, size, Blocks::even(n, size),
                                            Blocks::even(n, size));
     }},
    {"gather", "direct", [](const Terms& t) { return (t.p - 1) * t.message(t.n / t.p); },
     [](int rank, int size, uint64_t n) {
       const Blocks blocks = Blocks::even(n, size);
       return internal::gather_schedule(rank, size, blocks, blocks.length(rank), 0);
     }},
    {"scatter", "direct", [](const Terms& t) { return (t.p - 1) * t.message(t.n / t.p); },
     [](int rank, int size, uint64_t n) {
       const Blocks blocks = Blocks::even(n, size);
       return internal::scatter_schedule(rank, size, blocks, blocks.length(rank), 0);
     }},
    {"barrier", "dissemination", [](const Terms& t) { return t.lg_up() * t.cost.alpha; },
     [](int rank, int size, uint64_t) { return internal::barrier_schedule(rank, size); }},
};

Status bad_cost(const std::string& why) {
  return make_error(ErrorKind::kInvalidArgument, absl::StrCat("cost model: ", why));
}

Status check(int ranks, uint64_t elements, uint64_t element_bytes, const CostParameters& cost) {
  if (ranks < 2 || ranks > kMostCostRanks) {
    return bad_cost(absl::StrCat(ranks, " ranks; from 2 to ", kMostCostRanks, " are possible"));
  }
  if (elements == 0 || element_bytes == 0 || elements > (uint64_t{1} << 50) / element_bytes) {
    return bad_cost(absl::StrCat(elements, " elements of ", element_bytes,
                                 " bytes; from 1 element to 2^50 bytes are possible"));
  }
  for (const auto& [name, value] :
       {std::pair{"alpha", cost.alpha}, {"beta", cost.beta}, {"gamma", cost.gamma}}) {
    if (std::isfinite(value) && value >= 0) continue;
    return bad_cost(absl::StrCat(name, " is ", value, "; it must be a time, 0 or more"));
  }
  return absl::OkStatus();
}

CostParameters rounded(const CostParameters& cost) {
  const auto ticks = [](double seconds) {
    return std::round(seconds * kTicksPerSecond) / kTicksPerSecond;
  };
  return {ticks(cost.alpha), ticks(cost.beta), ticks(cost.gamma)};
}

StatusOr<CostEstimate> estimate(std::string_view name, const Terms& terms,
                                double (*formula)(const Terms&), uint64_t element_bytes,
                                const std::function<Schedule(int rank)>& schedule) {
  CostEstimate out;
  out.name = name;
  out.formula = formula(terms);
  // Whatever a schedule does differently, its ticks stay far below 2^63.
  if (out.formula > kLongest) {
    return bad_cost(absl::StrCat(internal::view(name), " would last ", out.formula,
                                 " s; up to an hour is simulated"));
  }
  const auto ticks = [](double seconds) {
    return static_cast<EventSim::Ticks>(std::llround(seconds * kTicksPerSecond));
  };
  const int ranks = static_cast<int>(terms.p);
  internal::ScheduleSim sim(
      ranks, element_bytes,
      {ticks(terms.cost.alpha), ticks(terms.cost.beta), ticks(terms.cost.gamma)});
  for (int rank = 0; rank < ranks; ++rank) WEFT_RETURN_IF_ERROR(sim.add(schedule(rank)));
  WEFT_ASSIGN_OR_RETURN(const internal::SimResult result, sim.run());
  out.simulated = static_cast<double>(result.ticks) / kTicksPerSecond;
  out.messages = result.messages;
  out.bytes = result.bytes;
  return out;
}

}  // namespace

StatusOr<std::vector<CostEstimate>> try_estimate_all_reduce(int ranks, uint64_t elements,
                                                            const CostParameters& cost,
                                                            uint64_t element_bytes) {
  WEFT_RETURN_IF_ERROR(check(ranks, elements, element_bytes, cost));
  const Terms terms{static_cast<double>(ranks), static_cast<double>(elements * element_bytes),
                    rounded(cost)};
  std::vector<CostEstimate> out;
  for (const Row& row : kAllReduce) {
    WEFT_ASSIGN_OR_RETURN(CostEstimate one,
                          estimate(algorithm_name(static_cast<uint8_t>(row.algorithm)), terms,
                                   row.formula, element_bytes, [&](int rank) {
                                     return internal::all_reduce_schedule(row.algorithm, rank,
                                                                          ranks, elements);
                                   }));
    one.algorithm = row.algorithm;
    one.exact = row.exact;
    out.push_back(one);
  }
  return out;
}

StatusOr<CostEstimate> try_estimate_operation(std::string_view operation, int ranks,
                                              uint64_t elements, const CostParameters& cost,
                                              uint64_t element_bytes) {
  WEFT_RETURN_IF_ERROR(check(ranks, elements, element_bytes, cost));
  const Terms terms{static_cast<double>(ranks), static_cast<double>(elements * element_bytes),
                    rounded(cost)};
  std::string names;
  for (const OperationRow& row : kOperations) {
    absl::StrAppend(&names, names.empty() ? "" : ", ", internal::view(row.name));
    if (row.name != operation) continue;
    return estimate(row.algorithm, terms, row.formula, element_bytes,
                    [&](int rank) { return row.schedule(rank, ranks, elements); });
  }
  return bad_cost(
      absl::StrCat("there is no operation '", internal::view(operation), "': all_reduce, ", names));
}

const CostEstimate& fastest(const std::vector<CostEstimate>& estimates) {
  return *std::min_element(
      estimates.begin(), estimates.end(),
      [](const CostEstimate& a, const CostEstimate& b) { return a.simulated < b.simulated; });
}

}  // namespace weft
