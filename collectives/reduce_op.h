#ifndef WEFT_COLLECTIVES_REDUCE_OP_H_
#define WEFT_COLLECTIVES_REDUCE_OP_H_

// ReduceOp: how the elements of all ranks become one. A value type; any thread.
//
//   group.all_reduce(t, {.op = weft::ReduceOp::kAvg});
//   group.all_reduce(t, {.op = weft::ReduceOp::premul_sum(0.5)});
//
//   kind           types                                  definition
//   kSum, kProd    all but none; bool: or, and            integers wrap
//   kMin, kMax     all but complex; bool: and, or         NaN if any element is NaN
//   kAvg           all but bool                           integers: wrapping sum, then a division
//                                                         that truncates toward zero
//   kPremulSum     floating point and complex             sum of factor * element; each rank gives
//                                                         a factor of its own
//   kBand, kBor, kBxor   integers and bool
//
// What a pair of type and operation does not have is an error at the caller, before anything moves.

#include <cstdint>
#include <string_view>

#include "weft/common/api.h"

namespace weft {

class ReduceOp {
 public:
  // Sent as numbers: values are never reused.
  enum Kind : uint8_t {
    kSum = 0,
    kProd = 1,
    kMin = 2,
    kMax = 3,
    kAvg = 4,
    kPremulSum = 5,
    kBand = 6,
    kBor = 7,
    kBxor = 8,
  };

  constexpr ReduceOp(Kind kind = kSum) : kind_(kind) {}  // NOLINT: implicit by design
  static constexpr ReduceOp premul_sum(double factor) {
    ReduceOp op(kPremulSum);
    op.factor_ = factor;
    return op;
  }

  constexpr Kind kind() const { return kind_; }
  // The factor of kPremulSum.
  constexpr double factor() const { return factor_; }

 private:
  Kind kind_ = kSum;
  double factor_ = 1;
};

// "sum", "avg", ...; "reduction 77" for a number that is none.
WEFT_API std::string_view reduction_name(uint8_t kind);

}  // namespace weft

#endif  // WEFT_COLLECTIVES_REDUCE_OP_H_
