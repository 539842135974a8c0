// The link over streams by itself: what it makes of a peer's private socket.
#include "weft/collectives/internal/stream_link.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "weft/common/posix.h"
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
  void poll_for(int, int, bool, bool, std::vector<pollfd>*) override {}
  bool goodbye_comes_last() const override { return true; }

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
  ends.links[1]->leave();
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

INSTANTIATE_TEST_SUITE_P(Sockets, PrivateSocket, ::testing::Values(SOCK_STREAM, SOCK_SEQPACKET),
                         [](const auto& info) {
                           return info.param == SOCK_STREAM ? "stream" : "seqpacket";
                         });

}  // namespace
}  // namespace weft::internal
