// Requests to parts: as a server takes them, alone or several together, and as a client sends them.

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "weft/common/call_scope.h"
#include "weft/ps/internal/service.h"
#include "weft/rpc/spi/untyped_call.h"

namespace weft::ps::internal {
namespace {

// What waits for the message that is on its way to a server; a call beyond it leaves alone.
constexpr int64_t kLaneBytes = int64_t{8} << 20;
// The bounds of one message.
constexpr size_t kMostTogether = 1024;
constexpr int64_t kMostBytesTogether = int64_t{1} << 20;

// The answers to the requests of one message. It leaves with the last of them; a request whose part has
// dropped it is told so.
class BatchReply {
 public:
  BatchReply(size_t count, ReplyFn reply) : results_(count), reply_(std::move(reply)) {}
  BatchReply(const BatchReply&) = delete;
  BatchReply& operator=(const BatchReply&) = delete;
  // All parts have let go of it: each has answered, or dropped its request.
  ~BatchReply() {
    try {
      std::vector<at::Tensor> tensors;
      Results out;
      for (size_t i = 0; i < results_.size();) {
        BatchedResult result{make_error(ErrorKind::kInternal, "the request was dropped")};
        if (results_[i].has_value()) result = *std::move(results_[i]);
        if (result.said.ok()) {
          tensors.insert(tensors.end(), result.said->tensors.begin(), result.said->tensors.end());
        }
        i += 1 + result.more;
        add(std::move(result), &out);
      }
      reply_(pack({encode(out), std::move(tensors)}));
    } catch (...) {  // no memory
      reply_(status_from_current_exception());
    }
  }

  // Each once; one that stands for others is theirs, too.
  void set(size_t i, BatchedResult result) { results_[i].emplace(std::move(result)); }

 private:
  // Each written by one thread, before it lets go of this object.
  std::vector<std::optional<BatchedResult>> results_;
  ReplyFn reply_;
};

// `results` are of as many requests as there are calls.
void tell(absl::Span<OutgoingCall> calls, Results results) {
  size_t i = 0;
  for (BatchedResult& result : results) {
    const size_t end = i + 1 + result.more;
    StatusOr<Reply> said = std::move(result.said);
    while (i < end) {
      size_t same = i + 1;  // those of one requester
      while (same < end && calls[same].by == calls[i].by) ++same;
      StatusOr<Reply> rest;
      if (same < end) {
        rest = Reply{answer_after(said->answer, static_cast<uint32_t>(same - i)), {}};
      }
      const std::shared_ptr<Requester> by = calls[i].by;
      by->answered(calls.subspan(i, same - i), std::move(said));
      said = std::move(rest);
      i = same;
    }
  }
}

}  // namespace

// ---- server ------------------------------------------------------------------------------------

void PsService::do_requests(CallContext& call, uint64_t part, std::vector<PartCall> requests) {
  PartRef there;
  {
    MutexLock lock(&mutex_);
    const auto at = by_id_.find(part);
    if (at != by_id_.end()) there = at->second;
  }
  if (there != nullptr) {
    return there->call(key_of(call.caller()), std::move(requests), call.scope());
  }
  for (PartCall& one : requests) {
    Status why = say_restored(part, {key_of(call.caller()), one.what.request.client});
    if (why.ok()) {
      why = make_error(ErrorKind::kNotFound,
                       absl::StrCat("there is no part ", part, " at '", worker().name(),
                                    "': its server has ended"));
    }
    for (size_t i = 0; i < one.what.size(); ++i) one.reply(i, {why});
  }
}

void PsService::on_call(CallContext& call, Payload arguments, ReplyFn reply) {
  messages_.fetch_add(1);
  const auto read = [&]() -> StatusOr<Batch> {
    WEFT_ASSIGN_OR_RETURN(Parcel parcel, unpack(std::move(arguments)));
    return decode_batch(parcel.bytes, std::move(parcel.tensors));
  };
  StatusOr<Batch> batch = read();
  if (!batch.ok()) return reply(batch.status());
  size_t count = 0;
  for (const BatchedRequest& one : *batch) count += one.size();
  requests_.fetch_add(static_cast<int64_t>(count));
  const auto all = std::make_shared<BatchReply>(count, std::move(reply));
  size_t first = 0;  // place of its result
  for (size_t i = 0; i < batch->size();) {
    const uint64_t part = (*batch)[i].request.part;
    std::vector<PartCall> together;  // neighbours to one part
    for (; i < batch->size() && (*batch)[i].request.part == part; ++i) {
      const size_t of_it = (*batch)[i].size();
      together.push_back({std::move((*batch)[i]), [all, first](size_t at, BatchedResult said) {
                            all->set(first + at, std::move(said));
                          }});
      first += of_it;
    }
    do_requests(call, part, std::move(together));
  }
}

// ---- client ------------------------------------------------------------------------------------

void PsService::send(const WorkerInfo& to, OutgoingCall call) {
  const LaneKey key(to, call.copied);
  if (!call.small) return start_alone(key, std::move(call));
  const absl::Time now = context_.runtime->now();
  const absl::Time ends = call.ends(now);
  bool fresh = false;
  {
    MutexLock lock(&lanes_mutex_);
    const auto at = lanes_.try_emplace(key);
    Lane& lane = at.first->second;
    fresh = at.second;
    if (fresh) {
      lane.until = ends;
    } else if (call.deadline >= lane.until && lane.bytes + call.bytes <= kLaneBytes) {
      lane.bytes += call.bytes;
      lane.waiting.push_back(std::move(call));
      return;
    }
  }
  if (!fresh) return start_alone(key, std::move(call));
  std::vector<OutgoingCall> one;
  one.push_back(std::move(call));
  start(key, std::move(one), ends - now, Place::kHoldsLane);
}

void PsService::start_alone(const LaneKey& to, OutgoingCall call) {
  const absl::Time now = context_.runtime->now();
  const absl::Duration time = call.ends(now) - now;
  std::vector<OutgoingCall> one;
  one.push_back(std::move(call));
  start(to, std::move(one), time, Place::kAlone);
}

// The message that held the lane has ended: what has come meanwhile leaves together.
void PsService::lane_is_free(const LaneKey& to, absl::Duration unanswered) {
  const absl::Time now = context_.runtime->now();
  std::vector<OutgoingCall> late;
  std::vector<OutgoingCall> hurried;
  std::vector<OutgoingCall> together;
  int64_t bytes = 0;
  absl::Time until = absl::InfiniteFuture();
  {
    MutexLock lock(&lanes_mutex_);
    const auto at = lanes_.find(to);
    Lane& lane = at->second;
    absl::Time last = now;
    for (const OutgoingCall& call : lane.waiting) last = std::max(last, call.ends(now));
    std::deque<OutgoingCall> stay;
    for (OutgoingCall& call : std::exchange(lane.waiting, {})) {
      if (unanswered > absl::ZeroDuration() && unanswered >= call.attempt) {
        late.push_back(std::move(call));
        continue;
      }
      // One that has much less time than the others would end them with it.
      const absl::Time ends = call.ends(now);
      if (ends - now < (last - now) / 2) {
        hurried.push_back(std::move(call));
        continue;
      }
      until = std::min(until, ends);
      const bool full = !together.empty() && (together.size() == kMostTogether ||
                                              bytes + call.bytes > kMostBytesTogether);
      if (full || !stay.empty()) {
        stay.push_back(std::move(call));
        continue;
      }
      bytes += call.bytes;
      together.push_back(std::move(call));
    }
    lane.bytes = 0;
    for (const OutgoingCall& call : stay) lane.bytes += call.bytes;
    lane.waiting = std::move(stay);
    lane.until = until;
    if (together.empty()) lanes_.erase(at);
  }
  if (!together.empty()) start(to, std::move(together), until - now, Place::kHoldsLane);
  for (OutgoingCall& call : hurried) start_alone(to, std::move(call));
  for (OutgoingCall& call : late) {
    call.end(make_error(ErrorKind::kNotDelivered,
                        absl::StrCat("the message before it to '", to.first.name,
                                     "' had no answer in ", absl::FormatDuration(unanswered))));
  }
}

void PsService::start(const LaneKey& to, std::vector<OutgoingCall> calls, absl::Duration time,
                      Place place) {
  std::vector<const BatchedRequest*> asked;
  asked.reserve(calls.size());
  for (const OutgoingCall& out : calls) asked.push_back(out.what.get());
  const Batch batch = in_runs(asked);
  std::vector<at::Tensor> tensors;
  for (const BatchedRequest& one : batch) {
    tensors.insert(tensors.end(), one.tensors.begin(), one.tensors.end());
  }
  const std::string requests = encode(batch);
  auto all = std::make_shared<std::vector<OutgoingCall>>(std::move(calls));
  const auto deliver = [self = shared_from_this(), to, all, place,
                        time](StatusOr<Results> results) {
    size_t answers = 0;
    if (results.ok()) {
      for (const BatchedResult& one : *results) answers += 1 + one.more;
    }
    if (results.ok() && answers != all->size()) {
      results = make_error(ErrorKind::kProtocol,
                           absl::StrCat(answers, " answers to ", all->size(), " requests"));
    }
    if (place == Place::kHoldsLane) {
      const bool late = !results.ok() && error_kind(results.status()) == ErrorKind::kDeadline;
      self->lane_is_free(to, late ? time : absl::ZeroDuration());
    }
    // Together they may be more than a budget of either side takes, which each of them fits into.
    const bool apart =
        all->size() > 1 && !results.ok() && error_kind(results.status()) == ErrorKind::kResource;
    if (results.ok()) return tell(absl::MakeSpan(*all), *std::move(results));
    for (OutgoingCall& one : *all) {
      if (apart) {
        self->start_alone(to, std::move(one));
      } else {
        one.end(results.status());
      }
    }
  };
  StatusOr<Payload> arguments = pack({requests, std::move(tensors)});
  if (!arguments.ok()) return deliver(arguments.status());
  UntypedCall call;
  call.method = std::string(kCallMethod);
  call.signature = kCallSignature;
  call.arguments = *std::move(arguments);
  call.options.deadline = std::max(time, absl::ZeroDuration());
  call.options.retry = Retry::kAtMostOnce;
  call.options.backpressure = Backpressure::kWait;
  // It is no part of the call that happens to be served here.
  const ScopeGuard nothing_ambient(nullptr);
  start_call(worker(), to.first, std::move(call), [deliver](StatusOr<Payload> result) {
    const auto read = [&]() -> StatusOr<Results> {
      WEFT_RETURN_IF_ERROR(result.status());
      WEFT_ASSIGN_OR_RETURN(Parcel parcel, unpack(*std::move(result)));
      return decode_results(parcel.bytes, std::move(parcel.tensors));
    };
    deliver(read());
  });
}

}  // namespace weft::ps::internal
