#include "weft/collectives/cost_model.h"

#include <algorithm>
#include <bit>
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

// Inside each host a tree to its first rank, a ring of these, and a tree back.
double hierarchical_ring(const Terms& t) {
  const double k = t.cost.ranks_per_host;
  const double hosts = t.p / k;
  const double inside = t.cost.local_alpha + t.n * t.cost.local_beta;
  return std::ceil(std::log2(k)) * (2 * inside + t.reduced(t.n)) +
         (hosts - 1) * (2 * t.message(t.n / hosts) + t.reduced(t.n / hosts));
}

// With segments without number it would be 2 lg p alpha + 2 n beta + n gamma. With four in each tree
// the way up and down them is of weight: each level costs two messages, and where the two trees meet
// in a rank their messages wait for each other. Two ranks only exchange their halves.
double double_tree(const Terms& t) {
  const double segment = t.n / 8;
  const double messages = t.p == 2 ? 8 : 4 * t.lg_up() + 13;
  const double reductions = t.p == 2 ? 4 : 2 * t.lg_up() + 5;
  return messages * t.message(segment) + reductions * t.reduced(segment);
}

struct Row {
  Algorithm algorithm;
  // How far formula and simulation may differ; 0: exact.
  double within;
  double (*formula)(const Terms&);
};

// reference: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005, and docs/collectives.md. A segmented
// ring could hide the reduction of one segment behind the transfer of the next; the engine reduces
// before it goes on, so that its time is within 5 % of the formula while gamma is at most beta / 8.
// That of the double binary tree is within 10 % from 5 ranks on, and within a quarter below.
constexpr Row kAllReduce[] = {
    {Algorithm::kNaive, 0,
     [](const Terms& t) { return (t.p - 1) * (t.message(t.n) + t.reduced(t.n)); }},
    {Algorithm::kStar, 0,
     [](const Terms& t) { return 2 * (t.p - 1) * t.message(t.n) + (t.p - 1) * t.reduced(t.n); }},
    {Algorithm::kReduceBroadcast, 0,
     [](const Terms& t) { return t.lg_up() * (2 * t.message(t.n) + t.reduced(t.n)); }},
    {Algorithm::kRecursiveDoubling, 0,
     [](const Terms& t) {
       return std::log2(t.q()) * (t.message(t.n) + t.reduced(t.n)) + t.fold();
     }},
    {Algorithm::kHalvingDoubling, 0,
     [](const Terms& t) {
       const double part = (t.q() - 1) / t.q() * t.n;
       return 2 * std::log2(t.q()) * t.cost.alpha + 2 * part * t.cost.beta + t.reduced(part) +
              t.fold();
     }},
    {Algorithm::kRing, 0, ring},
    {Algorithm::kSegmentedRing, 0.05,
     [](const Terms& t) {
       constexpr double kSegments = 4;
       const double segment = t.n / (t.p * kSegments);
       return 2 * (t.p - 1) * kSegments * t.message(segment) + (t.p - 1) * t.reduced(segment);
     }},
    {Algorithm::kTorus, 0, [](const Terms& t) { return torus(t, 2, 1); }},
    {Algorithm::kTorus3D, 0, [](const Terms& t) { return torus(t, 3, 1); }},
    {Algorithm::kMesh, 0, [](const Terms& t) { return torus(t, 2, 2); }},
    {Algorithm::kDoubleTree, 0.1, double_tree},
    {Algorithm::kHierarchicalRing, 0, hierarchical_ring},
};

struct OperationRow {
  std::string_view name;
  Algorithm algorithm;  // kAuto: there is only one
  double (*formula)(const Terms&);
  Schedule (*schedule)(int rank, int size, uint64_t elements);
};

// p - 1 messages of a block each.
double one_by_one(const Terms& t) { return (t.p - 1) * t.message(t.n / t.p); }
// Messages whose number is that of doublings, with all blocks but one.
double by_doubling(const Terms& t) {
  return t.lg_up() * t.cost.alpha + (t.p - 1) / t.p * t.n * t.cost.beta;
}
double ring_reduce_scatter(const Terms& t) {
  return (t.p - 1) * (t.message(t.n / t.p) + t.reduced(t.n / t.p));
}
// Each block goes once for each bit of the distance that it has to go.
double bruck_all_to_all(const Terms& t) {
  int bits = 0;
  for (unsigned distance = 1; distance < static_cast<unsigned>(t.p); ++distance) {
    bits += std::popcount(distance);
  }
  return t.lg_up() * t.cost.alpha + bits * (t.n / t.p) * t.cost.beta;
}

template <Algorithm kAlgorithm>
Schedule all_gather_of(int rank, int size, uint64_t n) {
  return internal::all_gather_schedule(rank, size, Blocks::even(n, size), kAlgorithm);
}
template <Algorithm kAlgorithm>
Schedule reduce_scatter_of(int rank, int size, uint64_t n) {
  return internal::reduce_scatter_schedule(rank, size, Blocks::even(n, size), kAlgorithm);
}
template <Algorithm kAlgorithm>
Schedule broadcast_of(int rank, int size, uint64_t n) {
  return internal::broadcast_schedule(rank, size, n, 0, kAlgorithm);
}
// Equal blocks, of the shortest one where the elements cannot be cut into equal ones.
uint64_t equal_block(uint64_t n, int size) { return n / static_cast<uint64_t>(size); }

constexpr OperationRow kOperations[] = {
    {"broadcast", Algorithm::kBinomialTree,
     [](const Terms& t) { return t.lg_up() * t.message(t.n); },
     broadcast_of<Algorithm::kBinomialTree>},
    {"broadcast", Algorithm::kScatterAllGather,
     [](const Terms& t) { return by_doubling(t) + one_by_one(t); },
     broadcast_of<Algorithm::kScatterAllGather>},
    {"reduce", Algorithm::kBinomialTree,
     [](const Terms& t) { return t.lg_up() * (t.message(t.n) + t.reduced(t.n)); },
     [](int rank, int size, uint64_t n) { return internal::reduce_schedule(rank, size, n, 0); }},
    {"all_gather", Algorithm::kRing, one_by_one, all_gather_of<Algorithm::kRing>},
    {"all_gather", Algorithm::kRecursiveDoubling, by_doubling,
     all_gather_of<Algorithm::kRecursiveDoubling>},
    {"all_gather", Algorithm::kBruck, by_doubling, all_gather_of<Algorithm::kBruck>},
    {"reduce_scatter", Algorithm::kRing, ring_reduce_scatter, reduce_scatter_of<Algorithm::kRing>},
    {"reduce_scatter", Algorithm::kRecursiveHalving,
     [](const Terms& t) {
       return t.folds() ? ring_reduce_scatter(t)
                        : by_doubling(t) + t.reduced((t.p - 1) / t.p * t.n);
     },
     reduce_scatter_of<Algorithm::kRecursiveHalving>},
    {"all_to_all", Algorithm::kPairwise, one_by_one,
     [](int rank, int size, uint64_t n) {
       return internal::all_to_all_schedule(rank, size, Blocks::even(n, size),
                                            Blocks::even(n, size));
     }},
    {"all_to_all", Algorithm::kBruck, bruck_all_to_all,
     [](int rank, int size, uint64_t n) {
       return internal::bruck_all_to_all_schedule(rank, size, equal_block(n, size));
     }},
    {"gather", Algorithm::kDirect, one_by_one,
     [](int rank, int size, uint64_t n) {
       const Blocks blocks = Blocks::even(n, size);
       return internal::gather_schedule(rank, size, blocks, blocks.length(rank), 0);
     }},
    {"gather", Algorithm::kBinomialTree, by_doubling,
     [](int rank, int size, uint64_t n) {
       return internal::tree_gather_schedule(rank, size, equal_block(n, size), 0);
     }},
    {"scatter", Algorithm::kDirect, one_by_one,
     [](int rank, int size, uint64_t n) {
       const Blocks blocks = Blocks::even(n, size);
       return internal::scatter_schedule(rank, size, blocks, blocks.length(rank), 0);
     }},
    {"scatter", Algorithm::kBinomialTree, by_doubling,
     [](int rank, int size, uint64_t n) {
       return internal::tree_scatter_schedule(rank, size, equal_block(n, size), 0);
     }},
    {"barrier", Algorithm::kAuto, [](const Terms& t) { return t.lg_up() * t.cost.alpha; },
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
  for (const auto& [name, value] : {std::pair{"alpha", cost.alpha},
                                    {"beta", cost.beta},
                                    {"gamma", cost.gamma},
                                    {"local_alpha", cost.local_alpha},
                                    {"local_beta", cost.local_beta}}) {
    if (std::isfinite(value) && value >= 0) continue;
    return bad_cost(absl::StrCat(name, " is ", value, "; it must be a time, 0 or more"));
  }
  if (cost.ranks_per_host < 1 || ranks % cost.ranks_per_host != 0) {
    return bad_cost(absl::StrCat(ranks, " ranks, ", cost.ranks_per_host,
                                 " on each host; the hosts must have equally many"));
  }
  if (cost.local_alpha > cost.alpha || cost.local_beta > cost.beta) {
    return bad_cost("a message inside a host costs more than one between hosts");
  }
  return absl::OkStatus();
}

CostParameters rounded(const CostParameters& cost) {
  const auto ticks = [](double seconds) {
    return std::round(seconds * kTicksPerSecond) / kTicksPerSecond;
  };
  return {ticks(cost.alpha),   ticks(cost.beta),        ticks(cost.gamma),
          cost.ranks_per_host, ticks(cost.local_alpha), ticks(cost.local_beta)};
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
  const CostParameters& cost = terms.cost;
  const int ranks = static_cast<int>(terms.p);
  internal::ScheduleSim sim(ranks, element_bytes,
                            {ticks(cost.alpha), ticks(cost.beta), ticks(cost.gamma),
                             cost.ranks_per_host, ticks(cost.local_alpha), ticks(cost.local_beta)});
  for (int rank = 0; rank < ranks; ++rank) WEFT_RETURN_IF_ERROR(sim.add(schedule(rank)));
  WEFT_ASSIGN_OR_RETURN(const internal::SimResult result, sim.run());
  out.simulated = static_cast<double>(result.ticks) / kTicksPerSecond;
  out.messages = result.messages;
  out.bytes = result.bytes;
  if (cost.ranks_per_host > 1) out.agreement = Agreement::kAtMost;
  return out;
}

}  // namespace

StatusOr<std::vector<CostEstimate>> try_estimate_all_reduce(int ranks, uint64_t elements,
                                                            const CostParameters& cost,
                                                            uint64_t element_bytes) {
  WEFT_RETURN_IF_ERROR(check(ranks, elements, element_bytes, cost));
  const Terms terms{static_cast<double>(ranks), static_cast<double>(elements * element_bytes),
                    rounded(cost)};
  internal::Topology topology;
  for (int rank = 0; rank < ranks; ++rank) topology.host.push_back(rank / cost.ranks_per_host);
  std::vector<CostEstimate> out;
  for (const Row& row : kAllReduce) {
    const bool by_hosts = row.algorithm == Algorithm::kHierarchicalRing;
    // Without hosts it is a ring.
    if (by_hosts && cost.ranks_per_host == 1) continue;
    WEFT_ASSIGN_OR_RETURN(CostEstimate one,
                          estimate(algorithm_name(static_cast<uint8_t>(row.algorithm)), terms,
                                   row.formula, element_bytes, [&](int rank) {
                                     return internal::all_reduce_schedule(
                                         row.algorithm, rank, ranks, elements, topology);
                                   }));
    one.algorithm = row.algorithm;
    if (by_hosts) one.agreement = Agreement::kExact;
    if (one.agreement == Agreement::kExact && row.within > 0) {
      one.agreement = Agreement::kAbout;
      one.within = row.algorithm == Algorithm::kDoubleTree && ranks < 5 ? 0.25 : row.within;
    }
    out.push_back(one);
  }
  return out;
}

StatusOr<std::vector<CostEstimate>> try_estimate_operation(std::string_view operation, int ranks,
                                                           uint64_t elements,
                                                           const CostParameters& cost,
                                                           uint64_t element_bytes) {
  WEFT_RETURN_IF_ERROR(check(ranks, elements, element_bytes, cost));
  const Terms terms{static_cast<double>(ranks), static_cast<double>(elements * element_bytes),
                    rounded(cost)};
  std::string names;
  std::string_view last;
  std::vector<CostEstimate> out;
  for (const OperationRow& row : kOperations) {
    if (row.name != last) {
      absl::StrAppend(&names, names.empty() ? "" : ", ", internal::view(row.name));
    }
    last = row.name;
    if (row.name != operation) continue;
    const std::string_view name = row.algorithm == Algorithm::kAuto
                                      ? std::string_view("dissemination")
                                      : algorithm_name(static_cast<uint8_t>(row.algorithm));
    WEFT_ASSIGN_OR_RETURN(CostEstimate one,
                          estimate(name, terms, row.formula, element_bytes,
                                   [&](int rank) { return row.schedule(rank, ranks, elements); }));
    one.algorithm = row.algorithm;
    out.push_back(one);
  }
  if (!out.empty()) return out;
  return bad_cost(
      absl::StrCat("there is no operation '", internal::view(operation), "': all_reduce, ", names));
}

const CostEstimate& fastest(const std::vector<CostEstimate>& estimates) {
  return *std::min_element(
      estimates.begin(), estimates.end(),
      [](const CostEstimate& a, const CostEstimate& b) { return a.simulated < b.simulated; });
}

}  // namespace weft
