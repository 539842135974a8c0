// What only the grpc transport has: local sockets, ports and hosts, health checks.
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/tests/contract/grpc_raw.h"
#include "weft/tests/contract/grpc_transport_harness.h"

namespace weft::testing {
namespace {

// ---- local sockets -----------------------------------------------------------------------------

TEST_F(GrpcTransportTest, WithoutCredentialsOnlyProcessesOfThisUserComeIn) {
  open({});
  std::unique_ptr<Peer> a = world().make_peer("a");
  std::unique_ptr<Peer> b = world().make_peer("b");
  ASSERT_TRUE(world().listen(*b).ok());
  // As a process without access to the private socket: by the port alone.
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
  // Both sockets are closed, and workers do not move: a waiting caller need not wait on.
  const Status s = world().dial(*a, b->address).status();
  EXPECT_EQ(error_kind(s), ErrorKind::kPeerLost) << s;
  // In another network namespace ports and sockets of the same names say nothing of it.
  std::string elsewhere = b->address;
  ASSERT_EQ(std::count(elsewhere.begin(), elsewhere.end(), '-'), 2) << "it names no namespace";
  elsewhere.back() = elsewhere.back() == '0' ? '1' : '0';
  const Status unknown = world().dial(*a, elsewhere).status();
  EXPECT_EQ(error_kind(unknown), ErrorKind::kUnavailable) << unknown;
  // The address of a relay may come back.
  const Status relayed = world().dial(*a, tcp_part(b->address)).status();
  EXPECT_EQ(error_kind(relayed), ErrorKind::kUnavailable) << relayed;
  a->transport->shutdown();
}

// The time of a handshake is over while the acceptor is told of the connection, as where its threads wait for a core.
TEST_F(GrpcTransportTest, DEF_11_an_acceptor_that_takes_its_time_keeps_the_connection) {
  open({.handshake_timeout = absl::Milliseconds(100),
        .local_sockets = false,
        .data_connections = false});
  std::unique_ptr<Peer> a = world().make_peer("a");
  std::unique_ptr<Peer> b = world().make_peer("b");
  ASSERT_TRUE(world().listen(*b).ok());
  b->acceptor->set_opened([this](const End&) {
    Runtime& runtime = world().runtime();
    const auto parker = runtime.make_parker();
    const absl::Time end = runtime.now() + absl::Milliseconds(400);
    while (runtime.now() < end) parker->park_until(end);
  });
  const StatusOr<End> at_a = world().dial(*a, b->address);
  ASSERT_TRUE(at_a.ok()) << at_a.status();
  const End at_b = b->acceptor->accepted();
  for (int lane = 0; lane < 2; ++lane) {
    ASSERT_TRUE(at_a->connection->send(make_frame(FrameKind::kRequest, "x", ""), lane).ok());
    ASSERT_TRUE(at_b.connection->send(make_frame(FrameKind::kResponse, "y", ""), lane).ok());
  }
  EXPECT_TRUE(at_b.handler->wait_frames(2));
  EXPECT_TRUE(at_a->handler->wait_frames(2));
  EXPECT_EQ(at_a->handler->lost_calls() + at_b.handler->lost_calls(), 0);
  for (Peer* peer : {a.get(), b.get()}) peer->transport->shutdown();
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

bool has_ipv6() {
  const int probe = socket(AF_INET6, SOCK_STREAM, 0);
  if (probe >= 0) close(probe);
  std::ifstream interfaces("/proc/net/if_inet6");
  std::string line;
  return probe >= 0 && std::getline(interfaces, line);
}

TEST_F(GrpcTransportTest, EveryInterfaceMeansThoseOfIpv6Too) {
  for (const char* host : {"0.0.0.0", "::"}) {
    std::unique_ptr<Peer> a = world().make_peer("a");
    ListenOptions options;
    options.host = host;
    options.advertise = "127.0.0.1";
    options.allow_insecure = true;
    const Status s = world().listen(*a, options);
    if (!s.ok()) {
      EXPECT_FALSE(has_ipv6()) << s;
      continue;
    }
    std::unique_ptr<Peer> b = world().make_peer("b");
    const StatusOr<End> v4 = world().dial(*b, a->address);
    EXPECT_TRUE(v4.ok()) << host << ": " << v4.status();
    // As an IPv4 address, not as one mapped into IPv6.
    EXPECT_THAT(a->acceptor->accepted().connection->describe(),
                ::testing::StartsWith("b (127.0.0.1:"));
    const StatusOr<End> v6 = world().dial(*b, "[::1]" + a->address.substr(a->address.find(':')));
    EXPECT_EQ(v6.ok(), has_ipv6()) << host << ": " << v6.status();
    b->transport->shutdown();
    a->transport->shutdown();
  }
}

// What the kernel knows of the end that was accepted, in this process.
struct SocketOptions {
  int no_delay = 0;
  unsigned user_timeout_ms = 0;
  bool close_on_exec = false;
  bool blocks = true;
};
std::vector<SocketOptions> accepted_at(int port) {
  std::vector<SocketOptions> out;
  for (int fd = 0; fd < 1024; ++fd) {
    sockaddr_in own = {}, peer = {};
    socklen_t own_length = sizeof own, peer_length = sizeof peer;
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_length) != 0 ||
        own.sin_family != AF_INET || ntohs(own.sin_port) != port ||
        getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_length) != 0) {
      continue;
    }
    SocketOptions options;
    socklen_t length = sizeof(int);
    getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &options.no_delay, &length);
    length = sizeof(unsigned);
    getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &options.user_timeout_ms, &length);
    options.close_on_exec = (fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0;
    options.blocks = (fcntl(fd, F_GETFL) & O_NONBLOCK) == 0;
    out.push_back(options);
  }
  return out;
}

TEST_F(GrpcTransportTest, WhatIsAcceptedDoesNotDelayAndGivesAMutePeerUp) {
  open({.keepalive_timeout = absl::Seconds(77), .local_sockets = false, .data_connections = false});
  std::unique_ptr<Peer> a = world().make_peer("a");
  std::unique_ptr<Peer> b = world().make_peer("b");
  ASSERT_TRUE(world().listen(*b).ok());
  const StatusOr<End> end = world().dial(*a, b->address);
  ASSERT_TRUE(end.ok()) << end.status();
  const std::vector<SocketOptions> accepted = accepted_at(std::stoi(b->address.substr(10)));
  EXPECT_EQ(accepted.size(), end->connection->peer().lanes);
  for (const SocketOptions& options : accepted) {
    EXPECT_NE(options.no_delay, 0);
    EXPECT_EQ(options.user_timeout_ms, 77'000u);
    EXPECT_TRUE(options.close_on_exec);
    EXPECT_FALSE(options.blocks);
  }
  EXPECT_EQ(counter(*b, "listener_accepted"), static_cast<int64_t>(accepted.size()));
  EXPECT_EQ(counter(*b, "listener_stalls"), 0);
  for (Peer* peer : {a.get(), b.get()}) peer->transport->shutdown();
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
  if (!has_ipv6()) {
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

}  // namespace
}  // namespace weft::testing
