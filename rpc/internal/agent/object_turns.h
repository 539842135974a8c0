#ifndef WEFT_RPC_INTERNAL_AGENT_OBJECT_TURNS_H_
#define WEFT_RPC_INTERNAL_AGENT_OBJECT_TURNS_H_

// ObjectTurns: whose turn it is on an object. Calls on one object run one at a time, const methods
// together; a call made, over whatever workers, by the handler that has the turn is let in, because
// it would otherwise wait for itself.
//
//   OBJ-1  at most one call that is not const and not nested below another holder runs at a time.
//   OBJ-2  a call that holds nothing waits in order of arrival; const calls join a running group of
//          const calls only when no call waits before them.
//   OBJ-3  a call that names the innermost holder among its `holding` runs at once, on top of it.
//   OBJ-4  a call holds its turn until its method returns, be it a future; a coroutine until its body
//          ends. Not until the answer: what a future waits for may be another call on the object.
//
// Any thread; `run` is called without the lock, on the thread that makes room for it.

#include <cstdint>
#include <deque>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "weft/common/api.h"
#include "weft/common/mutex.h"
#include "weft/rpc/internal/device/published_streams.h"

namespace weft::internal {

class WEFT_API ObjectTurns {
 public:
  using Run = absl::AnyInvocable<void()>;

  // `turn` is the call's own random id; `holding` the turns that its chain holds. `run` is called
  // once, now or later; release(turn) must follow when the call has ended. Before `run` was called
  // it gives the place in the line up.
  void acquire(uint64_t turn, bool is_const, const std::vector<uint64_t>& holding, Run run);
  void release(uint64_t turn);
  // What of their kernels comes before what; used between the two.
  ObjectStreams& streams() { return streams_; }

 private:
  struct Waiter {
    uint64_t turn;
    bool is_const;
    std::vector<uint64_t> holding;
    Run run;
  };
  // Calls that run now. Each level is one call, or a group of const ones; the last is innermost.
  struct Level {
    bool is_const;
    std::vector<uint64_t> turns;
  };

  bool admit_locked(const Waiter& w, bool first_in_line) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  std::vector<Level> levels_ ABSL_GUARDED_BY(mutex_);
  std::deque<Waiter> waiting_ ABSL_GUARDED_BY(mutex_);
  ObjectStreams streams_;
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_AGENT_OBJECT_TURNS_H_
