#ifndef WEFT_COLLECTIVES_INTERNAL_ALGORITHM_TABLE_H_
#define WEFT_COLLECTIVES_INTERNAL_ALGORITHM_TABLE_H_

// AlgorithmTable: rules by which an operation that names no algorithm gets one, from the size, the
// number of ranks and the topology. Written as text:
//
//   # what was measured on two hosts of four cores
//   recursive_doubling:0-16384 on=tcp; hierarchical_ring:16385-max ranks=3-64 hosts=some
//   all_gather.bruck:0-8192; broadcast.scatter_all_gather:262144-max
//
// A rule that names no operation is of all_reduce. Others that may stand there are broadcast,
// all_gather and reduce_scatter: of the rest a rank does not know all sizes.
//
// Rules are separated by semicolons or line ends; behind # stands a comment. The first rule that
// fits decides; where none does the built-in choice stands. Sizes are bytes of the whole tensor,
// both ends included. hosts: one (all ranks on one), each (one rank on each), some (neither). on: the
// backend, as ProcessGroup::backend() names it. A rule that does not say fits all.
//
// A value type; any thread.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "weft/collectives/internal/header.h"
#include "weft/collectives/internal/schedule.h"
#include "weft/common/api.h"
#include "weft/common/error.h"

namespace weft::internal {

// Bytes of a table that goes to the other members.
inline constexpr size_t kMaxTableBytes = 32 << 10;

class WEFT_API AlgorithmTable {
 public:
  // The rules for that backend; empty: for any. Error, kind invalid_argument: quotes the rule.
  static StatusOr<AlgorithmTable> parse(std::string_view text, std::string_view backend = {});

  // kAuto: no rule fits.
  Algorithm find(OpKind op, uint64_t bytes, int size, const Topology& topology) const;
  bool empty() const { return rules_.empty(); }

 private:
  enum class Hosts { kAny, kOne, kSome, kEach };
  struct Rule {
    OpKind op = OpKind::kAllReduce;
    Algorithm algorithm = Algorithm::kAuto;
    uint64_t first = 0;
    uint64_t last = UINT64_MAX;
    uint64_t least_ranks = 0;
    uint64_t most_ranks = UINT64_MAX;
    Hosts hosts = Hosts::kAny;
    std::string on;  // empty: any backend
  };
  static StatusOr<Rule> parse_rule(std::string_view text);

  std::vector<Rule> rules_;
};

// Whether an operation has that algorithm.
WEFT_API bool offers(OpKind op, Algorithm algorithm);
// "recursive_doubling": the name of an algorithm in a table. kAuto: there is no such algorithm.
WEFT_API std::string table_name(Algorithm algorithm);
WEFT_API Algorithm algorithm_named(std::string_view name);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_ALGORITHM_TABLE_H_
