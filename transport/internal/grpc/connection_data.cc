// The data connections of a connection: offered by the acceptor, dialled by the dialler, used by
// both when all of them are up.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/transport/address.h"
#include "weft/transport/internal/data/offer.h"
#include "weft/transport/internal/grpc/connection.h"
#include "weft/transport/internal/grpc/core.h"
#include "weft/transport/local_socket.h"
#include "weft/transport/tls_stream.h"

namespace weft::internal {
namespace {

constexpr std::string_view kOff = "it is switched off here (data_connections is false)";

}  // namespace

// The end of the dialler's patience.
class GrpcConnection::DataTimer final : public GrpcTimed {
 public:
  void bind(std::weak_ptr<GrpcConnection> connection) { connection_ = std::move(connection); }
  void on_deadline() override {
    const std::shared_ptr<GrpcConnection> connection = connection_.lock();
    if (connection == nullptr) return;
    for (const auto& lane : connection->data_lanes()) {
      lane->give_up(make_error(ErrorKind::kDeadline, "no end of the greetings in time"));
    }
  }

 private:
  std::weak_ptr<GrpcConnection> connection_;  // set before the first use
};

std::shared_ptr<GrpcConnection::DataTimer> GrpcConnection::make_data_timer() {
  return std::make_shared<DataTimer>();
}

// ---- the acceptor ------------------------------------------------------------------------------

void GrpcConnection::offer_data() {
  if (local_) return;
  if (!core_->options().data_connections) {
    MutexLock lock(&mutex_);
    why_no_data_ = std::string(kOff);
    return;
  }
  const size_t count = std::min(lanes_.size() - 1, kMaxLanes - lanes_.size());
  {
    MutexLock lock(&mutex_);
    data_count_ = count;
  }
  for (size_t i = 0; i < count; ++i) {
    DataOffer offer{random_bytes(core_->runtime().random(), kDataTicketBytes), i, count, {}};
    if (core_->tls() != nullptr) {
      StatusOr<std::string> key = random_tls_key();
      if (!key.ok()) return no_data(key.status());
      offer.key = *std::move(key);
    }
    Frame frame;
    frame.kind = FrameKind::kDataOffer;
    frame.header = encode_data_offer(offer, lanes_.size());
    core_->expect_data(offer.ticket, {weak_from_this(), i, offer.key, {}});
    // A connection that is lost needs none.
    lanes_[kControlLane]->send(std::move(frame)).IgnoreError();
  }
}

void GrpcConnection::take_data(size_t index, std::string key, UniqueFd fd) {
  start_data(index, std::string(), std::move(key), std::move(fd));
}

// ---- the dialler -------------------------------------------------------------------------------

Status GrpcConnection::on_data_offer(std::string_view header) {
  if (!dialled_ || local_) {
    return make_error(ErrorKind::kProtocol, "a data offer to an acceptor, or by a local socket");
  }
  WEFT_ASSIGN_OR_RETURN(const DataOffer offer,
                        decode_data_offer(header, lanes_.size(), core_->tls() != nullptr));
  {
    MutexLock lock(&mutex_);
    if (!core_->options().data_connections) {
      why_no_data_ = std::string(kOff);
      return absl::OkStatus();
    }
    if (data_[offer.index] != nullptr || (data_count_ != 0 && data_count_ != offer.count)) {
      return make_error(ErrorKind::kProtocol,
                        absl::StrCat("a data offer of number ", lanes_.size() + offer.index, " of ",
                                     offer.count, ", after one of ", data_count_));
    }
    data_count_ = offer.count;
  }
  start_data(offer.index, offer.ticket, offer.key, begin_connect(lanes_[kControlLane]->remote()));
  return absl::OkStatus();
}

// ---- both --------------------------------------------------------------------------------------

void GrpcConnection::start_data(size_t index, const std::string& ticket, std::string key,
                                StatusOr<UniqueFd> fd) {
  if (!fd.ok()) return no_data(fd.status());
  set_tcp_options(fd->get(), core_->options().keepalive_timeout);
  StatusOr<std::shared_ptr<DataLane>> lane = DataLane::make(
      {static_cast<int>(lanes_.size() + index), ticket, std::move(key),
       core_->context().max_frame_bytes, core_->context().runtime, core_->data_loop()},
      *std::move(fd), dialled_, shared_from_this());
  if (!lane.ok()) return no_data(lane.status());
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kOpen || closing_ || ending_) return;
    data_[index] = *lane;
    ++data_begun_;
  }
  if (const Status started = (*lane)->start(); !started.ok()) {
    no_data(started);
    return one_ended({}, /*was_up=*/false);
  }
  // An acceptor without TLS goes up at once.
  if (!dialled_ && core_->tls() == nullptr) return;
  data_timer_->bind(weak_from_this());
  core_->set_deadline(core_->runtime().now() + core_->options().handshake_timeout, data_timer_);
}

ConnectionHandler* GrpcConnection::data_lane_up(DataLane& lane) {
  (void)lane;
  MutexLock lock(&mutex_);
  // Also while the connection ends in good order: what the peer has sent before is to come still.
  if (state_ != State::kOpen) return nullptr;
  if (++data_up_ == data_count_) data_ready_.store(data_count_, std::memory_order_release);
  return handler_.get();
}

void GrpcConnection::data_lane_ended(DataLane& lane, bool was_up, LaneEnd end) {
  (void)lane;
  if (!was_up) no_data(end.why);
  one_ended(std::move(end), was_up);
}

void GrpcConnection::no_data(const Status& why) {
  bool first;
  {
    MutexLock lock(&mutex_);
    first = why_no_data_.empty() && state_ == State::kOpen && !closing_ && !ending_;
    if (first) why_no_data_ = std::string(why.message());
  }
  if (!first) return;
  WEFT_LOG(core_->context().log, kInfo)
      << "no data connection with " << describe()
      << ", large messages go by its other lanes: " << std::string(why.message());
}

LaneRange GrpcConnection::bulk_lanes() const {
  const size_t ready = data_ready_.load(std::memory_order_acquire);
  if (ready == 0) return Connection::bulk_lanes();
  return {static_cast<int>(lanes_.size()), static_cast<int>(ready)};
}

std::vector<std::shared_ptr<DataLane>> GrpcConnection::data_lanes() {
  std::vector<std::shared_ptr<DataLane>> out;
  MutexLock lock(&mutex_);
  for (const auto& lane : data_) {
    if (lane != nullptr) out.push_back(lane);
  }
  return out;
}

std::vector<LaneStats> GrpcConnection::data_stats() const {
  std::vector<LaneStats> out;
  const size_t ready = data_ready_.load(std::memory_order_acquire);
  for (size_t i = 0; i < ready; ++i) out.push_back(data_[i]->stats());
  return out;
}

std::string GrpcConnection::describe_data() const {
  const size_t ready = data_ready_.load(std::memory_order_acquire);
  if (ready > 0) {
    return absl::StrCat(ready, ready == 1 ? " connection" : " connections",
                        core_->tls() == nullptr ? "" : ", TLS 1.3");
  }
  if (local_) return "the peer is on this host's local socket";
  MutexLock lock(&mutex_);
  return why_no_data_.empty() ? "not there yet" : why_no_data_;
}

}  // namespace weft::internal
