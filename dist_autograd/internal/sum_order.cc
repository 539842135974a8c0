#include "weft/dist_autograd/internal/sum_order.h"

#include <algorithm>

#include "weft/dist_autograd/internal/functions.h"

namespace weft::internal {
namespace {

// Negative: `a` is earlier in the program.
int compare_calls(const CallOrder* a, const CallOrder* b) {
  if (a == b) return 0;
  if (a == nullptr || b == nullptr) return a == nullptr ? 1 : -1;
  const auto order = *a <=> *b;
  return order == 0 ? 0 : (order < 0 ? -1 : 1);
}

}  // namespace

void Place::merge(const Place& other) {
  if (compare_calls(other.first, first) < 0) first = other.first;
  if (compare_calls(other.last, last) > 0) last = other.last;
  sequence = std::min(sequence, other.sequence);
}

bool comes_before(const Place& a, const Place& b) {
  if (const int order = compare_calls(a.first, b.first); order != 0) return order > 0;
  // A node that later calls share with this one was made before what is this one's alone.
  if (const int order = compare_calls(a.last, b.last); order != 0) return order < 0;
  return a.sequence > b.sequence;
}

void AwaitedSends::add(uint64_t message, const NodePtr& send) {
  all_.push_back(One{static_cast<const SendRpcBackward&>(*send).order, message});
}

void AwaitedSends::sort() {
  std::sort(all_.begin(), all_.end(), [](const One& a, const One& b) {
    return compare_calls(a.order.get(), b.order.get()) > 0;
  });
}

}  // namespace weft::internal
