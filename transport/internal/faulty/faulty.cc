#include "weft/transport/internal/faulty/faulty.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"
#include "weft/transport/frame.h"

namespace weft::internal {
namespace {

Status planned(ErrorKind kind, std::string_view what) {
  return make_error(kind, absl::StrCat(view(what), " (planned fault)"));
}

std::shared_ptr<std::string> join(const std::vector<Slice>& payload) {
  auto out = std::make_shared<std::string>();
  for (const Slice& s : payload) out->append(s.data, s.size);
  return out;
}

void set_payload(Frame* frame, std::shared_ptr<std::string> bytes) {
  frame->payload.clear();
  if (!bytes->empty()) frame->payload.push_back({bytes->data(), bytes->size(), bytes});
}

void flip(std::string* bytes, uint64_t random) {
  if (bytes->empty()) return;
  // Never 0: the byte does change.
  (*bytes)[random % bytes->size()] ^= static_cast<char>(1 + (random >> 32) % 255);
}

void damage(Frame* frame, const FaultPlan::Decision& decision) {
  std::shared_ptr<std::string> payload = join(frame->payload);
  if (decision.fault == Fault::kTruncate) {
    std::string* const target = payload->empty() ? &frame->header : payload.get();
    target->resize(target->size() / 2);
  } else {
    flip(frame->header.empty() ? payload.get() : &frame->header, decision.random);
  }
  set_payload(frame, std::move(payload));
}

Frame copy_of(const FrameView& frame) {
  Frame out;
  out.kind = frame.kind;
  out.header = std::string(frame.header);
  auto payload = std::make_shared<std::string>();
  for (std::string_view piece : frame.payload) payload->append(piece);
  set_payload(&out, std::move(payload));
  return out;
}

void deliver(ConnectionHandler& handler, const Frame& frame, int lane) {
  std::vector<std::string_view> pieces;
  for (const Slice& s : frame.payload) pieces.emplace_back(s.data, s.size);
  handler.on_frame({frame.kind, frame.header, pieces, frame.payload_bytes()}, lane);
}

}  // namespace

// ---- sending ---------------------------------------------------------------------------------

Status FaultyConnection::send(Frame frame, int lane) {
  const FaultPlan::Decision decision =
      shared_->plan->decide(shared_->own_name, inner_->peer().name, frame.kind,
                            frame.header.size() + frame.payload_bytes(), false);
  switch (decision.fault) {
    case Fault::kNone: return forward(std::move(frame), lane, absl::ZeroDuration(), false);
    case Fault::kFailBefore:
      return planned(ErrorKind::kNotDelivered,
                     absl::StrCat("the frame to ", inner_->peer().name, " was not sent"));
    case Fault::kLoseUnsent: {
      {
        MutexLock lock(&mutex_);
        if (ended_ || faulted_) {
          return make_error(ErrorKind::kNotDelivered, "the connection is lost");
        }
        if (frame.cookie != 0) unsent_.push_back(frame.cookie);
      }
      cut(false);
      return absl::OkStatus();
    }
    case Fault::kFailAfter: {
      const Status sent = forward(std::move(frame), lane, absl::ZeroDuration(), false);
      if (sent.ok()) cut(true);
      return sent;
    }
    case Fault::kCut: cut(false); return absl::OkStatus();
    case Fault::kDrop: return absl::OkStatus();
    case Fault::kDelay: return forward(std::move(frame), lane, decision.delay, false);
    case Fault::kReorder: return forward(std::move(frame), lane, decision.delay, true);
    case Fault::kDuplicate: {
      Frame copy = frame;
      copy.cookie = 0;
      const Status sent = forward(std::move(frame), lane, absl::ZeroDuration(), false);
      if (sent.ok()) (void)forward(std::move(copy), lane, absl::ZeroDuration(), false);
      return sent;
    }
    case Fault::kTruncate:
    case Fault::kFlipByte:
      damage(&frame, decision);
      return forward(std::move(frame), lane, absl::ZeroDuration(), false);
  }
  return make_error(ErrorKind::kInternal, "an unknown fault");
}

Status FaultyConnection::forward(Frame frame, int lane, absl::Duration delay, bool reorder) {
  bool release = false;
  {
    MutexLock lock(&mutex_);
    if (ended_ || faulted_) return make_error(ErrorKind::kNotDelivered, "the connection is lost");
    LaneQueue& queue = lanes_[lane];
    for (auto& [other, waiting] : lanes_) {
      if (other == lane) continue;
      for (Delayed& d : waiting.frames) {
        release = release || d.until_other_lane;
        d.until_other_lane = false;
      }
      if (release && !waiting.frames.empty()) waiting.frames.front().due = absl::InfinitePast();
    }
    if (delay > absl::ZeroDuration() || !queue.frames.empty() || queue.flushing) {
      // What is refused later cannot be told to the caller any more: checked now.
      WEFT_RETURN_IF_ERROR(check_sendable(frame, inner_->peer().max_frame_bytes));
      queue.frames.push_back({shared_->runtime->now() + delay, std::move(frame), reorder});
      arm_locked();
      return absl::OkStatus();
    }
  }
  const Status sent = inner_->send(std::move(frame), lane);
  if (release) flush(false);
  return sent;
}

void FaultyConnection::arm_locked() {
  absl::Time first = absl::InfiniteFuture();
  for (const auto& [lane, queue] : lanes_) {
    if (!queue.frames.empty() && !queue.flushing) first = std::min(first, queue.frames.front().due);
  }
  if (first == absl::InfiniteFuture()) return;
  if (timer_ == nullptr) {
    timer_ = shared_->runtime->make_timer([weak = weak_from_this()] {
      if (const std::shared_ptr<FaultyConnection> self = weak.lock()) self->flush(false);
    });
  }
  timer_->arm(first);
}

bool FaultyConnection::next_due_locked(bool all, int* lane, Frame* frame) {
  const absl::Time now = shared_->runtime->now();
  for (auto& [number, queue] : lanes_) {
    if (queue.flushing || queue.frames.empty()) continue;
    if (!all && queue.frames.front().due > now) continue;
    *lane = number;
    *frame = std::move(queue.frames.front().frame);
    queue.frames.pop_front();
    queue.flushing = true;
    return true;
  }
  return false;
}

void FaultyConnection::flush(bool all) {
  while (true) {
    int lane = 0;
    Frame frame;
    {
      MutexLock lock(&mutex_);
      if (!next_due_locked(all, &lane, &frame)) {
        if (!ended_) arm_locked();
        return;
      }
    }
    const uint64_t cookie = frame.cookie;
    const Status sent = inner_->send(std::move(frame), lane);
    MutexLock lock(&mutex_);
    lanes_[lane].flushing = false;
    if (!sent.ok() && cookie != 0) unsent_.push_back(cookie);
  }
}

void FaultyConnection::close(Status reason) {
  if (reason.ok()) flush(true);
  inner_->close(std::move(reason));
}

void FaultyConnection::cut(bool after_delivery) {
  if (after_delivery) flush(true);
  {
    MutexLock lock(&mutex_);
    if (faulted_ || ended_) return;
    faulted_ = true;
  }
  inner_->close(after_delivery ? absl::OkStatus()
                               : planned(ErrorKind::kUnavailable, "the connection was cut"));
}

void FaultyConnection::finish(Lost* lost) {
  std::unique_ptr<Timer> timer;
  MutexLock lock(&mutex_);
  ended_ = true;
  for (auto& [number, queue] : lanes_) {
    for (const Delayed& d : queue.frames) {
      if (d.frame.cookie != 0) lost->unsent.push_back(d.frame.cookie);
    }
    queue.frames.clear();
  }
  lost->unsent.insert(lost->unsent.end(), unsent_.begin(), unsent_.end());
  unsent_.clear();
  if (faulted_) lost->why = planned(ErrorKind::kUnavailable, "the connection was cut");
  timer = std::move(timer_);
  // In this order: the timer's callback may wait for the lock, and its destructor for the callback.
  lock.unlock();
  timer = nullptr;
}

// ---- receiving -------------------------------------------------------------------------------

void FaultyHandler::on_frame(const FrameView& frame, int lane) {
  const FaultPlan::Decision decision =
      shared_->plan->decide(connection_->peer().name, shared_->own_name, frame.kind,
                            frame.header.size() + frame.payload_bytes, true);
  switch (decision.fault) {
    case Fault::kDrop: return;
    case Fault::kCut: return connection_->cut(false);
    case Fault::kFailAfter: inner_->on_frame(frame, lane); return connection_->cut(false);
    case Fault::kDuplicate: inner_->on_frame(frame, lane); return inner_->on_frame(frame, lane);
    case Fault::kTruncate:
    case Fault::kFlipByte: {
      Frame copy = copy_of(frame);
      damage(&copy, decision);
      return deliver(*inner_, copy, lane);
    }
    default: return inner_->on_frame(frame, lane);
  }
}

void FaultyHandler::on_lost(Lost lost) {
  const std::shared_ptr<FaultyConnection> connection = std::move(connection_);
  if (connection != nullptr) connection->finish(&lost);
  inner_->on_lost(std::move(lost));
}

// ---- the acceptor ----------------------------------------------------------------------------

StatusOr<Hello> FaultyAcceptor::check_hello(const Hello& theirs) {
  const FaultPlan::Decision decision =
      shared_->plan->decide(shared_->own_name, theirs.name, FrameKind::kHelloAck, 0, false);
  if (decision.fault == Fault::kFailBefore) {
    return planned(ErrorKind::kUnavailable, absl::StrCat(shared_->own_name, " refuses"));
  }
  return inner_->check_hello(theirs);
}

std::shared_ptr<ConnectionHandler> FaultyAcceptor::on_connection(
    std::shared_ptr<Connection> connection) {
  auto wrapped = std::make_shared<FaultyConnection>(shared_, std::move(connection));
  auto handler = std::make_shared<FaultyHandler>(shared_, nullptr);
  handler->set(wrapped);
  handler->set_inner(inner_->on_connection(wrapped));
  return handler;
}

// ---- the transport ---------------------------------------------------------------------------

FaultyTransport::FaultyTransport(std::shared_ptr<const FaultyShared> shared,
                                 std::unique_ptr<Transport> inner)
    : shared_(std::move(shared)),
      inner_(std::move(inner)),
      loop_(shared_->runtime->make_loop(absl::StrCat("faulty-", shared_->own_name))) {}

StatusOr<std::string> FaultyTransport::listen(const ListenOptions& options,
                                              std::shared_ptr<Acceptor> acceptor) {
  return inner_->listen(options, std::make_shared<FaultyAcceptor>(shared_, std::move(acceptor)));
}

void FaultyTransport::connect(std::string_view address, const Hello& hello, absl::Time deadline,
                              std::shared_ptr<ConnectionHandler> handler, DialDone done) {
  const FaultPlan::Decision decision =
      shared_->plan->decide(shared_->own_name, address, FrameKind::kHello, 0, false);
  const std::string where = absl::StrCat("dial of ", view(address));
  std::string target(address);
  switch (decision.fault) {
    case Fault::kFailBefore: {
      const Status why = planned(ErrorKind::kUnavailable, absl::StrCat(where, ": refused"));
      Task fail = [done, why] { done(why); };
      if (!loop_->post(std::move(fail))) done(why);
      return;
    }
    case Fault::kDrop: {
      const Status why = planned(ErrorKind::kDeadline, absl::StrCat(where, ": no answer"));
      return wait_until(
          deadline, [done, why] { done(why); }, done);
    }
    case Fault::kDelay:
      return wait_until(
          std::min(deadline, shared_->runtime->now() + decision.delay),
          [this, target, hello, deadline, handler, done]() mutable {
            dial(std::move(target), hello, deadline, std::move(handler), std::move(done), false);
          },
          done);
    default:
      return dial(std::move(target), hello, deadline, std::move(handler), std::move(done),
                  decision.fault == Fault::kFailAfter);
  }
}

void FaultyTransport::dial(std::string address, const Hello& hello, absl::Time deadline,
                           std::shared_ptr<ConnectionHandler> handler, DialDone done,
                           bool fail_after) {
  auto wrapped = std::make_shared<FaultyHandler>(shared_, std::move(handler));
  inner_->connect(address, hello, deadline, wrapped,
                  [shared = shared_, wrapped, done = std::move(done),
                   fail_after](StatusOr<std::shared_ptr<Connection>> result) {
                    if (!result.ok()) return done(result.status());
                    auto connection = std::make_shared<FaultyConnection>(shared, *result);
                    wrapped->set(connection);
                    done(std::shared_ptr<Connection>(connection));
                    if (fail_after) connection->cut(false);
                  });
}

void FaultyTransport::wait_until(absl::Time when, Task go_on_with, DialDone fail) {
  auto waiting = std::make_shared<Waiting>();
  waiting->go_on = std::move(go_on_with);
  waiting->fail = std::move(fail);
  MutexLock lock(&mutex_);
  if (closed_) {
    lock.unlock();
    return waiting->fail(make_error(ErrorKind::kState, "the transport is shut down"));
  }
  const uint64_t id = ++next_id_;
  waiting->timer =
      shared_->runtime->make_timer([this, id] { loop_->post([this, id] { go_on(id); }); });
  waiting->timer->arm(when);
  waiting_.emplace(id, std::move(waiting));
}

void FaultyTransport::go_on(uint64_t id) {
  std::shared_ptr<Waiting> waiting;
  {
    MutexLock lock(&mutex_);
    auto it = waiting_.find(id);
    if (it == waiting_.end()) return;
    waiting = std::move(it->second);
    waiting_.erase(it);
  }
  waiting->go_on();
}

void FaultyTransport::shutdown() {
  std::map<uint64_t, std::shared_ptr<Waiting>> waiting;
  {
    MutexLock lock(&mutex_);
    closed_ = true;
    waiting.swap(waiting_);
  }
  for (auto& [id, w] : waiting) {
    w->timer = nullptr;
    Task fail = [w = w] { w->fail(make_error(ErrorKind::kState, "the transport was shut down")); };
    (void)loop_->post(std::move(fail));
  }
  inner_->shutdown();
  loop_->shutdown();
}

std::vector<std::pair<std::string, int64_t>> FaultyTransport::counters() const {
  std::vector<std::pair<std::string, int64_t>> out = inner_->counters();
  out.emplace_back("faults", shared_->plan->hits());
  return out;
}

}  // namespace weft::internal

namespace weft {

TransportFactory faulty_transport(TransportFactory inner, std::shared_ptr<FaultPlan> plan) {
  return [inner = std::move(inner), plan = std::move(plan)](
             const TransportContext& context) -> StatusOr<std::unique_ptr<Transport>> {
    WEFT_ASSIGN_OR_RETURN(std::unique_ptr<Transport> made, inner(context));
    auto shared = std::make_shared<internal::FaultyShared>();
    shared->runtime = context.runtime;
    shared->plan = plan;
    shared->own_name = context.worker_name;
    return std::make_unique<internal::FaultyTransport>(std::move(shared), std::move(made));
  };
}

}  // namespace weft
