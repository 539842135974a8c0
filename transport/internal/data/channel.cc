#include "weft/transport/internal/data/channel.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"
#include "weft/transport/address.h"
#include "weft/transport/internal/data/lane.h"
#include "weft/transport/internal/data/offer.h"
#include "weft/transport/internal/wire/handshake.h"
#include "weft/transport/local_socket.h"
#include "weft/transport/tls_stream.h"

namespace weft::internal {
namespace {

constexpr std::string_view kOff = "it is switched off here (data_connections is false)";

}  // namespace

class DataChannel final : public Channel,
                          public DataLaneHost,
                          public std::enable_shared_from_this<DataChannel> {
 public:
  DataChannel(std::shared_ptr<DataBackend> backend, const ChannelSite& site)
      : backend_(std::move(backend)),
        dialled_(site.dialled),
        local_(site.local),
        first_lane_(site.first_lane),
        max_lanes_(site.max_lanes) {
    if (!backend_->options().enabled) why_none_ = std::string(kOff);
  }

  std::string_view name() const override { return "data"; }
  ChannelCapabilities capabilities() const override { return {.lanes = true}; }
  bool owns(FrameKind kind) const override { return kind == FrameKind::kDataOffer; }
  void note_small() override { backend_->loop(local_)->turn().note_small(); }

  void start(std::shared_ptr<ChannelHost> host) override ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    host_ = std::move(host);
  }
  void opened() override {
    if (!dialled_ && !local_ && backend_->options().enabled) offer();
  }
  Status on_own_frame(FrameKind kind, std::string_view header) override ABSL_LOCKS_EXCLUDED(mutex_);

  bool only_prompt() const override { return local_; }
  void want_lanes() override;

  size_t lanes() const override { return ready_.load(std::memory_order_acquire); }
  LaneStats lane_stats(size_t index) const override { return lanes_[index]->stats(); }
  Status send(Frame frame, size_t index) override { return lanes_[index]->send(std::move(frame)); }

  void drain() override {
    for (const auto& lane : begin_ending()) lane->drain();
  }
  void abort(const Status& why) override {
    for (const auto& lane : begin_ending()) lane->abort(why);
  }
  void close() override ABSL_LOCKS_EXCLUDED(mutex_) {
    std::shared_ptr<ChannelHost> host;
    MutexLock lock(&mutex_);
    ending_ = true;
    host.swap(host_);
    lock.unlock();
  }
  void add_to(ConnectionStats* stats) const override ABSL_LOCKS_EXCLUDED(mutex_);
  // The end of the patience with greetings.
  void on_deadline() override {
    for (const auto& lane : all_lanes()) {
      lane->give_up(make_error(ErrorKind::kDeadline, "no end of the greetings in time"));
    }
  }

  // A socket, ours that connects or one that showed the ticket.
  void start_lane(size_t index, const std::string& ticket, const std::string& key,
                  StatusOr<UniqueFd> fd) ABSL_LOCKS_EXCLUDED(mutex_);

  ConnectionHandler* data_lane_up(DataLane& lane) override ABSL_LOCKS_EXCLUDED(mutex_);
  void data_lane_ended(DataLane& lane, bool was_up, LaneEnd end) override
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Lanes = std::vector<std::shared_ptr<DataLane>>;

  void offer() ABSL_LOCKS_EXCLUDED(mutex_);
  void refuse(const Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  std::shared_ptr<ChannelHost> host() const ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    return host_;
  }
  Lanes all_locked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Lanes out;
    for (const auto& lane : lanes_) {
      if (lane != nullptr) out.push_back(lane);
    }
    return out;
  }
  Lanes all_lanes() const ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    return all_locked();
  }
  // From here on no lane begins.
  Lanes begin_ending() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    ending_ = true;
    return all_locked();
  }

  const std::shared_ptr<DataBackend> backend_;
  const bool dialled_;
  const bool local_;
  const size_t first_lane_;
  const size_t max_lanes_;
  // By index; none is replaced. Changed under mutex_; those below ready_ are constant.
  std::array<std::shared_ptr<DataLane>, kMaxLanes> lanes_;
  std::atomic<size_t> ready_{0};  // 0, or all of them when all are up
  std::atomic<bool> wanted_{false};
  Status admitted_;  // of the dialler's poller: offers come one by one

  mutable Mutex mutex_;
  std::shared_ptr<ChannelHost> host_ ABSL_GUARDED_BY(mutex_);
  size_t count_ ABSL_GUARDED_BY(mutex_) = 0;  // offered
  size_t up_ ABSL_GUARDED_BY(mutex_) = 0;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::string why_none_ ABSL_GUARDED_BY(mutex_);
};

// ---- the acceptor ------------------------------------------------------------------------------

void DataChannel::offer() {
  const size_t count = std::min(local_ ? size_t{1} : max_lanes_, kMaxLanes - first_lane_);
  if (const Status room = backend_->admit(count); !room.ok()) return refuse(room);
  {
    MutexLock lock(&mutex_);
    count_ = count;
  }
  for (size_t i = 0; i < count; ++i) {
    DataOffer offer{random_bytes(backend_->runtime()->random(), kSocketTicketBytes), i, count, {}};
    if (backend_->options().tls) {
      StatusOr<std::string> key = random_tls_key();
      if (!key.ok()) return refuse(key.status());
      offer.key = *std::move(key);
    }
    Frame frame;
    frame.kind = FrameKind::kDataOffer;
    frame.header = encode_data_offer(offer, first_lane_);
    backend_->expect(offer.ticket, weak_from_this(), i, offer.key);
    if (const std::shared_ptr<ChannelHost> to = host()) to->send_own(std::move(frame));
  }
}

// ---- the dialler -------------------------------------------------------------------------------

Status DataChannel::on_own_frame(FrameKind kind, std::string_view header) {
  (void)kind;
  if (!dialled_) {
    if (!local_ || !header.empty()) {
      return make_error(ErrorKind::kProtocol, "a data offer to an acceptor");
    }
    if (backend_->options().enabled && !wanted_.exchange(true)) offer();
    return absl::OkStatus();
  }
  WEFT_ASSIGN_OR_RETURN(const DataOffer offer,
                        decode_data_offer(header, first_lane_, backend_->options().tls));
  if (!backend_->options().enabled) return absl::OkStatus();
  std::shared_ptr<ChannelHost> host;
  bool first = false;
  {
    MutexLock lock(&mutex_);
    if (lanes_[offer.index] != nullptr || (count_ != 0 && count_ != offer.count)) {
      return make_error(ErrorKind::kProtocol,
                        absl::StrCat("a data offer of number ", first_lane_ + offer.index, " of ",
                                     offer.count, ", after one of ", count_));
    }
    first = count_ == 0;
    count_ = offer.count;
    host = host_;
  }
  if (first) admitted_ = backend_->admit(offer.count);  // all of them or none
  if (!admitted_.ok()) {
    refuse(admitted_);
    return absl::OkStatus();
  }
  if (host != nullptr) start_lane(offer.index, offer.ticket, offer.key, host->dial_socket());
  return absl::OkStatus();
}

// ---- both --------------------------------------------------------------------------------------

void DataChannel::want_lanes() {
  if (!local_ || !backend_->options().enabled || wanted_.exchange(true)) return;
  const std::shared_ptr<ChannelHost> to = host();
  if (to == nullptr || to->peer_version() < kPromptLaneVersion) return;
  if (!dialled_) return offer();
  Frame ask;
  ask.kind = FrameKind::kDataOffer;
  to->send_own(std::move(ask));
}

void DataChannel::start_lane(size_t index, const std::string& ticket, const std::string& key,
                             StatusOr<UniqueFd> fd) {
  if (!fd.ok()) return refuse(fd.status());
  const DataBackend::Options& options = backend_->options();
  if (!local_) set_tcp_options(fd->get(), options.keepalive_timeout);
  StatusOr<std::shared_ptr<DataLane>> lane =
      DataLane::make({static_cast<int>(first_lane_ + index), ticket, key, options.max_frame_bytes,
                      backend_->runtime(), backend_->loop(local_), /*prompt=*/local_},
                     *std::move(fd), dialled_, shared_from_this());
  if (!lane.ok()) return refuse(lane.status());
  std::shared_ptr<ChannelHost> host;
  {
    MutexLock lock(&mutex_);
    if (ending_ || lanes_[index] != nullptr) return;
    lanes_[index] = *lane;
    host = host_;
  }
  // After the table has it, so that the thread that ends the connection finds it.
  if (host == nullptr || !host->lane_begun()) {
    MutexLock lock(&mutex_);
    lanes_[index] = nullptr;
    return;
  }
  if (const Status started = (*lane)->start(); !started.ok()) {
    refuse(started);
    return host->lane_ended({}, /*was_up=*/false);
  }
  // An acceptor without TLS goes up at once.
  if (dialled_ || options.tls) {
    host->set_deadline(backend_->runtime()->now() + options.handshake_timeout, weak_from_this());
  }
}

ConnectionHandler* DataChannel::data_lane_up(DataLane& lane) {
  (void)lane;
  const std::shared_ptr<ChannelHost> to = host();
  // Also while the connection ends in good order: what the peer has sent before is to come still.
  ConnectionHandler* const handler = to == nullptr ? nullptr : to->lane_up();
  if (handler == nullptr) return nullptr;
  bool serves = false;
  {
    MutexLock lock(&mutex_);
    serves = ++up_ == count_;
    if (serves) ready_.store(count_, std::memory_order_release);
  }
  if (serves) to->channel_settled(*this, true, {});
  return handler;
}

void DataChannel::data_lane_ended(DataLane& lane, bool was_up, LaneEnd end) {
  (void)lane;
  if (!was_up) refuse(end.why);
  if (const std::shared_ptr<ChannelHost> to = host()) to->lane_ended(std::move(end), was_up);
}

void DataChannel::refuse(const Status& why) {
  std::shared_ptr<ChannelHost> to;
  {
    MutexLock lock(&mutex_);
    if (!why_none_.empty() || ending_) return;
    why_none_ = std::string(why.message());
    to = host_;
  }
  if (to != nullptr) to->channel_settled(*this, false, std_view(why.message()));
}

void DataChannel::add_to(ConnectionStats* stats) const {
  if (const size_t ready = lanes(); ready > 0) {
    stats->data = absl::StrCat(ready, ready == 1 ? " connection" : " connections",
                               backend_->options().tls ? ", TLS 1.3" : "");
  } else {
    MutexLock lock(&mutex_);
    const std::string_view none =
        local_ ? "the peer is on this host's local socket" : "not there yet";
    stats->data = why_none_.empty() ? std::string(none) : why_none_;
  }
}

// ---- the backend -------------------------------------------------------------------------------

std::shared_ptr<Channel> DataBackend::make(const ChannelSite& site) {
  return std::make_shared<DataChannel>(shared_from_this(), site);
}

void DataBackend::expect(const std::string& ticket, std::weak_ptr<DataChannel> channel,
                         size_t index, std::string key) {
  const absl::Time now = runtime_->now();
  MutexLock lock(&mutex_);
  std::erase_if(expected_, [now](const auto& one) {
    return one.second.until < now || one.second.channel.expired();
  });
  expected_.emplace(ticket, Expected{std::move(channel), index, std::move(key),
                                     now + options_.handshake_timeout});
}

bool DataBackend::take_socket(const std::string& ticket, UniqueFd* fd) {
  Expected expected;
  {
    MutexLock lock(&mutex_);
    const auto it = expected_.find(ticket);
    if (it == expected_.end()) return false;
    expected = std::move(it->second);
    expected_.erase(it);
  }
  const std::shared_ptr<DataChannel> channel = expected.channel.lock();
  if (channel == nullptr || expected.until < runtime_->now()) return false;
  channel->start_lane(expected.index, std::string(), expected.key, std::move(*fd));
  return true;
}

}  // namespace weft::internal
