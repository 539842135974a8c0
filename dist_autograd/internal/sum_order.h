#ifndef WEFT_DIST_AUTOGRAD_INTERNAL_SUM_ORDER_H_
#define WEFT_DIST_AUTOGRAD_INTERNAL_SUM_ORDER_H_

// In which order gradients are added up: by where their calls stand in the program, the latest
// first, as LibTorch adds up those of one worker. So equal runs give equal bits, whichever message
// was faster. Not thread-safe; belongs to a PassGraph.

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/Stream.h"
#include "weft/dist_autograd/internal/call_order.h"
#include "weft/dist_autograd/internal/torch_compat.h"

namespace weft::internal {

// Where a node stands in a pass. It never comes before a node of which it takes a gradient.
struct Place {
  // The earliest and the latest of the messages from which its gradients come; null: the losses,
  // which are later than all messages. They live as long as the pass's sends.
  const CallOrder* first = nullptr;
  const CallOrder* last = nullptr;
  // Among those of the same messages, the larger one first: LibTorch's sequence number, but not above
  // those of the nodes that it takes gradients of, which come before it by themselves.
  int64_t sequence = std::numeric_limits<int64_t>::max();

  // Becomes the place of a node that also takes a gradient of one at `other`.
  void merge(const Place& other);
};
bool comes_before(const Place& a, const Place& b);

// A gradient that waits for others that are to be added before it.
struct ApartGradient {
  uint32_t input = 0;
  at::Tensor gradient{};
  std::optional<c10::Stream> from{};
};
struct ComesBefore {
  bool operator()(const Place& a, const Place& b) const { return comes_before(a, b); }
};
using ApartGradients = std::multimap<Place, ApartGradient, ComesBefore>;

// The messages of this worker whose gradients may still come, the latest first.
class AwaitedSends {
 public:
  void add(uint64_t message, const NodePtr& send);
  // After the last add().
  void sort();
  // The latest one for which `is_over(message)` is false; null: there is none. What is over stays so.
  template <class F>
  const CallOrder* latest(const F& is_over) {
    while (next_ < all_.size() && is_over(all_[next_].message)) ++next_;
    return next_ == all_.size() ? nullptr : all_[next_].order.get();
  }

 private:
  struct One {
    std::shared_ptr<const CallOrder> order;
    uint64_t message = 0;
  };
  std::vector<One> all_;
  size_t next_ = 0;
};

}  // namespace weft::internal

#endif  // WEFT_DIST_AUTOGRAD_INTERNAL_SUM_ORDER_H_
