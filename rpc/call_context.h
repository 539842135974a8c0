#ifndef WEFT_RPC_CALL_CONTEXT_H_
#define WEFT_RPC_CALL_CONTEXT_H_

// CallContext: what a handler may ask about the call that it serves, if it takes a CallContext& as
// its first parameter. It lives until the handler's result (or its Future) is complete. Any thread.

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/call_scope.h"
#include "weft/common/executor.h"
#include "weft/common/trace_context.h"
#include "weft/common/worker_info.h"

namespace weft {

class Worker;

class WEFT_API CallContext {
 public:
  CallContext(const Worker& worker, WorkerInfo caller, uint64_t call_id, ScopeRef scope,
              absl::Duration remaining_at_start, std::shared_ptr<Executor> executor = nullptr)
      : worker_(worker),
        caller_(std::move(caller)),
        call_id_(call_id),
        scope_(std::move(scope)),
        remaining_at_start_(remaining_at_start),
        executor_(std::move(executor)) {}
  CallContext(const CallContext&) = delete;
  CallContext& operator=(const CallContext&) = delete;

  // The worker that serves the call: a handle that owns nothing. Nested calls go through it.
  const Worker& worker() const { return worker_; }
  const WorkerInfo& caller() const { return caller_; }
  uint64_t call_id() const { return call_id_; }  // as drawn by the caller
  // What is left of the caller's deadline; infinite when it set none.
  absl::Duration remaining() const;
  // What was left when the request arrived.
  absl::Duration remaining_at_start() const { return remaining_at_start_; }
  // True once the caller has given up: cancelled, its deadline over, or its incarnation gone.
  bool cancelled() const { return scope_->cancel.cancelled(); }
  CancelReason cancel_reason() const { return scope_->cancel.reason(); }
  // Runs `fn` once when that happens, also when it has happened already: on the worker's pool,
  // whichever thread hears of it.
  void on_cancel(absl::AnyInvocable<void()> fn) const;
  // The trace that the call is part of, with the span of this handler; empty when there is none.
  const TraceContext& trace() const { return scope_->trace; }
  const ScopeRef& scope() const { return scope_; }

  // ---- for the framework
  // The handler is a coroutine that has returned with its body under way.
  void set_body_goes_on() { body_goes_on_ = true; }
  bool body_goes_on() const { return body_goes_on_; }
  const std::shared_ptr<Executor>& executor() const { return executor_; }

 private:
  const Worker& worker_;
  const WorkerInfo caller_;
  const uint64_t call_id_;
  const ScopeRef scope_;
  const absl::Duration remaining_at_start_;
  const std::shared_ptr<Executor> executor_;  // null: whichever thread hears of a cancellation
  bool body_goes_on_ = false;
};

}  // namespace weft

#endif  // WEFT_RPC_CALL_CONTEXT_H_
