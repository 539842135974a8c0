#ifndef WEFT_COLLECTIVES_INTERNAL_REDUCE_H_
#define WEFT_COLLECTIVES_INTERNAL_REDUCE_H_

// The arithmetic of reductions on plain memory. Types of less than 32 bits of floating point
// are added up in fp32, and rounded once per call. No allocation, no lock; any thread.

#include <cstddef>
#include <cstdint>

#include "weft/collectives/internal/element.h"
#include "weft/collectives/reduce_op.h"
#include "weft/common/api.h"
#include "weft/common/error.h"

namespace weft::internal {

// Error, kind invalid_argument: the type does not have that reduction.
WEFT_API Status check_reduction(ElementType type, ReduceOp op);

// out[i] = inputs[0][i] op inputs[1][i] op ..., in this order. `out` may be one of the inputs.
// kAvg divides by `divisor` in the type of the accumulation when that is not 0; otherwise it and
// kPremulSum only add. `streamed`: the output is written around the caches (stream_copy.h).
// REQUIRES: check_reduction() and at least one input.
WEFT_API void reduce_many(ElementType type, ReduceOp::Kind kind, void* out,
                          const void* const* inputs, size_t input_count, uint64_t elements,
                          uint64_t divisor, bool streamed = false);

// out[i] = factor * in[i], in floating-point and complex types. `out` may be `in`.
WEFT_API void multiply(ElementType type, void* out, const void* in, uint64_t elements,
                       double factor);
// data[i] = data[i] / divisor: integers truncate toward zero.
WEFT_API void divide(ElementType type, void* data, uint64_t elements, uint64_t divisor);

// Whether partial sums of an average may leave the range of the type: it is then divided first.
WEFT_API bool divides_first(ElementType type);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_REDUCE_H_
