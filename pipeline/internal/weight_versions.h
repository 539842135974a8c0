#ifndef WEFT_PIPELINE_INTERNAL_WEIGHT_VERSIONS_H_
#define WEFT_PIPELINE_INTERNAL_WEIGHT_VERSIONS_H_

// WeightVersions: the weights of a stage of an asynchronous plan. A backward uses the values that its
// forward used, though the stage has stepped since: before a step, values that a forward still needs
// are set aside, and the step writes to a copy.
//
// What LibTorch saves of a parameter is the parameter itself, with the number of writes to it, or a
// view of the memory that it had. So use() puts the old memory back for a backward, and a step is
// counted on a counter of its own.
//
// One thread.

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/GradMode.h"
#include "c10/core/TensorImpl.h"

namespace weft::pipeline::internal {

class WeightVersions {
 public:
  using Key = std::pair<int64_t, int>;  // step, micro-batch

  explicit WeightVersions(std::vector<at::Tensor> parameters)
      : parameters_(std::move(parameters)) {}

  // The forward of `key` uses what the parameters are now.
  void forward(const Key& key) { used_[key] = current_; }
  int64_t kept() const { return static_cast<int64_t>(stashed_.size()) + 1; }

  // Parameters are what the forward of `key` used, until it ends.
  class Use {
   public:
    Use(const WeightVersions* of, const Key& key) {
      const auto used = of->used_.find(key);
      if (used == of->used_.end()) return;
      const auto old = of->stashed_.find(used->second);
      if (old == of->stashed_.end()) return;
      of_ = of;
      for (const at::Tensor& p : of->parameters_) now_.push_back(p.detach());
      of->put(old->second);
    }
    ~Use() {
      if (of_ != nullptr) of_->put(now_);
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    const WeightVersions* of_ = nullptr;
    std::vector<at::Tensor> now_;
  };

  // The backward of `key` has run.
  void done(const Key& key) {
    used_.erase(key);
    for (auto it = stashed_.begin(); it != stashed_.end();) {
      it = needs(it->first) ? std::next(it) : stashed_.erase(it);
    }
  }
  // Around what writes to the parameters.
  void before_step() {
    if (needs(current_)) {
      std::vector<at::Tensor> old;
      std::vector<at::Tensor> copies;
      const c10::AutoGradMode off(false);
      for (const at::Tensor& p : parameters_) {
        old.push_back(p.detach());
        copies.push_back(p.detach().clone());
      }
      put(copies);
      stashed_.emplace(current_, std::move(old));
    }
    counts_.clear();
    for (const at::Tensor& p : parameters_) {
      counts_.push_back(static_cast<uint32_t>(p._version()));
      count_anew(p, counts_.back());
    }
    ++current_;
  }
  void after_step() {
    for (size_t i = 0; i < parameters_.size(); ++i) count_anew(parameters_[i], counts_[i]);
  }
  void drop() {
    used_.clear();
    stashed_.clear();
  }

 private:
  bool needs(int64_t version) const {
    for (const auto& [key, used] : used_) {
      if (used == version) return true;
    }
    return false;
  }
  void put(const std::vector<at::Tensor>& values) const {
    for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].set_data(values[i]);
  }
  static void count_anew(const at::Tensor& p, uint32_t count) {
    p.unsafeGetTensorImpl()->set_version_counter(c10::VariableVersion(count));
  }

  const std::vector<at::Tensor> parameters_;
  int64_t current_ = 0;
  std::map<Key, int64_t> used_;
  std::map<int64_t, std::vector<at::Tensor>> stashed_;
  std::vector<uint32_t> counts_;
};

}  // namespace weft::pipeline::internal

#endif  // WEFT_PIPELINE_INTERNAL_WEIGHT_VERSIONS_H_
