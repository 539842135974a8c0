// The contract of transports (transport/transport.h), which every backend keeps: delivery, order,
// the end of connections. Names cite its promises. Handshake and shutdown:
// transport_lifecycle_test.cc.
#include <set>

#include "gtest/gtest.h"
#include "weft/tests/contract/transport_harness.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::testing {
namespace {

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
    EXPECT_EQ(p.at_b.connection->describe().rfind("a (", 0), 0u) << p.at_b.connection->describe();
    EXPECT_EQ(p.b->acceptor->hellos(), GetParam().late ? 1 : 2) << "one for each lane";
    p.shutdown();
  });
}

TEST_P(TransportContract, Conn2FramesOfEverySizeArriveWholeAndInOrder) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    const size_t limit = 5u << 20;
    const std::vector<std::pair<size_t, size_t>> sizes = {{0, 0},
                                                          {0, 1},
                                                          {1, 0},
                                                          {15, 16},
                                                          {100, 4095},
                                                          {100, 4096},
                                                          {100, 4097},
                                                          {7, 65535},
                                                          {7, 65536},
                                                          {64 << 10, 0},
                                                          {64 << 10, 1 << 20},
                                                          {3, 1 << 20},
                                                          {0, limit - 16},
                                                          {16, limit - 32}};
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

TEST_P(TransportContract, EveryKindTravels) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    size_t n = 0;
    for (int k = static_cast<int>(FrameKind::kRequest); k <= static_cast<int>(FrameKind::kGoodbye);
         ++k, ++n) {
      const auto kind = static_cast<FrameKind>(k);
      ASSERT_TRUE(p.at_a.connection->send(make_frame(kind, "h", "p"), kBulkLane).ok());
      ASSERT_TRUE(p.at_b.handler->wait_frames(n + 1));
      EXPECT_EQ(p.at_b.handler->frames().back().kind, kind);
      EXPECT_EQ(p.at_b.handler->frames().back().lane, kBulkLane);
    }
    // The handshake's kinds are the transport's own.
    for (const FrameKind kind : {FrameKind::kHello, FrameKind::kHelloAck}) {
      const Status s = p.at_a.connection->send(make_frame(kind, "", ""), kControlLane);
      EXPECT_EQ(error_kind(s), ErrorKind::kInvalidArgument) << s;
    }
    const Status s = p.at_a.connection->send(make_frame(FrameKind::kChunk, "", ""), 8);
    EXPECT_EQ(error_kind(s), ErrorKind::kInvalidArgument) << s;
    p.shutdown();
  });
}

TEST_P(TransportContract, Conn2TenThousandSmallFramesFromTwoThreadsKeepTheirOrderPerLane) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    constexpr int kEach = 5000;
    std::vector<std::unique_ptr<Thread>> threads;
    for (int t = 0; t < 2; ++t) {
      threads.push_back(world().runtime().spawn("sender", [&, t] {
        for (int i = 0; i < kEach; ++i) {
          const std::string header = std::string(1, static_cast<char>('0' + t)) + std::to_string(i);
          const Status s = p.at_a.connection->send(
              make_frame(FrameKind::kRequest, header, std::string(i % 50, 'p')), i % 2);
          EXPECT_TRUE(s.ok()) << s;
        }
      }));
    }
    for (const auto& thread : threads) thread->join();
    ASSERT_TRUE(p.at_b.handler->wait_frames(2 * kEach));
    int last[2][2] = {{-1, -1}, {-1, -1}};
    for (const Received& r : p.at_b.handler->frames()) {
      const int t = r.header[0] - '0';
      const int i = std::stoi(r.header.substr(1));
      EXPECT_EQ(i % 2, r.lane);
      EXPECT_GT(i, last[t][r.lane]);
      last[t][r.lane] = i;
      EXPECT_EQ(r.payload.size(), static_cast<size_t>(i % 50));
    }
    EXPECT_EQ(p.at_b.handler->frame_count(), 2u * kEach);
    p.shutdown();
  });
}

TEST_P(TransportContract, Conn6LargeFramesBothWaysAtOnceDoNotStall) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    constexpr size_t kFrames = 12;
    constexpr size_t kBytes = fewer(3u << 20, 1u << 20);
    auto send_all = [&](End* end, uint64_t salt) {
      for (size_t i = 0; i < kFrames; ++i) {
        const Status s = end->connection->send(
            make_frame(FrameKind::kChunk, "c", pattern(kBytes, salt + i)), static_cast<int>(i % 2));
        EXPECT_TRUE(s.ok()) << s;
      }
    };
    send_all(&p.at_a, 100);
    send_all(&p.at_b, 200);
    ASSERT_TRUE(p.at_a.handler->wait_frames(kFrames));
    ASSERT_TRUE(p.at_b.handler->wait_frames(kFrames));
    size_t next[2] = {0, 1};
    for (const Received& r : p.at_b.handler->frames()) {
      EXPECT_TRUE(r.payload == pattern(kBytes, 100 + next[r.lane])) << r.lane;
      next[r.lane] += 2;
    }
    p.shutdown();
  });
}

TEST_P(TransportContract, RepliesFromInsideOnFrame) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    const ConnectionRef back = p.at_b.connection;
    p.at_b.handler->reply_with([back](const Received& r) {
      EXPECT_TRUE(
          back->send(make_frame(FrameKind::kResponse, r.header + "!", r.payload), r.lane).ok());
    });
    for (size_t i = 0; i < 200; ++i) {
      ASSERT_TRUE(
          p.at_a.connection->send(make_frame(FrameKind::kRequest, std::to_string(i), pattern(i)), 0)
              .ok());
      if (i % 10 == 9) {
        ASSERT_TRUE(p.at_a.handler->wait_frames(i + 1));
      }
    }
    const std::vector<Received> got = p.at_a.handler->frames();
    for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i].header, std::to_string(i) + "!");
    p.shutdown();
  });
}

TEST_P(TransportContract, ReceiverNeverSeesTheSendersMemory) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    auto owner = std::make_shared<std::string>(pattern(100'000));
    const std::weak_ptr<std::string> alive = owner;
    Frame frame;
    frame.kind = FrameKind::kRequest;
    frame.payload = {{owner->data(), 10, owner},
                     {owner->data() + 10, 0, owner},
                     {owner->data() + 10, 5000, owner},
                     {owner->data() + 5010, owner->size() - 5010, owner}};
    ASSERT_TRUE(p.at_a.connection->send(std::move(frame), kControlLane).ok());
    ASSERT_TRUE(p.at_b.handler->wait_frames(1));
    EXPECT_TRUE(p.at_b.handler->frames()[0].payload == *owner);
    owner = nullptr;
    p.shutdown();
    p.at_a = {};
    p.at_b = {};
    p.a = nullptr;
    EXPECT_TRUE(alive.expired()) << "the owner of the sent bytes was not dropped";
  });
}

TEST_P(TransportContract, Conn3SendDoesNotWaitForASlowReceiver) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    // The receiver hangs in its first frame until everything was accepted for sending.
    Signal& signal = world().signal();
    auto all_sent = std::make_shared<bool>(false);
    p.at_b.handler->reply_with([&signal, all_sent](const Received& r) {
      if (r.header == "0") {
        EXPECT_TRUE(signal.wait([&] { return *all_sent; }));
      }
    });
    constexpr int kFrames = 64;
    const std::string bytes = pattern(1 << 20);
    for (int i = 0; i < kFrames; ++i) {
      const Status s = p.at_a.connection->send(
          make_frame(FrameKind::kChunk, std::to_string(i), bytes), kBulkLane);
      ASSERT_TRUE(s.ok()) << s;
    }
    signal.with([&] { *all_sent = true; });
    ASSERT_TRUE(p.at_b.handler->wait_frames(kFrames));
    p.shutdown();
  });
}

// ---- the end of a connection -----------------------------------------------------------------

TEST_P(TransportContract, Conn1LostExactlyOnceAfterTheLastFrameAndNotInsideClose) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    for (int i = 0; i < 100; ++i) {
      ASSERT_TRUE(p.at_a.connection->send(make_frame(FrameKind::kRequest, "", "x"), i % 2).ok());
    }
    // Were on_lost called inside close(), it would wait for this very lock.
    p.a->acceptor->forget();
    world().signal().with([&] { p.at_a.connection->close(absl::OkStatus()); });
    ASSERT_TRUE(p.at_a.handler->wait_lost());
    ASSERT_TRUE(p.at_b.handler->wait_lost());
    EXPECT_EQ(p.at_b.handler->frame_count(), 100u) << "close sends what is queued";
    EXPECT_TRUE(p.at_a.handler->lost().why.ok()) << p.at_a.handler->lost().why;
    EXPECT_EQ(error_kind(p.at_b.handler->lost().why), ErrorKind::kUnavailable);
    p.at_a.connection->close(absl::OkStatus());
    p.shutdown();
    EXPECT_EQ(p.at_a.handler->lost_calls(), 1);
    EXPECT_EQ(p.at_b.handler->lost_calls(), 1);
  });
}

TEST_P(TransportContract, CloseDrainsLargeQueues) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    for (int i = 0; i < 20; ++i) {
      ASSERT_TRUE(
          p.at_a.connection->send(make_frame(FrameKind::kChunk, "", pattern(1 << 20)), kBulkLane)
              .ok());
    }
    p.at_a.connection->close(absl::OkStatus());
    ASSERT_TRUE(p.at_b.handler->wait_lost());
    EXPECT_EQ(p.at_b.handler->frame_count(), 20u);
    ASSERT_TRUE(p.at_a.handler->wait_lost());
    EXPECT_TRUE(p.at_a.handler->lost().unsent.empty());
    p.shutdown();
  });
}

TEST_P(TransportContract, CloseOnBothSidesAtOnceDeliversBothWays) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    for (int i = 0; i < 50; ++i) {
      ASSERT_TRUE(p.at_a.connection->send(make_frame(FrameKind::kRequest, "", "a"), 0).ok());
    }
    p.at_a.connection->close(absl::OkStatus());
    p.at_b.connection->close(absl::OkStatus());
    ASSERT_TRUE(p.at_a.handler->wait_lost());
    ASSERT_TRUE(p.at_b.handler->wait_lost());
    p.shutdown();
    EXPECT_EQ(p.at_a.handler->lost_calls(), 1);
    EXPECT_EQ(p.at_b.handler->lost_calls(), 1);
  });
}

TEST_P(TransportContract, Conn4RefusedFramesAreNotDelivered) {
  run([&] {
    Pair p = join(1u << 20);
    ASSERT_TRUE(p.ok);
    // At the limit, and one above: in the frame and in the header.
    const size_t limit = 1u << 20;
    auto send = [&](size_t header, size_t payload) {
      return p.at_a.connection->send(
          make_frame(FrameKind::kRequest, std::string(header, 'h'), std::string(payload, 'p'), 7),
          kBulkLane);
    };
    EXPECT_TRUE(send(0, limit - 16).ok());
    Status s = send(0, limit - 15);
    EXPECT_EQ(error_kind(s), ErrorKind::kResource) << s;
    EXPECT_NE(std::string(s.message()).find("1048577"), std::string::npos) << s;
    EXPECT_TRUE(send(64 << 10, 0).ok());
    s = send((64 << 10) + 1, 0);
    EXPECT_EQ(error_kind(s), ErrorKind::kResource) << s;
    // Only that frame failed.
    EXPECT_TRUE(send(1, 1).ok());
    ASSERT_TRUE(p.at_b.handler->wait_frames(3));
    p.at_a.connection->close(absl::OkStatus());
    s = send(2, 2);
    EXPECT_EQ(error_kind(s), ErrorKind::kNotDelivered) << s;
    ASSERT_TRUE(p.at_b.handler->wait_lost());
    ASSERT_TRUE(p.at_a.handler->wait_lost());
    s = send(2, 2);
    EXPECT_EQ(error_kind(s), ErrorKind::kNotDelivered) << s;
    s = p.at_b.connection->send(make_frame(FrameKind::kRequest, "", ""), 0);
    EXPECT_EQ(error_kind(s), ErrorKind::kNotDelivered) << s;
    EXPECT_EQ(p.at_b.handler->frame_count(), 3u);
    p.shutdown();
  });
}

TEST_P(TransportContract, Conn4UnsentFramesWereNotDelivered) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    constexpr uint64_t kFrames = 40;
    for (uint64_t i = 1; i <= kFrames; ++i) {
      ASSERT_TRUE(
          p.at_a.connection
              ->send(make_frame(FrameKind::kChunk, std::to_string(i), std::string(1 << 20, 'x'), i),
                     kBulkLane)
              .ok());
    }
    const Status why = make_error(ErrorKind::kProtocol, "the user's reason");
    p.at_a.connection->close(why);
    ASSERT_TRUE(p.at_a.handler->wait_lost());
    ASSERT_TRUE(p.at_b.handler->wait_lost());
    const Lost lost = p.at_a.handler->lost();
    EXPECT_EQ(lost.why.message(), "the user's reason");
    EXPECT_EQ(error_kind(lost.why), ErrorKind::kProtocol);
    std::set<uint64_t> seen;
    for (const Received& r : p.at_b.handler->frames()) {
      EXPECT_TRUE(seen.insert(std::stoull(r.header)).second) << "delivered twice: " << r.header;
    }
    for (const uint64_t cookie : lost.unsent) {
      EXPECT_TRUE(seen.insert(cookie).second) << "delivered and reported as unsent: " << cookie;
    }
    p.shutdown();
  });
}

TEST_P(TransportContract, LostWhenThePeerIsGone) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    ASSERT_TRUE(p.at_a.connection->send(make_frame(FrameKind::kRequest, "1", ""), 0).ok());
    ASSERT_TRUE(p.at_b.handler->wait_frames(1));
    p.b->transport->shutdown();
    ASSERT_TRUE(p.at_a.handler->wait_lost());
    EXPECT_EQ(p.at_b.handler->lost_calls(), 1) << "before shutdown() returned";
    const Status why = p.at_a.handler->lost().why;
    EXPECT_EQ(error_kind(why), ErrorKind::kUnavailable) << why;
    EXPECT_NE(std::string(why.message()).find("b-with-dashes"), std::string::npos) << why;
    EXPECT_FALSE(p.at_a.connection->send(make_frame(FrameKind::kRequest, "", ""), 0).ok());
    p.shutdown();
  });
}

INSTANTIATE_TEST_SUITE_P(Delivery, TransportContract, ::testing::ValuesIn(transport_backends()),
                         backend_name);

}  // namespace
}  // namespace weft::testing
