#ifndef WEFT_TESTS_TESTING_FORWARDING_RUNTIME_H_
#define WEFT_TESTS_TESTING_FORWARDING_RUNTIME_H_

// A runtime that is another one but for what a test overrides.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "weft/common/runtime.h"

namespace weft::testing {

class ForwardingRuntime : public Runtime {
 public:
  explicit ForwardingRuntime(std::shared_ptr<Runtime> inner) : inner_(std::move(inner)) {}
  const Clock& clock() const override { return inner_->clock(); }
  Random& random() override { return inner_->random(); }
  Files& files() override { return inner_->files(); }
  std::shared_ptr<Executor> make_loop(std::string_view name) override {
    return inner_->make_loop(name);
  }
  std::shared_ptr<Executor> make_pool(const PoolOptions& o) override {
    return inner_->make_pool(o);
  }
  std::unique_ptr<Parker> make_parker() override { return inner_->make_parker(); }
  std::unique_ptr<Timer> make_timer(Task on_fire) override {
    return inner_->make_timer(std::move(on_fire));
  }
  std::unique_ptr<Thread> spawn(std::string_view name, Task body) override {
    return inner_->spawn(name, std::move(body));
  }
  bool simulated() const override { return inner_->simulated(); }
  void trace(const char* label, uint64_t a, uint64_t b) override { inner_->trace(label, a, b); }

 private:
  const std::shared_ptr<Runtime> inner_;
};

// Each reading of its clock is `step` later than the one before at least: whatever is timed was slow.
class SlowClock : public ForwardingRuntime, public Clock {
 public:
  SlowClock(std::shared_ptr<Runtime> inner, absl::Duration step)
      : ForwardingRuntime(std::move(inner)), step_(step) {}
  const Clock& clock() const override { return *this; }
  absl::Time now() const override {
    return ForwardingRuntime::clock().now() + step_ * readings_.fetch_add(1);
  }

 private:
  const absl::Duration step_;
  mutable std::atomic<int64_t> readings_{0};
};

// Its timers fire `late` after their time, as on a machine that has better things to do.
class LateTimers : public ForwardingRuntime {
 public:
  LateTimers(std::shared_ptr<Runtime> inner, absl::Duration late)
      : ForwardingRuntime(std::move(inner)), late_(late) {}
  std::unique_ptr<Timer> make_timer(Task on_fire) override {
    class Late : public Timer {
     public:
      Late(std::unique_ptr<Timer> inner, absl::Duration late)
          : inner_(std::move(inner)), late_(late) {}
      void arm(absl::Time when) override { inner_->arm(when + late_); }
      void disarm() override { inner_->disarm(); }

     private:
      const std::unique_ptr<Timer> inner_;
      const absl::Duration late_;
    };
    return std::make_unique<Late>(ForwardingRuntime::make_timer(std::move(on_fire)), late_);
  }

 private:
  const absl::Duration late_;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_FORWARDING_RUNTIME_H_
