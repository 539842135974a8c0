#include "weft/tests/testing/gate.h"

#include <utility>

#include "weft/common/error.h"

namespace weft::testing {

Gate::Gate(std::shared_ptr<Runtime> runtime)
    : runtime_(std::move(runtime)), changed_(runtime_.get()) {}

void Gate::open() {
  {
    MutexLock lock(&mutex_);
    open_ = true;
  }
  changed_.notify_all();
}

void Gate::arrive_and_wait() {
  MutexLock lock(&mutex_);
  ++arrived_;
  changed_.notify_all();
  while (!open_) {
    throw_if_error(changed_.wait_until(&mutex_, runtime_->now() + absl::Seconds(60)));
  }
}

void Gate::wait_arrived(int n) {
  MutexLock lock(&mutex_);
  while (arrived_ < n) {
    throw_if_error(changed_.wait_until(&mutex_, runtime_->now() + absl::Seconds(60)));
  }
}

}  // namespace weft::testing
