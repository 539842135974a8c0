#include "weft/rpc/internal/agent/object_turns.h"

#include <algorithm>
#include <utility>

namespace weft::internal {

bool ObjectTurns::admit_locked(const Waiter& w, bool first_in_line) {
  if (levels_.empty()) {
    levels_.push_back(Level{w.is_const, {w.turn}});
    return true;
  }
  Level& top = levels_.back();
  const bool nested = std::any_of(w.holding.begin(), w.holding.end(), [&top](uint64_t held) {
    return std::find(top.turns.begin(), top.turns.end(), held) != top.turns.end();
  });
  if (nested) {  // OBJ-3
    levels_.push_back(Level{w.is_const, {w.turn}});
    return true;
  }
  // OBJ-2: joins the const group; on a nested level only calls of that chain may.
  if (w.is_const && top.is_const && levels_.size() == 1 && first_in_line) {
    top.turns.push_back(w.turn);
    return true;
  }
  return false;
}

void ObjectTurns::acquire(uint64_t turn, bool is_const, const std::vector<uint64_t>& holding,
                          Run run) {
  Waiter w{turn, is_const, holding, std::move(run)};
  {
    MutexLock lock(&mutex_);
    if (!admit_locked(w, waiting_.empty())) {
      waiting_.push_back(std::move(w));
      return;
    }
  }
  w.run();
}

void ObjectTurns::release(uint64_t turn) {
  std::vector<Waiter> admitted;
  Run given_up;  // destroyed without the lock
  {
    MutexLock lock(&mutex_);
    for (size_t i = levels_.size(); i-- > 0;) {
      auto& turns = levels_[i].turns;
      auto it = std::find(turns.begin(), turns.end(), turn);
      if (it == turns.end()) continue;
      turns.erase(it);
      break;
    }
    const auto waits = std::find_if(waiting_.begin(), waiting_.end(),
                                    [turn](const Waiter& w) { return w.turn == turn; });
    if (waits != waiting_.end()) {
      given_up = std::move(waits->run);
      waiting_.erase(waits);
    }
    // A holder may end before what it nested (it did not wait for it): empty levels below stay
    // until everything above them is gone.
    while (!levels_.empty() && levels_.back().turns.empty()) levels_.pop_back();
    // Those that nest in the new innermost holder may stand anywhere in the line.
    bool all_before_admitted = true;
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      if (admit_locked(*it, all_before_admitted)) {
        admitted.push_back(std::move(*it));
        it = waiting_.erase(it);
      } else {
        all_before_admitted = false;
        ++it;
      }
    }
  }
  for (Waiter& w : admitted) w.run();
}

}  // namespace weft::internal
