#ifndef WEFT_DIST_AUTOGRAD_INTERNAL_LEAF_SLOTS_H_
#define WEFT_DIST_AUTOGRAD_INTERNAL_LEAF_SLOTS_H_

// LeafSlots: what a pass has added up for leaves of this worker, and how reducers get at it
// (collectives/grad_accessor.h). Threads: see there. A slot stays where it is.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "weft/collectives/grad_accessor.h"
#include "weft/common/mutex.h"
#include "weft/dist_autograd/id.h"

namespace weft::internal {

class LeafSlots final : public GradAccessor {
 public:
  using TimeLeft = std::function<absl::Duration()>;

  LeafSlots(const AutogradContextId& context, TimeLeft time_left)
      : context_(context), time_left_(std::move(time_left)) {}

  BackwardId backward_id() const override {
    return {context_, static_cast<uint64_t>(reinterpret_cast<uintptr_t>(this))};
  }
  absl::Duration time_left() const override { return time_left_(); }
  void with_grad(const at::Tensor& parameter, absl::FunctionRef<bool(at::Tensor&)> fn) override {
    Slot* slot = nullptr;
    {
      MutexLock lock(&mutex_);
      const auto at = slots_.find(parameter.unsafeGetTensorImpl());
      if (at != slots_.end()) slot = &at->second;
    }
    at::Tensor grad = slot == nullptr ? at::Tensor() : slot->gradient;
    if (!fn(grad)) return;
    if (slot == nullptr) {
      MutexLock lock(&mutex_);
      slot = &slots_[parameter.unsafeGetTensorImpl()];
      slot->added = parameter;
    }
    slot->gradient = std::move(grad);
  }
  void at_end(absl::AnyInvocable<void()> fn) override {
    MutexLock lock(&mutex_);
    at_end_.push_back(std::move(fn));
  }

  void show_wait(std::function<std::string()> text) override {
    MutexLock lock(&mutex_);
    waits_.push_back(std::move(text));
  }
  // What at_end() waits for; "": nothing, as far as is known.
  std::string waits_for() {
    std::vector<std::function<std::string()>> all;
    {
      MutexLock lock(&mutex_);
      all = waits_;
    }
    for (const auto& one : all) {
      if (std::string text = one(); !text.empty()) return text;
    }
    return "";
  }

  // Made when it is not there. The leaf lives as long as the pass's graph does.
  at::Tensor* slot(const at::Tensor& leaf) {
    MutexLock lock(&mutex_);
    return &slots_[leaf.unsafeGetTensorImpl()].gradient;
  }
  // Calls `fn` with leaves that the pass did not reach, and what a reducer has given to them.
  void visit_added(absl::FunctionRef<void(const at::Tensor& leaf, at::Tensor& gradient)> fn) {
    std::vector<Slot*> added;
    {
      MutexLock lock(&mutex_);
      for (auto& [impl, slot] : slots_) {
        if (slot.added.defined() && slot.gradient.defined()) added.push_back(&slot);
      }
    }
    for (Slot* slot : added) fn(slot->added, slot->gradient);
  }
  bool has_at_end() {
    MutexLock lock(&mutex_);
    return !at_end_.empty();
  }
  // What is to be done at the end; again, if that asked for more.
  std::vector<absl::AnyInvocable<void()>> take_at_end() {
    MutexLock lock(&mutex_);
    return std::exchange(at_end_, {});
  }

 private:
  struct Slot {
    at::Tensor gradient{};
    at::Tensor added{};  // the leaf, when the pass did not reach it
  };
  const AutogradContextId context_;
  const TimeLeft time_left_;
  Mutex mutex_;
  std::map<const void*, Slot> slots_ ABSL_GUARDED_BY(mutex_);
  std::vector<absl::AnyInvocable<void()>> at_end_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::function<std::string()>> waits_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_DIST_AUTOGRAD_INTERNAL_LEAF_SLOTS_H_
