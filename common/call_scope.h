#ifndef WEFT_COMMON_CALL_SCOPE_H_
#define WEFT_COMMON_CALL_SCOPE_H_

// CallScope: what travels with a call. Set around every handler, carried by Future::then and by
// co_await, read when a nested call is issued: so a nested call can never outlive its caller's
// deadline, cancellation reaches down the chain, and traces join up.
//
// It is ambient (internal/ambient.h has the project's only thread_local) but it never supplies a
// worker: scopes are keyed by worker, so several workers in one thread do not see each other's.
//
// A CallScope is immutable once installed. Threads: a ScopeGuard belongs to one thread.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/mutex.h"
#include "weft/common/trace_context.h"

namespace weft {

enum class CancelReason : uint8_t {
  kNotCancelled = 0,
  kGivenUp = 1,   // by the caller, or it is gone, or its worker shuts down
  kDeadline = 2,  // the caller's time is over
};

// A one-way signal with callbacks. Copies share the signal. Any thread.
class WEFT_API CancelToken {
 public:
  CancelToken();
  // A token that cannot be cancelled and costs nothing: its cancel() only returns false.
  static CancelToken none() { return CancelToken(nullptr); }
  bool cancelled() const { return reason() != CancelReason::kNotCancelled; }
  // The reason of the first cancel().
  CancelReason reason() const {
    return state_ == nullptr ? CancelReason::kNotCancelled
                             : state_->reason.load(std::memory_order_acquire);
  }
  // Runs `fn` once, on the thread that cancels; at once when already cancelled. Short functions
  // only. Returns an id for remove(); 0 when there is nothing to remove.
  uint64_t on_cancel(absl::AnyInvocable<void()> fn) const;
  void remove(uint64_t id) const;
  // Whether a callback is registered.
  bool watched() const;
  // False when it was cancelled before.
  bool cancel(CancelReason why = CancelReason::kGivenUp) const;

 private:
  struct State {
    std::atomic<CancelReason> reason{CancelReason::kNotCancelled};
    Mutex mutex;
    uint64_t next_id ABSL_GUARDED_BY(mutex) = 1;
    std::map<uint64_t, absl::AnyInvocable<void()>> callbacks ABSL_GUARDED_BY(mutex);
  };
  explicit CancelToken(std::shared_ptr<State> state) : state_(std::move(state)) {}

  std::shared_ptr<State> state_;
};

// What else a thread takes over with a scope, and gives back when the scope ends there: the streams
// on which a handler's devices work. Any thread.
class ScopeEntry {
 public:
  virtual ~ScopeEntry() = default;
};
class ScopeAttachment {
 public:
  virtual ~ScopeAttachment() = default;
  // What it returns lives until the scope ends on this thread, and is destroyed there. Short.
  virtual std::unique_ptr<ScopeEntry> enter() const = 0;
};

struct CallScope {
  const void* worker = nullptr;                  // whose call this is
  absl::Time deadline = absl::InfiniteFuture();  // on that worker's clock
  CancelToken cancel = CancelToken::none();
  TraceContext trace;             // its span is that of what runs here
  std::vector<uint64_t> holding;  // calls of this chain that hold an object's turn
  // Incarnations of the workers that wait for this call: of its caller, of the caller's caller, and
  // so on.
  absl::InlinedVector<uint64_t, 4> chain;
  std::map<std::string, std::shared_ptr<void>> slots;  // opaque to us: one entry per service
  std::shared_ptr<const ScopeAttachment> attachment;   // null: nothing
  std::shared_ptr<const CallScope> outer;              // scopes of other workers on this thread
};

using ScopeRef = std::shared_ptr<const CallScope>;  // a scope shared by what runs in it

// Everything ambient on this thread, to be reinstalled elsewhere; null when there is nothing.
WEFT_API ScopeRef capture_scope();
// The innermost scope of `worker`, or null.
WEFT_API const CallScope* find_scope(const void* worker);

class WEFT_API ScopeGuard {
 public:
  explicit ScopeGuard(ScopeRef scope);
  ~ScopeGuard();
  ScopeGuard(const ScopeGuard&) = delete;
  ScopeGuard& operator=(const ScopeGuard&) = delete;

 private:
  ScopeRef previous_;
  std::unique_ptr<ScopeEntry> entry_;
};

// A thread pool learns through this hook that user code on one of its threads is about to block, so
// that it can start a replacement thread. The pool installs the hook around each task.
class BlockingHook {
 public:
  virtual ~BlockingHook() = default;
  // An error means that the bound on blocked threads is reached: the wait must fail with it.
  virtual absl::Status begin_blocking() = 0;
  virtual void end_blocking() = 0;
};

// Whether this is a thread of a pool: user code may run, and wait, here. False on a poller, on the
// timer, and on an application thread that waits for an answer.
WEFT_API bool on_pool_thread();

class WEFT_API BlockingHookGuard {  // installs a hook for this thread while it lives
 public:
  explicit BlockingHookGuard(BlockingHook* hook);  // not owned; may be null
  ~BlockingHookGuard();
  BlockingHookGuard(const BlockingHookGuard&) = delete;
  BlockingHookGuard& operator=(const BlockingHookGuard&) = delete;

 private:
  BlockingHook* previous_;
};

// Around every wait of user code. Nothing happens on a thread that no pool lent.
class WEFT_API BlockingRegion {
 public:
  BlockingRegion();
  ~BlockingRegion();
  BlockingRegion(const BlockingRegion&) = delete;
  BlockingRegion& operator=(const BlockingRegion&) = delete;
  const absl::Status& status() const { return status_; }  // not OK: the wait must fail

 private:
  BlockingHook* hook_;
  absl::Status status_;
};

}  // namespace weft

#endif  // WEFT_COMMON_CALL_SCOPE_H_
