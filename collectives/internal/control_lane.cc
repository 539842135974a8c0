#include "weft/collectives/internal/control_lane.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include "weft/collectives/internal/stream_link.h"
#include "weft/proto/collectives.pb.h"

namespace weft::internal {
namespace {

constexpr uint32_t kMaxMessage = 64 << 10;

}  // namespace

std::string control_message(const wire::GroupFault& fault) {
  const std::string body = fault.SerializeAsString();
  const auto length = static_cast<uint32_t>(body.size());
  std::string out(sizeof length, '\0');
  std::memcpy(out.data(), &length, sizeof length);
  return out + body;
}

Status ControlLane::read(Streams& streams, const Header& current, uint64_t position) {
  if (streams.control(rank_) < 0) return absl::OkStatus();
  if (!ended_) WEFT_RETURN_IF_ERROR(receive(streams, current));
  return position >= since_of(later_) ? later_ : absl::OkStatus();
}

Status ControlLane::receive(Streams& streams, const Header& current) {
  char buffer[4096];
  while (true) {
    const ssize_t n = streams.hear(rank_, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return absl::OkStatus();
    // Of a peer that closed a Unix socket with rings unread: told once, before what it wrote.
    if (n < 0 && errno == ECONNRESET && !std::exchange(reset_, true)) continue;
    if (n > 0) bytes_.append(buffer, static_cast<size_t>(n));
    WEFT_RETURN_IF_ERROR(decode(streams, current));
    if (n > 0) continue;
    ended_ = true;
    return left_ ? absl::OkStatus() : peer_lost(rank_, "its connection ended");
  }
}

Status ControlLane::decode(Streams& streams, const Header& current) {
  while (true) {
    uint32_t length = 0;
    if (bytes_.size() < sizeof length) return absl::OkStatus();
    std::memcpy(&length, bytes_.data(), sizeof length);
    if (length == 0) {  // a ring of a peer that saw this thread sleep
      bytes_.erase(0, sizeof length);
      continue;
    }
    if (length > kMaxMessage) return peer_lost(rank_, "it sent no fault of a member");
    if (bytes_.size() < sizeof length + length) return absl::OkStatus();
    wire::GroupFault message;
    if (!message.ParseFromArray(bytes_.data() + sizeof length, static_cast<int>(length))) {
      return peer_lost(rank_, "it sent no fault of a member");
    }
    bytes_.erase(0, sizeof length + length);
    WEFT_RETURN_IF_ERROR(take(streams, message, current));
  }
}

Status ControlLane::take(Streams& streams, const wire::GroupFault& message, const Header& current) {
  if (message.goodbye()) {
    left_ = true;
    finished_ = message.sequence();
    return absl::OkStatus();
  }
  if (message.asks()) {
    wire::GroupFault answer;
    answer.set_header(&current, sizeof current);
    // A peer that hears nothing takes this rank for one that is behind.
    streams.say(rank_, control_message(answer));
    return absl::OkStatus();
  }
  if (message.header().empty()) {
    Status fault = fault_of(rank_, message.kind(), message.text(), message.since());
    if (message.since() == 0) return fault;
    later_ = std::move(fault);
    return absl::OkStatus();
  }
  if (message.header().size() != sizeof(Header)) {
    return peer_lost(rank_, "it sent no fault of a member");
  }
  std::memcpy(&answer_.emplace(), message.header().data(), sizeof(Header));
  return absl::OkStatus();
}

}  // namespace weft::internal
