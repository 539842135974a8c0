#ifndef WEFT_DIST_OPTIM_SPI_STEP_LOG_H_
#define WEFT_DIST_OPTIM_SPI_STEP_LOG_H_

// StepLog: what the owner of parameters knows of the steps of one optimizer: which are prepared,
// and what became of the others. A pure table: no lock, no clock, no message.
//
//   OPT-8  a step is decided once; questions, at any time and in any order, get the same answer.
//   OPT-9  a step that was cancelled, or whose time was over before it was told to apply, is never
//          applied, whatever arrives later, its own beginning included.
//
// It keeps the newest kKept decisions. One that is older counts as not applied: its trainer gave up
// asking long ago.

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/error.h"

namespace weft::internal {

class WEFT_API StepLog {
 public:
  enum class State : uint8_t {
    kUnknown,
    kPrepared,
    kApplying,
    kApplied,
    kPartlyApplied,  // it failed between two parameters
    kNotApplied,
  };
  enum class Event : uint8_t { kPrepare, kBegin, kApply, kCancel, kExpire };
  // What the caller of the event does.
  enum class Next : uint8_t {
    kGo,      // it is the one that does it
    kDrop,    // let go of what was held
    kWait,    // another call applies it now: ask again then
    kTell,    // it is decided; say how
    kRefuse,  // it cannot begin any more
  };
  using Held = std::shared_ptr<void>;  // what a prepared step holds
  struct Step {
    State state = State::kUnknown;
    Held held{};
    absl::Time until = absl::InfiniteFuture();
    Status error{};
    int64_t updated = 0;
    int64_t stale = 0;
  };
  struct Answer {
    Next next = Next::kTell;
    Step step{};  // as it was when the event came, and for kTell as it is
  };

  static constexpr size_t kKept = 256;

  // Both phases at once, or the first one.
  Next begin(uint64_t step);
  Next prepare(uint64_t step, Held held, absl::Time until);
  // One whose time is over expires first.
  Answer apply(uint64_t step, absl::Time now);
  Answer cancel(uint64_t step);
  // REQUIRES: it is being applied. `state`: one that is decided.
  void finish(uint64_t step, State state, const Status& error, int64_t updated, int64_t stale);
  // Those whose time is over, by what they held.
  std::vector<Held> expire(absl::Time now);
  // All that are prepared, by what they held: this is the end.
  std::vector<Held> drop_all();
  absl::Time next_expiry() const;  // InfiniteFuture: none
  size_t prepared() const;
  size_t size() const { return steps_.size(); }

 private:
  Answer on(uint64_t step, Event event);
  void trim();

  std::map<uint64_t, Step> steps_;
  uint64_t floor_ = 0;  // at and below it nothing begins
};

}  // namespace weft::internal

#endif  // WEFT_DIST_OPTIM_SPI_STEP_LOG_H_
