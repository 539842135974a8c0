#ifndef WEFT_DIST_AUTOGRAD_INTERNAL_RELEASED_H_
#define WEFT_DIST_AUTOGRAD_INTERNAL_RELEASED_H_

// Released: what a worker remembers of the contexts of one creator that were released (CTX-1): all
// below a counter, but for those that the creator still had when it said so, and some above. So what
// is remembered is bounded by what lives, also beside a context that lives for ever. Not thread-safe.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <set>
#include <vector>

namespace weft::internal {

class Released {
 public:
  bool contains(uint64_t counter) const {
    return counter < below_ ? !alive_.contains(counter) : above_.contains(counter);
  }
  void add(uint64_t counter) {
    if (counter < below_) {
      alive_.erase(counter);
    } else {
      above_.insert(counter);
    }
  }
  // The creator says, or has said at any time, that those below are released, but for `alive`.
  void add_below(uint64_t below, const std::vector<uint64_t>& alive) {
    const std::set<uint64_t> theirs(alive.begin(), alive.end());
    std::erase_if(alive_, [&](uint64_t one) { return one < below && !theirs.contains(one); });
    if (below <= below_) return;
    for (const uint64_t one : theirs) {
      if (one >= below_ && one < below && !above_.contains(one)) alive_.insert(one);
    }
    above_.erase(above_.begin(), above_.lower_bound(below));
    below_ = below;
  }
  uint64_t below() const { return below_; }
  std::vector<uint64_t> alive() const { return {alive_.begin(), alive_.end()}; }
  size_t size() const { return alive_.size() + above_.size(); }

 private:
  uint64_t below_ = 0;
  std::set<uint64_t> alive_;  // below
  std::set<uint64_t> above_;
};

}  // namespace weft::internal

#endif  // WEFT_DIST_AUTOGRAD_INTERNAL_RELEASED_H_
