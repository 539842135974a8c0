// Control items: batches to each peer until they are answered, and what is to be said after a time.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/call_scope.h"
#include "weft/rref/internal/service.h"

namespace weft::internal {
namespace {

constexpr size_t kMostItems = 512;  // in one batch
// A batch costs both sides as much as a small call, and a worker that makes and drops objects has
// more to do than to say so of each one (SRV-4).
constexpr absl::Duration kPace = absl::Milliseconds(1);
constexpr size_t kMany = 64;
constexpr absl::Duration kFlushSpan = absl::Milliseconds(10);
constexpr absl::Duration kFirstBackoff = absl::Milliseconds(20);
constexpr absl::Duration kMaxBackoff = absl::Seconds(1);
constexpr absl::Duration kBatchDeadline = absl::Seconds(10);
// RRefs in answers that have been unconfirmed for so long are asked about.
constexpr absl::Duration kOldAnswers = absl::Seconds(5);
// So long an answer may still be sent again. A caller that asks later finds its RRefs taken back.
constexpr absl::Duration kAnswersAgain = absl::Minutes(1);
// So long an id without a member may be that of one that has just joined.
constexpr absl::Duration kUnknownFor = absl::Seconds(15);

// A handler or a future waits for a fork to be confirmed.
bool is_urgent(const Message& message) { return message.kind == MessageKind::kFork; }

}  // namespace

absl::Time RRefService::Outbox::due() const {
  return urgent || queue.size() >= kMany ? not_before : std::max(not_before, paced_until);
}

void RRefService::enqueue_locked(const WorkerKey& to, Message message, Todo* todo) {
  Outbox& box = outboxes_[to];
  const bool urgent = is_urgent(message);
  box.urgent |= urgent;
  box.queue.push_back(std::move(message));
  if (!box.in_flight.empty() || box.posted) return;
  if (const absl::Time due = box.due(); due > context_.runtime->now()) return arm_locked(due, todo);
  box.posted = true;
  // What is urgent goes not by way of another thread.
  (urgent ? todo->send_now : todo->send_soon).push_back(to);
}

void RRefService::send_batch(const WorkerKey& to) {
  UntypedCall call;
  WorkerInfo info;
  {
    MutexLock lock(&mutex_);
    auto it = outboxes_.find(to);
    if (it == outboxes_.end()) return;
    Outbox& box = it->second;
    box.posted = false;
    if (!closed_.ok() || box.queue.empty() || !box.in_flight.empty()) return;
    while (!box.queue.empty() && box.in_flight.size() < kMostItems) {
      box.in_flight.push_back(std::move(box.queue.front()));
      box.queue.pop_front();
    }
    box.urgent = std::any_of(box.queue.begin(), box.queue.end(), is_urgent);
    box.paced_until = context_.runtime->now() + kPace;
    ++batches_;
    items_ += static_cast<int64_t>(box.in_flight.size());
    Encoder(&call.arguments).put_bytes(encode(box.in_flight));
  }
  info = info_of(to);
  call.method = std::string(kControlMethod);
  call.signature = kControlSignature;
  call.options.deadline = kBatchDeadline;
  call.options.retry = Retry::kAtMostOnce;
  // It is no part of the call that happens to be served here.
  const ScopeGuard nothing_ambient(nullptr);
  start_call(worker(), info, std::move(call),
             [weak = weak_from_this(), to](StatusOr<Payload> result) {
               if (auto self = weak.lock()) self->batch_ended(to, std::move(result));
             });
}

void RRefService::batch_ended(const WorkerKey& to, StatusOr<Payload> result) {
  const auto read = [&result]() -> StatusOr<std::vector<NumberedReply>> {
    WEFT_RETURN_IF_ERROR(result.status());
    Decoder in(*std::move(result));
    WEFT_ASSIGN_OR_RETURN(const std::string bytes, in.take_bytes());
    return decode_replies(bytes);
  };
  const StatusOr<std::vector<NumberedReply>> replies = read();
  const Status failed = replies.status();
  // A peer without the service, or that does not let us call it, will not take the items later.
  const ErrorKind kind = error_kind(failed);
  const bool never = kind == ErrorKind::kUnimplemented || kind == ErrorKind::kPermission ||
                     kind == ErrorKind::kSignature;
  if (kind == ErrorKind::kPeerLost || kind == ErrorKind::kNotFound) {
    // What membership says of it counts, and nothing else: others must come to the same.
    const StatusOr<WorkerInfo> there = worker().try_get_worker_info(to.id.value());
    const bool replaced = there.ok() && there->incarnation != to.incarnation.value();
    const bool gone = !there.ok() && error_kind(there.status()) == ErrorKind::kPeerLost;
    if (replaced) return lose(to, absl::StrCat("'", there->name, "' is another one now"));
    if (gone || (!there.ok() && unknown_for_long(to))) {
      return lose(to, std::string(there.status().message()));
    }
  }
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    auto it = outboxes_.find(to);
    if (it == outboxes_.end()) return;
    std::vector<Message> sent = std::exchange(it->second.in_flight, {});
    Outbox& box = it->second;
    size_t taken = 0;
    if (replies.ok()) {
      for (const auto& [seq, reply] : *replies) {
        const auto of_seq = [seq = seq](const Message& m) { return m.seq == seq; };
        auto item = std::find_if(sent.begin(), sent.end(), of_seq);
        if (item == sent.end()) continue;
        sent.erase(item);
        ++taken;
        p.acknowledged(to, seq, reply, out);
      }
    } else if (never) {
      for (const Message& m : sent) p.acknowledged(to, m.seq, Reply{failed, {}}, out);
      sent.clear();
    }
    if (sent.empty() || taken > 0) {
      box.backoff = absl::ZeroDuration();
      box.not_before = absl::InfinitePast();
    }
    if (!sent.empty()) {
      resent_ += static_cast<int64_t>(sent.size());
      box.urgent |= std::any_of(sent.begin(), sent.end(), is_urgent);
      box.queue.insert(box.queue.begin(), std::make_move_iterator(sent.begin()),
                       std::make_move_iterator(sent.end()));
      box.backoff = std::min(kMaxBackoff, std::max(kFirstBackoff, 2 * box.backoff));
      box.not_before =
          context_.runtime->now() + box.backoff * (0.5 + 0.5 * context_.runtime->random().unit());
    }
  });
  // What came up meanwhile.
  Todo todo;
  {
    MutexLock lock(&mutex_);
    auto it = outboxes_.find(to);
    if (it == outboxes_.end() || it->second.queue.empty() || it->second.posted ||
        !it->second.in_flight.empty() || !closed_.ok()) {
      return;
    }
    if (const absl::Time due = it->second.due(); due > context_.runtime->now()) {
      arm_locked(due, &todo);
    } else {
      it->second.posted = true;
      todo.send_now.push_back(to);
    }
  }
  perform(std::move(todo));
}

bool RRefService::unknown_for_long(const WorkerKey& to) {
  MutexLock lock(&mutex_);
  auto it = outboxes_.find(to);
  if (it == outboxes_.end()) return false;
  const absl::Time now = context_.runtime->now();
  it->second.unknown_since = std::min(it->second.unknown_since, now);
  return now - it->second.unknown_since > kUnknownFor;
}

void RRefService::on_control(CallContext& call, Payload arguments, ReplyFn reply) {
  const WorkerKey from{WorkerId(call.caller().id), Incarnation(call.caller().incarnation)};
  Decoder in(std::move(arguments));
  const StatusOr<std::string> bytes = in.take_bytes();
  if (!bytes.ok()) return reply(bytes.status());
  StatusOr<std::vector<ReceivedItem>> items = decode_items(*bytes);
  if (!items.ok()) return reply(items.status());
  std::vector<NumberedReply> replies;
  with([&](RRefProtocol& p, Effects& out) {
    for (const ReceivedItem& item : *items) {
      replies.emplace_back(item.seq, item.message.ok() ? p.deliver(from, *item.message, out)
                                                       : Reply{item.message.status(), {}});
    }
  });
  if (replies.empty() && !items->empty()) {
    return reply(make_error(ErrorKind::kState, "the worker has shut down"));
  }
  Payload answer;
  Encoder(&answer).put_bytes(encode(replies));
  reply(std::move(answer));
}

void RRefService::lose(const WorkerKey& peer, std::string_view why) {
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    outboxes_.erase(peer);
    p.worker_gone(peer, out, why);
  });
}

uint64_t RRefService::answers_to_ask_locked(const WorkerKey& peer) {
  const uint64_t next = protocol().next_carrier(peer);
  const auto box = outboxes_.find(peer);
  if (box == outboxes_.end()) return next;
  const absl::Time now = context_.runtime->now();
  for (const auto& [carrier, sent] : box->second.answers) {
    if (sent.on_its_way > 0 || now - sent.since < kAnswersAgain) return carrier;
  }
  return next;
}

void RRefService::on_fetch(const std::shared_ptr<void>& object, ReplyFn reply) {
  const auto* value = static_cast<const RRefValue*>(object.get());
  if (value == nullptr) {
    return reply(make_error(ErrorKind::kProtocol, "a fetch that does not say of what"));
  }
  if (value->kept.encode == nullptr) {
    return reply(make_error(
        ErrorKind::kInvalidArgument,
        "the object cannot be sent: its class has no WEFT_STRUCT and no Codec; call its methods"));
  }
  Payload result;
  Encoder out(&result);
  value->kept.encode(out, value->kept.object.get());
  if (!out.status().ok()) return reply(annotate(out.status(), "the value of the RRef"));
  reply(std::move(result));
}

void RRefService::arm_locked(absl::Time when, Todo* todo) {
  if (when >= armed_) return;
  armed_ = when;
  todo->arm = when;
}

void RRefService::tick() {
  Todo todo;
  {
    MutexLock lock(&mutex_);
    if (!closed_.ok()) return;
    armed_ = absl::InfiniteFuture();
    ++looks_;
    const absl::Time now = context_.runtime->now();
    Effects out;
    while (!flushes_.empty() && flushes_.front().due <= now) {
      const Flush flush = flushes_.front();
      flushes_.pop_front();
      if (flush.known.is_zero()) {
        protocol().flush_accept(flush.from, flush.carrier, out);
      } else {
        protocol().flush_known(flush.known, out);
      }
    }
    if (next_audit_ <= now) {
      next_audit_ = absl::InfiniteFuture();
      // Those that were there at the last look. Each is asked about once; an answer ends it.
      bool young = false;
      for (auto& [peer, box] : outboxes_) {
        const uint64_t next = answers_to_ask_locked(peer);
        young = young || next > box.answers_below || !box.answers.empty();
        protocol().audit_answers(peer, std::exchange(box.answers_below, next), out);
      }
      if (young) next_audit_ = now + kOldAnswers;
    }
    sort_out_locked(std::move(out), &todo);
    for (auto& [peer, box] : outboxes_) {
      if (box.queue.empty() || box.posted || !box.in_flight.empty()) continue;
      if (box.due() > now) {
        arm_locked(box.due(), &todo);
      } else {
        box.posted = true;
        todo.send_now.push_back(peer);
      }
    }
    arm_for_waiting_locked(&todo);
  }
  perform(std::move(todo));
}

void RRefService::arm_for_waiting_locked(Todo* todo) {
  // One look serves all that fall due in the same span: creations may come by the thousand.
  if (!flushes_.empty()) arm_locked(flushes_.front().due + kFlushSpan, todo);
  if (next_audit_ != absl::InfiniteFuture()) arm_locked(next_audit_, todo);
}

}  // namespace weft::internal
