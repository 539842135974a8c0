#ifndef WEFT_TRANSPORT_INTERNAL_GRPC_CHANNELS_H_
#define WEFT_TRANSPORT_INTERNAL_GRPC_CHANNELS_H_

// GrpcChannels: the channels of one connection, and the connection as they see it. It knows what
// they can do, not which they are: at most one of them has places, and at most one has lanes.
//
// Threads: any.

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/transport/channel.h"
#include "weft/transport/transport.h"

namespace weft::internal {

class GrpcConnection;

class GrpcChannels final : public ChannelHost {
 public:
  using List = std::vector<std::shared_ptr<Channel>>;

  // `connection` owns it.
  GrpcChannels(GrpcConnection* connection, List channels);

  void start();
  void opened();
  Status on_own_frame(const FrameView& frame, int lane);
  // What goes with the next frame of the control lane, if anything does.
  std::optional<Frame> take_rider();
  void note_small() {
    if (lanes_ != nullptr) lanes_->note_small();
  }

  std::optional<Placement> place(std::string_view bytes);
  void unplace(const Placement& placement);
  StatusOr<Borrowed> borrow(const Placement& placement, uint64_t length);
  // Those that can be used.
  size_t lanes() const { return lanes_ == nullptr ? 0 : lanes_->lanes(); }
  size_t bulk_lanes() const { return lanes_ == nullptr || lanes_->only_prompt() ? 0 : lanes(); }
  size_t prompt_lanes() const { return lanes_ != nullptr && lanes_->only_prompt() ? lanes() : 0; }
  void want_prompt_lane() {
    if (lanes_ != nullptr && lanes_->only_prompt()) lanes_->want_lanes();
  }
  Status send(Frame frame, size_t index) { return lanes_->send(std::move(frame), index); }
  std::vector<LaneStats> lane_stats() const;

  void drain();
  void abort(const Status& why);
  void close();
  void add_to(ConnectionStats* stats) const;

  bool dialled() const override;
  uint32_t peer_version() const override;
  std::string describe() const override;
  void send_own(Frame frame) override;
  void set_deadline(absl::Time when, std::weak_ptr<Timed> what) override;
  StatusOr<UniqueFd> dial_socket() override;
  void channel_settled(Channel& channel, bool serves, std::string_view why_not) override;
  bool lane_begun() override;
  ConnectionHandler* lane_up() override;
  void lane_ended(LaneEnd end, bool was_up) override;

 private:
  GrpcConnection* const connection_;
  const List channels_;
  Channel* places_ = nullptr;
  Channel* lanes_ = nullptr;
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_GRPC_CHANNELS_H_
