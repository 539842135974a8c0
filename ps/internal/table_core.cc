#include "weft/ps/internal/table_core.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/linalg_vector_norm.h"
#include "absl/strings/str_cat.h"
#include "weft/ps/internal/definition.h"
#include "weft/rpc/plain_tensor.h"
#include "weft/rpc/spi/untyped_call.h"

namespace weft::ps::internal {
namespace {

at::Tensor plain_here(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided) return tensor;  // check() refuses it
  // A tensor object of its own, whatever becomes of the caller's.
  return plain(tensor.is_cpu() ? tensor.tensor_data() : tensor.detach().cpu());
}

// What is not finite stays, and is refused later.
at::Tensor clipped(const at::Tensor& gradient, double max_norm) {
  const at::AutoGradMode no_grad(false);
  const double norm =
      at::linalg_vector_norm(gradient, 2, std::nullopt, false, at::kDouble).item<double>();
  if (!(norm > max_norm) || !std::isfinite(norm)) return gradient;
  return gradient.mul(max_norm / norm);
}

}  // namespace

TableCore::TableCore(std::shared_ptr<PsService> service, Setup setup)
    : service_(std::move(service)),
      setup_(std::move(setup)),
      client_(service_->next_client()),
      ring_([this]() -> std::optional<HashRing> {
        if (setup_.definition.kind == TableKind::kDense) return std::nullopt;
        std::vector<std::string> names;
        for (const std::string& name : setup_.servers) names.push_back(name);
        return HashRing(names);
      }()),
      elements_(setup_.definition.kind == TableKind::kDense ? element_count(setup_.definition) : 0),
      trace_(trace_of(service_->worker())),
      compensates_(setup_.rule != nullptr && setup_.rule->compensates_delay()),
      versions_(setup_.parts.size(), 0),
      at_least_(setup_.parts.size(), 0) {
  for (const PartTarget& part : setup_.parts) {
    targets_.push_back(std::make_shared<const PartTarget>(part));
  }
  searches_.resize(setup_.parts.size());
  names_ = setup_.servers;
}

std::shared_ptr<TableCore> TableCore::make(std::shared_ptr<PsService> service, Setup setup) {
  auto core = std::make_shared<TableCore>(std::move(service), std::move(setup));
  core->service_->add_client(core->client_, core);
  return core;
}

void TableCore::set_clock(uint64_t clock) {
  MutexLock lock(&mutex_);
  clock_ = std::max(clock_, clock);
}
uint64_t TableCore::clock() const {
  MutexLock lock(&mutex_);
  return clock_;
}
TableStats TableCore::stats() const {
  MutexLock lock(&mutex_);
  return stats_;
}

void TableCore::submit(Ask ask, OpDone done) {
  ask.push_keys = plain_here(ask.push_keys);
  ask.pull_keys = plain_here(ask.pull_keys);
  if (ask.push.has_value()) ask.push = plain_here(*ask.push);
  ask.then = plain_here(ask.then);
  if (Status s = check(ask); !s.ok()) return done(std::move(s));
  if (ask.max_norm.has_value() && ask.push.has_value())
    ask.push = clipped(*ask.push, *ask.max_norm);
  auto op = std::make_shared<Op>();
  op->deadline = deadline_after(service_->context().runtime->now(), ask.deadline);
  op->barrier = ask.advance || ask.leave;
  op->ask = std::move(ask);
  op->done = std::move(done);
  if (setup_.definition.kind == TableKind::kDense) {
    cut_dense(op.get());
  } else {
    cut_sparse(op.get());
  }
  if (Status s = check_values(*op); !s.ok()) return op->done(std::move(s));
  op->left = op->pieces.size();
  for (Piece& piece : op->pieces) {
    piece.op = op.get();
    piece.pushed = piece.tensors.size();
    if (piece.pull_keys.defined()) piece.tensors.push_back(piece.pull_keys);
  }
  bool waits = false;
  {
    MutexLock lock(&mutex_);
    if (passes_queue(*op) && closed_.ok() && !left_) {
      begin_locked(op);
      lock.unlock();
      return send_all(op);
    }
    queue_.push_back(op);
    waits = queue_.size() > 1 || barrier_running_ || is_held();
    // CLIENT-1, also of one that never leaves: one look at the earliest, which holds no operation.
    waits = waits && op->deadline < queue_ends_;
    if (waits) queue_ends_ = op->deadline;
  }
  pump();
  if (waits) look_at_queue(op->deadline);
}

void TableCore::look_at_queue(absl::Time when) {
  later(when, [self = shared_from_this()] { self->end_late(); });
}

void TableCore::end_late() {
  std::vector<OpRef> late;
  Status closed;
  absl::Time next = absl::InfiniteFuture();
  {
    MutexLock lock(&mutex_);
    closed = closed_;
    const absl::Time now = service_->context().runtime->now();
    for (const OpRef& op : queue_) {
      if (op->ended) continue;
      if (!closed.ok() || op->deadline <= now) {
        late.push_back(op);
      } else {
        next = std::min(next, op->deadline);
      }
    }
    queue_ends_ = next;
  }
  const std::string table = absl::StrCat("table '", setup_.name, "'");
  for (const OpRef& op : late) {
    end(op, closed.ok() ? make_error(ErrorKind::kDeadline,
                                     absl::StrCat(table, ": ", std::string(op->ask.what),
                                                  " waited for the step before it to end"))
                        : annotate(closed, table));
  }
  if (next != absl::InfiniteFuture()) look_at_queue(next);
}

// ---- order -------------------------------------------------------------------------------------

void TableCore::begin_locked(const OpRef& op) {
  op->begun = true;
  if (trace_ != nullptr) op->began = service_->context().runtime->now();
  const Ask& ask = op->ask;
  if (op->changes()) {
    op->order = first_order_ + running_.size();
    running_.push_back(op);
  }
  if (!ask.position.empty()) position_ = ask.position;
  uint64_t floor = 0;  // CLIENT-4: numbers are in the order of those that run
  if (ask.push.has_value()) {
    op->number = ++last_number_;
    ++pushes_running_;
    for (size_t i = 0; floor == 0; ++i) floor = running_[i] == nullptr ? 0 : running_[i]->number;
  }
  if (op->barrier) barrier_running_ = true;
  for (Piece& piece : op->pieces) {
    Request& request = piece.request;
    request.client = client_;
    request.enter = ask.enter;
    request.leave = ask.leave;
    if (piece.pushed != 0) {
      request.push =
          PushHeader{op->number, floor, clock_, versions_[piece.part], ask.kind, ask.rate};
      // A step that this push goes into ends with a greater version.
      if (setup_.definition.consistency.mode == Mode::kBatch && ask.kind == PushKind::kGradient) {
        at_least_[piece.part] = versions_[piece.part] + 1;
      }
    }
    if (ask.advance) request.advance = clock_ + 1;
    if (request.pull.has_value()) {
      if (!setup_.observer) request.pull->clock = clock_ + (ask.advance ? 1 : 0);
      request.pull->at_least = at_least_[piece.part];
    }
  }
  if (ask.advance) ++clock_;
  if (ask.leave) left_ = true;
}

void TableCore::pump() {
  for (;;) {
    OpRef op;
    Status refused;
    bool more = false;
    {
      MutexLock lock(&mutex_);
      while (!queue_.empty() && queue_.front()->ended) queue_.pop_front();
      if (queue_.empty() || barrier_running_) return;
      op = queue_.front();
      if (op->barrier && pushes_running_ > 0) return;
      if (op->changes() && is_held()) return;
      queue_.pop_front();
      if (!closed_.ok()) {
        refused = annotate(closed_, absl::StrCat("table '", setup_.name, "'"));
      } else if (left_) {
        refused = make_error(ErrorKind::kState,
                             absl::StrCat("table '", setup_.name, "': ", std::string(op->ask.what),
                                          " after this client has left the table"));
      } else {
        begin_locked(op);
      }
      more = !queue_.empty();
    }
    if (!refused.ok()) {
      end(op, refused);
      continue;
    }
    send_all(op);
    if (!more) return;  // one that comes later has its own thread
  }
}

void TableCore::send_all(const OpRef& op) {
  if (op->pieces.empty()) return end(op, absl::OkStatus());
  for (size_t i = 0; i < op->pieces.size(); ++i) send(op, i);
}

bool TableCore::passes_queue(const Op& op) const {
  return op.ask.pull && !op.changes() && !op.ask.enter.has_value() &&
         setup_.definition.consistency.mode == Mode::kAsp;
}

bool TableCore::end_locked(Op* op, bool ok) {
  if (op->ended) return false;
  op->ended = true;
  if (op->number != 0) --pushes_running_;
  if (op->begun && op->barrier) barrier_running_ = false;
  if (op->begun && op->changes()) {
    running_[op->order - first_order_] = nullptr;
    for (; !running_.empty() && running_.front() == nullptr; ++first_order_) running_.pop_front();
  }
  if (ok) {
    stats_.pushes += op->ask.push.has_value() ? 1 : 0;
    stats_.pulls += op->ask.pull ? 1 : 0;
  }
  return true;
}

void TableCore::end(const OpRef& op, Status why) {
  {
    MutexLock lock(&mutex_);
    if (!end_locked(op.get(), why.ok())) return;
  }
  draw(*op, why);
  OpDone done = std::move(op->done);
  if (!why.ok()) {
    done(std::move(why));
  } else {
    done(result_of(op.get()));
  }
  pump();
}

// Operations overlap, so each has a line of its own; its requests are on the timeline as calls.
void TableCore::draw(const Op& op, const Status& end) const {
  if (trace_ == nullptr || !op.begun) return;
  int64_t bytes = 0;
  for (const Piece& piece : op.pieces) bytes += bytes_of(piece);
  const uint64_t id = client_ << 40 | drawn_.fetch_add(1);
  trace_->async_begin("ps", op.ask.what, id, op.began,
                      {{"table", setup_.name},
                       {"push", static_cast<int64_t>(op.number)},
                       {"parts", static_cast<int64_t>(op.pieces.size())},
                       {"bytes", bytes}});
  const std::string error = end.ok() ? "" : std::string(end.message());
  trace_->async_end("ps", op.ask.what, id, service_->context().runtime->now(), {{"error", error}});
}

// ---- time --------------------------------------------------------------------------------------

void TableCore::later(absl::Time when, Task task) {
  const std::shared_ptr<Executor> executor = service_->context().executor;
  MutexLock lock(&mutex_);
  if (!closed_.ok()) {
    lock.unlock();
    return post_or_run(executor.get(), std::move(task));
  }
  if (timer_ == nullptr) {
    // The callback keeps nothing alive: the timer may not be destroyed in it.
    timer_ = service_->context().runtime->make_timer([weak = weak_from_this(), executor] {
      post_or_run(executor.get(), [weak] {
        if (const auto self = weak.lock()) self->run_due();
      });
    });
  }
  due_.emplace(when, std::move(task));
  timer_->arm(due_.begin()->first);
}

void TableCore::run_due() {
  std::vector<Task> now_due;
  {
    MutexLock lock(&mutex_);
    if (!closed_.ok()) return;
    const absl::Time now = service_->context().runtime->now();
    while (!due_.empty() && due_.begin()->first <= now) {
      now_due.push_back(std::move(due_.begin()->second));
      due_.erase(due_.begin());
    }
    if (!due_.empty()) timer_->arm(due_.begin()->first);
  }
  for (Task& task : now_due) task();
}

void TableCore::close(const Status& why) {
  std::multimap<absl::Time, Task> due;
  std::deque<OpRef> queue;
  {
    MutexLock lock(&mutex_);
    if (!closed_.ok()) return;
    closed_ = why;
    due = std::exchange(due_, {});
    queue = std::exchange(queue_, {});
    if (timer_ != nullptr) timer_->disarm();
  }
  for (auto& [when, task] : due) task();  // requests that fail at once
  for (const OpRef& op : queue) end(op, annotate(why, absl::StrCat("table '", setup_.name, "'")));
}

TableHandle::~TableHandle() {
  if (core_->setup().observer) return;
  // Until every part has heard of it, or its server or this worker has ended: a part that has not waits
  // for this client with every step (PSR-8).
  core_->submit(Ask{.what = "leave", .leave = true, .deadline = absl::InfiniteDuration()},
                [](const StatusOr<OpResult>&) {
                  // No caller is left to tell.
                });
}

}  // namespace weft::ps::internal
