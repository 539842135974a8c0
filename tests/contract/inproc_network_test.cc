// The inproc network as an instrument: what it can hold, cut, kill and count, on threads and in
// simulation; and that a seed gives the same run.
#include "gtest/gtest.h"
#include "weft/tests/contract/transport_harness.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::testing {
namespace {

class InprocNetworkTest : public TransportContract {
 protected:
  InprocNetwork& net() { return *world().network(); }
};

TEST_P(InprocNetworkTest, CountsFramesPerKindAndLink) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    for (int i = 0; i < 3; ++i) {
      ASSERT_TRUE(p.at_a.connection->send(make_frame(FrameKind::kRequest, "", ""), 0).ok());
    }
    ASSERT_TRUE(p.at_b.connection->send(make_frame(FrameKind::kResponse, "", ""), 0).ok());
    ASSERT_TRUE(p.at_b.handler->wait_frames(3));
    ASSERT_TRUE(p.at_a.handler->wait_frames(1));
    EXPECT_EQ(net().count(FrameKind::kHello).sent, 2);
    EXPECT_EQ(net().count(FrameKind::kHelloAck).delivered, 2);
    EXPECT_EQ(net().count(FrameKind::kRequest, "a", "b-with-dashes").delivered, 3);
    EXPECT_EQ(net().count(FrameKind::kRequest, "b-with-dashes").sent, 0);
    EXPECT_EQ(net().count(FrameKind::kResponse, "", "a").delivered, 1);
    EXPECT_EQ(net().connections(), 1);
    EXPECT_NE(net().dump().find("a -> b-with-dashes lane 0"), std::string::npos) << net().dump();
    EXPECT_NE(net().dump().find("request header 0 payload 0 delivered"), std::string::npos);
    p.shutdown();
    EXPECT_EQ(net().connections(), 0);
  });
}

TEST_P(InprocNetworkTest, HeldFramesArriveInOrderAfterTheRelease) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    net().hold("a", "b-with-dashes");
    for (int i = 0; i < 10; ++i) {
      ASSERT_TRUE(
          p.at_a.connection->send(make_frame(FrameKind::kRequest, std::to_string(i), ""), 0).ok());
    }
    // The other direction flows: whatever of a's had left would be there before this comes back.
    ASSERT_TRUE(p.at_b.connection->send(make_frame(FrameKind::kResponse, "", ""), 0).ok());
    ASSERT_TRUE(p.at_a.handler->wait_frames(1));
    EXPECT_EQ(p.at_b.handler->frame_count(), 0u);
    net().release("a", "b-with-dashes");
    ASSERT_TRUE(p.at_b.handler->wait_frames(10));
    for (size_t i = 0; i < 10; ++i) {
      EXPECT_EQ(p.at_b.handler->frames()[i].header, std::to_string(i));
    }
    p.shutdown();
  });
}

TEST_P(InprocNetworkTest, Conn4HeldFramesOfACutConnectionAreUnsent) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    ASSERT_TRUE(p.at_a.connection->send(make_frame(FrameKind::kRequest, "", "", 1), 0).ok());
    ASSERT_TRUE(p.at_b.handler->wait_frames(1));
    net().hold("a", "");
    for (uint64_t i = 2; i <= 4; ++i) {
      ASSERT_TRUE(p.at_a.connection->send(make_frame(FrameKind::kRequest, "", "", i), 0).ok());
    }
    EXPECT_EQ(net().cut("a", "b-with-dashes"), 1);
    ASSERT_TRUE(p.at_a.handler->wait_lost());
    ASSERT_TRUE(p.at_b.handler->wait_lost());
    EXPECT_EQ(p.at_a.handler->lost().unsent, (std::vector<uint64_t>{2, 3, 4}));
    EXPECT_EQ(error_kind(p.at_a.handler->lost().why), ErrorKind::kUnavailable);
    EXPECT_EQ(p.at_b.handler->frame_count(), 1u);
    p.shutdown();
  });
}

TEST_P(InprocNetworkTest, PartitionAndHeal) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    net().partition("a", "b-with-dashes");
    ASSERT_TRUE(p.at_a.connection->send(make_frame(FrameKind::kRequest, "1", "", 1), 0).ok());
    ASSERT_TRUE(p.at_b.connection->send(make_frame(FrameKind::kRequest, "2", "", 2), 1).ok());
    StatusOr<End> end = world().dial(*p.a, p.b->address, absl::Milliseconds(50));
    EXPECT_EQ(error_kind(end.status()), ErrorKind::kDeadline) << end.status();
    EXPECT_EQ(p.at_a.handler->frame_count() + p.at_b.handler->frame_count(), 0u);
    net().heal("b-with-dashes", "a");
    ASSERT_TRUE(p.at_a.handler->wait_frames(1));
    ASSERT_TRUE(p.at_b.handler->wait_frames(1));
    EXPECT_TRUE(world().dial(*p.a, p.b->address).ok());
    p.shutdown();
  });
}

TEST_P(InprocNetworkTest, RefusedDials) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    net().refuse_connects("b-with-dashes", true);
    StatusOr<End> end = world().dial(*p.a, p.b->address);
    EXPECT_EQ(error_kind(end.status()), ErrorKind::kUnavailable) << end.status();
    net().refuse_connects("b-with-dashes", false);
    EXPECT_TRUE(world().dial(*p.a, p.b->address).ok());
    EXPECT_EQ(p.at_a.handler->lost_calls(), 0);
    p.shutdown();
  });
}

TEST_P(InprocNetworkTest, AKilledWorkerIsGoneForItsPeersAndHearsNothing) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    net().kill("b-with-dashes");
    ASSERT_TRUE(p.at_a.handler->wait_lost());
    EXPECT_EQ(error_kind(p.at_a.handler->lost().why), ErrorKind::kUnavailable);
    StatusOr<End> end = world().dial(*p.a, p.b->address);
    EXPECT_EQ(error_kind(end.status()), ErrorKind::kUnavailable) << end.status();
    EXPECT_EQ(p.at_b.handler->lost_calls(), 0);
    EXPECT_FALSE(p.at_b.connection->send(make_frame(FrameKind::kRequest, "", ""), 0).ok());
    // Its address is free for its successor.
    std::unique_ptr<Peer> again = world().make_peer("b-with-dashes");
    ListenOptions options;
    options.port_first = std::stoi(p.b->address.substr(7));
    ASSERT_TRUE(world().listen(*again, options).ok());
    EXPECT_EQ(again->address, p.b->address);
    StatusOr<End> next = world().dial(*p.a, again->address);
    ASSERT_TRUE(next.ok()) << next.status();
    EXPECT_EQ(next->connection->peer().incarnation, again->hello.incarnation);
    // Its own shutdown tells it at last.
    p.b->transport->shutdown();
    EXPECT_EQ(p.at_b.handler->lost_calls(), 1);
    EXPECT_EQ(next->handler->lost_calls(), 0);
    p.a->transport->shutdown();
    again->transport->shutdown();
  });
}

std::vector<Backend> inproc_backends() {
  std::vector<Backend> out;
  for (const Backend& backend : transport_backends()) {
    if (backend.name == "inproc" || backend.name == "inproc_sim") out.push_back(backend);
  }
  return out;
}

INSTANTIATE_TEST_SUITE_P(Inproc, InprocNetworkTest, ::testing::ValuesIn(inproc_backends()),
                         backend_name);

// A little protocol under faults, as a function of the seed.
uint64_t simulated_run(uint64_t seed, std::string* transcript) {
  World world(inproc_backends()[1], seed);
  world.run([&] {
    InprocNetwork& net = *world.network();
    std::vector<std::unique_ptr<Peer>> peers;
    for (int i = 0; i < 3; ++i) {
      peers.push_back(world.make_peer("w" + std::to_string(i)));
      ASSERT_TRUE(world.listen(*peers.back()).ok());
    }
    std::vector<End> ends;
    for (size_t i = 0; i < 3; ++i) {
      StatusOr<End> end = world.dial(*peers[i], peers[(i + 1) % 3]->address);
      ASSERT_TRUE(end.ok()) << end.status();
      ends.push_back(*end);
      ends.push_back(peers[(i + 1) % 3]->acceptor->accepted(0));
    }
    for (int i = 0; i < 200; ++i) {
      const auto which = static_cast<size_t>(world.runtime().random().below(ends.size()));
      (void)ends[which].connection->send(
          make_frame(FrameKind::kRequest, std::to_string(i), "", static_cast<uint64_t>(i + 1)),
          i % 2);
      if (i == 50) net.hold("w0", "w1");
      if (i == 80) net.release("w0", "w1");
      if (i == 120) {
        EXPECT_EQ(net.cut("w1", "w2"), 1);
      }
      if (i == 150) net.kill("w0");
      // Some virtual time passes, so that traffic and faults mix.
      if (i % 10 == 9) (void)world.signal().wait([] { return false; }, absl::Microseconds(200));
    }
    for (const auto& peer : peers) peer->transport->shutdown();
    for (size_t e = 0; e < ends.size(); ++e) {
      EXPECT_EQ(ends[e].handler->lost_calls(), 1);
      for (const Received& r : ends[e].handler->frames()) {
        *transcript += std::to_string(e) + ":" + r.header + " ";
      }
    }
  });
  return world.trace_hash();
}

TEST(InprocSimulation, TheSameSeedGivesTheSameRun) {
  std::string first, second, other;
  const uint64_t hash = simulated_run(42, &first);
  EXPECT_EQ(simulated_run(42, &second), hash);
  EXPECT_EQ(first, second);
  EXPECT_NE(simulated_run(43, &other), hash);
  EXPECT_NE(first, other);
}

TEST(InprocSimulation, ManySeeds) {
  for (uint64_t seed = 1; seed <= fewer(200, 40); ++seed) {
    std::string transcript;
    simulated_run(seed, &transcript);
    if (::testing::Test::HasFailure()) {
      FAIL() << "seed " << seed;
    }
  }
}

TEST(InprocSimulation, LanesOvertakeEachOther) {
  bool overtaken = false;
  for (uint64_t seed = 1; seed <= 50 && !overtaken; ++seed) {
    World world(inproc_backends()[1], seed);
    world.run([&] {
      auto a = world.make_peer("a"), b = world.make_peer("b");
      ASSERT_TRUE(world.listen(*b).ok());
      StatusOr<End> end = world.dial(*a, b->address);
      ASSERT_TRUE(end.ok());
      ASSERT_TRUE(end->connection->send(make_frame(FrameKind::kRequest, "first", ""), 0).ok());
      ASSERT_TRUE(end->connection->send(make_frame(FrameKind::kChunk, "second", ""), 1).ok());
      const End there = b->acceptor->accepted();
      ASSERT_TRUE(there.handler->wait_frames(2));
      overtaken = there.handler->frames()[0].header == "second";
      a->transport->shutdown();
      b->transport->shutdown();
    });
  }
  EXPECT_TRUE(overtaken);
}

}  // namespace
}  // namespace weft::testing
