#include "weft/ps/internal/table_core.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "weft/common/call_scope.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/internal/part_data.h"
#include "weft/rpc/untyped_call.h"

namespace weft::ps::internal {
namespace {

constexpr absl::Duration kFirstBackoff = absl::Milliseconds(20);
constexpr absl::Duration kMostBackoff = absl::Seconds(1);
constexpr absl::Duration kLeaveTime = absl::Seconds(10);

absl::Duration backoff_after(int attempts) {
  return std::min(kMostBackoff, kFirstBackoff * (1 << std::min(attempts, 8)));
}

at::Tensor plain(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided) return tensor;  // check() refuses it
  const at::Tensor detached = tensor.detach();
  return (detached.device().is_cpu() ? detached : detached.cpu()).contiguous();
}

}  // namespace

TableCore::TableCore(std::shared_ptr<PsService> service, Setup setup)
    : service_(std::move(service)),
      setup_(std::move(setup)),
      client_(service_->next_client()),
      ring_([this]() -> std::optional<HashRing> {
        if (setup_.definition.kind == TableKind::kDense) return std::nullopt;
        std::vector<std::string> names;
        for (const PartTarget& part : setup_.parts) names.push_back(part.server.name);
        return HashRing(names);
      }()),
      elements_(setup_.definition.kind == TableKind::kDense ? element_count(setup_.definition) : 0),
      versions_(setup_.parts.size(), 0),
      at_least_(setup_.parts.size(), 0) {}

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

// ---- what is asked -----------------------------------------------------------------------------

Status TableCore::check(const Ask& ask) const {
  const TableDefinition& d = setup_.definition;
  const auto wrong = [&](std::string_view why) {
    return make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("table '", setup_.name, "': ", std::string(ask.what), ": ", std::string(why)));
  };
  if (setup_.observer && (ask.push.has_value() || ask.advance)) {
    return make_error(ErrorKind::kState,
                      absl::StrCat("table '", setup_.name, "': ", std::string(ask.what),
                                   " of an observer, which only pulls"));
  }
  const auto check_keys = [&](const at::Tensor& keys) -> Status {
    if (keys.defined() && keys.dim() == 1 && keys.scalar_type() == c10::ScalarType::Long) {
      return absl::OkStatus();
    }
    return wrong("keys must be a tensor of int64 of one dimension");
  };
  if (d.kind == TableKind::kDense) {
    if (ask.push_keys.defined() || ask.pull_keys.defined()) {
      return wrong("the table is dense, and has no rows with keys");
    }
    if (ask.push.has_value()) {
      if (Status s = check_tensor(*ask.push, d.dtype, d.shape, "a tensor that"); !s.ok()) {
        return wrong(std::string(s.message()));
      }
    }
    return absl::OkStatus();
  }
  if (ask.push.has_value()) {
    if (!ask.push_keys.defined()) return wrong("the table is sparse: it needs keys");
    WEFT_RETURN_IF_ERROR(check_keys(ask.push_keys));
    const std::vector<int64_t> shape = {ask.push_keys.size(0), d.shape[0]};
    if (Status s = check_tensor(*ask.push, d.dtype, shape, "a tensor of rows that"); !s.ok()) {
      return wrong(std::string(s.message()));
    }
  }
  if (ask.pull) {
    if (!ask.pull_keys.defined()) return wrong("the table is sparse: it needs keys");
    WEFT_RETURN_IF_ERROR(check_keys(ask.pull_keys));
  }
  return absl::OkStatus();
}

void TableCore::submit(Ask ask, OpDone done) {
  ask.push_keys = plain(ask.push_keys);
  ask.pull_keys = plain(ask.pull_keys);
  if (ask.push.has_value()) ask.push = plain(*ask.push);
  if (Status s = check(ask); !s.ok()) return done(std::move(s));
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
  op->left = op->pieces.size();
  bool waits = false;
  {
    MutexLock lock(&mutex_);
    queue_.push_back(op);
    waits = queue_.size() > 1 || barrier_running_;
  }
  pump();
  if (waits) {
    // CLIENT-1, also of one that never leaves.
    later(op->deadline, [self = shared_from_this(), op] {
      bool queued = false;
      {
        MutexLock lock(&self->mutex_);
        queued = !op->begun;
      }
      if (!queued) return;
      self->end(op, make_error(
                        ErrorKind::kDeadline,
                        absl::StrCat("table '", self->setup_.name, "': ", std::string(op->ask.what),
                                     " waited for the step before it to end")));
    });
  }
}

// Every part hears of a step, of a client that comes or goes, and of what concerns it.
void TableCore::cut_dense(Op* op) const {
  const Ask& ask = op->ask;
  const bool all = ask.advance || ask.leave || ask.enter.has_value();
  const at::Tensor flat = ask.push.has_value() ? ask.push->reshape({-1}) : at::Tensor();
  for (size_t p = 0; p < setup_.parts.size(); ++p) {
    const ElementRange range = element_range(elements_, setup_.parts.size(), p);
    if (range.size() == 0 && !all) continue;
    Piece piece;
    piece.part = p;
    if (flat.defined()) piece.push.push_back(flat.narrow(0, range.begin, range.size()));
    if (ask.pull) piece.request.pull.emplace();
    op->pieces.push_back(std::move(piece));
  }
}

void TableCore::cut_sparse(Op* op) const {
  const Ask& ask = op->ask;
  const bool all = ask.advance || ask.leave || ask.enter.has_value();
  const auto slices = [&](const at::Tensor& keys) {
    if (!keys.defined()) return std::vector<std::vector<int64_t>>(setup_.parts.size());
    return slice_keys(*ring_, reinterpret_cast<const uint64_t*>(keys.const_data_ptr<int64_t>()),
                      static_cast<size_t>(keys.numel()));
  };
  const auto pick_keys = [](const at::Tensor& keys, const std::vector<int64_t>& places) {
    at::Tensor out = at::empty({static_cast<int64_t>(places.size())}, keys.options());
    const int64_t* const from = keys.const_data_ptr<int64_t>();
    int64_t* const to = out.mutable_data_ptr<int64_t>();
    for (size_t i = 0; i < places.size(); ++i) to[i] = from[places[i]];
    return out;
  };
  const auto pushed = slices(ask.push.has_value() ? ask.push_keys : at::Tensor());
  auto pulled = slices(ask.pull ? ask.pull_keys : at::Tensor());
  for (size_t p = 0; p < setup_.parts.size(); ++p) {
    if (!all && pushed[p].empty() && pulled[p].empty()) continue;
    Piece piece;
    piece.part = p;
    if (!pushed[p].empty()) {
      const at::Tensor& rows = *ask.push;
      const size_t bytes = static_cast<size_t>(rows.size(1)) * rows.element_size();
      at::Tensor part =
          at::empty({static_cast<int64_t>(pushed[p].size()), rows.size(1)}, rows.options());
      const char* const from = static_cast<const char*>(rows.const_data_ptr());
      char* const to = static_cast<char*>(part.mutable_data_ptr());
      for (size_t i = 0; i < pushed[p].size(); ++i) {
        std::memcpy(to + i * bytes, from + static_cast<size_t>(pushed[p][i]) * bytes, bytes);
      }
      piece.push = {pick_keys(ask.push_keys, pushed[p]), std::move(part)};
    }
    if (!pulled[p].empty()) {
      piece.request.pull.emplace();
      piece.pull_keys = pick_keys(ask.pull_keys, pulled[p]);
      piece.places = std::move(pulled[p]);
    }
    op->pieces.push_back(std::move(piece));
  }
}

// ---- order -------------------------------------------------------------------------------------

void TableCore::begin_locked(const OpRef& op) {
  op->begun = true;
  const Ask& ask = op->ask;
  if (ask.push.has_value()) {
    op->number = ++last_number_;
    op->counted = true;
    open_numbers_.insert(op->number);
    ++pushes_running_;
  }
  if (op->barrier) barrier_running_ = true;
  for (Piece& piece : op->pieces) {
    Request& request = piece.request;
    request.part = setup_.parts[piece.part].part;
    request.client = client_;
    request.enter = ask.enter;
    request.leave = ask.leave;
    if (!piece.push.empty()) {
      request.push = PushHeader{
          op->number, *open_numbers_.begin(), clock_, versions_[piece.part], ask.kind, ask.rate};
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
    {
      MutexLock lock(&mutex_);
      while (!queue_.empty() && queue_.front()->ended) queue_.pop_front();
      if (queue_.empty() || barrier_running_) return;
      op = queue_.front();
      if (op->barrier && pushes_running_ > 0) return;
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
    }
    if (!refused.ok() || op->pieces.empty()) {
      end(op, refused);
      continue;
    }
    for (size_t i = 0; i < op->pieces.size(); ++i) send(op, i);
  }
}

void TableCore::end(const OpRef& op, Status why) {
  {
    MutexLock lock(&mutex_);
    if (op->ended) return;
    op->ended = true;
    if (op->counted) {
      open_numbers_.erase(op->number);
      --pushes_running_;
    }
    if (op->begun && op->barrier) barrier_running_ = false;
    if (why.ok()) {
      if (op->ask.push.has_value()) ++stats_.pushes;
      if (op->ask.pull) ++stats_.pulls;
    }
  }
  OpDone done = std::move(op->done);
  if (!why.ok()) {
    done(std::move(why));
  } else {
    done(result_of(op.get()));
  }
  pump();
}

// ---- requests ----------------------------------------------------------------------------------

std::string TableCore::label(const Op& op, size_t piece) const {
  const PartTarget& part = setup_.parts[op.pieces[piece].part];
  std::string where;
  if (setup_.definition.kind == TableKind::kDense) {
    const ElementRange range = element_range(elements_, setup_.parts.size(), op.pieces[piece].part);
    where = absl::StrCat("elements ", range.begin, " to ", range.end);
  } else {
    where = absl::StrCat("part ", op.pieces[piece].part, " of ", setup_.parts.size());
  }
  std::string text = absl::StrCat("table '", setup_.name, "', ", where, " at '", part.server.name,
                                  "': ", std::string(op.ask.what));
  if (op.number != 0) absl::StrAppend(&text, " ", op.number);
  return text;
}

void TableCore::send(const OpRef& op, size_t i) {
  Piece& piece = op->pieces[i];
  const PartTarget& part = setup_.parts[piece.part];
  const absl::Duration remaining = op->deadline - service_->context().runtime->now();
  if (remaining <= absl::ZeroDuration()) {
    return end(op, make_error(ErrorKind::kDeadline,
                              absl::StrCat(label(*op, i), ": no answer to ", piece.attempts,
                                           " requests in its time")));
  }
  ++piece.attempts;
  std::vector<at::Tensor> tensors = piece.push;
  if (piece.pull_keys.defined()) tensors.push_back(piece.pull_keys);
  StatusOr<Payload> arguments = pack({encode(piece.request), std::move(tensors)});
  if (!arguments.ok()) return end(op, annotate(arguments.status(), label(*op, i)));
  UntypedCall call;
  call.method = std::string(kCallMethod);
  call.signature = kCallSignature;
  call.arguments = *std::move(arguments);
  call.options.deadline = std::min(remaining, setup_.attempt);
  call.options.retry = Retry::kAtMostOnce;
  call.options.backpressure = Backpressure::kWait;
  // It is no part of the call that happens to be served here.
  const ScopeGuard nothing_ambient(nullptr);
  start_call(service_->worker(), part.server, std::move(call),
             [self = shared_from_this(), op, i](StatusOr<Payload> result) {
               self->answered(op, i, std::move(result));
             });
}

bool TableCore::may_retry(const PartTarget& part, const Status& why) const {
  switch (error_kind(why)) {
    case ErrorKind::kDeadline:
    case ErrorKind::kNotDelivered:
    case ErrorKind::kMaybeExecuted:
    case ErrorKind::kUnavailable: return true;
    case ErrorKind::kCancelled:
    case ErrorKind::kPeerLost: break;
    default: return false;
  }
  // What membership says of it counts: a connection may be lost without its worker.
  const StatusOr<WorkerInfo> there = service_->worker().try_get_worker_info(part.server.id);
  return there.ok() && there->incarnation == part.server.incarnation;
}

StatusOr<Answer> TableCore::read(Piece* piece, StatusOr<Payload> result) const {
  WEFT_RETURN_IF_ERROR(result.status());
  WEFT_ASSIGN_OR_RETURN(Parcel parcel, unpack(*std::move(result)));
  WEFT_ASSIGN_OR_RETURN(const Answer answer, decode_answer(parcel.bytes));
  if (parcel.tensors.size() != (piece->request.pull.has_value() ? 1 : 0)) {
    return make_error(ErrorKind::kProtocol,
                      absl::StrCat("an answer with ", parcel.tensors.size(), " tensors"));
  }
  if (piece->request.pull.has_value()) {
    const TableDefinition& d = setup_.definition;
    std::vector<int64_t> shape;
    if (d.kind == TableKind::kDense) {
      shape = {element_range(elements_, setup_.parts.size(), piece->part).size()};
    } else {
      shape = {static_cast<int64_t>(piece->places.size()), d.shape[0]};
    }
    if (Status s = check_tensor(parcel.tensors[0], d.dtype, shape, "an answer that"); !s.ok()) {
      return make_error(ErrorKind::kProtocol, std::string(s.message()));
    }
    piece->values = parcel.tensors[0].contiguous();
  }
  return answer;
}

void TableCore::answered(const OpRef& op, size_t i, StatusOr<Payload> result) {
  Piece& piece = op->pieces[i];
  const PartTarget& part = setup_.parts[piece.part];
  const StatusOr<Answer> answer = read(&piece, std::move(result));
  if (!answer.ok()) {
    const absl::Time now = service_->context().runtime->now();
    if (!may_retry(part, answer.status())) {
      return end(op, annotate(answer.status(), label(*op, i)));
    }
    if (now >= op->deadline) {
      return end(op, make_error(ErrorKind::kDeadline,
                                absl::StrCat(label(*op, i), ": no answer to ", piece.attempts,
                                             " requests; the last: ", answer.status().message())));
    }
    {
      MutexLock lock(&mutex_);
      if (op->ended) return;
      ++stats_.repeats;
    }
    later(std::min(op->deadline, now + backoff_after(piece.attempts)),
          [self = shared_from_this(), op, i] { self->send(op, i); });
    return;
  }
  bool last = false;
  {
    MutexLock lock(&mutex_);
    if (piece.ended) return;
    piece.ended = true;
    piece.answer = *answer;
    last = --op->left == 0;
    if (piece.request.pull.has_value()) {
      versions_[piece.part] = std::max(versions_[piece.part], answer->version);
      stats_.most_lag = std::max(stats_.most_lag, answer->lag);
    }
    if (piece.request.push.has_value()) {
      stats_.dropped += answer->dropped ? 1 : 0;
      stats_.most_behind = std::max(stats_.most_behind, answer->behind);
      stats_.sum_behind += answer->behind;
    }
  }
  if (last) end(op, absl::OkStatus());
}

OpResult TableCore::result_of(Op* op) const {
  OpResult out;
  for (const Piece& piece : op->pieces) {
    out.clock = std::max(out.clock, piece.answer.clock);
    if (!piece.request.push.has_value()) continue;
    out.push.dropped |= piece.answer.dropped;
    out.push.behind = std::max(out.push.behind, piece.answer.behind);
  }
  if (!op->ask.pull) return out;
  const TableDefinition& d = setup_.definition;
  if (d.kind == TableKind::kDense) {
    std::vector<at::Tensor> parts;
    for (const Piece& piece : op->pieces) parts.push_back(piece.values);
    out.values = (parts.size() == 1 ? parts[0] : at::cat(parts)).reshape(d.shape);
    return out;
  }
  const int64_t count = op->ask.pull_keys.numel();
  out.values = at::empty({count, d.shape[0]}, at::TensorOptions().dtype(d.dtype));
  const size_t bytes = static_cast<size_t>(d.shape[0]) * out.values.element_size();
  char* const to = static_cast<char*>(out.values.mutable_data_ptr());
  for (const Piece& piece : op->pieces) {
    if (!piece.values.defined()) continue;
    const char* const from = static_cast<const char*>(piece.values.const_data_ptr());
    for (size_t i = 0; i < piece.places.size(); ++i) {
      std::memcpy(to + static_cast<size_t>(piece.places[i]) * bytes, from + i * bytes, bytes);
    }
  }
  return out;
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
  core_->submit(Ask{.what = "leave", .leave = true, .deadline = kLeaveTime},
                [](const StatusOr<OpResult>&) {
                  // No caller is left to tell: a server that did not hear of it learns it when the
                  // worker leaves.
                });
}

}  // namespace weft::ps::internal
