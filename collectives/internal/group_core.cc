#include "weft/collectives/internal/group_core.h"
#include "weft/collectives/internal/text.h"
#include "weft/common/trace.h"

#include <utility>

namespace weft::internal {

GroupCore::GroupCore(GroupCoreOptions options, std::unique_ptr<Engine> engine)
    : options_(std::move(options)),
      engine_(std::move(engine)),
      changed_(options_.runtime.get()),
      executor_(options_.executor) {}

GroupCore::~GroupCore() { close(); }

Status GroupCore::failed_locked(std::string_view op) const {
  return annotate(failure_, cat(op, " in group '", options_.name, "', which has failed"));
}

Status GroupCore::take_turn_locked(std::string_view op, Timeout timeout, bool counts, Turn* turn,
                                   uint64_t* ticket) {
  if (!failure_.ok()) return failed_locked(op);
  if (closed_) {
    return make_error(ErrorKind::kState,
                      cat(op, " in group '", options_.name, "', which was left"));
  }
  turn->deadline = deadline_after(options_.runtime->now(), timeout.value_or(options_.timeout));
  turn->sequence = counts ? ++sequence_ : 0;
  *ticket = next_ticket_++;
  return absl::OkStatus();
}

Status GroupCore::await_turn_locked(std::string_view op, uint64_t ticket, const Turn& turn) {
  while (serving_ != ticket) {
    if (!failure_.ok()) return failed_locked(op);
    ++waiting_;
    const Status waited = changed_.wait_until(&mutex_, turn.deadline);
    --waiting_;
    if (waited.ok() || serving_ == ticket) continue;
    if (!failure_.ok()) return failed_locked(op);
    // The others will run this operation, so that it cannot be left out here.
    return annotate(waited, cat(op, " #", turn.sequence, " in group '", options_.name,
                                "', behind operations that are not over"));
  }
  if (!failure_.ok()) return failed_locked(op);
  busy_ = true;
  recorded_ = record_.begin(op, turn.sequence, options_.runtime->now());
  return absl::OkStatus();
}

Status GroupCore::settle(std::string_view op, const Turn& turn, Status done) {
  if (!done.ok()) {
    done = annotate(
        done, cat(op, turn.sequence > 0 ? cat(" #", turn.sequence) : std::string(), " in group '",
                  options_.name, "' at rank ", member().rank, " of ", member().size));
    fail(done);
  }
  MutexLock lock(&mutex_);
  ++settled_;
  busy_ = false;
  if (done.ok() && turn.sequence > 0) finished_ = turn.sequence;
  record_.end(recorded_, done.ok(), options_.runtime->now());
  if (waiting_ > 0) changed_.notify_all();
  // The first cause counts.
  return done.ok() ? done : failure_;
}

void GroupCore::end_turn() {
  MutexLock lock(&mutex_);
  ++serving_;
  if (waiting_ > 0) changed_.notify_all();
}

Status GroupCore::run(std::string_view op, Timeout timeout, bool counts, Body body) {
  Turn turn;
  {
    uint64_t ticket = 0;
    MutexLock lock(&mutex_);
    WEFT_RETURN_IF_ERROR(take_turn_locked(op, timeout, counts, &turn, &ticket));
    if (Status mine = await_turn_locked(op, ticket, turn); !mine.ok()) {
      lock.unlock();
      fail(mine);
      return mine;
    }
  }
  Status done = settle(op, turn, body(turn));
  end_turn();
  return done;
}

Future<void> GroupCore::start(std::string_view op, Timeout timeout, bool counts,
                              absl::AnyInvocable<Status(const Turn&)> body) {
  MutexLock lock(&mutex_);
  Queued queued;
  queued.op = op;
  if (Status s = take_turn_locked(op, timeout, counts, &queued.turn, &queued.ticket); !s.ok()) {
    return Future<void>::ready(std::move(s));
  }
  if (executor_ == nullptr) {
    PoolOptions pool;
    pool.name = "weft-coll-then";
    pool.threads = 1;
    executor_ = options_.runtime->make_pool(pool);
  }
  queued.body = std::move(body);
  queued.promise = Promise<void>(executor_);
  queued.promise.state()->set_label(cat(op, " in group '", options_.name, "'"));
  // It ends by its own deadline.
  queued.promise.state()->set_default_wait(absl::InfiniteDuration());
  Future<void> future = queued.promise.future();
  queue_.push_back(std::move(queued));
  if (thread_ == nullptr) {
    thread_ = options_.runtime->spawn("weft-coll", [this] { work(); });
  }
  changed_.notify_all();
  return future;
}

void GroupCore::work() {
  MutexLock lock(&mutex_);
  while (true) {
    if (queue_.empty()) {
      if (closed_) return;
      ++waiting_;
      const Status waited = changed_.wait_until(&mutex_, absl::InfiniteFuture());
      --waiting_;
      if (!waited.ok() && queue_.empty()) return;  // a simulation that has given up
      continue;
    }
    Queued next = std::move(queue_.front());
    queue_.pop_front();
    Status done = await_turn_locked(next.op, next.ticket, next.turn);
    lock.unlock();
    const bool had_turn = done.ok();
    if (had_turn) {
      done = settle(next.op, next.turn, next.body(next.turn));
    } else {
      fail(done);
    }
    next.body = nullptr;  // releases what it holds before the promise completes
    next.promise.try_set(std::move(done));
    // A thread that sees a later operation done sees this one done, too.
    if (had_turn) end_turn();
    lock.lock();
  }
}

void GroupCore::fail(const Status& cause) {
  uint64_t sequence = 0;
  {
    MutexLock lock(&mutex_);
    if (!failure_.ok()) return;
    failure_ = cause;
    sequence = sequence_;
    changed_.notify_all();
  }
  WEFT_LOG(options_.log, kWarning)
      << "process group '" << options_.name << "' has failed: " << cause;
  engine_->link().fail(cause, sequence);
}

std::vector<bool> GroupCore::gone() {
  {
    MutexLock lock(&mutex_);
    // A thread that runs an operation now ends it soon, with the group's failure.
    while (busy_) {
      ++waiting_;
      const Status waited = changed_.wait_until(&mutex_, absl::InfiniteFuture());
      --waiting_;
      if (!waited.ok()) break;
    }
  }
  return engine_->link().gone();
}

Status GroupCore::failure() {
  MutexLock lock(&mutex_);
  return failure_;
}

std::string GroupCore::flight_record() {
  MutexLock lock(&mutex_);
  return cat("{\"group\":", json_quoted(options_.name), ",\"generation\":", member().generation,
             ",\"rank\":", member().rank, ",\"size\":", member().size,
             ",\"failure\":", json_quoted(std_view(failure_.message())),
             ",\"operations\":", record_.json(options_.runtime->now()), "}");
}

uint64_t GroupCore::sequence() {
  MutexLock lock(&mutex_);
  return sequence_;
}

void GroupCore::close() {
  bool pending = false;
  uint64_t finished = 0;
  {
    MutexLock lock(&mutex_);
    if (closed_) return;
    closed_ = true;
    pending = settled_ != next_ticket_;
    finished = finished_;
  }
  if (pending) {
    fail(make_error(ErrorKind::kState, cat("rank ", member().rank, " left group '", options_.name,
                                           "' while operations were under way")));
  }
  engine_->link().leave(finished);
  std::unique_ptr<Thread> thread;
  std::shared_ptr<Executor> executor;
  {
    MutexLock lock(&mutex_);
    thread = std::move(thread_);
    executor = std::move(executor_);
    changed_.notify_all();
  }
  if (thread != nullptr) thread->join();
  // Idle threads end at once. A continuation that closes the group, or another one that goes on,
  // cannot be waited for.
  constexpr absl::Duration kPatience = absl::Milliseconds(100);
  if (executor != nullptr && executor != options_.executor) {
    executor->shutdown_until(options_.runtime->now() + kPatience);
  }
}

}  // namespace weft::internal
