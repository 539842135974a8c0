#ifndef WEFT_DIST_AUTOGRAD_INTERNAL_CALL_ORDER_H_
#define WEFT_DIST_AUTOGRAD_INTERNAL_CALL_ORDER_H_

// CallOrder: where a message stands in the program of its context, whatever thread or worker was
// faster: the number of the call of the context's own threads, then that of the call which its
// handler made, and so on. Numbers of one caller grow in the order of its calls, so of two messages
// of one worker the lexicographically larger one was sent later by the program. Values; no state.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace weft::internal {

using CallOrder = std::vector<uint64_t>;

// Maximum number of nested calls that are told apart: what lies deeper has the place of the last.
inline constexpr size_t kOrderedDepth = 16;

// The place of call `number` of a handler that serves the call at `served`; empty: of no handler.
inline CallOrder order_within(const CallOrder& served, uint64_t number) {
  CallOrder out;
  out.reserve(std::min(served.size() + 1, kOrderedDepth));
  out = served;
  if (out.size() < kOrderedDepth) out.push_back(number);
  return out;
}
// The place of the answer to that call: after all that the handler has called.
inline CallOrder order_of_answer(const CallOrder& served) {
  return order_within(served, std::numeric_limits<uint64_t>::max());
}

}  // namespace weft::internal

#endif  // WEFT_DIST_AUTOGRAD_INTERNAL_CALL_ORDER_H_
