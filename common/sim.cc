#include "weft/common/sim.h"

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/error.h"
#include "weft/common/files.h"
#include "weft/common/time.h"

namespace weft {
namespace {

// SplitMix64: small, and the same everywhere.
class SeededRandom : public Random {
 public:
  explicit SeededRandom(uint64_t seed) : state_(seed) {}
  uint64_t next() override {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

 private:
  uint64_t state_;
};

class VirtualClock : public Clock {
 public:
  absl::Time now() const override { return now_; }
  void advance_to(absl::Time t) {
    if (t > now_) now_ = t;
  }

 private:
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
};

// Keeps the calling thread on one processor. Since one thread of a simulation runs at a time (SIM-1), nothing is lost, and
// a hand-over wakes no other processor: simulations of autograd take a fifth of the time beside other work. Where the
// system refuses, the thread stays where it is.
void stay_on(int processor) {
  if (processor < 0 || processor >= CPU_SETSIZE) return;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(processor, &one);
  (void)pthread_setaffinity_np(pthread_self(), sizeof(one), &one);
}

// One OS thread of the simulation, asleep unless it holds the baton. A semaphore, because a thread that is woken by a
// condition variable finds its mutex taken and sleeps once more: a hand-over then takes twice as long.
class Baton {
 public:
  Baton() {
    if (sem_init(&given_, 0, 0) != 0) std::abort();
  }
  ~Baton() { sem_destroy(&given_); }
  Baton(const Baton&) = delete;
  Baton& operator=(const Baton&) = delete;

  void give() { sem_post(&given_); }
  void wait() {
    while (sem_wait(&given_) != 0) {  // a signal
    }
  }

 private:
  sem_t given_;
};

}  // namespace

namespace internal {

// All state is touched only by the thread that holds the baton, so there is no lock besides the
// batons' own: handing one over orders everything before it.
class SimCore {
 public:
  // A source of ready work: a queue of tasks, drawn in order or in any order.
  struct Queue {
    std::string name;
    uint64_t id = 0;
    bool serial = true;  // one at a time, in order, even across a wait (a loop)
    bool any_order = false;
    bool closed = false;
    std::deque<Task> tasks;
    int active = 0;                // tasks begun and not ended
    std::vector<Baton*> draining;  // threads in shutdown(), woken when all is done
  };

  // A thread that waits in park_until().
  struct Waiting {
    Baton* baton = nullptr;
    uint64_t id = 0;
    bool timed_out = false;
    absl::Time deadline;
    std::string name;
  };

  struct TimerState {
    uint64_t id = 0;
    Task on_fire;
    bool armed = false;
    bool running = false;
    bool dead = false;
    absl::Time when;

    void fire() {
      if (dead) return;
      running = true;
      on_fire();
      running = false;
      if (dead) on_fire = nullptr;
    }
  };

  explicit SimCore(const SimOptions& options)
      : options_(options),
        random_(options.seed),
        choices_(options.seed ^ 0x5eed5eed5eed5eedu),
        files_(make_memory_files()) {}

  ~SimCore() {
    stopping_ = true;
    while (!idle_.empty()) {
      Baton* baton = idle_.back();
      idle_.pop_back();
      baton->give();
    }
    for (std::thread& t : threads_) t.join();
  }

  absl::Status run(Task body) {
    body_done_ = false;
    running_ = true;
    outcome_ = absl::OkStatus();
    auto queue = new_queue("main", true, false);
    post(queue, [this, body = std::move(body)]() mutable {
      body();
      body_done_ = true;
    });
    hand_over_scheduler();
    finished_.wait();
    return outcome_;
  }

  // ---- what the scheduler runs -------------------------------------------------------------

  // Runs ready work until the baton has gone elsewhere or everything is finished. On a thread of
  // ours.
  void schedule(Baton* self) {
    while (!stopping_) {
      if (nothing_ready()) {
        if (body_done_ && parked_.empty()) return finish(self);
        if (body_done_) {
          give_up(
              make_error(ErrorKind::kInternal, absl::StrCat("seed ", options_.seed,
                                                            ": the body has ended, but somebody "
                                                            "still waits: ",
                                                            who_waits())));
        } else if (!advance()) {
          give_up(make_error(ErrorKind::kInternal,
                             absl::StrCat("seed ", options_.seed, ": deadlock at step ", steps_,
                                          "; waiting: ", who_waits())));
        }
        continue;
      }
      if (!chosen_.has_value()) choose();
      step(self, *std::exchange(chosen_, std::nullopt));
    }
  }

  // REQUIRES: something is ready.
  void choose() {
    if (++steps_ == options_.max_steps) {
      give_up(make_error(ErrorKind::kResource,
                         absl::StrCat("seed ", options_.seed, ": no end after ", options_.max_steps,
                                      " steps; waiting: ", who_waits())));
    }
    chosen_ = static_cast<size_t>(choices_.below(ready_queues_.size() + ready_threads_.size()));
  }

  // From here on every wait fails at once, so that the program unwinds. One that does not, even so,
  // is a hang that nothing can report later.
  void give_up(absl::Status why) {
    if (outcome_.ok()) outcome_ = std::move(why);
    if (++gave_up_ > 1000) {
      std::fprintf(stderr, "simulation does not unwind: %s\n", outcome_.ToString().c_str());
      std::abort();
    }
    std::vector<Waiting*> all;
    for (const auto& [id, w] : parked_) all.push_back(w);
    for (Waiting* w : all) {
      w->timed_out = true;
      unpark(w);
    }
  }

  bool nothing_ready() const { return ready_queues_.empty() && ready_threads_.empty(); }

  // Takes a thread, of those that come before all queues in what is chosen from.
  Baton* take_thread(size_t pick) {
    auto it = std::next(ready_threads_.begin(), static_cast<long>(pick));
    Waiting* thread = it->second;
    ready_threads_.erase(it);
    record("wake", thread->id, 0, thread->name);
    return thread->baton;
  }

  void step(Baton* self, size_t pick) {
    if (pick < ready_threads_.size()) {
      Baton* next = take_thread(pick);
      // The woken thread takes the baton along; this one is idle until a scheduler is needed.
      idle_.push_back(self);
      next->give();
      self->wait();
      return;
    }
    pick -= ready_threads_.size();
    auto it = std::next(ready_queues_.begin(), static_cast<long>(pick));
    std::shared_ptr<Queue> queue = it->second;
    size_t index = 0;
    if (queue->any_order) index = static_cast<size_t>(choices_.below(queue->tasks.size()));
    Task task = std::move(queue->tasks[index]);
    queue->tasks.erase(queue->tasks.begin() + static_cast<long>(index));
    // A queue in order is not ready while its task runs: even one that waits keeps its turn.
    ++queue->active;
    update_ready(queue);
    record("task", queue->id, index, queue->name);
    task();
    task = nullptr;
    --queue->active;
    update_ready(queue);
    if (queue->active == 0 && queue->tasks.empty()) {
      for (Baton* b : queue->draining) make_ready(b);
      queue->draining.clear();
    }
  }

  // SIM-2. False when there is nothing to wait for.
  bool advance() {
    absl::Time next = absl::InfiniteFuture();
    for (const auto& [id, t] : timers_) {
      if (t->armed && t->when < next) next = t->when;
    }
    for (const auto& [id, w] : parked_) {
      if (w->deadline < next) next = w->deadline;
    }
    if (next == absl::InfiniteFuture()) return false;
    clock_.advance_to(next);
    record("time", static_cast<uint64_t>(absl::ToUnixNanos(next)), 0, "");
    for (auto& [id, t] : timers_) {
      if (t->armed && t->when <= next) {
        t->armed = false;
        post(timer_queue(), [t = t] { t->fire(); });
      }
    }
    std::vector<Waiting*> due;
    for (const auto& [id, w] : parked_) {
      if (w->deadline <= next) due.push_back(w);
    }
    for (Waiting* w : due) {
      w->timed_out = true;
      unpark(w);
    }
    return true;
  }

  void finish(Baton* self) {
    running_ = false;
    idle_.push_back(self);
    finished_.give();
    self->wait();
  }

  // ---- called by what runs -----------------------------------------------------------------

  std::shared_ptr<Queue> new_queue(std::string name, bool serial, bool any_order) {
    auto queue = std::make_shared<Queue>();
    queue->name = std::move(name);
    queue->id = ++next_id_;
    queue->serial = serial;
    queue->any_order = any_order;
    return queue;
  }

  void update_ready(const std::shared_ptr<Queue>& queue) {
    const bool ready = !queue->tasks.empty() && (!queue->serial || queue->active == 0);
    if (ready) {
      ready_queues_.emplace(queue->id, queue);
    } else {
      ready_queues_.erase(queue->id);
    }
  }

  bool post(const std::shared_ptr<Queue>& queue, Task&& task) {
    if (queue->closed) return false;
    queue->tasks.push_back(std::move(task));
    update_ready(queue);
    return true;
  }

  void drain(const std::shared_ptr<Queue>& queue) {
    queue->closed = true;
    Baton mine;
    while (queue->active > 0 || !queue->tasks.empty()) {
      if (!running_) return;  // torn down after run(): what is left never runs
      queue->draining.push_back(&mine);
      // Even after giving up: what the tasks use is destroyed when this returns.
      wait_ready(&mine, absl::InfiniteFuture(), "shutdown of " + queue->name);
      queue->draining.erase(std::remove(queue->draining.begin(), queue->draining.end(), &mine),
                            queue->draining.end());
    }
  }

  // Blocks the calling thread; true when it was made ready before the deadline.
  bool block(Baton* mine, absl::Time deadline, std::string name) {
    if (gave_up_ > 0) return false;
    return wait_ready(mine, deadline, std::move(name));
  }

  bool wait_ready(Baton* mine, absl::Time deadline, std::string name) {
    Waiting waiting;
    waiting.baton = mine;
    waiting.id = ++next_id_;
    waiting.deadline = deadline;
    waiting.name = std::move(name);
    parked_.emplace(waiting.id, &waiting);
    by_baton_[mine] = &waiting;
    pass_on(mine);
    return !waiting.timed_out;
  }

  void unpark(Waiting* w) {
    parked_.erase(w->id);
    by_baton_.erase(w->baton);
    ready_threads_.emplace(w->id, w);
  }

  void make_ready(Baton* baton) {
    auto it = by_baton_.find(baton);
    if (it != by_baton_.end()) unpark(it->second);
  }

  // Returns when the thread of `mine`, which waits, is woken. Another thread that is woken gets the baton at once; for
  // anything else a scheduler runs, which would be a second hand-over.
  void pass_on(Baton* mine) {
    if (!body_done_ && running_ && (!nothing_ready() || advance())) choose();
    if (chosen_.has_value() && *chosen_ < ready_threads_.size()) {
      Baton* next = take_thread(*std::exchange(chosen_, std::nullopt));
      if (next == mine) return;
      next->give();
    } else {
      hand_over_scheduler();
    }
    mine->wait();
  }

  // Lets another thread run the scheduler from here on.
  void hand_over_scheduler() {
    if (!idle_.empty()) {
      Baton* next = idle_.back();
      idle_.pop_back();
      next->give();
      return;
    }
    // It starts only when it is in the list: it may add threads to that itself.
    auto start = std::make_shared<Baton>();
    if (threads_.empty()) processor_ = sched_getcpu();
    threads_.emplace_back([this, start] {
      stay_on(processor_);
      Baton self;
      start->wait();
      while (!stopping_) schedule(&self);
    });
    start->give();
  }

  const std::shared_ptr<Queue>& timer_queue() {
    if (timer_queue_ == nullptr) timer_queue_ = new_queue("timers", false, true);
    return timer_queue_;
  }

  void record(const char* label, uint64_t a, uint64_t b, const std::string& name) {
    for (const char* p = label; *p != 0; ++p) mix(static_cast<uint64_t>(*p));
    mix(a);
    mix(b);
    if (options_.keep_events > 0) {
      events_.push_back(absl::StrCat(absl::FormatDuration(clock_.now() - absl::UnixEpoch()), " ",
                                     label, " ", a, " ", b, " ", name));
      if (events_.size() > options_.keep_events) events_.pop_front();
    }
  }

  void mix(uint64_t v) { hash_ = (hash_ ^ v) * 0x100000001b3u ^ (hash_ >> 29); }

  std::string who_waits() const {
    std::string out;
    for (const auto& [id, w] : parked_) absl::StrAppend(&out, "[", id, "] ", w->name, "; ");
    return out.empty() ? "nobody" : out;
  }

  const SimOptions options_;
  VirtualClock clock_;
  SeededRandom random_;
  SeededRandom
      choices_;  // apart, so that what a program draws does not shift the schedule's stream
  std::unique_ptr<Files> files_;

  uint64_t next_id_ = 0;
  uint64_t steps_ = 0;
  std::optional<size_t> chosen_;  // of what is ready, and not yet taken
  uint64_t hash_ = 0xcbf29ce484222325u;
  std::deque<std::string> events_;

  std::map<uint64_t, std::shared_ptr<Queue>> ready_queues_;
  std::map<uint64_t, Waiting*> ready_threads_;
  std::map<uint64_t, Waiting*> parked_;
  std::map<Baton*, Waiting*> by_baton_;  // looked up only, never iterated
  std::map<uint64_t, std::shared_ptr<TimerState>> timers_;
  std::shared_ptr<Queue> timer_queue_;

  bool running_ = false;
  bool body_done_ = true;  // no body yet
  int gave_up_ = 0;
  bool stopping_ = false;
  absl::Status outcome_;
  Baton finished_;
  std::vector<Baton*> idle_;
  std::list<std::thread> threads_;
  int processor_ = -1;
};

class SimParker : public Parker {
 public:
  explicit SimParker(std::shared_ptr<SimCore> core) : core_(std::move(core)) {}
  bool park_until(absl::Time deadline) override {
    if (!permit_ && deadline > core_->clock_.now()) {
      parked_ = true;
      core_->block(&baton_, deadline, "park");
      parked_ = false;
    }
    return std::exchange(permit_, false);
  }
  void unpark() override {
    permit_ = true;
    if (parked_) core_->make_ready(&baton_);
  }
  absl::Time now() const override { return core_->clock_.now(); }

 private:
  std::shared_ptr<SimCore> core_;
  Baton baton_;
  bool permit_ = false;
  bool parked_ = false;
};

class SimExecutor : public Executor {
 public:
  SimExecutor(std::shared_ptr<SimCore> core, std::string name, bool serial, bool any_order)
      : core_(std::move(core)), queue_(core_->new_queue(std::move(name), serial, any_order)) {}
  ~SimExecutor() override { shutdown(); }
  bool post(Task&& task) override { return core_->post(queue_, std::move(task)); }
  void shutdown() override { core_->drain(queue_); }
  std::unique_ptr<Parker> make_parker() override { return std::make_unique<SimParker>(core_); }

 private:
  std::shared_ptr<SimCore> core_;
  std::shared_ptr<SimCore::Queue> queue_;
};

class SimTimer : public Timer {
 public:
  SimTimer(std::shared_ptr<SimCore> core, Task on_fire)
      : core_(std::move(core)), state_(std::make_shared<SimCore::TimerState>()) {
    state_->id = ++core_->next_id_;
    state_->on_fire = std::move(on_fire);
    core_->timers_.emplace(state_->id, state_);
  }
  ~SimTimer() override {
    state_->armed = false;
    state_->dead = true;
    // The callback may be what destroys the timer; then it goes when it returns.
    if (!state_->running) state_->on_fire = nullptr;
    core_->timers_.erase(state_->id);
  }
  void arm(absl::Time when) override {
    state_->armed = true;
    state_->when = when;
  }
  void disarm() override { state_->armed = false; }

 private:
  std::shared_ptr<SimCore> core_;
  std::shared_ptr<SimCore::TimerState> state_;
};

class SimThread : public Thread {
 public:
  SimThread(std::shared_ptr<SimCore> core, std::string name, Task body)
      : core_(std::move(core)), queue_(core_->new_queue(std::move(name), true, false)) {
    core_->post(queue_, std::move(body));
  }
  ~SimThread() override { join(); }
  void join() override { core_->drain(queue_); }

 private:
  std::shared_ptr<SimCore> core_;
  std::shared_ptr<SimCore::Queue> queue_;
};

}  // namespace internal

using internal::SimCore;
using internal::SimExecutor;
using internal::SimParker;
using internal::SimThread;
using internal::SimTimer;

SimRuntime::SimRuntime(const SimOptions& options) : core_(std::make_shared<SimCore>(options)) {}
SimRuntime::~SimRuntime() = default;

absl::Status SimRuntime::run(Task body) { return core_->run(std::move(body)); }
void SimRuntime::sleep(absl::Duration d) {
  SimParker(core_).park_until(deadline_after(core_->clock_.now(), d));
}
uint64_t SimRuntime::trace_hash() const { return core_->hash_; }
uint64_t SimRuntime::steps() const { return core_->steps_; }
std::vector<std::string> SimRuntime::last_events() const {
  return {core_->events_.begin(), core_->events_.end()};
}

const Clock& SimRuntime::clock() const { return core_->clock_; }
Random& SimRuntime::random() { return core_->random_; }
Files& SimRuntime::files() { return *core_->files_; }
std::shared_ptr<Executor> SimRuntime::make_loop(std::string_view name) {
  return std::make_shared<SimExecutor>(core_, std::string(name), true, false);
}
std::shared_ptr<Executor> SimRuntime::make_pool(const PoolOptions& options) {
  return std::make_shared<SimExecutor>(core_, options.name, false, options.threads > 1);
}
std::unique_ptr<Parker> SimRuntime::make_parker() { return std::make_unique<SimParker>(core_); }
std::unique_ptr<Timer> SimRuntime::make_timer(Task on_fire) {
  return std::make_unique<SimTimer>(core_, std::move(on_fire));
}
std::unique_ptr<Thread> SimRuntime::spawn(std::string_view name, Task body) {
  return std::make_unique<SimThread>(core_, std::string(name), std::move(body));
}
void SimRuntime::trace(const char* label, uint64_t a, uint64_t b) {
  core_->record(label, a, b, std::string());
}

}  // namespace weft
