#ifndef WEFT_COLLECTIVES_WORK_H_
#define WEFT_COLLECTIVES_WORK_H_

// Work: an operation of a process group that is under way.
//
//   weft::Work work = group.all_reduce_async(grad, {.op = weft::ReduceOp::kAvg});
//   ... compute something else; leave `grad` alone ...
//   work.wait();                                  // throws weft::Error
//   absl::Status s = work.try_wait(5s);           // the same without exceptions
//   work.then([grad] { ... });                    // on a thread of the group
//   co_await work;
//
// The tensors belong to the operation until it has ended. It ends exactly once, with the result or
// an error (COLL-1), by its own deadline at the latest. A cheap handle; any thread, any number of
// times. Dropping it does not stop the operation, nor does cancel(): the other ranks count on this
// one; it ends the waiting.

#include <memory>
#include <utility>

#include "weft/common/future.h"

namespace weft {

class [[nodiscard]] Work {
 public:
  Work() = default;
  explicit Work(Future<void> future, std::shared_ptr<const int> source = nullptr)
      : future_(std::move(future)), source_(std::move(source)) {}

  bool valid() const { return future_.valid(); }          // refers to an operation
  bool is_completed() const { return future_.done(); }    // with or without an error
  bool has_error() const { return future_.has_error(); }  // has completed with one
  // Without a timeout until the operation's own deadline.
  void wait(Timeout timeout = {}) const { future_.wait(timeout); }
  Status try_wait(Timeout timeout = {}) const { return future_.try_wait(timeout); }
  // OK while it is under way.
  Status error() const { return has_error() ? future_.try_wait() : absl::OkStatus(); }
  // False when it was over already.
  bool cancel() { return future_.cancel(); }
  template <class F>
  auto then(F f) const {
    return future_.then(std::move(f));
  }
  const Future<void>& future() const { return future_; }
  auto operator co_await() const { return future_.operator co_await(); }

  // Rank from which a completed recv got its data. -1 for every other operation.
  int source_rank() const { return source_ == nullptr || !is_completed() ? -1 : *source_; }

 private:
  Future<void> future_;
  std::shared_ptr<const int> source_;
};

}  // namespace weft

#endif  // WEFT_COLLECTIVES_WORK_H_
