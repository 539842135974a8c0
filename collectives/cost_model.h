#ifndef WEFT_COLLECTIVES_COST_MODEL_H_
#define WEFT_COLLECTIVES_COST_MODEL_H_

// Cost model: how long an operation of a group takes, by formula and by a simulation of the
// schedules that the ranks would run, for networks and sizes that are not at hand. It computes; it
// sends nothing, and needs no LibTorch. weft-plan collectives prints it.
//
//   for (const CostEstimate& e : estimate_all_reduce(4096, 64 << 20, {2e-6, 1e-10, 2e-11})) {
//     std::cout << e.name << " " << e.formula << " s, simulated " << e.simulated << " s\n";
//   }
//
// The model: a message of n bytes takes alpha + n beta and keeps the sending port of its sender and
// the receiving port of its receiver busy as long; a rank has one of each. It begins when both
// ranks are in the rounds that it belongs to. When all messages of a round are there, n reduced
// bytes take n gamma, and the next round begins. Between ranks of one host a message takes
// local_alpha + n local_beta.
//
// Pure functions; any thread.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "weft/collectives/algorithm.h"
#include "weft/common/api.h"
#include "weft/common/error.h"

namespace weft {

// Seconds; rounded to femtoseconds.
struct CostParameters {
  double alpha = 0;  // latency of a message
  double beta = 0;   // per byte of a message
  double gamma = 0;  // per byte that is reduced
  // Neighbouring ranks share a host, so many of them. 1: each rank has a host of its own, and the
  // rest is not used.
  int ranks_per_host = 1;
  double local_alpha = 0;  // latency of a message inside a host, at most alpha
  double local_beta = 0;   // per byte of such a message, at most beta
};

// How formula and simulation go together when the number of ranks divides the number of elements.
enum class Agreement : uint8_t {
  kExact,   // to the last bit of arithmetic
  kAbout,   // within CostEstimate::within (cost_model.cc says for which parameters)
  kAtMost,  // the formula is of a network without hosts: the simulation is not above it
};

struct CostEstimate {
  std::string_view name;  // of the algorithm
  Algorithm algorithm = Algorithm::kAuto;
  double formula = 0;    // seconds
  double simulated = 0;  // seconds
  Agreement agreement = Agreement::kExact;
  double within = 0;      // of kAbout: 0.05 is 5 %
  uint64_t messages = 0;  // over all ranks
  uint64_t bytes = 0;     // over all ranks, without headers
};

// Every algorithm of all_reduce, of `elements` elements of `element_bytes` bytes; the hierarchical
// ring where hosts have several ranks. Errors: invalid_argument: ranks below 2 or above
// kMostCostRanks, no elements, parameters that are negative, not finite, or make an operation last
// longer than an hour; hosts that do not divide the ranks, or whose messages cost more than others.
WEFT_API StatusOr<std::vector<CostEstimate>> try_estimate_all_reduce(int ranks, uint64_t elements,
                                                                     const CostParameters& cost,
                                                                     uint64_t element_bytes = 4);
// The same of another operation: "broadcast", "reduce", "all_gather", "reduce_scatter",
// "all_to_all", "gather", "scatter" or "barrier". `elements`: of the whole buffer; of all_to_all, of
// the input of one rank.
WEFT_API StatusOr<std::vector<CostEstimate>> try_estimate_operation(std::string_view operation,
                                                                    int ranks, uint64_t elements,
                                                                    const CostParameters& cost,
                                                                    uint64_t element_bytes = 4);

inline constexpr int kMostCostRanks = 1 << 14;  // bound of the model

// The fastest by simulation; among equals the first. REQUIRES: not empty.
WEFT_API const CostEstimate& fastest(const std::vector<CostEstimate>& estimates);

}  // namespace weft

#endif  // WEFT_COLLECTIVES_COST_MODEL_H_
