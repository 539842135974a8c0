// The contract of transports (rpc/transport.h), which every backend keeps. Names cite its promises.
#include "gtest/gtest.h"
#include "weft/tests/contract/transport_harness.h"

namespace weft::testing {
namespace {

class TransportContract : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override { make_world(1); }
  void make_world(uint64_t seed) {
    pairs_.clear();
    world_ = std::make_unique<World>(GetParam(), seed);
  }
  World& world() { return *world_; }
  void run(const std::function<void()>& body) { world().run(body); }

  // Two peers, joined: a dialled b.
  struct Pair {
    std::unique_ptr<Peer> a, b;
    End at_a, at_b;
    bool ok = false;
    void shutdown() {
      a->transport->shutdown();
      b->transport->shutdown();
    }
  };
  Pair join(size_t max_frame_bytes = 5u << 20) {
    Pair pair;
    pair.a = world().make_peer("a", max_frame_bytes);
    pair.b = world().make_peer("b-with-dashes", max_frame_bytes);
    const Status listening = world().listen(*pair.b);
    EXPECT_TRUE(listening.ok()) << listening;
    if (!listening.ok()) return pair;
    StatusOr<End> end = world().dial(*pair.a, pair.b->address);
    EXPECT_TRUE(end.ok()) << end.status();
    if (!end.ok()) return pair;
    pair.at_a = *end;
    pair.at_b = pair.b->acceptor->accepted();
    pair.ok = pair.at_b.connection != nullptr;
    return pair;
  }

  std::unique_ptr<World> world_;
  std::vector<Pair> pairs_;
};

TEST_P(TransportContract, HellosArriveOnBothSides) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    EXPECT_EQ(p.at_a.connection->peer().name, "b-with-dashes");
    EXPECT_EQ(p.at_a.connection->peer().incarnation, p.b->hello.incarnation);
    EXPECT_EQ(p.at_b.connection->peer().name, "a");
    EXPECT_EQ(p.at_b.connection->peer().id, p.a->hello.id);
    EXPECT_EQ(p.at_b.connection->peer().job_id, p.a->hello.job_id);
    EXPECT_TRUE(p.at_a.connection->dialled());
    EXPECT_FALSE(p.at_b.connection->dialled());
    EXPECT_EQ(p.at_a.connection->describe(), "b-with-dashes (" + p.b->address + ")");
    p.shutdown();
  });
}

TEST_P(TransportContract, Conn2FramesOfEverySizeArriveWholeAndInOrder) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    const size_t limit = 5u << 20;
    std::vector<std::pair<size_t, size_t>> sizes = {
        {0, 0},       {0, 1},          {1, 0},          {15, 16},      {100, 4095},
        {100, 4096},  {7, 65535},      {7, 65536 - 23}, {64 << 10, 0}, {64 << 10, 1 << 20},
        {3, 1 << 20}, {0, limit - 16}, {16, limit - 32}};
    for (size_t i = 0; i < sizes.size(); ++i) {
      const auto [header, payload] = sizes[i];
      const Status s = p.at_a.connection->send(
          make_frame(FrameKind::kRequest, pattern(header, i), pattern(payload, i)), kControlLane);
      ASSERT_TRUE(s.ok()) << s;
    }
    ASSERT_TRUE(p.at_b.handler->wait_frames(sizes.size()));
    const std::vector<Received> got = p.at_b.handler->frames();
    ASSERT_EQ(got.size(), sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_TRUE(got[i].header == pattern(sizes[i].first, i)) << i;
      EXPECT_TRUE(got[i].payload == pattern(sizes[i].second, i)) << i;
      EXPECT_EQ(got[i].kind, FrameKind::kRequest);
      EXPECT_EQ(got[i].lane, kControlLane);
    }
    p.shutdown();
  });
}

TEST_P(TransportContract, Conn1LostExactlyOnceAfterTheLastFrameAndNotInsideClose) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    for (uint32_t i = 0; i < 100; ++i) {
      ASSERT_TRUE(
          p.at_a.connection->send(make_frame(FrameKind::kRequest, "", "x"), i % 2 ? 1 : 0).ok());
    }
    // on_lost takes the world's mutex, as does this: were it called inside close(), it would hang.
    p.a->acceptor->set_own(p.a->hello);
    p.at_a.connection->close(absl::OkStatus());
    ASSERT_TRUE(p.at_a.handler->wait_lost());
    ASSERT_TRUE(p.at_b.handler->wait_lost());
    EXPECT_EQ(p.at_b.handler->frame_count(), 100u);  // close drains
    EXPECT_TRUE(p.at_a.handler->lost().why.ok()) << p.at_a.handler->lost().why;
    EXPECT_FALSE(p.at_b.handler->lost().why.ok());
    p.at_a.connection->close(absl::OkStatus());
    p.shutdown();
    EXPECT_EQ(p.at_a.handler->lost_calls(), 1);
    EXPECT_EQ(p.at_b.handler->lost_calls(), 1);
  });
}

INSTANTIATE_TEST_SUITE_P(All, TransportContract, ::testing::ValuesIn(transport_backends()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace weft::testing
