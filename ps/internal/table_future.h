#ifndef WEFT_PS_INTERNAL_TABLE_FUTURE_H_
#define WEFT_PS_INTERNAL_TABLE_FUTURE_H_

// What is asked of a table, as futures. Any thread.

#include <string>
#include <utility>

#include "weft/ps/internal/table_core.h"
#include "weft/rpc/spi/untyped_call.h"

namespace weft::ps::internal {

struct TableAccess {
  static TableCore& core(const Table& table) { return table.handle_->core(); }
};

template <class T>
Promise<T> promise_of(const Continuation& with, const Ask& ask) {
  Promise<T> promise(with.executor);
  promise.state()->set_default_wait(absl::InfiniteDuration());  // it ends by its own deadline
  promise.state()->set_wait_driver(with.driver);
  promise.state()->set_label(std::string(ask.what));
  return promise;
}

// The default is that of the worker, which one that has left does not have.
inline absl::Duration deadline_of(const TableCore& core, const Continuation& with,
                                  const Timeout& deadline) {
  if (deadline.is_set()) return deadline.value_or(absl::ZeroDuration());
  return with.executor == nullptr ? absl::ZeroDuration() : core.service()->worker().rpc_timeout();
}

// What is taken from a result.
inline at::Tensor values_of(OpResult result) { return std::move(result.values); }
inline PushResult push_of(const OpResult& result) { return result.push; }
inline Status nothing_of(const OpResult&) { return absl::OkStatus(); }

// The future of what `Pick` takes from the result. It is no argument: what waits for the answer is then a promise alone,
// which needs no memory beside the operation's.
template <class T, auto Pick>
Future<T> start(TableCore& core, Ask ask, const Timeout& deadline) {
  const Continuation with = continuation_of(core.service()->worker());
  Promise<T> promise = promise_of<T>(with, ask);
  Future<T> future = promise.future();
  ask.deadline = deadline_of(core, with, deadline);
  core.submit(std::move(ask), [promise = std::move(promise)](StatusOr<OpResult> result) mutable {
    if (!result.ok()) {
      promise.try_set(result.status());
    } else {
      promise.try_set(Pick(*std::move(result)));
    }
  });
  return future;
}

struct PushAndValues {
  Future<PushResult> push;
  Future<at::Tensor> values;
};
// Both of one operation.
inline PushAndValues start_both(TableCore& core, Ask ask, const Timeout& deadline) {
  const Continuation with = continuation_of(core.service()->worker());
  Promise<PushResult> push = promise_of<PushResult>(with, ask);
  Promise<at::Tensor> values = promise_of<at::Tensor>(with, ask);
  PushAndValues out{push.future(), values.future()};
  ask.deadline = deadline_of(core, with, deadline);
  core.submit(std::move(ask), [push = std::move(push),
                               values = std::move(values)](StatusOr<OpResult> result) mutable {
    if (!result.ok()) {
      values.try_set(result.status());
      push.try_set(result.status());
    } else {
      values.try_set(std::move(result->values));
      push.try_set(result->push);
    }
  });
  return out;
}

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_TABLE_FUTURE_H_
