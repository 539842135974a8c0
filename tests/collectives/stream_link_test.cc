// The link over streams by itself: what it makes of a peer's private socket.
#include "weft/collectives/internal/stream_link.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "weft/collectives/internal/tcp_link.h"
#include "weft/common/posix.h"
#include "weft/proto/collectives.pb.h"
#include "weft/tests/collectives/world.h"

namespace weft::internal {
namespace {

// No data ever comes; the private socket is real.
class QuietStreams : public Streams {
 public:
  QuietStreams(int peer, UniqueFd control) : peer_(peer), control_(std::move(control)) {}

  Moved read(int, int, char*, size_t, size_t*) override { return Moved::kNothing; }
  Moved write(int, int, const iovec*, size_t, size_t*) override { return Moved::kNothing; }
  int control(int peer) const override { return peer == peer_ ? control_.get() : -1; }
  int looks() const override { return 1; }
  void relax(int) override {}
  void poll_for(int, int, size_t, bool, std::vector<pollfd>*) override {}
  bool goodbye_comes_last(int) const override { return true; }

 private:
  const int peer_;
  const UniqueFd control_;
};

struct Ends {
  std::shared_ptr<Runtime> runtime = make_system_runtime();
  std::unique_ptr<StreamLink> links[2];
  int sockets[2] = {-1, -1};

  explicit Ends(int type) {
    EXPECT_EQ(socketpair(AF_UNIX, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, sockets), 0);
    for (int rank = 0; rank < 2; ++rank) {
      auto streams = std::make_unique<QuietStreams>(1 - rank, UniqueFd(sockets[rank]));
      auto link =
          make_stream_link({.group = 7, .rank = rank, .size = 2}, std::move(streams), runtime);
      EXPECT_TRUE(link.ok()) << link.status();
      links[rank] = std::move(*link);
    }
  }

  Status receive(int rank) {
    return links[rank]->receive_point(1 - rank, 0, runtime->now() + absl::Seconds(30)).status();
  }
};

class PrivateSocket : public ::testing::TestWithParam<int> {};

TEST_P(PrivateSocket, AGoodbyeIsHeardFromAPeerThatLeftARingUnread) {
  Ends ends(GetParam());
  // A ring that rank 1 does not read: its close is then told to rank 0 as a reset, before the
  // goodbye.
  const uint32_t ring = 0;
  ASSERT_EQ(send(ends.sockets[0], &ring, sizeof ring, MSG_NOSIGNAL),
            static_cast<ssize_t>(sizeof ring));
  ends.links[1]->leave(0);
  ends.links[1].reset();
  testing::expect_error(ends.receive(0), ErrorKind::kPeerLost, {"rank 1 has left the group"});
}

TEST_P(PrivateSocket, AnEndWithoutAGoodbyeIsALoss) {
  for (const bool ring_unread : {false, true}) {
    Ends ends(GetParam());
    const uint32_t ring = 0;
    if (ring_unread) {
      ASSERT_EQ(send(ends.sockets[0], &ring, sizeof ring, MSG_NOSIGNAL),
                static_cast<ssize_t>(sizeof ring));
    }
    ends.links[1].reset();
    testing::expect_error(ends.receive(0), ErrorKind::kPeerLost, {"rank 1 is gone"});
  }
}

// Streams on which nothing comes and a yield takes longer than a time slice of another program.
class SlowYields : public Streams {
 public:
  SlowYields(std::shared_ptr<Runtime> runtime, UniqueFd control, int* yields_before_sleep)
      : runtime_(std::move(runtime)),
        control_(std::move(control)),
        yields_before_sleep_(yields_before_sleep) {}

  Moved read(int, int, char*, size_t, size_t*) override { return Moved::kNothing; }
  Moved write(int, int, const iovec*, size_t, size_t*) override { return Moved::kNothing; }
  int control(int peer) const override { return peer == 1 ? control_.get() : -1; }
  int looks() const override { return 1'000'000; }
  void relax(int) override {
    ++yields_;
    const absl::Time until = runtime_->now() + absl::Milliseconds(1);
    while (runtime_->now() < until) {
    }
  }
  void begin_sleep() override {
    if (*yields_before_sleep_ < 0) *yields_before_sleep_ = yields_;
  }
  void poll_for(int, int, size_t, bool, std::vector<pollfd>*) override {}

 private:
  const std::shared_ptr<Runtime> runtime_;
  const UniqueFd control_;
  int* const yields_before_sleep_;
  int yields_ = 0;
};

TEST(StreamLink, AThreadWhoseYieldsAreSlowSleeps) {
  const std::shared_ptr<Runtime> runtime = make_system_runtime();
  int sockets[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, sockets), 0);
  const UniqueFd other(sockets[1]);
  int yields = -1;
  auto link = make_stream_link({.group = 7, .rank = 0, .size = 2},
                               std::make_unique<SlowYields>(runtime, UniqueFd(sockets[0]), &yields),
                               runtime);
  ASSERT_TRUE(link.ok()) << link.status();
  const Status s = (*link)->receive_point(1, 0, runtime->now() + absl::Milliseconds(50)).status();
  testing::expect_error(s, ErrorKind::kDeadline, {"rank 1"});
  EXPECT_GE(yields, 0);
  EXPECT_LE(yields, 2);
}

// Data of rank 1 that comes only after all that the control sockets have was read.
class LateData : public Streams {
 public:
  LateData(UniqueFd of_1, UniqueFd of_2, std::string data)
      : controls_{UniqueFd(), std::move(of_1), std::move(of_2)}, data_(std::move(data)) {}

  Moved read(int peer, int lane, char* to, size_t bytes, size_t* got) override {
    if (peer != 1 || lane != kDataLane || data_.empty()) return Moved::kNothing;
    for (const UniqueFd& one : controls_) {
      int unread = 0;
      if (one.valid() && ioctl(one.get(), FIONREAD, &unread) == 0 && unread > 0) {
        return Moved::kNothing;
      }
    }
    *got = std::min(bytes, data_.size());
    std::memcpy(to, data_.data(), *got);
    data_.erase(0, *got);
    return Moved::kBytes;
  }
  Moved write(int, int, const iovec*, size_t, size_t*) override { return Moved::kNothing; }
  int control(int peer) const override { return controls_[peer].get(); }
  int looks() const override { return 1; }
  void relax(int) override {}
  void poll_for(int, int, size_t, bool, std::vector<pollfd>*) override {}

 private:
  const UniqueFd controls_[3];
  std::string data_;
};

void write_control(int fd, const wire::GroupFault& message) {
  const std::string body = message.SerializeAsString();
  const auto length = static_cast<uint32_t>(body.size());
  std::string bytes(reinterpret_cast<const char*>(&length), sizeof length);
  bytes += body;
  ASSERT_EQ(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
}

// Rank 2 has finished operation 5 and left; rank 1 has, too, and misses it in operation 6. What it
// says of that is read here, in operation 5, before its message of operation 5 comes.
TEST(StreamLink, COLL_6_an_operation_that_the_leaver_has_finished_goes_on) {
  const std::shared_ptr<Runtime> runtime = make_system_runtime();
  UniqueFd here[3];
  UniqueFd there[3];
  for (int peer : {1, 2}) {
    int sockets[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, sockets), 0);
    here[peer] = UniqueFd(sockets[0]);
    there[peer] = UniqueFd(sockets[1]);
  }
  wire::GroupFault goodbye;
  goodbye.set_goodbye(true);
  goodbye.set_sequence(5);
  write_control(there[2].get(), goodbye);
  wire::GroupFault fault;
  fault.set_kind(static_cast<uint32_t>(ErrorKind::kPeerLost));
  fault.set_text("rank 2 has left the group");
  fault.set_sequence(6);
  fault.set_since(6);
  write_control(there[1].get(), fault);

  Header mine;
  mine.op = static_cast<uint8_t>(OpKind::kBarrier);
  mine.group = 7;
  mine.generation = 1;
  mine.sequence = 5;
  const Incoming from_1{1, mine, nullptr, nullptr};
  auto link = make_stream_link(
      {.group = 7, .rank = 0, .size = 3},
      std::make_unique<LateData>(std::move(here[1]), std::move(here[2]),
                                 std::string(reinterpret_cast<const char*>(&mine), sizeof mine)),
      runtime);
  ASSERT_TRUE(link.ok()) << link.status();
  const absl::Time deadline = runtime->now() + absl::Seconds(30);
  const Status fifth = (*link)->exchange(mine, {}, {&from_1, 1}, deadline);
  EXPECT_TRUE(fifth.ok()) << fifth;

  mine.sequence = 6;
  const Incoming next{1, mine, nullptr, nullptr};
  testing::expect_error((*link)->exchange(mine, {}, {&next, 1}, deadline), ErrorKind::kPeerLost,
                        {"rank 1 says: rank 2 has left the group"});
}

// Two ends of a connection of TCP. The receiving one takes few bytes at a time.
void connect_pair(UniqueFd* first, UniqueFd* second) {
  const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  const int little = 16 << 10;
  const int much = 1 << 20;
  ASSERT_EQ(setsockopt(listener.get(), SOL_SOCKET, SO_RCVBUF, &little, sizeof little), 0);
  auto* const name = reinterpret_cast<sockaddr*>(&address);
  ASSERT_EQ(bind(listener.get(), name, length), 0);
  ASSERT_EQ(listen(listener.get(), 1), 0);
  ASSERT_EQ(getsockname(listener.get(), name, &length), 0);
  *second = UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(setsockopt(second->get(), SOL_SOCKET, SO_SNDBUF, &much, sizeof much), 0);
  ASSERT_EQ(connect(second->get(), name, length), 0);
  *first = UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  ASSERT_TRUE(first->valid());
}

// A close with bytes unread resets the connection: what the kernel still had of the last message
// was lost, although send() had returned.
TEST(TcpLink, TheLastMessageOfARankThatLeavesWithBytesUnreadArrives) {
  const std::shared_ptr<Runtime> runtime = make_system_runtime();
  std::vector<TcpPeer> peers(2);
  UniqueFd other[kLanes];  // the sockets of rank 0
  for (int lane = 0; lane < kLanes; ++lane) connect_pair(&other[lane], &peers[0].lanes[lane]);
  auto link = make_tcp_link({.group = 7, .rank = 1, .size = 2}, std::move(peers), runtime);
  ASSERT_TRUE(link.ok()) << link.status();
  // More than the receiver's buffer, and less than the sender's.
  const std::string body(100'000, 'x');
  Header header;
  header.op = static_cast<uint8_t>(OpKind::kSend);
  header.group = 7;
  header.bytes = body.size();
  const Outgoing last{0, header, body.data()};
  ASSERT_TRUE((*link)->send_points({&last, 1}, runtime->now() + absl::Seconds(30)).ok());
  const int point = other[kPointLane].get();
  ASSERT_EQ(send(point, "unread", 6, MSG_NOSIGNAL), 6);
  (*link)->leave(0);
  link->reset();
  std::string got;
  char buffer[4096];
  ssize_t n = 0;
  while ((n = recv(point, buffer, sizeof buffer, 0)) > 0) got.append(buffer, n);
  EXPECT_EQ(n, 0) << "the connection was reset";
  ASSERT_EQ(got.size(), sizeof header + body.size());
  EXPECT_EQ(got.substr(sizeof header), body);
}

INSTANTIATE_TEST_SUITE_P(Sockets, PrivateSocket, ::testing::Values(SOCK_STREAM, SOCK_SEQPACKET),
                         [](const auto& info) {
                           return info.param == SOCK_STREAM ? "stream" : "seqpacket";
                         });

// Two TCP sockets that are connected over loopback.
std::pair<UniqueFd, UniqueFd> tcp_pair() {
  const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof at;
  EXPECT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&at), sizeof at), 0);
  EXPECT_EQ(listen(listener.get(), 1), 0);
  EXPECT_EQ(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&at), &size), 0);
  UniqueFd one(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(one.get(), reinterpret_cast<sockaddr*>(&at), sizeof at), 0);
  return {std::move(one), UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC))};
}

// A thread that awaits a piece of a tensor is not woken for each packet of it.
TEST(StreamLink, ASocketWakesForThePieceThatIsAwaited) {
  auto [peer, own] = tcp_pair();
  const int fd = own.get();
  std::vector<TcpPeer> peers(2);
  peers[1].lanes[kDataLane] = std::move(own);
  const auto streams = make_tcp_streams(std::move(peers));
  const auto ready = [&](size_t awaited, int timeout_ms) {
    std::vector<pollfd> fds;
    streams->poll_for(1, kDataLane, awaited, false, &fds);
    EXPECT_EQ(fds.size(), 1U);
    EXPECT_EQ(fds.at(0).fd, fd);
    return poll(fds.data(), fds.size(), timeout_ms) == 1;
  };
  const auto arrived = [fd](int bytes) {
    int unread = 0;
    while (unread < bytes) ASSERT_EQ(ioctl(fd, FIONREAD, &unread), 0);
  };
  constexpr int kLong = 30'000;
  const std::vector<char> piece(kPieceBytes);
  ASSERT_EQ(send(peer.get(), piece.data(), 1000, 0), 1000);
  arrived(1000);
  EXPECT_FALSE(ready(kPieceBytes, 0));
  EXPECT_TRUE(ready(1000, 0)) << "of a short message every byte counts";
  EXPECT_FALSE(ready(kPieceBytes, 0));
  ASSERT_EQ(send(peer.get(), piece.data(), piece.size() - 1000, 0), ssize_t{kPieceBytes} - 1000);
  EXPECT_TRUE(ready(kPieceBytes, kLong));
  std::vector<char> read(kPieceBytes);
  size_t got = 0;
  EXPECT_EQ(streams->read(1, kDataLane, read.data(), read.size(), &got), Moved::kBytes);
  EXPECT_EQ(got, read.size());
  // The end of a connection is seen, however little came before.
  ASSERT_EQ(send(peer.get(), piece.data(), 1, 0), 1);
  arrived(1);
  EXPECT_FALSE(ready(kPieceBytes, 0));
  peer = UniqueFd();
  EXPECT_TRUE(ready(kPieceBytes, kLong));
  EXPECT_EQ(streams->read(1, kDataLane, read.data(), read.size(), &got), Moved::kBytes);
  EXPECT_EQ(got, 1U);
  EXPECT_EQ(streams->read(1, kDataLane, read.data(), read.size(), &got), Moved::kEnd);
}

}  // namespace
}  // namespace weft::internal
