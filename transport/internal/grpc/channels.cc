#include "weft/transport/internal/grpc/channels.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"
#include "weft/transport/address.h"
#include "weft/transport/internal/grpc/connection.h"
#include "weft/transport/internal/grpc/core.h"

namespace weft::internal {

GrpcChannels::GrpcChannels(GrpcConnection* connection, List channels)
    : connection_(connection), channels_(std::move(channels)) {
  for (const auto& channel : channels_) {
    const ChannelCapabilities can = channel->capabilities();
    if (can.places) places_ = channel.get();
    if (can.lanes) lanes_ = channel.get();
  }
}

// ---- the connection's side ---------------------------------------------------------------------

void GrpcChannels::start() {
  // They hold the connection until close().
  const std::shared_ptr<ChannelHost> self(connection_->shared_from_this(), this);
  for (const auto& channel : channels_) channel->start(self);
}

void GrpcChannels::opened() {
  for (const auto& channel : channels_) channel->opened();
}

Status GrpcChannels::on_own_frame(const FrameView& frame, int lane) {
  for (const auto& channel : channels_) {
    if (channel->owns(frame.kind)) return channel->on_own_frame(frame.kind, frame.header);
  }
  return make_error(ErrorKind::kProtocol,
                    absl::StrCat("a frame of kind ", view(frame_kind_name(frame.kind)), " on lane ",
                                 lane, " of this connection"));
}

std::optional<Frame> GrpcChannels::take_rider() {
  if (places_ == nullptr || !places_->rider_waits()) return std::nullopt;
  Frame rider = places_->take_rider();
  if (rider.header.empty()) return std::nullopt;
  return rider;
}

std::optional<Placement> GrpcChannels::place(std::string_view bytes) {
  std::optional<Placement> placed;
  if (places_ != nullptr) placed = places_->place(bytes);
  if (placed.has_value()) connection_->core().poller()->note_bulk();
  return placed;
}

void GrpcChannels::unplace(const Placement& placement) {
  if (places_ != nullptr) places_->unplace(placement);
}

StatusOr<Borrowed> GrpcChannels::borrow(const Placement& placement, uint64_t length) {
  StatusOr<Borrowed> out = places_ == nullptr ? connection_->Connection::borrow(placement, length)
                                              : places_->borrow(placement, length);
  if (out.ok()) connection_->core().poller()->note_bulk();
  return out;
}

std::vector<LaneStats> GrpcChannels::lane_stats() const {
  std::vector<LaneStats> out;
  for (size_t i = 0; i < lanes(); ++i) out.push_back(lanes_->lane_stats(i));
  return out;
}

void GrpcChannels::drain() {
  for (const auto& channel : channels_) channel->drain();
}

void GrpcChannels::abort(const Status& why) {
  for (const auto& channel : channels_) channel->abort(why);
}

void GrpcChannels::close() {
  for (const auto& channel : channels_) channel->close();
}

void GrpcChannels::add_to(ConnectionStats* stats) const {
  for (const auto& channel : channels_) channel->add_to(stats);
}

// ---- the channels' side ------------------------------------------------------------------------

bool GrpcChannels::dialled() const { return connection_->dialled(); }
uint32_t GrpcChannels::peer_version() const { return connection_->peer().version_max; }
std::string GrpcChannels::describe() const { return connection_->describe(); }

void GrpcChannels::send_own(Frame frame) { connection_->send_own(std::move(frame)); }

void GrpcChannels::set_deadline(absl::Time when, std::weak_ptr<Timed> what) {
  connection_->core().set_deadline(when, std::move(what));
}

StatusOr<UniqueFd> GrpcChannels::dial_socket() { return connection_->dial_socket(); }

void GrpcChannels::channel_settled(Channel& channel, bool serves, std::string_view why_not) {
  if (serves || !connection_->is_open()) return;
  WEFT_LOG(connection_->core().context().log, kInfo)
      << "no channel '" << std::string(channel.name()) << "' with " << describe() << ", "
      << (channel.only_prompt() ? "prompt frames" : "large tensors")
      << " go another way: " << std::string(why_not);
}

bool GrpcChannels::lane_begun() { return connection_->channel_lanes_begun(1); }
ConnectionHandler* GrpcChannels::lane_up() { return connection_->channel_lane_up(); }
void GrpcChannels::lane_ended(LaneEnd end, bool was_up) {
  connection_->one_ended(std::move(end), was_up);
}

}  // namespace weft::internal
