// The contract of transports, continued: how connections begin, and how transports end.
#include "gtest/gtest.h"
#include "weft/tests/contract/transport_harness.h"

namespace weft::testing {
namespace {

class TransportLifecycle : public TransportContract {
 protected:
  // A dial that must fail; nothing may have been opened.
  Status refused(Peer& from, Peer& to, const std::function<void(Hello*)>& change = nullptr) {
    StatusOr<End> end = world().dial(from, to.address, absl::Seconds(20), change);
    EXPECT_FALSE(end.ok());
    EXPECT_EQ(to.acceptor->accepted_count(), 0u) << "CONN-5";
    return end.status();
  }
  // A pair that is not joined.
  void make(std::unique_ptr<Peer>* a, std::unique_ptr<Peer>* b) {
    *a = world().make_peer("a");
    *b = world().make_peer("b");
    const Status s = world().listen(**b);
    ASSERT_TRUE(s.ok()) << s;
  }
  static bool says(const Status& s, const std::string& text) {
    return std::string(s.message()).find(text) != std::string::npos;
  }
};

TEST_P(TransportLifecycle, Conn5RefusedWithTheAcceptorsWords) {
  run([&] {
    std::unique_ptr<Peer> a, b;
    make(&a, &b);
    b->acceptor->set_check([](const Hello& theirs) {
      return make_error(absl::StatusCode::kFailedPrecondition, ErrorKind::kState,
                        std::string("no room for '") + theirs.name + "', \xff\x01 says b");
    });
    const Status s = refused(*a, *b);
    EXPECT_EQ(s.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(error_kind(s), ErrorKind::kState);
    EXPECT_TRUE(says(s, "no room for 'a', \xff\x01 says b")) << s;
    EXPECT_TRUE(says(s, b->address)) << s;
    // It may be different next time.
    b->acceptor->set_check(nullptr);
    EXPECT_TRUE(world().dial(*a, b->address).ok());
    a->transport->shutdown();
    b->transport->shutdown();
  });
}

TEST_P(TransportLifecycle, Conn5OtherJobIsRefused) {
  run([&] {
    std::unique_ptr<Peer> a, b;
    make(&a, &b);
    const Status s = refused(*a, *b, [](Hello* hello) { hello->job_id = "another"; });
    EXPECT_EQ(error_kind(s), ErrorKind::kPermission);
    EXPECT_TRUE(says(s, "'b' belongs to another job than 'a'")) << s;
    a->transport->shutdown();
    b->transport->shutdown();
  });
}

TEST_P(TransportLifecycle, Conn5OtherIncarnationIsRefused) {
  run([&] {
    std::unique_ptr<Peer> a, b;
    make(&a, &b);
    const Status s = refused(*a, *b, [](Hello* hello) { hello->to_incarnation = 99; });
    EXPECT_EQ(error_kind(s), ErrorKind::kPeerLost) << s;
    a->transport->shutdown();
    b->transport->shutdown();
  });
}

TEST_P(TransportLifecycle, Conn5DiallerChecksWhoAnswers) {
  run([&] {
    std::unique_ptr<Peer> a, b;
    make(&a, &b);
    // The acceptor does not look at to_id; the dialler does at the answer.
    StatusOr<End> end =
        world().dial(*a, b->address, absl::Seconds(20), [](Hello* hello) { hello->to_id = 77; });
    ASSERT_FALSE(end.ok());
    EXPECT_EQ(error_kind(end.status()), ErrorKind::kPeerLost) << end.status();
    EXPECT_TRUE(says(end.status(), "77")) << end.status();
    a->transport->shutdown();
    b->transport->shutdown();
  });
}

TEST_P(TransportLifecycle, Conn5VersionsWithoutOverlapAreRefusedNamingBothRanges) {
  run([&] {
    std::unique_ptr<Peer> a, b;
    make(&a, &b);
    const Status s = refused(*a, *b, [](Hello* hello) {
      hello->version_min = 2;
      hello->version_max = 3;
    });
    EXPECT_TRUE(says(s, "2 to 3")) << s;
    EXPECT_TRUE(says(s, "1 to 1")) << s;
    a->transport->shutdown();
    b->transport->shutdown();
  });
}

TEST_P(TransportLifecycle, BadArgumentsOfADialAreErrors) {
  run([&] {
    std::unique_ptr<Peer> a, b;
    make(&a, &b);
    for (const char* address :
         {"", "nonsense", "inproc", ":12", "host:", "host:99999", "[::1:80"}) {
      StatusOr<End> end = world().dial(*a, address);
      ASSERT_FALSE(end.ok()) << address;
      EXPECT_TRUE(error_kind(end.status()) == ErrorKind::kInvalidArgument ||
                  error_kind(end.status()) == ErrorKind::kUnavailable)
          << end.status();
    }
    const Status s = refused(*a, *b, [](Hello* hello) { hello->name.clear(); });
    EXPECT_EQ(error_kind(s), ErrorKind::kInvalidArgument) << s;
    const Status t = refused(*a, *b, [](Hello* hello) { hello->lanes = 9; });
    EXPECT_EQ(error_kind(t), ErrorKind::kInvalidArgument) << t;
    a->transport->shutdown();
    b->transport->shutdown();
  });
}

TEST_P(TransportLifecycle, NobodyThere) {
  run([&] {
    std::unique_ptr<Peer> a, b;
    make(&a, &b);
    const std::string address = b->address;
    b->transport->shutdown();
    StatusOr<End> end = world().dial(*a, address);
    ASSERT_FALSE(end.ok());
    // Where it can be told that the listener has ended, it is.
    EXPECT_TRUE(error_kind(end.status()) == ErrorKind::kUnavailable ||
                error_kind(end.status()) == ErrorKind::kPeerLost)
        << end.status();
    EXPECT_TRUE(says(end.status(), address)) << end.status();
    a->transport->shutdown();
  });
}

TEST_P(TransportLifecycle, DeadlineOfADial) {
  run([&] {
    std::unique_ptr<Peer> a, b;
    make(&a, &b);
    // Already over.
    StatusOr<End> end = world().dial(*a, b->address, -absl::Seconds(1));
    ASSERT_FALSE(end.ok());
    EXPECT_EQ(error_kind(end.status()), ErrorKind::kDeadline) << end.status();
    EXPECT_TRUE(says(end.status(), b->address)) << end.status();
    a->transport->shutdown();
    b->transport->shutdown();
  });
}

TEST_P(TransportLifecycle, FramesSentInsideOnConnectionComeAfterDone) {
  run([&] {
    std::unique_ptr<Peer> a, b;
    make(&a, &b);
    b->acceptor->set_opened([](const End& end) {
      for (int i = 0; i < 20; ++i) {
        EXPECT_TRUE(
            end.connection->send(make_frame(FrameKind::kRequest, std::to_string(i), ""), i % 2)
                .ok());
      }
    });
    for (size_t round = 0; round < 5; ++round) {
      // dial() itself checks that no frame came before `done`.
      StatusOr<End> end = world().dial(*a, b->address);
      ASSERT_TRUE(end.ok()) << end.status();
      ASSERT_TRUE(end->handler->wait_frames(20));
      end->connection->close(absl::OkStatus());
      ASSERT_TRUE(end->handler->wait_lost());
    }
    a->transport->shutdown();
    b->transport->shutdown();
  });
}

TEST_P(TransportLifecycle, ClosedInsideOnConnection) {
  run([&] {
    std::unique_ptr<Peer> a, b;
    make(&a, &b);
    b->acceptor->set_opened([](const End& end) {
      end.connection->close(make_error(ErrorKind::kState, "changed my mind"));
    });
    StatusOr<End> end = world().dial(*a, b->address);
    const End at_b = b->acceptor->accepted();
    ASSERT_NE(at_b.handler, nullptr);
    ASSERT_TRUE(at_b.handler->wait_lost());
    EXPECT_TRUE(says(at_b.handler->lost().why, "changed my mind"));
    // The dialler may have been open for a moment.
    if (end.ok()) {
      EXPECT_TRUE(end->handler->wait_lost());
    }
    a->transport->shutdown();
    b->transport->shutdown();
  });
}

TEST_P(TransportLifecycle, SeveralConnectionsAndReconnect) {
  run([&] {
    std::unique_ptr<Peer> a, b;
    make(&a, &b);
    ASSERT_TRUE(world().listen(*a).ok() || GetParam().sockets);
    std::vector<End> ends;
    for (size_t i = 0; i < 4; ++i) {
      StatusOr<End> end = world().dial(*a, b->address);
      ASSERT_TRUE(end.ok()) << end.status();
      ends.push_back(*end);
      ends.push_back(b->acceptor->accepted(i));
    }
    ends[0].connection->close(make_error(ErrorKind::kState, "first"));
    ASSERT_TRUE(ends[1].handler->wait_lost());
    for (size_t i = 2; i < ends.size(); i += 2) {
      ASSERT_TRUE(
          ends[i].connection->send(make_frame(FrameKind::kRequest, std::to_string(i), ""), 0).ok());
      ASSERT_TRUE(ends[i + 1].handler->wait_frames(1));
      EXPECT_EQ(ends[i + 1].handler->frames()[0].header, std::to_string(i));
      EXPECT_EQ(ends[i + 1].handler->lost_calls(), 0);
    }
    StatusOr<End> again = world().dial(*a, b->address);
    ASSERT_TRUE(again.ok()) << again.status();
    a->transport->shutdown();
    b->transport->shutdown();
    for (const End& end : ends) EXPECT_EQ(end.handler->lost_calls(), 1);
    EXPECT_EQ(again->handler->lost_calls(), 1);
  });
}

TEST_P(TransportLifecycle, ATransportMayDialItself) {
  run([&] {
    std::unique_ptr<Peer> a = world().make_peer("a");
    ASSERT_TRUE(world().listen(*a).ok());
    StatusOr<End> end = world().dial(*a, a->address);
    ASSERT_TRUE(end.ok()) << end.status();
    const End other = a->acceptor->accepted();
    ASSERT_TRUE(end->connection->send(make_frame(FrameKind::kRequest, "x", ""), 1).ok());
    ASSERT_TRUE(other.handler->wait_frames(1));
    a->transport->shutdown();
    EXPECT_EQ(end->handler->lost_calls(), 1);
    EXPECT_EQ(other.handler->lost_calls(), 1);
  });
}

TEST_P(TransportLifecycle, ListenTwiceAndTakenPortsAreErrorsThatNameThem) {
  run([&] {
    std::unique_ptr<Peer> a, b;
    make(&a, &b);
    EXPECT_EQ(error_kind(world().listen(*b)), ErrorKind::kState);
    const int port = std::stoi(b->address.substr(b->address.rfind(':') + 1));
    ListenOptions options;
    options.port_first = port;
    const Status s = world().listen(*a, options);
    EXPECT_EQ(error_kind(s), ErrorKind::kResource) << s;
    EXPECT_TRUE(says(s, b->address.substr(0, b->address.find('/')))) << s;
    // In a range the next free one is taken.
    options.port_last = port + 20;
    const Status t = world().listen(*a, options);
    ASSERT_TRUE(t.ok()) << t;
    EXPECT_NE(a->address, b->address);
    std::unique_ptr<Peer> c = world().make_peer("c");
    EXPECT_TRUE(world().dial(*c, a->address).ok());
    for (Peer* peer : {a.get(), b.get(), c.get()}) peer->transport->shutdown();
  });
}

// ---- shutdown --------------------------------------------------------------------------------

TEST_P(TransportLifecycle, ShutdownTwiceAndThenNothingWorks) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    p.a->transport->shutdown();
    EXPECT_EQ(p.at_a.handler->lost_calls(), 1);
    p.a->transport->shutdown();
    EXPECT_EQ(p.at_a.handler->lost_calls(), 1);
    EXPECT_FALSE(p.at_a.connection->send(make_frame(FrameKind::kRequest, "", ""), 0).ok());
    p.at_a.connection->close(absl::OkStatus());
    StatusOr<End> end = world().dial(*p.a, p.b->address);
    EXPECT_EQ(error_kind(end.status()), ErrorKind::kState) << end.status();
    EXPECT_EQ(error_kind(world().listen(*p.a)), ErrorKind::kState);
    p.b->transport->shutdown();
    EXPECT_EQ(p.at_b.handler->lost_calls(), 1);
  });
}

TEST_P(TransportLifecycle, ShutdownUnderTrafficBothWays) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    auto stop = std::make_shared<bool>(false);
    Signal& signal = world().signal();
    std::vector<std::unique_ptr<Thread>> threads;
    for (const ConnectionRef& connection : {p.at_a.connection, p.at_b.connection}) {
      threads.push_back(world().runtime().spawn("sender", [connection, stop, &signal] {
        for (int i = 0; !signal.with([&] { return *stop; }); ++i) {
          Frame frame = make_frame(FrameKind::kChunk, "x", std::string(i % 9 ? 100 : 200'000, 'y'));
          if (!connection->send(std::move(frame), i % 2).ok()) return;
          // A bound for a machine on which the shutdown is slow to begin.
          if (i % 100 == 99) (void)signal.wait([&] { return *stop; }, absl::Milliseconds(1));
        }
      }));
    }
    ASSERT_TRUE(p.at_b.handler->wait_frames(200));
    p.a->transport->shutdown();
    EXPECT_EQ(p.at_a.handler->lost_calls(), 1);
    ASSERT_TRUE(p.at_b.handler->wait_lost());
    signal.with([&] { *stop = true; });
    for (const auto& thread : threads) thread->join();
    p.b->transport->shutdown();
    EXPECT_EQ(p.at_b.handler->lost_calls(), 1);
  });
}

TEST_P(TransportLifecycle, ShutdownWithADialUnderWay) {
  run([&] {
    std::unique_ptr<Peer> a, b;
    make(&a, &b);
    struct Outcome {
      int calls = 0;
      Status status;
    };
    auto outcomes = std::make_shared<std::vector<Outcome>>(10);
    std::vector<HandlerRef> handlers;
    for (size_t i = 0; i < outcomes->size(); ++i) {
      handlers.push_back(std::make_shared<RecordingHandler>(&world().signal()));
      a->transport->connect(b->address, a->hello, world().runtime().now() + absl::Seconds(30),
                            handlers.back(), [this, outcomes, i](StatusOr<ConnectionRef> result) {
                              world().signal().with([&] {
                                ++(*outcomes)[i].calls;
                                (*outcomes)[i].status = result.status();
                              });
                            });
    }
    a->transport->shutdown();
    for (size_t i = 0; i < outcomes->size(); ++i) {
      EXPECT_EQ((*outcomes)[i].calls, 1) << "before shutdown() returned";
      // Open for a moment, and lost then; or never.
      EXPECT_EQ(handlers[i]->lost_calls(), (*outcomes)[i].status.ok() ? 1 : 0)
          << (*outcomes)[i].status;
    }
    b->transport->shutdown();
  });
}

TEST_P(TransportLifecycle, TransportsMayBeDestroyedWithoutShutdown) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    p.a->transport = nullptr;
    EXPECT_EQ(p.at_a.handler->lost_calls(), 1);
    ASSERT_TRUE(p.at_b.handler->wait_lost());
    p.b->transport = nullptr;
    // What is still held is of no use and does no harm.
    EXPECT_FALSE(p.at_b.connection->send(make_frame(FrameKind::kRequest, "", ""), 0).ok());
    EXPECT_EQ(p.at_b.connection->peer().name, "a");
  });
}

TEST_P(TransportLifecycle, CountersAreThere) {
  run([&] {
    Pair p = join();
    ASSERT_TRUE(p.ok);
    ASSERT_TRUE(p.at_a.connection->send(make_frame(FrameKind::kRequest, "", ""), 0).ok());
    ASSERT_TRUE(p.at_b.handler->wait_frames(1));
    int64_t sent = 0;
    for (const auto& [name, value] : p.a->transport->counters()) {
      if (name.find("frames_sent") != std::string::npos) sent += value;
    }
    EXPECT_GE(sent, 1);
    EXPECT_FALSE(p.a->transport->name().empty());
    p.shutdown();
  });
}

INSTANTIATE_TEST_SUITE_P(Lifecycle, TransportLifecycle, ::testing::ValuesIn(transport_backends()),
                         backend_name);

}  // namespace
}  // namespace weft::testing
