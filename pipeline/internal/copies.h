#ifndef WEFT_PIPELINE_INTERNAL_COPIES_H_
#define WEFT_PIPELINE_INTERNAL_COPIES_H_

// StateCopies: states of stages as they were after a step, at one process, for one pipeline: of its
// own stages and of those of a neighbour. Of each worker of the plan the last two are kept, because
// of two workers one may have done one step more than the other, and never two (COPY-1).
//
//   COPY-1  a worker begins step k+1 only after its copy of the state after step k is at its
//           neighbour; what another worker does in step k+1 needs something of that worker's step
//           k+1. So when any worker has done k+1 steps, every worker's state after step k has a copy.
//
// Any thread.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/common/mutex.h"
#include "weft/pipeline/internal/messages.h"

namespace weft::pipeline::internal {

class StateCopies {
 public:
  void put(int64_t owner, int64_t steps, std::vector<StageState> states) {
    std::map<int64_t, std::vector<StageState>> dropped;  // outlives the lock
    MutexLock lock(&mutex_);
    auto& of_owner = copies_[owner];
    of_owner[steps] = std::move(states);
    while (of_owner.size() > 2) dropped.insert(of_owner.extract(of_owner.begin()));
  }
  std::vector<KeptCopy> list() const {
    MutexLock lock(&mutex_);
    std::vector<KeptCopy> out;
    for (const auto& [owner, by_steps] : copies_) {
      for (const auto& [steps, states] : by_steps) out.push_back({owner, steps});
    }
    return out;
  }
  StatusOr<std::map<std::string, at::Tensor>> get(int64_t owner, int64_t steps,
                                                  int64_t stage) const {
    MutexLock lock(&mutex_);
    if (const auto it = copies_.find(owner); it != copies_.end()) {
      if (const auto copy = it->second.find(steps); copy != it->second.end()) {
        for (const StageState& s : copy->second) {
          if (s.stage == stage) return s.state;
        }
      }
    }
    return make_error(ErrorKind::kNotFound, absl::StrCat("no copy of stage ", stage, " after ",
                                                         steps, " steps is kept here"));
  }

 private:
  mutable Mutex mutex_;
  std::map<int64_t, std::map<int64_t, std::vector<StageState>>> copies_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::pipeline::internal

#endif  // WEFT_PIPELINE_INTERNAL_COPIES_H_
