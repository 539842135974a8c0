#include "weft/common/manual_executor.h"

#include <utility>

#include "weft/common/internal/pool.h"

namespace weft {

ManualExecutor::~ManualExecutor() { shutdown(); }

bool ManualExecutor::post(Task&& task) {
  MutexLock lock(&mutex_);
  if (closed_) return false;
  tasks_.push_back(std::move(task));
  return true;
}

void ManualExecutor::shutdown() {
  {
    MutexLock lock(&mutex_);
    closed_ = true;
  }
  run_all();
}

std::unique_ptr<Parker> ManualExecutor::make_parker() {
  return std::make_unique<internal::SystemParker>();
}

bool ManualExecutor::run_one() {
  Task task;
  {
    MutexLock lock(&mutex_);
    if (tasks_.empty()) return false;
    task = std::move(tasks_.front());
    tasks_.pop_front();
  }
  task();
  return true;
}

size_t ManualExecutor::run_all() {
  size_t count = 0;
  while (run_one()) ++count;
  return count;
}

size_t ManualExecutor::queued() const {
  MutexLock lock(&mutex_);
  return tasks_.size();
}

}  // namespace weft
