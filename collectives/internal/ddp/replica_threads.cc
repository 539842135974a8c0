#include "weft/collectives/internal/ddp/replica_threads.h"

#include <utility>

#include "ATen/ThreadLocalState.h"
#include "absl/strings/str_cat.h"
#include "c10/core/DeviceGuard.h"
#include "weft/common/error.h"

namespace weft::internal {

std::string exception_text(const std::exception& e) {
  const auto* error = dynamic_cast<const c10::Error*>(&e);
  return error != nullptr ? error->what_without_backtrace() : e.what();
}

ReplicaThreads::ReplicaThreads(std::shared_ptr<Runtime> runtime, std::vector<at::Device> devices)
    : runtime_(std::move(runtime)), devices_(std::move(devices)), ended_(runtime_.get()) {}

ReplicaThreads::~ReplicaThreads() {
  std::vector<std::shared_ptr<Executor>> loops;
  {
    MutexLock lock(&mutex_);
    loops = std::move(loops_);
  }
  for (const auto& loop : loops) loop->shutdown();
}

void ReplicaThreads::run(const std::vector<size_t>& on, const std::function<void(size_t)>& body,
                         size_t mine) {
  const at::ThreadLocalState state;
  std::vector<std::exception_ptr> errors(on.size());
  const auto one = [&](size_t i) {
    try {
      const at::ThreadLocalStateGuard guard(state);
      const c10::DeviceGuard device(devices_[on[i]]);
      body(i);
    } catch (...) {
      errors[i] = std::current_exception();
    }
  };
  std::vector<std::shared_ptr<Executor>> loops;
  {
    MutexLock lock(&mutex_);
    while (loops_.size() + 1 < on.size()) {
      loops_.push_back(runtime_->make_loop(absl::StrCat("weft-replica", loops_.size() + 1)));
    }
    loops = loops_;
  }
  size_t left = on.size() - 1;  // under mutex_
  size_t loop = 0;
  for (size_t i = 0; i < on.size(); ++i) {
    if (i == mine) continue;
    post_or_run(loops[loop++].get(), [this, &one, &left, i] {
      one(i);
      MutexLock lock(&mutex_);
      --left;
      ended_.notify_all();
    });
  }
  one(mine);
  {
    MutexLock lock(&mutex_);
    // What runs refers to this frame: no deadline.
    while (left > 0) (void)ended_.wait_until(&mutex_, absl::InfiniteFuture());
  }
  for (size_t i = 0; i < errors.size(); ++i) {
    if (errors[i] != nullptr) fail(on[i], errors[i]);
  }
}

void ReplicaThreads::fail(size_t replica, const std::exception_ptr& error) const {
  std::string what = "an exception that is no std::exception";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    what = exception_text(e);
  } catch (...) {
  }
  throw_error(make_error(ErrorKind::kUser, absl::StrCat("replica ", replica, " on ",
                                                        devices_[replica].str(), ": ", what)));
}

}  // namespace weft::internal
