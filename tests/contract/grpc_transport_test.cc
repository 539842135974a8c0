// What only the grpc transport has: ports and hosts, health checks, counters, threads, and real
// sockets that break at chosen bytes (tests/testing/relay.h).
#include <dirent.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/rpc/grpc_transport.h"
#include "weft/rpc/internal/grpc/crowd.h"
#include "weft/tests/contract/grpc_raw.h"
#include "weft/tests/contract/transport_harness.h"
#include "weft/tests/testing/relay.h"

namespace weft::testing {
namespace {

bool says(const Status& s, const std::string& text) {
  return std::string(s.message()).find(text) != std::string::npos;
}

int threads_named(const std::string& prefix) {
  int n = 0;
  DIR* const tasks = opendir("/proc/self/task");
  while (const dirent* entry = readdir(tasks)) {
    std::ifstream file(std::string("/proc/self/task/") + entry->d_name + "/comm");
    std::string name;
    if (std::getline(file, name) && name.rfind(prefix, 0) == 0) ++n;
  }
  closedir(tasks);
  return n;
}

class GrpcTransportTest : public ::testing::Test {
 protected:
  void SetUp() override { open({.local_sockets = false}); }
  void open(const GrpcTransportOptions& options) {
    Backend backend{"grpc", false, true, [options](World&) { return grpc_transport(options); }};
    world_ = std::make_unique<World>(backend, 1);
  }
  World& world() { return *world_; }
  static int64_t counter(const Peer& peer, const std::string& name) {
    for (const auto& [key, value] : peer.transport->counters()) {
      if (key == name) return value;
    }
    ADD_FAILURE() << "no counter " << name;
    return -1;
  }

  std::unique_ptr<World> world_;
};

// ---- local sockets -----------------------------------------------------------------------------

std::string tcp_part(const std::string& address) { return address.substr(0, address.find('/')); }

TEST_F(GrpcTransportTest, WithoutCredentialsOnlyProcessesOfThisUserComeIn) {
  open({});
  std::unique_ptr<Peer> a = world().make_peer("a");
  std::unique_ptr<Peer> b = world().make_peer("b");
  ASSERT_TRUE(world().listen(*b).ok());
  // As somebody without access to the private socket: by the port alone.
  const Status s = world().dial(*a, tcp_part(b->address)).status();
  EXPECT_EQ(error_kind(s), ErrorKind::kPermission) << s;
  EXPECT_THAT(std::string(s.message()), ::testing::HasSubstr("WEFT_SAME_USER"));
  EXPECT_EQ(b->acceptor->hellos(), 0) << "a stranger reaches nothing behind the transport";
  const StatusOr<End> end = world().dial(*a, b->address);
  EXPECT_TRUE(end.ok()) << end.status();
  for (Peer* peer : {a.get(), b.get()}) peer->transport->shutdown();
}

TEST_F(GrpcTransportTest, PeersOfOneHostMeetOverALocalSocket) {
  open({.same_user = false});
  std::unique_ptr<Peer> a = world().make_peer("a");
  std::unique_ptr<Peer> b = world().make_peer("b");
  ASSERT_TRUE(world().listen(*b).ok());
  const std::string tcp = tcp_part(b->address);
  ASSERT_NE(tcp, b->address) << "the address names no local socket";
  // The whole address; its TCP part alone, as a relay would have it; and with a name that this
  // network namespace does not know, as another host would see it.
  const std::vector<std::pair<std::string, std::string>> cases = {
      {b->address, "a (this host)"}, {tcp, "a (127.0.0.1:"}, {tcp + "/local-0", "a (127.0.0.1:"}};
  for (size_t i = 0; i < cases.size(); ++i) {
    StatusOr<End> end = world().dial(*a, cases[i].first);
    ASSERT_TRUE(end.ok()) << cases[i].first << ": " << end.status();
    const End there = b->acceptor->accepted(i);
    EXPECT_EQ(there.connection->describe().rfind(cases[i].second, 0), 0u)
        << there.connection->describe();
    ASSERT_TRUE(end->connection->send(make_frame(FrameKind::kRequest, "x", "payload"), 0).ok());
    ASSERT_TRUE(there.handler->wait_frames(1));
  }
  // A dialler that wants no local sockets.
  World plain(
      {"grpc", false, true, [](World&) { return grpc_transport({.local_sockets = false}); }}, 2);
  std::unique_ptr<Peer> c = plain.make_peer("c");
  StatusOr<End> end = plain.dial(*c, b->address);
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(b->acceptor->accepted(cases.size()).connection->describe().rfind("c (127.", 0), 0u);
  for (Peer* peer : {a.get(), b.get(), c.get()}) peer->transport->shutdown();
}

TEST_F(GrpcTransportTest, ALocalSocketIsGoneWithItsListener) {
  open({});
  std::unique_ptr<Peer> a = world().make_peer("a");
  std::unique_ptr<Peer> b = world().make_peer("b");
  ASSERT_TRUE(world().listen(*b).ok());
  const std::string name = "@weft-" + b->address.substr(b->address.find('/') + 1);
  const auto bound = [&name] {
    std::ifstream file("/proc/net/unix");
    const std::string all{std::istreambuf_iterator<char>(file), {}};
    return all.find(name) != std::string::npos;
  };
  EXPECT_TRUE(bound()) << name;
  b->transport->shutdown();
  EXPECT_FALSE(bound()) << name;
  // Both doors are shut, and workers do not move: whoever waits for this one need not wait on.
  const Status s = world().dial(*a, b->address).status();
  EXPECT_EQ(error_kind(s), ErrorKind::kPeerLost) << s;
  // The address of a relay may come back.
  const Status relayed = world().dial(*a, tcp_part(b->address)).status();
  EXPECT_EQ(error_kind(relayed), ErrorKind::kUnavailable) << relayed;
  a->transport->shutdown();
}

// ---- hosts and ports -------------------------------------------------------------------------

TEST_F(GrpcTransportTest, BindingBeyondLoopbackMustBeAllowedInWords) {
  std::unique_ptr<Peer> a = world().make_peer("a");
  ListenOptions options;
  options.host = "0.0.0.0";
  options.advertise = "127.0.0.1";
  const Status refused = world().listen(*a, options);
  EXPECT_EQ(error_kind(refused), ErrorKind::kPermission) << refused;
  EXPECT_TRUE(says(refused, "0.0.0.0")) << refused;
  EXPECT_TRUE(says(refused, "allow_insecure")) << refused;
  options.allow_insecure = true;
  const Status s = world().listen(*a, options);
  ASSERT_TRUE(s.ok()) << s;
  EXPECT_EQ(a->address.rfind("127.0.0.1:", 0), 0u) << a->address;
  std::unique_ptr<Peer> b = world().make_peer("b");
  EXPECT_TRUE(world().dial(*b, a->address).ok());
  b->transport->shutdown();
  a->transport->shutdown();
}

TEST_F(GrpcTransportTest, AWildcardNeedsAnAdvertisedHost) {
  std::unique_ptr<Peer> a = world().make_peer("a");
  ListenOptions options;
  options.host = "0.0.0.0";
  options.allow_insecure = true;
  const Status s = world().listen(*a, options);
  EXPECT_EQ(error_kind(s), ErrorKind::kInvalidArgument) << s;
  EXPECT_TRUE(says(s, "advertise")) << s;
}

TEST_F(GrpcTransportTest, HostsThatCannotBeBoundAreNamed) {
  for (const char* host : {"no.such.host.invalid", "203.0.113.7", "not a host"}) {
    std::unique_ptr<Peer> a = world().make_peer("a");
    ListenOptions options;
    options.host = host;
    options.allow_insecure = true;
    options.port_first = 1;
    options.port_last = 1;
    const Status s = world().listen(*a, options);
    EXPECT_FALSE(s.ok()) << host;
    EXPECT_TRUE(says(s, host)) << s;
  }
  std::unique_ptr<Peer> a = world().make_peer("a");
  ListenOptions options;
  options.port_first = 70'000;
  const Status s = world().listen(*a, options);
  EXPECT_EQ(error_kind(s), ErrorKind::kInvalidArgument) << s;
}

TEST_F(GrpcTransportTest, Ipv6Loopback) {
  std::unique_ptr<Peer> a = world().make_peer("a");
  std::unique_ptr<Peer> b = world().make_peer("b");
  ListenOptions options;
  options.host = "[::1]";
  const Status s = world().listen(*a, options);
  const int probe = socket(AF_INET6, SOCK_STREAM, 0);
  if (probe >= 0) close(probe);
  std::ifstream interfaces("/proc/net/if_inet6");
  std::string line;
  if (probe < 0 || !std::getline(interfaces, line)) {
    // A machine without IPv6: the error says what could not be bound.
    EXPECT_TRUE(says(s, "::1")) << s;
    return;
  }
  ASSERT_TRUE(s.ok()) << s;
  EXPECT_EQ(a->address.rfind("[::1]:", 0), 0u) << a->address;
  StatusOr<End> end = world().dial(*b, a->address);
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(end->connection->describe(), "a (" + a->address + ")");
  EXPECT_EQ(a->acceptor->accepted().connection->describe().rfind("b ([::1]:", 0), 0u)
      << a->acceptor->accepted().connection->describe();
  b->transport->shutdown();
  a->transport->shutdown();
}

TEST_F(GrpcTransportTest, HostNamesAreLookedUp) {
  std::unique_ptr<Peer> a = world().make_peer("a");
  std::unique_ptr<Peer> b = world().make_peer("b");
  ListenOptions options;
  options.advertise = "localhost";
  ASSERT_TRUE(world().listen(*a, options).ok());
  EXPECT_EQ(a->address.rfind("localhost:", 0), 0u);
  StatusOr<End> end = world().dial(*b, a->address);
  EXPECT_TRUE(end.ok()) << end.status();
  StatusOr<End> none = world().dial(*b, "no.such.host.invalid:1");
  EXPECT_EQ(error_kind(none.status()), ErrorKind::kUnavailable) << none.status();
  b->transport->shutdown();
  a->transport->shutdown();
}

TEST_F(GrpcTransportTest, RangeExhaustedNamesIt) {
  std::unique_ptr<Peer> a = world().make_peer("a");
  std::unique_ptr<Peer> b = world().make_peer("b");
  ASSERT_TRUE(world().listen(*a).ok());
  ListenOptions options;
  options.port_first = options.port_last = std::stoi(a->address.substr(10));
  const Status s = world().listen(*b, options);
  EXPECT_TRUE(says(s, a->address)) << s;
  EXPECT_TRUE(says(s, "taken")) << s;
  // Free again after its owner has gone, at once.
  a->transport->shutdown();
  a = nullptr;
  const Status again = world().listen(*b, options);
  EXPECT_TRUE(again.ok()) << again;
  b->transport->shutdown();
}

TEST_F(GrpcTransportTest, AHostThatNeverAnswersRunsIntoTheDeadline) {
  DeafListener deaf;
  std::unique_ptr<Peer> a = world().make_peer("a");
  StatusOr<End> end = world().dial(*a, deaf.address(), absl::Milliseconds(200));
  EXPECT_EQ(error_kind(end.status()), ErrorKind::kDeadline) << end.status();
  EXPECT_TRUE(says(end.status(), deaf.address())) << end.status();
  a->transport->shutdown();
}

TEST_F(GrpcTransportTest, HealthCheckAnswersServing) {
  std::unique_ptr<Peer> a = world().make_peer("a");
  ASSERT_TRUE(world().listen(*a).ok());
  for (int i = 0; i < 3; ++i) {
    std::string response;
    const grpc::Status ok = raw_call(a->address, "/grpc.health.v1.Health/Check", "", &response);
    EXPECT_TRUE(ok.ok()) << ok.error_message();
    EXPECT_EQ(response, std::string("\x08\x01", 2));  // status: SERVING
    const grpc::Status other = raw_call(a->address, "/grpc.health.v1.Health/Check",
                                        std::string("\x0a\x01x", 3), &response);
    EXPECT_EQ(other.error_code(), grpc::StatusCode::NOT_FOUND);
    const grpc::Status bad =
        raw_call(a->address, "/grpc.health.v1.Health/Check", "\xff\xff\xff", &response);
    EXPECT_EQ(bad.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  a->transport->shutdown();
}

// ---- counts ----------------------------------------------------------------------------------

TEST_F(GrpcTransportTest, OneWritePerFrameInPingPongAndManyFramesPerWriteInABurst) {
  std::unique_ptr<Peer> a = world().make_peer("a");
  std::unique_ptr<Peer> b = world().make_peer("b");
  ASSERT_TRUE(world().listen(*b).ok());
  StatusOr<End> end = world().dial(*a, b->address);
  ASSERT_TRUE(end.ok()) << end.status();
  const End there = b->acceptor->accepted();
  const ConnectionRef back = there.connection;
  there.handler->reply_with([back](const Received& r) {
    EXPECT_TRUE(back->send(make_frame(FrameKind::kResponse, r.header, ""), r.lane).ok());
  });
  constexpr int64_t kCalls = 1000;
  const int64_t writes_before = counter(*a, "lane0_writes");
  const int64_t waits_before =
      counter(*a, "poller_blocking_waits") + counter(*b, "poller_blocking_waits");
  for (int64_t i = 0; i < kCalls; ++i) {
    ASSERT_TRUE(end->connection->send(make_frame(FrameKind::kRequest, "x", ""), 0).ok());
    ASSERT_TRUE(end->handler->wait_frames(static_cast<size_t>(i + 1)));
  }
  EXPECT_EQ(counter(*a, "lane0_writes") - writes_before, kCalls);
  const int64_t received = counter(*a, "lane0_frames_received");
  EXPECT_GE(received, kCalls);
  EXPECT_LE(received, kCalls + 1) << "and one acknowledgement, if it has arrived";
  // transport.md, 9.1: at most two wake-ups per call; besides, the completion of a write may wake
  // the poller of its own side.
  EXPECT_LE(
      counter(*a, "poller_blocking_waits") + counter(*b, "poller_blocking_waits") - waits_before,
      4 * kCalls);
  EXPECT_EQ(counter(*a, "lane1_frames_sent"), 0);

  // While a write is under way the others gather: far fewer writes than frames.
  const int64_t burst_before = counter(*a, "lane0_writes");
  for (int64_t i = 0; i < kCalls; ++i) {
    ASSERT_TRUE(end->connection->send(make_frame(FrameKind::kRequest, "x", ""), 0).ok());
  }
  ASSERT_TRUE(there.handler->wait_frames(2 * kCalls));
  EXPECT_LT(counter(*a, "lane0_writes") - burst_before, kCalls);
  EXPECT_GT(counter(*a, "lane0_batches"), 0);
  ASSERT_TRUE(end->handler->wait_frames(2 * kCalls));
  a->transport->shutdown();
  b->transport->shutdown();
}

TEST_F(GrpcTransportTest, TheWayDecidesHowManyLanesAConnectionHas) {
  open({.same_user = false, .bulk_lanes = 3, .local_bulk_lanes = 2});
  std::unique_ptr<Peer> a = world().make_peer("a");
  std::unique_ptr<Peer> b = world().make_peer("b");
  ASSERT_TRUE(world().listen(*b).ok());
  const auto undecided = [](Hello* hello) { hello->lanes = 0; };
  size_t accepted = 0;
  for (const auto& [address, lanes] : {std::pair<std::string, uint32_t>{b->address, 3},
                                       std::pair<std::string, uint32_t>{tcp_part(b->address), 4}}) {
    StatusOr<End> end = world().dial(*a, address, absl::Seconds(20), undecided);
    ASSERT_TRUE(end.ok()) << end.status();
    const End there = b->acceptor->accepted(accepted++);
    EXPECT_EQ(end->connection->peer().lanes, lanes);
    EXPECT_EQ(there.connection->peer().lanes, lanes);
    const int last = static_cast<int>(lanes) - 1;
    const std::string name = "lane" + std::to_string(last);
    ASSERT_TRUE(end->connection->send(make_frame(FrameKind::kRequest, "x", ""), last).ok());
    ASSERT_TRUE(there.handler->wait_frames(1));
    EXPECT_EQ(there.handler->frames().front().lane, last);
    EXPECT_EQ(counter(*a, name + "_frames_sent"), 1) << "each lane has counters of its own";
    EXPECT_EQ(error_kind(end->connection->send(make_frame(FrameKind::kRequest, "x", ""), last + 1)),
              ErrorKind::kInvalidArgument);
  }
  for (const GrpcTransportOptions& bad :
       {GrpcTransportOptions{.bulk_lanes = 0}, GrpcTransportOptions{.local_bulk_lanes = 8}}) {
    TransportContext context;
    context.runtime = make_system_runtime();
    EXPECT_EQ(error_kind(grpc_transport(bad)(context).status()), ErrorKind::kInvalidArgument);
  }
  a->transport->shutdown();
  b->transport->shutdown();
}

TEST(CrowdWatch, IsCrowdedWhenClearlyMoreThreadsRunThanThereAreCores) {
  const std::string path = ::testing::TempDir() + "loadavg" + std::to_string(getpid());
  const auto say = [&path](int running) {
    std::ofstream(path) << "0.20 0.18 0.12 " << running << "/480 11206\n";
  };
  say(4);
  internal::CrowdWatch watch(path, 4);
  absl::Time now = absl::UnixEpoch();
  const auto look = [&](int times) {
    bool crowded = false;
    for (int i = 0; i < times; ++i) crowded = watch.crowded(now += absl::Milliseconds(3));
    return crowded;
  };
  EXPECT_FALSE(look(50));
  say(9);
  EXPECT_FALSE(look(50)) << "two per core: who spins still wins";
  say(14);
  EXPECT_FALSE(look(1)) << "one look is none";
  EXPECT_TRUE(look(50));
  say(8);
  EXPECT_TRUE(look(50)) << "those that stopped spinning are missing in the number";
  say(5);
  EXPECT_FALSE(look(50));
  say(14);
  ASSERT_TRUE(look(50));
  // Nothing is asked within the interval.
  say(1);
  for (int i = 0; i < 1000; ++i) EXPECT_TRUE(watch.crowded(now));
  std::ofstream(path) << "something else\n";
  EXPECT_FALSE(look(1));
  std::remove(path.c_str());
  internal::CrowdWatch nowhere("/no/such/file", 4);
  EXPECT_FALSE(nowhere.crowded(now));
}

TEST_F(GrpcTransportTest, ASmallFrameWaitsBehindAtMostOneChunk) {
  std::unique_ptr<Peer> a = world().make_peer("a");
  std::unique_ptr<Peer> b = world().make_peer("b");
  ASSERT_TRUE(world().listen(*b).ok());
  StatusOr<End> end = world().dial(*a, b->address);
  ASSERT_TRUE(end.ok()) << end.status();
  const End there = b->acceptor->accepted();
  // 64 MiB in chunks on the bulk lane, and one small frame on the control lane.
  for (int i = 0; i < 64; ++i) {
    ASSERT_TRUE(end->connection
                    ->send(make_frame(FrameKind::kChunk, "", std::string(1 << 20, 'c')), kBulkLane)
                    .ok());
  }
  ASSERT_TRUE(end->connection->send(make_frame(FrameKind::kRequest, "small", ""), 0).ok());
  ASSERT_TRUE(there.handler->wait_frames(65));
  const std::vector<Received> got = there.handler->frames();
  size_t at = 0;
  while (at < got.size() && got[at].kind != FrameKind::kRequest) ++at;
  EXPECT_LT(at, 64u) << "it came last, behind all of the bulk";
  a->transport->shutdown();
  b->transport->shutdown();
}

TEST_F(GrpcTransportTest, ThreadsDoNotGrowWithPeers) {
  constexpr size_t kPeers = 12;
  const int before = threads_named("weft-poller");
  std::vector<std::unique_ptr<Peer>> peers;
  for (size_t i = 0; i < kPeers; ++i) {
    peers.push_back(world().make_peer("p" + std::to_string(i)));
    ASSERT_TRUE(world().listen(*peers.back()).ok());
  }
  std::vector<End> ends;
  for (size_t i = 0; i < kPeers; ++i) {
    for (size_t j = 0; j < kPeers; ++j) {
      if (i == j) continue;
      StatusOr<End> end = world().dial(*peers[i], peers[j]->address);
      ASSERT_TRUE(end.ok()) << end.status();
      ends.push_back(*end);
    }
  }
  EXPECT_EQ(threads_named("weft-poller") - before, static_cast<int>(kPeers));
  for (const End& end : ends) {
    ASSERT_TRUE(end.connection->send(make_frame(FrameKind::kRequest, "x", ""), 0).ok());
  }
  for (const auto& peer : peers) {
    for (size_t i = 0; i + 1 < kPeers; ++i) {
      ASSERT_TRUE(peer->acceptor->accepted(i).handler->wait_frames(1));
    }
  }
  for (const auto& peer : peers) peer->transport->shutdown();
  EXPECT_EQ(threads_named("weft-poller"), before);
}

// ---- sockets that break ----------------------------------------------------------------------

class GrpcRelay : public GrpcTransportTest {
 protected:
  void SetUp() override {
    GrpcTransportTest::SetUp();
    begin();
  }
  void begin() {
    a_ = world().make_peer("a");
    b_ = world().make_peer("b");
    ASSERT_TRUE(world().listen(*b_).ok());
    relay_ = Relay::start(b_->address);
    ASSERT_NE(relay_, nullptr);
  }
  void TearDown() override {
    a_->transport->shutdown();
    b_->transport->shutdown();
  }
  // Whatever happened before, an undisturbed dial works.
  void expect_recovered() {
    relay_->clear();
    StatusOr<End> end = world().dial(*a_, relay_->address());
    ASSERT_TRUE(end.ok()) << end.status();
    const size_t last = b_->acceptor->accepted_count() - 1;
    ASSERT_TRUE(end->connection->send(make_frame(FrameKind::kRequest, "hi", ""), 0).ok());
    ASSERT_TRUE(b_->acceptor->accepted(last).handler->wait_frames(1));
    end->connection->close(absl::OkStatus());
    ASSERT_TRUE(end->handler->wait_lost());
  }

  std::unique_ptr<Peer> a_, b_;
  std::unique_ptr<Relay> relay_;
};

TEST_F(GrpcRelay, BrokenAtEveryPlaceOfTheHandshake) {
  // A handshake is some 400 bytes each way on each of the two sockets.
  for (const RelayAction action : {RelayAction::kCut, RelayAction::kReset, RelayAction::kHalfClose,
                                   RelayAction::kGarbage, RelayAction::kFlip}) {
    for (const bool to_target : {true, false}) {
      for (uint64_t at = 0; at < 480; at += 37) {
        relay_->clear();
        RelayRule rule;
        rule.action = action;
        rule.to_target = to_target;
        rule.connection = relay_->accepted() + static_cast<int>(at % 2);  // one lane or the other
        rule.at_byte = at;
        relay_->add(rule);
        StatusOr<End> end = world().dial(*a_, relay_->address(), absl::Seconds(1));
        if (end.ok()) {
          end->connection->close(make_error(ErrorKind::kState, "enough"));
          ASSERT_TRUE(end->handler->wait_lost());
          EXPECT_EQ(end->handler->lost_calls(), 1);
        } else {
          EXPECT_TRUE(says(end.status(), relay_->address())) << end.status();
        }
      }
    }
  }
  expect_recovered();
}

TEST_F(GrpcRelay, BrokenInTheMiddleOfTraffic) {
  for (const RelayAction action :
       {RelayAction::kCut, RelayAction::kReset, RelayAction::kHalfClose, RelayAction::kGarbage}) {
    for (const bool to_target : {true, false}) {
      relay_->clear();
      const size_t before = b_->acceptor->accepted_count();
      StatusOr<End> end = world().dial(*a_, relay_->address());
      ASSERT_TRUE(end.ok()) << end.status();
      const End there = b_->acceptor->accepted(before);
      RelayRule rule;
      rule.action = action;
      rule.to_target = to_target;
      rule.at_byte = 3'000'000;
      relay_->add(rule);
      for (uint64_t i = 1; i <= 16; ++i) {
        (void)end->connection->send(
            make_frame(FrameKind::kChunk, std::to_string(i), pattern(1 << 20, i), i), kBulkLane);
        (void)there.connection->send(
            make_frame(FrameKind::kChunk, std::to_string(i), pattern(1 << 20, i), i), kBulkLane);
      }
      ASSERT_TRUE(end->handler->wait_lost());
      ASSERT_TRUE(there.handler->wait_lost());
      // What did arrive is whole and in order (CONN-2); that its bytes are the sender's own, only
      // TLS could tell where someone puts garbage between them.
      for (const End& side : {*end, there}) {
        EXPECT_EQ(side.handler->lost_calls(), 1);
        const std::vector<Received> got = side.handler->frames();
        EXPECT_LT(got.size(), 17u);
        for (size_t i = 0; i < got.size(); ++i) {
          EXPECT_EQ(got[i].header, std::to_string(i + 1));
          EXPECT_EQ(got[i].payload.size(), 1u << 20);
          if (action != RelayAction::kGarbage) {
            EXPECT_TRUE(got[i].payload == pattern(1 << 20, i + 1));
          }
        }
      }
    }
  }
  expect_recovered();
}

TEST_F(GrpcRelay, OneOfTwoSocketsIsResetAndTheConnectionIsLostOnBothSides) {
  for (int lane = 0; lane < 2; ++lane) {
    const size_t before = b_->acceptor->accepted_count();
    const int first = relay_->accepted();
    StatusOr<End> end = world().dial(*a_, relay_->address());
    ASSERT_TRUE(end.ok()) << end.status();
    const End there = b_->acceptor->accepted(before);
    RelayRule rule;
    rule.action = RelayAction::kReset;
    rule.connection = first + lane;
    relay_->add(rule);
    ASSERT_TRUE(end->handler->wait_lost());
    ASSERT_TRUE(there.handler->wait_lost());
    relay_->clear();
  }
  expect_recovered();
}

TEST_F(GrpcRelay, SlowNetworkDelivers) {
  relay_->add({.action = RelayAction::kDelay, .to_target = true, .millis = 3});
  relay_->add({.action = RelayAction::kDelay, .to_target = false, .millis = 3});
  StatusOr<End> end = world().dial(*a_, relay_->address());
  ASSERT_TRUE(end.ok()) << end.status();
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(end->connection->send(make_frame(FrameKind::kRequest, "x", ""), i % 2).ok());
  }
  ASSERT_TRUE(b_->acceptor->accepted().handler->wait_frames(20));
}

TEST_F(GrpcRelay, AStalledPeerDoesNotHoldUpADialBeyondItsDeadline) {
  relay_->add({.action = RelayAction::kStall, .to_target = false, .at_byte = 100});
  StatusOr<End> end = world().dial(*a_, relay_->address(), absl::Milliseconds(300));
  EXPECT_EQ(error_kind(end.status()), ErrorKind::kDeadline) << end.status();
  expect_recovered();
}

TEST_F(GrpcRelay, AStalledPeerDoesNotHoldUpShutdownOrClose) {
  open({.drain_timeout = absl::Milliseconds(200), .same_user = false});
  a_->transport->shutdown();
  b_->transport->shutdown();
  begin();
  StatusOr<End> closed = world().dial(*a_, relay_->address());
  StatusOr<End> left = world().dial(*a_, relay_->address());
  ASSERT_TRUE(closed.ok() && left.ok());
  relay_->add({.action = RelayAction::kStall, .to_target = true});
  relay_->add({.action = RelayAction::kStall, .to_target = false});
  for (uint64_t i = 1; i <= 64; ++i) {
    for (const End& end : {*closed, *left}) {
      ASSERT_TRUE(
          end.connection
              ->send(make_frame(FrameKind::kChunk, "", std::string(1 << 20, 'x'), i), kBulkLane)
              .ok());
    }
  }
  // close() wants to send 64 MiB and cannot: it gives up and tells what was never handed over.
  closed->connection->close(absl::OkStatus());
  ASSERT_TRUE(closed->handler->wait_lost());
  EXPECT_FALSE(closed->handler->lost().why.ok());
  EXPECT_GT(closed->handler->lost().unsent.size(), 10u);
  const absl::Time begin = world().runtime().now();
  a_->transport->shutdown();
  // A bound against hanging: it takes some 1.5 s.
  EXPECT_LT(world().runtime().now() - begin, absl::Seconds(20));
  EXPECT_EQ(left->handler->lost_calls(), 1);
  EXPECT_GT(left->handler->lost().unsent.size(), 10u);
}

TEST_F(GrpcRelay, RefusedSockets) {
  relay_->refuse(true);
  StatusOr<End> end = world().dial(*a_, relay_->address());
  EXPECT_EQ(error_kind(end.status()), ErrorKind::kUnavailable) << end.status();
  relay_->refuse(false);
  expect_recovered();
}

}  // namespace
}  // namespace weft::testing
