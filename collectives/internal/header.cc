#include "weft/collectives/internal/header.h"

#include <iterator>

#include "weft/collectives/algorithm.h"
#include "weft/collectives/internal/element.h"
#include "weft/collectives/internal/text.h"
#include "weft/collectives/reduce_op.h"

namespace weft::internal {
namespace {

Status mismatch(const Header& got, const Header& mine, int peer) {
  return make_error(ErrorKind::kInvalidArgument,
                    cat("the ranks do different things: rank ", peer, " is in ", got.describe(),
                        ", this rank in ", mine.describe()));
}

bool reduces(uint8_t op) {
  const auto kind = static_cast<OpKind>(op);
  return kind == OpKind::kAllReduce || kind == OpKind::kReduce || kind == OpKind::kReduceScatter;
}

}  // namespace

std::string_view op_name(uint8_t op) {
  constexpr std::string_view kNames[kOpKinds] = {
      "nothing", "barrier", "all_reduce",     "broadcast",  "reduce", "all_gather",
      "gather",  "scatter", "reduce_scatter", "all_to_all", "send",   "monitored_barrier"};
  return op < kOpKinds ? kNames[op] : "unknown operation";
}

std::string_view schedule_name(uint8_t op) {
  constexpr std::string_view kNames[kOpKinds] = {
      "",     "dissemination", "", "binomial tree", "binomial tree", "ring", "direct", "direct",
      "ring", "pairwise",      "", "star"};
  return op < kOpKinds ? kNames[op] : "";
}

std::string Header::describe() const {
  std::string out = cat(op_name(op), " #", sequence);
  if (type != 0) cat_to(&out, " (", element_name(type), " x ", count);
  if (type == 0) return out;
  if (reduces(op)) cat_to(&out, ", ", reduction_name(reduction));
  if (root >= 0) cat_to(&out, ", root ", root);
  if (algorithm != 0) cat_to(&out, ", ", algorithm_name(algorithm));
  if (detail != 0) cat_to(&out, ", sizes ", absl::Hex(detail));
  return out + ")";
}

Status check_origin(const Header& got, uint64_t group, uint32_t generation, int peer) {
  if (got.magic == kHeaderMagic && got.version == kGroupVersion && got.group == group &&
      got.generation == generation) {
    return absl::OkStatus();
  }
  return make_error(
      ErrorKind::kProtocol,
      cat("rank ", peer, " sent a header of group ", absl::Hex(got.group), ", generation ",
          got.generation, ", version ", got.version, " where group ", absl::Hex(group),
          ", generation ", generation, ", version ", kGroupVersion, " was expected"));
}

Status check_expected(const Header& got, const Header& expected, int peer) {
  if (!got.same_operation(expected)) return mismatch(got, expected, peer);
  if (got.bytes == expected.bytes) return absl::OkStatus();
  return make_error(ErrorKind::kInvalidArgument,
                    cat("the ranks disagree on a size in ", expected.describe(), ": rank ", peer,
                        " sends ", got.bytes, " bytes, this rank expects ", expected.bytes));
}

Status check_ahead(const Header& got, const Header& mine, int peer) {
  if (got.sequence > mine.sequence) return absl::OkStatus();
  if (got.same_operation(mine)) return absl::OkStatus();
  return mismatch(got, mine, peer);
}

}  // namespace weft::internal
