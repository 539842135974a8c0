// Requests to the servers of a table, and their answers.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/internal/part_data.h"
#include "weft/ps/internal/table_core.h"

namespace weft::ps::internal {
namespace {

constexpr absl::Duration kFirstBackoff = absl::Milliseconds(20);
constexpr absl::Duration kMostBackoff = absl::Seconds(1);
// The most bytes of a request, with its answer, that may travel with others.
constexpr int64_t kSmallBytes = 32 << 10;

absl::Duration backoff_after(int attempts) {
  return std::min(kMostBackoff, kFirstBackoff * (1 << std::min(attempts, 8)));
}

}  // namespace

std::string TableCore::label(const Op& op, size_t piece) const {
  const TargetRef part = target(op.pieces[piece].part);
  std::string where;
  if (setup_.definition.kind == TableKind::kDense) {
    const ElementRange range = element_range(elements_, setup_.parts.size(), op.pieces[piece].part);
    where = absl::StrCat("elements ", range.begin, " to ", range.end);
  } else {
    where = absl::StrCat("part ", op.pieces[piece].part, " of ", setup_.parts.size());
  }
  std::string text = absl::StrCat("table '", setup_.name, "', ", where, " at '", part->server.name,
                                  "': ", std::string(op.ask.what));
  if (op.number != 0) absl::StrAppend(&text, " ", op.number);
  return text;
}

void TableCore::send(const OpRef& op, size_t i) {
  Piece& piece = op->pieces[i];
  const TargetRef part = target(piece.part);
  piece.request.part = part->part;
  piece.request.epoch = part->map.epoch;
  const absl::Duration remaining = op->deadline - service_->context().runtime->now();
  if (remaining <= absl::ZeroDuration()) {
    return end(op, make_error(ErrorKind::kDeadline,
                              absl::StrCat(label(*op, i), ": no answer to ", piece.attempts,
                                           " requests in its time")));
  }
  ++piece.attempts;
  OutgoingCall call;
  call.what = std::shared_ptr<const BatchedRequest>(op, &piece);
  call.by = shared_from_this();
  call.deadline = op->deadline;
  call.attempt = setup_.attempt;
  call.bytes = bytes_of(piece);
  // A pull in steps may wait for other clients.
  const bool waits =
      piece.request.pull.has_value() && setup_.definition.consistency.mode != Mode::kAsp;
  call.small = call.bytes <= kSmallBytes && !waits;
  call.copied = copied();
  service_->send(part->server, std::move(call));
}

int64_t TableCore::bytes_of(const Piece& piece) const {
  constexpr int64_t kOfRequest = 256;
  constexpr int64_t kOfTensor = 64;
  int64_t bytes = kOfRequest;
  for (const at::Tensor& t : piece.tensors) bytes += kOfTensor + static_cast<int64_t>(t.nbytes());
  if (!piece.request.pull.has_value()) return bytes;
  const TableDefinition& d = setup_.definition;
  const int64_t elements = d.kind == TableKind::kDense
                               ? element_range(elements_, setup_.parts.size(), piece.part).size()
                               : d.shape[0] * piece.pull_keys.numel();
  return bytes + kOfTensor + elements * static_cast<int64_t>(c10::elementSize(d.dtype));
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

StatusOr<Answer> TableCore::read(Op* op, size_t i, StatusOr<Reply> result) const {
  Piece* const piece = &op->pieces[i];
  WEFT_RETURN_IF_ERROR(result.status());
  const Answer& answer = result->answer;
  const std::vector<at::Tensor>& tensors = result->tensors;
  if (answer.moved) return answer;
  if (tensors.size() != (piece->request.pull.has_value() ? 1 : 0)) {
    return make_error(ErrorKind::kProtocol,
                      absl::StrCat("an answer with ", tensors.size(), " tensors"));
  }
  if (piece->request.pull.has_value()) {
    const TableDefinition& d = setup_.definition;
    std::vector<int64_t> shape;
    if (d.kind == TableKind::kDense) {
      shape = {element_range(elements_, setup_.parts.size(), piece->part).size()};
    } else {
      shape = {piece->pull_keys.numel(), d.shape[0]};
    }
    if (Status s = check_tensor(tensors[0], d.dtype, shape, "an answer that"); !s.ok()) {
      return make_error(ErrorKind::kProtocol, std::string(s.message()));
    }
    if (op->values.defined()) {
      const ElementRange range = element_range(elements_, setup_.parts.size(), piece->part);
      op->values.narrow(0, range.begin, range.size()).copy_(tensors[0]);
    } else {
      piece->values = tensors[0].contiguous();
    }
  }
  return answer;
}

void TableCore::answered(const OpRef& op, size_t i, StatusOr<Reply> result) {
  Piece& piece = op->pieces[i];
  const StatusOr<Answer> answer = read(op.get(), i, std::move(result));
  if (copied()) {
    if (answer.ok() && answer->moved) return locate(op, i, answer->map);
    if (!answer.ok() && may_have_moved(answer.status())) return locate(op, i, {});
    if (answer.ok() && answer->map.epoch != 0) learn(piece.part, answer->map);
  }
  if (!answer.ok()) {
    const absl::Time now = service_->context().runtime->now();
    if (!may_retry(*target(piece.part), answer.status())) {
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
    last = note(&piece, *answer);
  }
  if (last) end(op, absl::OkStatus());
}

bool TableCore::note(Piece* piece, const Answer& answer) {
  if (std::exchange(piece->ended, true)) return false;
  piece->push = {answer.dropped, answer.behind};
  piece->clock = answer.clock;
  if (piece->request.pull.has_value()) {
    versions_[piece->part] = std::max(versions_[piece->part], answer.version);
    stats_.most_lag = std::max(stats_.most_lag, answer.lag);
  }
  if (piece->request.push.has_value()) {
    stats_.dropped += answer.dropped ? 1 : 0;
    stats_.most_behind = std::max(stats_.most_behind, answer.behind);
    stats_.sum_behind += answer.behind;
  }
  return --piece->op->left == 0;
}

TableCore::OpRef TableCore::op_of(const OutgoingCall& call, size_t* piece) {
  const auto* const of_call = static_cast<const Piece*>(call.what.get());
  *piece = static_cast<size_t>(of_call - of_call->op->pieces.data());
  return OpRef(call.what, of_call->op);
}

void TableCore::answered(absl::Span<OutgoingCall> calls, StatusOr<Reply> said) {
  const bool pulls = std::any_of(calls.begin(), calls.end(), [](const OutgoingCall& call) {
    return call.what->request.pull.has_value();
  });
  if (calls.size() > 1 && !pulls) return all_answered(calls, said->answer);
  const Answer first = calls.size() > 1 ? said->answer : Answer();
  for (size_t i = 0; i < calls.size(); ++i) {
    if (i > 0) said = Reply{answer_after(first, static_cast<uint32_t>(i)), {}};
    size_t piece = 0;
    const OpRef op = op_of(calls[i], &piece);
    answered(op, piece, std::move(said));
  }
}

void TableCore::all_answered(absl::Span<OutgoingCall> calls, const Answer& first) {
  std::vector<OpRef> over;
  over.reserve(calls.size());
  {
    MutexLock lock(&mutex_);
    for (size_t i = 0; i < calls.size(); ++i) {
      size_t piece = 0;
      OpRef op = op_of(calls[i], &piece);
      const bool last = note(&op->pieces[piece], answer_after(first, static_cast<uint32_t>(i)));
      if (last && end_locked(op.get(), true)) over.push_back(std::move(op));
    }
  }
  for (const OpRef& op : over) {
    draw(*op, absl::OkStatus());
    OpDone done = std::move(op->done);
    done(result_of(op.get()));
  }
  pump();
}

}  // namespace weft::ps::internal
