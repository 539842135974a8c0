#ifndef WEFT_COMMON_GONE_WORKERS_H_
#define WEFT_COMMON_GONE_WORKERS_H_

// GoneWorkers: incarnations that have left or died, so that what comes late of them is refused.
// Workers come and go for ever: the last ones are remembered, as many as membership remembers
// (MEM-5). Not thread-safe.

#include <algorithm>
#include <cstddef>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "weft/common/id.h"

namespace weft::internal {

class GoneWorkers {
 public:
  static constexpr size_t kMost = 1024;

  // False: it is known.
  bool add(Incarnation incarnation, std::string_view why = "") {
    if (!why_.try_emplace(incarnation, why).second) return false;
    order_.push_back(incarnation);
    if (order_.size() > kMost) {
      why_.erase(order_.front());
      order_.pop_front();
    }
    return true;
  }
  bool contains(Incarnation incarnation) const { return why_.contains(incarnation); }
  // Empty when no reason was given or it is no longer remembered.
  std::string_view why(Incarnation incarnation) const {
    const auto at = why_.find(incarnation);
    return at == why_.end() ? std::string_view() : std::string_view(at->second);
  }
  size_t size() const { return why_.size(); }
  // Ascending.
  std::vector<Incarnation> all() const {
    std::vector<Incarnation> out;
    for (const auto& [incarnation, why] : why_) out.push_back(incarnation);
    return out;
  }

 private:
  std::map<Incarnation, std::string> why_;
  std::deque<Incarnation> order_;  // the longest gone first
};

}  // namespace weft::internal

#endif  // WEFT_COMMON_GONE_WORKERS_H_
