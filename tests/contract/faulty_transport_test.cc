// The faulty decorator: each fault does what it says, rules count as they say, a seed decides
// alike.
#include "weft/transport/faulty_transport.h"

#include <algorithm>

#include "gtest/gtest.h"
#include "weft/tests/contract/transport_harness.h"

namespace weft::testing {
namespace {

class FaultyTransportTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override { make(1); }
  void make(uint64_t seed) {
    plan_ = std::make_shared<FaultPlan>(seed);
    Backend backend{"faulty", GetParam(), false, [this](World& world) {
                      return faulty_transport(inproc_transport(world.network()), plan_);
                    }};
    world_ = std::make_unique<World>(backend, seed);
  }
  // Runs the body with a joined pair: a dialled b.
  void run(const std::function<void(End a, End b)>& body) {
    world_->run([&] {
      a_ = world_->make_peer("a");
      b_ = world_->make_peer("b");
      ASSERT_TRUE(world_->listen(*b_).ok());
      StatusOr<End> end = world_->dial(*a_, b_->address);
      ASSERT_TRUE(end.ok()) << end.status();
      body(*end, b_->acceptor->accepted());
      a_->transport->shutdown();
      b_->transport->shutdown();
    });
  }
  static Status send(const End& end, const std::string& header, int lane = 0, uint64_t cookie = 0) {
    return end.connection->send(make_frame(FrameKind::kRequest, header, "payload", cookie), lane);
  }
  static std::string headers(const End& end) {
    std::string out;
    for (const Received& r : end.handler->frames()) out += r.header + " ";
    return out;
  }

  std::shared_ptr<FaultPlan> plan_;
  std::unique_ptr<World> world_;
  std::unique_ptr<Peer> a_, b_;
};

TEST_P(FaultyTransportTest, FailBeforeNTimes) {
  run([&](End a, End b) {
    const int id = plan_->add(
        {.fault = Fault::kFailBefore, .kind = FrameKind::kRequest, .skip = 1, .times = 2});
    EXPECT_TRUE(send(a, "1").ok());
    EXPECT_EQ(error_kind(send(a, "2")), ErrorKind::kNotDelivered);
    EXPECT_EQ(error_kind(send(a, "3")), ErrorKind::kNotDelivered);
    EXPECT_TRUE(send(a, "4").ok());
    // Other kinds are not concerned.
    EXPECT_TRUE(a.connection->send(make_frame(FrameKind::kCancel, "5", ""), 0).ok());
    ASSERT_TRUE(b.handler->wait_frames(3));
    EXPECT_EQ(headers(b), "1 4 5 ");
    EXPECT_EQ(plan_->hits(id), 2);
    EXPECT_NE(plan_->log().find("fail_before: a -> b request #1"), std::string::npos)
        << plan_->log();
  });
}

TEST_P(FaultyTransportTest, LoseUnsentTellsTheCookie) {
  run([&](End a, End b) {
    plan_->add({.fault = Fault::kLoseUnsent, .from = "a"});
    EXPECT_TRUE(send(a, "1", 0, 77).ok());
    ASSERT_TRUE(a.handler->wait_lost());
    ASSERT_TRUE(b.handler->wait_lost());
    EXPECT_EQ(a.handler->lost().unsent, std::vector<uint64_t>{77});
    EXPECT_EQ(error_kind(a.handler->lost().why), ErrorKind::kUnavailable);
    EXPECT_EQ(b.handler->frame_count(), 0u);
    EXPECT_FALSE(send(a, "2").ok());
  });
}

TEST_P(FaultyTransportTest, FailAfterDeliversAndCuts) {
  run([&](End a, End b) {
    plan_->add({.fault = Fault::kFailAfter, .to = "b", .skip = 1, .times = 1});
    EXPECT_TRUE(send(a, "1", 1, 1).ok());
    EXPECT_TRUE(send(a, "2", 0, 2).ok());
    ASSERT_TRUE(a.handler->wait_lost());
    ASSERT_TRUE(b.handler->wait_lost());
    EXPECT_EQ(b.handler->frame_count(), 2u);
    EXPECT_TRUE(a.handler->lost().unsent.empty());
    EXPECT_FALSE(a.handler->lost().why.ok());
  });
}

TEST_P(FaultyTransportTest, FailAfterAtTheReceiver) {
  run([&](End a, End b) {
    plan_->add({.fault = Fault::kFailAfter, .at_receiver = true});
    EXPECT_TRUE(send(a, "1").ok());
    ASSERT_TRUE(a.handler->wait_lost());
    ASSERT_TRUE(b.handler->wait_lost());
    EXPECT_EQ(headers(b), "1 ");
  });
}

TEST_P(FaultyTransportTest, CutAfterBytes) {
  run([&](End a, End b) {
    // Frames of 8 bytes: the third crosses the 20th.
    plan_->add({.fault = Fault::kCut, .after_bytes = 20});
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(send(a, "x").ok());
    ASSERT_TRUE(a.handler->wait_lost());
    ASSERT_TRUE(b.handler->wait_lost());
    EXPECT_LE(b.handler->frame_count(), 2u);
    EXPECT_EQ(plan_->hits(), 1);
  });
}

TEST_P(FaultyTransportTest, DropAndDuplicateOnBothEnds) {
  run([&](End a, End b) {
    plan_->add({.fault = Fault::kDrop, .times = 1});
    plan_->add({.fault = Fault::kDuplicate, .skip = 1, .times = 1});
    plan_->add({.fault = Fault::kDrop, .at_receiver = true, .skip = 2, .times = 1});
    plan_->add({.fault = Fault::kDuplicate, .at_receiver = true, .skip = 2, .times = 1});
    for (int i = 1; i <= 6; ++i) EXPECT_TRUE(send(a, std::to_string(i)).ok());
    ASSERT_TRUE(b.handler->wait_frames(6));
    // 1 vanished; 3 was sent twice (2 passed the second rule); of 2 3 3 4 5 6 the third vanished at
    // the receiver; 4, the third that the last rule was asked about, came twice.
    EXPECT_EQ(plan_->hits(), 4) << plan_->log();
    EXPECT_EQ(headers(b), "2 3 4 4 5 6 ") << plan_->log();
  });
}

TEST_P(FaultyTransportTest, DelayKeepsTheLanesOrderAndLetsOthersPass) {
  run([&](End a, End b) {
    plan_->add({.fault = Fault::kDelay, .times = 1, .delay = absl::Milliseconds(30)});
    EXPECT_TRUE(send(a, "1", 0).ok());
    EXPECT_TRUE(send(a, "2", 0).ok());
    EXPECT_TRUE(send(a, "bulk", 1).ok());
    ASSERT_TRUE(b.handler->wait_frames(3));
    EXPECT_EQ(headers(b), "bulk 1 2 ");
  });
}

TEST_P(FaultyTransportTest, ReorderWaitsForTheOtherLane) {
  run([&](End a, End b) {
    plan_->add({.fault = Fault::kReorder, .times = 1, .delay = absl::Hours(1)});
    EXPECT_TRUE(send(a, "1", 0).ok());
    EXPECT_TRUE(send(a, "2", 0).ok());
    EXPECT_TRUE(send(a, "bulk", 1).ok());
    ASSERT_TRUE(b.handler->wait_frames(3));
    std::string of_lane0;
    for (const Received& r : b.handler->frames()) {
      if (r.lane == 0) of_lane0 += r.header;
    }
    EXPECT_EQ(of_lane0, "12");
  });
}

TEST_P(FaultyTransportTest, DelayedFramesOfALostConnectionAreUnsentAndACloseSendsThem) {
  run([&](End a, End b) {
    plan_->add({.fault = Fault::kDelay, .from = "a", .delay = absl::Hours(1)});
    EXPECT_TRUE(send(a, "1", 0, 11).ok());
    EXPECT_TRUE(send(a, "2", 1, 12).ok());
    a.connection->close(absl::OkStatus());
    ASSERT_TRUE(b.handler->wait_lost());
    EXPECT_EQ(b.handler->frame_count(), 2u);
    StatusOr<End> again = world_->dial(*a_, b_->address);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_TRUE(send(*again, "3", 0, 13).ok());
    world_->network()->cut("a", "b");
    ASSERT_TRUE(again->handler->wait_lost());
    EXPECT_EQ(again->handler->lost().unsent, std::vector<uint64_t>{13});
  });
}

TEST_P(FaultyTransportTest, TruncateAndFlip) {
  run([&](End a, End b) {
    plan_->add({.fault = Fault::kTruncate, .times = 2});
    plan_->add({.fault = Fault::kFlipByte, .skip = 0, .times = 1});
    plan_->add({.fault = Fault::kTruncate, .at_receiver = true, .skip = 3, .times = 1});
    EXPECT_TRUE(send(a, "header").ok());
    EXPECT_TRUE(a.connection->send(make_frame(FrameKind::kChunk, "header", ""), 0).ok());
    EXPECT_TRUE(send(a, "header").ok());
    EXPECT_TRUE(send(a, "header").ok());
    ASSERT_TRUE(b.handler->wait_frames(4));
    const std::vector<Received> got = b.handler->frames();
    EXPECT_EQ(got[0].payload, "pay");
    EXPECT_EQ(got[1].header, "hea");
    EXPECT_NE(got[2].header, "header");
    EXPECT_EQ(got[2].header.size(), 6u);
    EXPECT_EQ(got[2].payload, "payload");
    EXPECT_EQ(got[3].payload, "pay");
  });
}

TEST_P(FaultyTransportTest, FaultsOfTheHandshake) {
  run([&](End, End) {
    const size_t before = b_->acceptor->accepted_count();
    int id = plan_->add({.fault = Fault::kFailBefore, .kind = FrameKind::kHello, .times = 1});
    StatusOr<End> end = world_->dial(*a_, b_->address);
    EXPECT_EQ(error_kind(end.status()), ErrorKind::kUnavailable) << end.status();
    plan_->remove(id);
    id = plan_->add({.fault = Fault::kDrop, .kind = FrameKind::kHello, .to = b_->address});
    end = world_->dial(*a_, b_->address, absl::Milliseconds(20));
    EXPECT_EQ(error_kind(end.status()), ErrorKind::kDeadline) << end.status();
    plan_->remove(id);
    id = plan_->add({.fault = Fault::kFailBefore, .kind = FrameKind::kHelloAck, .from = "b"});
    end = world_->dial(*a_, b_->address);
    EXPECT_EQ(error_kind(end.status()), ErrorKind::kUnavailable) << end.status();
    plan_->remove(id);
    EXPECT_EQ(b_->acceptor->accepted_count(), before);
    id = plan_->add({.fault = Fault::kDelay, .kind = FrameKind::kHello});
    end = world_->dial(*a_, b_->address);
    EXPECT_TRUE(end.ok()) << end.status();
    plan_->remove(id);
    plan_->add({.fault = Fault::kFailAfter, .kind = FrameKind::kHello});
    end = world_->dial(*a_, b_->address);
    ASSERT_TRUE(end.ok()) << end.status();
    EXPECT_TRUE(end->handler->wait_lost());
    plan_->clear();
    EXPECT_TRUE(world_->dial(*a_, b_->address).ok());
  });
}

TEST_P(FaultyTransportTest, ShutdownWhileADialIsDelayed) {
  world_->run([&] {
    a_ = world_->make_peer("a");
    plan_->add({.fault = Fault::kDrop, .kind = FrameKind::kHello});
    auto result = std::make_shared<std::vector<Status>>();
    a_->transport->connect("inproc:1", a_->hello, world_->runtime().now() + absl::Hours(1),
                           std::make_shared<RecordingHandler>(&world_->signal()),
                           [result](StatusOr<ConnectionRef> r) { result->push_back(r.status()); });
    a_->transport->shutdown();
    ASSERT_EQ(result->size(), 1u);
    EXPECT_EQ(error_kind((*result)[0]), ErrorKind::kState);
  });
}

INSTANTIATE_TEST_SUITE_P(Faulty, FaultyTransportTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "simulated" : "threads"; });

TEST(FaultPlan, DecisionsDependOnSeedLinkKindAndIndexOnly) {
  auto decisions = [](uint64_t seed, bool interleaved) {
    FaultPlan plan(seed);
    plan.add({.fault = Fault::kDrop, .probability = 0.5});
    std::string out;
    for (int i = 0; i < 64; ++i) {
      // Traffic of other links and kinds does not matter.
      if (interleaved) {
        (void)plan.decide("x", "y", FrameKind::kRequest, 10, false);
        (void)plan.decide("a", "b", FrameKind::kCancel, 10, false);
      }
      out +=
          plan.decide("a", "b", FrameKind::kRequest, 10, false).fault == Fault::kDrop ? '1' : '0';
    }
    return out;
  };
  EXPECT_EQ(decisions(5, false), decisions(5, true));
  EXPECT_NE(decisions(5, false), decisions(6, false));
  const std::string bits = decisions(5, false);
  const auto ones = std::count(bits.begin(), bits.end(), '1');
  EXPECT_GT(ones, 16);
  EXPECT_LT(ones, 48);
  // The same in every process and build.
  EXPECT_EQ(bits, decisions(5, false));
}

TEST(FaultPlan, EveryFaultHasAName) {
  for (int f = 0; f <= static_cast<int>(Fault::kFlipByte); ++f) {
    EXPECT_NE(fault_name(static_cast<Fault>(f)), "unknown");
  }
}

}  // namespace
}  // namespace weft::testing
