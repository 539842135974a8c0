#include "weft/common/internal/pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/error.h"

namespace weft::internal {

std::chrono::steady_clock::time_point to_steady(absl::Time t) {
  using TimePoint = std::chrono::steady_clock::time_point;
  // Far enough for ever, near enough that adding to it inside the library cannot overflow.
  if (t == absl::InfiniteFuture())
    return TimePoint::clock::now() + std::chrono::hours(24 * 365 * 20);
  return TimePoint(std::chrono::nanoseconds(absl::ToUnixNanos(t)));
}

absl::Time steady_now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return absl::FromUnixNanos(std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
}

void name_this_thread(const std::string& name) {
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
}

namespace {

// False when the time had come first. REQUIRES: the mutex is held.
bool wait(std::condition_variable* wake, Mutex* mutex,
          absl::Time deadline = absl::InfiniteFuture()) {
  std::unique_lock<std::mutex> lock(mutex->native(), std::adopt_lock);
  bool in_time = true;
  if (deadline == absl::InfiniteFuture()) {
    wake->wait(lock);
  } else {
    in_time = wake->wait_until(lock, to_steady(deadline)) == std::cv_status::no_timeout;
  }
  lock.release();
  return in_time;
}

}  // namespace

bool SystemParker::park_until(absl::Time deadline) {
  const bool forever = deadline == absl::InfiniteFuture();
  const timespec until = absl::ToTimespec(deadline);
  while (permit_.exchange(0, std::memory_order_acquire) == 0) {
    if (!forever && now() >= deadline) return false;
    // An absolute time on the steady clock; every other reason to return is looked at above.
    syscall(SYS_futex, &permit_, FUTEX_WAIT_BITSET_PRIVATE, 0, forever ? nullptr : &until, nullptr,
            FUTEX_BITSET_MATCH_ANY);
  }
  return true;
}

void SystemParker::unpark() {
  if (permit_.exchange(1, std::memory_order_release) == 0) {
    syscall(SYS_futex, &permit_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
  }
}

bool Pool::State::post(Task&& task) {
  std::list<std::thread> ended;
  bool wake = false;
  {
    MutexLock lock(&mutex_);
    if (closed_) return false;
    tasks_.push_back(std::move(task));
    // An idle thread that was woken for an earlier task still counts as idle until it runs, so the
    // number of queued tasks decides, not whether a thread is idle.
    if (tasks_.size() <= static_cast<size_t>(idle_)) {
      wake = true;
    } else if (running_ < options_.threads && !start_thread_locked() && threads_.empty()) {
      // No thread would ever run it: refused as after shutdown, so that the caller can run it.
      task = std::move(tasks_.back());
      tasks_.pop_back();
      return false;
    }
    ended.swap(ended_);
  }
  // Outside the lock, which the woken thread wants first.
  if (wake) wake_.notify_one();
  reap(&ended);
  return true;
}

bool Pool::State::start_thread_locked() {
  threads_.emplace_back();
  auto self = std::prev(threads_.end());
  try {
    *self = std::thread([state = shared_from_this(), self] { state->run(self); });
  } catch (const std::system_error&) {  // the system's limit on threads
    threads_.pop_back();
    return false;
  }
  ++running_;
  return true;
}

void Pool::State::run(std::list<std::thread>::iterator self) {
  name_this_thread(options_.name);
  MutexLock lock(&mutex_);
  while (true) {
    // Surplus threads, left over when blocked ones came back, end as soon as they are free.
    if (running_ > options_.threads) break;
    if (tasks_.empty()) {
      if (closed_ && blocked_ == 0) break;
      ++idle_;
      wait(&wake_, &mutex_);
      --idle_;
      continue;
    }
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    ++under_way_;
    lock.unlock();
    {
      BlockingHookGuard hook(this);
      task();
      task = nullptr;
    }
    lock.lock();
    --under_way_;
  }
  --running_;
  // A waiting thread may have to take over the queued tasks, or to notice that all are done.
  wake_.notify_all();
  if (abandoned_) {
    // No thread is left to join this one, and it has nothing more to do.
    self->detach();
    threads_.erase(self);
    return;
  }
  ended_.splice(ended_.end(), threads_, self);
}

absl::Status Pool::State::begin_blocking() {
  MutexLock lock(&mutex_);
  if (blocked_ >= options_.max_blocked) {
    return make_error(
        ErrorKind::kResource,
        absl::StrCat("pool '", options_.name, "' already has ", blocked_,
                     " waiting tasks (its bound): make handlers asynchronous, or raise "
                     "max_blocked"));
  }
  ++blocked_;
  --running_;
  if (tasks_.size() > static_cast<size_t>(idle_) && running_ < options_.threads &&
      !start_thread_locked() && running_ == 0) {
    --blocked_;
    ++running_;
    return make_error(ErrorKind::kResource,
                      absl::StrCat("pool '", options_.name, "' has ", threads_.size(),
                                   " threads and the system lets it start no more: this wait could "
                                   "block all that is queued"));
  }
  return absl::OkStatus();
}

void Pool::State::end_blocking() {
  MutexLock lock(&mutex_);
  --blocked_;
  ++running_;
  if (closed_) wake_.notify_all();
}

void Pool::State::reap(std::list<std::thread>* ended) {
  for (std::thread& thread : *ended) thread.join();
  ended->clear();
}

int Pool::State::threads_for_test() {
  MutexLock lock(&mutex_);
  return static_cast<int>(threads_.size());
}

int Pool::State::tasks_for_test() {
  MutexLock lock(&mutex_);
  return under_way_ + static_cast<int>(tasks_.size());
}

bool Pool::State::shutdown_until(absl::Time deadline) {
  std::list<std::thread> ended;
  bool all = true;
  {
    MutexLock lock(&mutex_);
    closed_ = true;
    wake_.notify_all();
    while (!threads_.empty()) {
      // Threads without a task end by themselves, when they get a core.
      if (deadline == absl::InfiniteFuture() || (under_way_ == 0 && tasks_.empty())) {
        wait(&wake_, &mutex_);
      } else if (!wait(&wake_, &mutex_, deadline) && (under_way_ > 0 || !tasks_.empty())) {
        break;
      }
    }
    all = threads_.empty();
    gave_up_ = !all;
    ended.swap(ended_);
  }
  reap(&ended);
  return all;
}

bool Pool::State::gave_up() {
  MutexLock lock(&mutex_);
  return gave_up_;
}

bool Pool::State::on_own_thread() {
  MutexLock lock(&mutex_);
  for (const std::thread& thread : threads_) {
    if (thread.get_id() == std::this_thread::get_id()) return true;
  }
  return false;
}

void Pool::State::abandon() {
  std::list<std::thread> ended;
  {
    MutexLock lock(&mutex_);
    closed_ = true;
    abandoned_ = true;
    wake_.notify_all();
    ended.swap(ended_);
  }
  reap(&ended);
}

Pool::~Pool() {
  if (state_->gave_up() || state_->on_own_thread()) {
    state_->abandon();
  } else {
    shutdown();
  }
}

Loop::Loop(std::string name) : name_(std::move(name)), thread_([this] { run(); }) {}

bool Loop::post(Task&& task) {
  bool first = false;
  {
    MutexLock lock(&mutex_);
    if (closed_) return false;
    tasks_.push_back(std::move(task));
    first = tasks_.size() == 1;
  }
  if (first) wake_.notify_one();
  return true;
}

void Loop::run() {
  name_this_thread(name_);
  MutexLock lock(&mutex_);
  while (true) {
    while (tasks_.empty() && !closed_) wait(&wake_, &mutex_);
    if (tasks_.empty()) return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

void Loop::shutdown() {
  {
    MutexLock lock(&mutex_);
    closed_ = true;
    wake_.notify_all();
  }
  std::call_once(joined_, [this] { thread_.join(); });
}

}  // namespace weft::internal
