#include "weft/rpc/internal/agent/link.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/rpc/internal/agent/agent.h"
#include "weft/rpc/internal/agent/arena_message.h"
#include "weft/rpc/internal/agent/header.h"

namespace weft::internal {
namespace {

// So long after a small message others are expected.
constexpr absl::Duration kSmallLasts = absl::Milliseconds(100);
// A request of an observer has a hundred bytes.
constexpr absl::Duration kObserverTime = absl::Seconds(60);

std::shared_ptr<Metadata> take_metadata(const v1::ResponseHeader& header) {
  if (header.metadata_size() == 0) return nullptr;
  auto out = std::make_shared<Metadata>();
  for (const v1::MetadataEntry& entry : header.metadata()) {
    out->emplace_back(entry.key(), entry.value());
  }
  return out;
}

// Not to be held as long as the call.
template <class Header>
std::unique_ptr<v1::Layout> take_layout(Header* header) {
  auto out = std::make_unique<v1::Layout>();
  out->Swap(header->mutable_layout());
  header->clear_layout();
  return out;
}

// Which call it is for, and when that is over.
Assembler::Purpose purpose_of(const v1::CallHeader& header, absl::Time arrived) {
  Assembler::Purpose out{true, header.call_id()};
  if (header.has_remaining_us()) {
    out.deadline = arrived + absl::Microseconds(header.remaining_us());
  }
  return out;
}
template <class Header>
Assembler::Purpose purpose_of_answer(const Header& header) {
  return {false, header.call_id()};
}

Delivery delivery_of(v1::ErrorHeader::Reach reach) {
  switch (reach) {
    case v1::ErrorHeader::NOT_TAKEN: return Delivery::kNotDelivered;
    case v1::ErrorHeader::PASSED: return Delivery::kDelivered;
    default: return Delivery::kUnknown;
  }
}

}  // namespace

int LaneLoads::choose(LaneRange lanes) {
  const int count = std::min(lanes.count, kMaxLanes - lanes.first);
  if (count < 1) return kControlLane;
  // The place of the one after the last; before the first choice, of the first.
  const int last = last_.load(std::memory_order_relaxed);
  const int turn = last < lanes.first ? 0 : last - lanes.first + 1;
  int best = 0;
  for (int i = 0; i < count; ++i) {
    const int lane = lanes.first + (turn + i) % count;
    if (best == 0 || bytes(lane) < bytes(best)) best = lane;
  }
  last_.store(best, std::memory_order_relaxed);
  return best;
}

std::vector<int> Link::lanes() const {
  std::vector<int> out;
  const Hello& hello = connection_->peer();
  const auto first = static_cast<int>(hello.lanes + hello.late_lanes);
  for (int lane = 0; lane < first; ++lane) {
    if (connection_->lane_begun(lane)) out.push_back(lane);
  }
  if (const int prompt = connection_->prompt_lane(); prompt >= first) out.push_back(prompt);
  const LaneRange bulk = connection_->bulk_lanes();
  if (bulk.first < first) return out;
  for (int i = 0; i < bulk.count; ++i) out.push_back(bulk.first + i);
  return out;
}

size_t Link::chunk_bytes(absl::Time now, LaneRange bulk) const {
  const Hello& hello = connection_->peer();
  if (bulk.first >= static_cast<int>(hello.lanes + hello.late_lanes)) return kDataChunkBytes;
  const absl::Time small = absl::FromUnixNanos(last_small_.load(std::memory_order_relaxed));
  return now - small < kSmallLasts ? limits_.chunk_bytes : limits_.chunk_bytes / 5 * 8;
}

OutMessageRef Link::on_lane(const OutMessageRef& message, int lane,
                            std::shared_ptr<const void> held) const {
  struct OnLane {
    OnLane(OutMessageRef m, std::shared_ptr<LaneLoads> l, int n, std::shared_ptr<const void> h,
           std::shared_ptr<CallTrace> t, std::string_view to)
        : message(std::move(m)),
          loads(std::move(l)),
          lane(n),
          held(std::move(h)),
          trace(std::move(t)) {
      loads->add(lane, message->bytes);
      if (trace != nullptr) trace->bulk_begun(this, lane, to, message->bytes);
    }
    ~OnLane() {
      loads->remove(lane, message->bytes);
      if (trace != nullptr) trace->bulk_ended(this);
    }
    const OutMessageRef message;
    const std::shared_ptr<LaneLoads> loads;
    const int lane;
    const std::shared_ptr<const void> held;
    const std::shared_ptr<CallTrace> trace;
  };
  const auto owner =
      std::make_shared<OnLane>(message, loads_, lane, std::move(held), trace_, peer().name);
  return OutMessageRef(owner, owner->message.get());
}

Status Link::send_control(FrameKind kind, std::string header, int lane, absl::Time now) {
  last_sent_.store(absl::ToUnixNanos(now), std::memory_order_relaxed);
  weft::Frame frame;
  frame.kind = kind;
  frame.header = std::move(header);
  return connection_->send(std::move(frame), lane);
}

void Link::on_frame(const FrameView& frame, int lane) {
  const std::shared_ptr<Agent> agent = agent_.lock();
  if (agent == nullptr) return;
  received(agent->now());
  const Status status = handle(frame, lane, agent.get());
  // A peer that sends what no correct peer sends loses this connection and nothing else.
  if (!status.ok()) connection_->close(status);
}

ChunkTarget Link::chunk_target(std::string_view header, size_t bytes, int lane) {
  (void)lane;
  return assembler_.chunk_target(header, bytes);
}

void Link::chunk_filled(std::string_view header, size_t bytes, int lane) {
  (void)lane;
  const std::shared_ptr<Agent> agent = agent_.lock();
  if (agent == nullptr) return;
  received(agent->now());
  const Status status = assembler_.chunk_filled(header, bytes);
  if (!status.ok()) connection_->close(status);
}

Status Link::handle(const FrameView& frame, int lane, Agent* agent) {
  // An observer asks, and has no part in the calls of others.
  const bool observer = peer().observer;
  if (observer && frame.kind != FrameKind::kRequest && frame.kind != FrameKind::kHeartbeat) {
    return make_error(
        ErrorKind::kProtocol,
        absl::StrCat("frame kind ", static_cast<int>(frame.kind), " from an observer"));
  }
  switch (frame.kind) {
    case FrameKind::kRequest: {
      const auto memory = std::make_shared<ArenaMessage<v1::CallHeader>>();
      const std::shared_ptr<const v1::CallHeader> header(memory, memory->get());
      WEFT_RETURN_IF_ERROR(parse_header(frame, memory->get()));
      if (observer) {
        return assembler_.begin(header->layout(), frame, connection_.get(),
                                [self = shared_from_this(), header](StatusOr<Payload> payload) {
                                  if (auto a = self->agent_.lock()) {
                                    a->on_observer_request(self, *header, std::move(payload));
                                  }
                                },
                                {true, header->call_id(), agent->now() + kObserverTime});
      }
      const absl::Time arrived = agent->now();
      if (is_wide(header->layout())) return begin_wide(frame, header, arrived);
      return assembler_.begin(
          header->layout(), frame, connection_.get(),
          [self = shared_from_this(), header, arrived](StatusOr<Payload> payload) {
            if (auto a = self->agent_.lock()) {
              a->on_request(self, header, std::move(payload), arrived);
            }
          },
          purpose_of(*header, arrived));
    }
    case FrameKind::kResponse: {
      ArenaMessage<v1::ResponseHeader> header;
      WEFT_RETURN_IF_ERROR(parse_header(frame, header.get()));
      if (is_wide(header->layout())) return begin_wide(frame, *header);
      return assembler_.begin(
          header->layout(), frame, connection_.get(),
          [self = shared_from_this(), id = header->call_id(),
           metadata = take_metadata(*header)](StatusOr<Payload> payload) mutable {
            auto a = self->agent_.lock();
            if (a == nullptr) return;
            a->on_answer(self->peer().incarnation, id, std::move(payload), Delivery::kDelivered,
                         std::move(metadata));
          },
          purpose_of_answer(*header));
    }
    case FrameKind::kError: {
      v1::ErrorHeader header;
      WEFT_RETURN_IF_ERROR(parse_header(frame, &header));
      return assembler_.begin(
          header.layout(), frame, connection_.get(),
          [self = shared_from_this(), id = header.call_id(), code = header.code(),
           kind = header.kind(),
           delivery = delivery_of(header.reach())](StatusOr<Payload> payload) {
            auto a = self->agent_.lock();
            if (a == nullptr) return;
            a->on_answer(self->peer().incarnation, id,
                         payload.ok() ? unpack_error(code, kind, payload->body, self->peer().name)
                                      : payload.status(),
                         delivery, nullptr);
          },
          purpose_of_answer(header));
    }
    case FrameKind::kChunk: return assembler_.on_chunk(frame);
    case FrameKind::kCancel: {
      v1::CancelHeader header;
      WEFT_RETURN_IF_ERROR(parse_header(frame, &header));
      agent->on_cancel_frame(shared_from_this(), header);
      return absl::OkStatus();
    }
    case FrameKind::kGoodbye: {
      v1::GoodbyeHeader header;
      WEFT_RETURN_IF_ERROR(parse_header(frame, &header));
      agent->on_goodbye(shared_from_this(), header);
      return absl::OkStatus();
    }
    case FrameKind::kHeartbeat: {
      if (frame.header.empty()) return absl::OkStatus();  // as most are
      v1::HeartbeatHeader header;
      WEFT_RETURN_IF_ERROR(parse_header(frame, &header));
      agent->on_heartbeat(shared_from_this(), header);
      return absl::OkStatus();
    }
    case FrameKind::kTransferAbort: return absl::OkStatus();
    case FrameKind::kHello:
    case FrameKind::kHelloAck:
    case FrameKind::kArenaProbe:
    case FrameKind::kArenaFree:
    case FrameKind::kDataOffer:
    case FrameKind::kDataEnd: break;
  }
  return make_error(ErrorKind::kProtocol,
                    absl::StrCat("frame kind ", static_cast<int>(frame.kind), " on lane ", lane,
                                 " of an open connection"));
}

Status Link::begin_wide(const FrameView& frame, std::shared_ptr<const v1::CallHeader> brief,
                        absl::Time arrived) {
  const auto tell = [self = shared_from_this(), arrived](
                        const std::shared_ptr<const v1::CallHeader>& header,
                        StatusOr<Payload> payload) {
    if (auto a = self->agent_.lock()) a->on_request(self, header, std::move(payload), arrived);
  };
  return assembler_.begin_wide(
      brief->layout(), frame, connection_.get(),
      [tell, brief](std::string_view bytes) -> StatusOr<Assembler::Opened> {
        const auto header = std::make_shared<v1::CallHeader>();
        WEFT_RETURN_IF_ERROR(parse_wide(bytes, *brief, header.get()));
        return Assembler::Opened{
            take_layout(header.get()),
            [tell, header](StatusOr<Payload> payload) { tell(header, std::move(payload)); }};
      },
      [tell, brief](StatusOr<Payload> payload) { tell(brief, std::move(payload)); },
      purpose_of(*brief, arrived));
}

Status Link::begin_wide(const FrameView& frame, const v1::ResponseHeader& brief) {
  const auto tell = [self = shared_from_this(), id = brief.call_id()](
                        StatusOr<Payload> payload, std::shared_ptr<Metadata> metadata) {
    auto a = self->agent_.lock();
    if (a == nullptr) return;
    a->on_answer(self->peer().incarnation, id, std::move(payload), Delivery::kDelivered,
                 std::move(metadata));
  };
  v1::ResponseHeader same;
  same.set_call_id(brief.call_id());
  return assembler_.begin_wide(
      brief.layout(), frame, connection_.get(),
      [tell, same](std::string_view bytes) -> StatusOr<Assembler::Opened> {
        v1::ResponseHeader header;
        WEFT_RETURN_IF_ERROR(parse_wide(bytes, same, &header));
        return Assembler::Opened{take_layout(&header), [tell, metadata = take_metadata(header)](
                                                           StatusOr<Payload> payload) mutable {
                                   tell(std::move(payload), std::move(metadata));
                                 }};
      },
      [tell](StatusOr<Payload> payload) { tell(std::move(payload), nullptr); },
      purpose_of_answer(brief));
}

void Link::on_lost(Lost lost) {
  const std::shared_ptr<Agent> agent = agent_.lock();
  assembler_.abandon();
  if (agent != nullptr && connection_ != nullptr && !peer().observer) publish(agent->metrics());
  if (agent != nullptr) agent->on_link_lost(shared_from_this(), std::move(lost));
}

}  // namespace weft::internal
