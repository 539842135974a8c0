#include "weft/collectives/internal/group_core.h"
#include "weft/collectives/flight_recorder.h"
#include "weft/collectives/internal/device_engine.h"
#include "weft/collectives/internal/text.h"
#include "weft/common/trace.h"

#include <utility>

namespace weft::internal {

GroupCore::GroupCore(GroupCoreOptions options, std::unique_ptr<Engine> engine,
                     std::unique_ptr<DeviceEngine> device)
    : options_(std::move(options)),
      engine_(std::move(engine)),
      staging_(options_.runtime, options_.log),
      device_(std::move(device)),
      metrics_(options_.metrics),
      changed_(options_.runtime.get()),
      executor_(options_.executor) {
  if (device_ == nullptr) return;
  device_->start({[this](const Status& cause) { fail(cause); },
                  [this](uint64_t sequence) { return look(sequence); }});
}

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
  engine_->note().begin();
  busy_ = true;
  running_ = op;
  running_sequence_ = turn.sequence;
  running_since_ = options_.runtime->now();
  recorded_ = record_.begin(op, turn.sequence, running_since_);
  return absl::OkStatus();
}

Status GroupCore::settle(std::string_view op, const Turn& turn, Status done) {
  std::string what;
  if (!done.ok()) {
    what = cat(op, turn.sequence > 0 ? cat(" #", turn.sequence) : std::string(), " in group '",
               options_.name, "' at rank ", member().rank, " of ", member().size);
    done = annotate(done, what);
    fail(done);
  }
  show_ended(op, turn, done);
  MutexLock lock(&mutex_);
  ++settled_;
  busy_ = false;
  if (done.ok() && turn.sequence > 0) finished_ = turn.sequence;
  record_.end(recorded_, done.ok(), engine_->note(), options_.runtime->now());
  if (waiting_ > 0) changed_.notify_all();
  if (done.ok()) return done;
  // The first cause counts.
  return failure_ == done ? done : annotate(failure_, what);
}

void GroupCore::show_ended(std::string_view op, const Turn& turn, const Status& done) {
  if (options_.metrics == nullptr && options_.trace == nullptr) return;
  absl::Time begun;
  {
    MutexLock lock(&mutex_);
    begun = running_since_;
  }
  const absl::Duration took = options_.runtime->now() - begun;
  const OperationNote& note = engine_->note();
  metrics_.operation_ended(op, done.ok(), took, note.bytes(), engine_->link().traffic(),
                           engine_->between_hosts(), staging_.bytes());
  if (options_.trace == nullptr) return;
  options_.trace->complete("collectives", op, begun, took,
                           {{"group", std::string_view(options_.name)},
                            {"generation", int64_t{member().generation}},
                            {"sequence", static_cast<int64_t>(turn.sequence)},
                            {"algorithm", note.algorithm()},
                            {"bytes", static_cast<int64_t>(note.bytes())},
                            {"error", std_view(done.message())}});
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
  queued.body = std::move(body);
  queued.promise = Promise<void>(executor_locked());
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

const std::shared_ptr<Executor>& GroupCore::executor_locked() {
  if (executor_ == nullptr) {
    PoolOptions pool;
    pool.name = "weft-coll-then";
    pool.threads = 1;
    executor_ = options_.runtime->make_pool(pool);
  }
  return executor_;
}

Future<void> GroupCore::queued(std::string_view op, const std::shared_ptr<ValueGuard>& guard) {
  MutexLock lock(&mutex_);
  Promise<void> promise(closed_ ? executor_ : executor_locked());
  promise.state()->set_label(cat(op, " in group '", options_.name, "'"));
  lock.unlock();
  promise.try_set({}, guard);
  return promise.future();
}

Status GroupCore::on_host(absl::FunctionRef<Status()> body) {
  if (device_ == nullptr) return body();
  {
    MutexLock lock(&host_mutex_);
    on_host_ = true;
  }
  Status done = body();
  MutexLock lock(&host_mutex_);
  on_host_ = false;
  return done;
}

Status GroupCore::look(uint64_t sequence) {
  MutexLock lock(&host_mutex_);
  // A body on the host looks itself.
  return on_host_ ? absl::OkStatus() : engine_->link().look(sequence);
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
  staging_.interrupt(cause);
  if (device_ != nullptr) device_->abort(cause);
  metrics_.group_failed();
  if (options_.recorder != nullptr) options_.recorder->group_failed(*this, flight_record());
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
  std::vector<bool> out;
  {
    MutexLock lock(&host_mutex_);
    out = engine_->link().gone();
  }
  MutexLock lock(&mutex_);
  for (const int rank : died_) out[static_cast<size_t>(rank)] = true;
  return out;
}

void GroupCore::member_died(int rank, const Status& why) {
  {
    MutexLock lock(&mutex_);
    if (closed_) return;
    died_.push_back(rank);
  }
  fail(peer_lost(rank, std_view(why.message())));
}

GroupState GroupCore::state() {
  GroupState out;
  {
    MutexLock lock(&mutex_);
    out.sequence = sequence_;
    out.failure = failure_;
    out.left = closed_;
    out.pending = next_ticket_ - settled_;
    if (!busy_) return out;
    out.op = running_;
    out.op_sequence = running_sequence_;
    out.algorithm = engine_->note().algorithm();
    out.op_age = options_.runtime->now() - running_since_;
  }
  out.waits_for = engine_->awaited();
  return out;
}

Status GroupCore::failure() {
  MutexLock lock(&mutex_);
  return failure_;
}

std::string GroupCore::flight_record() {
  const std::vector<int> waits_for = engine_->awaited();
  MutexLock lock(&mutex_);
  return cat("{\"group\":", json_quoted(options_.name), ",\"generation\":", member().generation,
             ",\"rank\":", member().rank, ",\"size\":", member().size,
             ",\"backend\":", json_quoted(options_.backend),
             ",\"failure\":", json_quoted(std_view(failure_.message())),
             ",\"operations\":", record_.json(options_.runtime->now(), engine_->note(), waits_for),
             "}");
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
  // What was queued is this rank's part of operations that others finish, too.
  if (device_ != nullptr) device_->drain();
  engine_->link().leave(finished);
  if (device_ != nullptr) device_->close();
  std::unique_ptr<Thread> thread;
  std::shared_ptr<Executor> executor;
  {
    MutexLock lock(&mutex_);
    thread = std::move(thread_);
    executor = std::move(executor_);
    changed_.notify_all();
  }
  if (thread != nullptr) thread->join();
  staging_.close();
  // Idle threads end at once. A continuation that closes the group, or another one that goes on,
  // cannot be waited for.
  constexpr absl::Duration kPatience = absl::Milliseconds(100);
  if (executor != nullptr && executor != options_.executor) {
    executor->shutdown_until(options_.runtime->now() + kPatience);
  }
}

void GroupCore::add_user(const std::weak_ptr<GroupUser>& user) {
  MutexLock lock(&mutex_);
  std::erase_if(users_, [](const auto& one) { return one.expired(); });
  users_.push_back(user);
}

std::vector<std::shared_ptr<GroupUser>> GroupCore::users() {
  std::vector<std::shared_ptr<GroupUser>> out;
  MutexLock lock(&mutex_);
  for (const auto& one : users_) {
    if (auto user = one.lock(); user != nullptr) out.push_back(std::move(user));
  }
  return out;
}

std::string awaited_text(const GroupCore& core, const GroupState& state) {
  std::string out;
  for (const int rank : state.waits_for) {
    cat_to(&out, out.empty() ? "" : ", ", "rank ", rank);
    const auto& workers = core.options().workers;
    if (static_cast<size_t>(rank) < workers.size()) {
      cat_to(&out, " ('", workers[static_cast<size_t>(rank)].name, "')");
    }
  }
  return out;
}

}  // namespace weft::internal
