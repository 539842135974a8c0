// TLS of the grpc transport, with real sockets: who is let in, who is not, and what both are told.
// That everything else works over it too is the contract suite's ("grpc_tls").
#include <grpcpp/generic/async_generic_service.h>

#include "gtest/gtest.h"
#include "weft/tests/contract/grpc_raw.h"
#include "weft/tests/contract/grpc_transport_harness.h"
#include "weft/tests/contract/transport_harness.h"
#include "weft/tests/testing/tls_files.h"
#include "weft/transport/checked_credentials.h"
#include "weft/transport/frame.h"
#include "weft/transport/grpc_transport.h"
#include "weft/transport/internal/wire/handshake.h"

namespace weft::testing {
namespace {

constexpr char kToken[] = "correct-horse-battery-staple";

// Peers with credentials of their own each, in one world.
class GrpcTls : public ::testing::Test {
 protected:
  void SetUp() override {
    Backend backend{
        "grpc", false, true, [this](World&) -> TransportFactory {
          return [this](const TransportContext& context) {
            return grpc_transport({.local_sockets = local_sockets_, .credentials = next_})(context);
          };
        }};
    world_ = std::make_unique<World>(backend, 1);
  }
  // Empty credentials: plain text.
  std::unique_ptr<Peer> peer(const std::string& name, const Credentials& credentials) {
    next_ = credentials;
    return world_->make_peer(name);
  }
  std::unique_ptr<Peer> listener(const std::string& name, const Credentials& credentials) {
    std::unique_ptr<Peer> out = peer(name, credentials);
    const Status listening = world_->listen(*out);
    EXPECT_TRUE(listening.ok()) << listening;
    return out;
  }
  // The error of a dial, of kind permission: no deadline has ended it.
  Status refusal(Peer& from, const std::string& address,
                 const std::function<void(Hello*)>& change = nullptr) {
    StatusOr<End> end = world_->dial(from, address, absl::Seconds(60), change);
    EXPECT_FALSE(end.ok());
    EXPECT_EQ(error_kind(end.status()), ErrorKind::kPermission) << end.status();
    return end.status();
  }
  // Makes a factory of our own for one peer and returns its error.
  Status start_error(const std::string& name, const Credentials& credentials) {
    TransportContext context;
    context.runtime = make_system_runtime();
    context.worker_name = name;
    return grpc_transport({.credentials = credentials})(context).status();
  }
  void expect_traffic(const End& here, const End& there) {
    ASSERT_TRUE(here.connection->send(make_frame(FrameKind::kRequest, "h", "payload"), 0).ok());
    ASSERT_TRUE(there.connection->send(make_frame(FrameKind::kResponse, "h", "back"), 1).ok());
    EXPECT_TRUE(there.handler->wait_frames(1));
    EXPECT_TRUE(here.handler->wait_frames(1));
  }

  bool local_sockets_ = false;
  TlsFiles files_;
  Credentials next_;
  std::unique_ptr<World> world_;
};

TEST_F(GrpcTls, TwoWorkersOfOneAuthorityMeet) {
  for (bool local : {false, true}) {
    local_sockets_ = local;
    std::unique_ptr<Peer> a = peer("a", files_.make("a", {.rank = 1 + 2 * local}));
    std::unique_ptr<Peer> b = listener("b", files_.make("b", {.only_common_name = true}));
    EXPECT_NE(b->address.find("/tls"), std::string::npos) << b->address;
    StatusOr<End> end = world_->dial(*a, b->address);
    ASSERT_TRUE(end.ok()) << end.status();
    expect_traffic(*end, b->acceptor->accepted());
    // Every lane was looked at, not only the first.
    EXPECT_EQ(b->acceptor->hellos(), 2);
    a->transport->shutdown();
    b->transport->shutdown();
  }
}

TEST_F(GrpcTls, AListenerOfAnotherAuthorityIsNotBelieved) {
  TlsFiles others;
  std::unique_ptr<Peer> a = peer("a", files_.make("a"));
  std::unique_ptr<Peer> b = listener("b", others.make("b"));
  const Status status = refusal(*a, b->address);
  EXPECT_TRUE(says(status, "its certificate is not believed")) << status;
  EXPECT_TRUE(says(status, files_.directory() + "/ca.pem")) << status;
  EXPECT_EQ(b->acceptor->hellos(), 0);
}

TEST_F(GrpcTls, ADiallerOfAnotherAuthorityIsTurnedAwayBeforeItsHello) {
  TlsFiles others;
  Credentials foreign = others.make("a");
  // It believes the listener, which does not believe it.
  others.write("ca.pem", read_text(others.directory() + "/ca.pem") +
                             read_text(files_.directory() + "/ca.pem"));
  std::unique_ptr<Peer> a = peer("a", foreign);
  std::unique_ptr<Peer> b = listener("b", files_.make("b"));
  const Status status = refusal(*a, b->address);
  EXPECT_TRUE(says(status, "when it had seen our certificate '" + foreign.cert_file + "'"))
      << status;
  EXPECT_EQ(b->acceptor->hellos(), 0);
}

TEST_F(GrpcTls, AnExpiredCertificateIsRefusedOnBothSides) {
  const Credentials expired = files_.make("old", {.valid_to = -absl::Minutes(1)});
  const Status own = start_error("old", expired);
  EXPECT_EQ(error_kind(own), ErrorKind::kPermission);
  EXPECT_TRUE(says(own, expired.cert_file) && says(own, "expired at")) << own;

  // A dialler that does not look at what it brings along.
  std::unique_ptr<Peer> b = listener("b", files_.make("b"));
  RawStream dialler(tcp_part(b->address), "/weft.v1.Transport/Lane0",
                    raw_channel_credentials(expired));
  EXPECT_FALSE(dialler.started());
  EXPECT_EQ(b->acceptor->hellos(), 0);

  // And a listener.
  grpc::AsyncGenericService service;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", raw_server_credentials(expired), &port);
  builder.RegisterAsyncGenericService(&service);
  const std::unique_ptr<grpc::ServerCompletionQueue> queue = builder.AddCompletionQueue();
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  std::unique_ptr<Peer> a = peer("a", files_.make("a"));
  const Status status = refusal(*a, "127.0.0.1:" + std::to_string(port));
  EXPECT_TRUE(says(status, "out of date")) << status;
  server->Shutdown(std::chrono::system_clock::now());
  queue->Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue->Next(&tag, &ok)) {
  }
}

TEST_F(GrpcTls, ANameThatIsNotInTheCertificateIsRefusedByTheListener) {
  std::unique_ptr<Peer> a = peer("a", files_.make("a", {.rank = 1}));
  std::unique_ptr<Peer> b = listener("b", files_.make("b"));
  const Status name = refusal(*a, b->address, [](Hello* h) { h->name = "ps0"; });
  EXPECT_TRUE(says(name, "that of 'a' (rank 1), and not of 'ps0'")) << name;
  const Status rank = refusal(*a, b->address, [](Hello* h) { h->id = 7; });
  EXPECT_TRUE(says(rank, "that of 'a' (rank 1), and not of 'a' with rank 7")) << rank;
  EXPECT_EQ(b->acceptor->hellos(), 0);
}

TEST_F(GrpcTls, ANameThatIsNotInTheCertificateIsRefusedByTheDialler) {
  std::unique_ptr<Peer> a = peer("a", files_.make("a"));
  std::unique_ptr<Peer> b = listener("b", files_.make("b"));
  const Status wanted = refusal(*a, b->address, [](Hello* h) { h->to_name = "ps0"; });
  EXPECT_TRUE(says(wanted, "that of 'b', and not of 'ps0'")) << wanted;
  EXPECT_EQ(b->acceptor->hellos(), 0) << "it got a hello, and so the token";
  Hello lie = b->hello;
  lie.name = "ps0";
  b->acceptor->set_own(lie);
  const Status said = refusal(*a, b->address);
  EXPECT_TRUE(says(said, "that of 'b', and not of 'ps0'")) << said;
}

TEST_F(GrpcTls, ASharedCertificateIsAskedForInWords) {
  Credentials shared = files_.make("cluster");
  const Status own = start_error("a", shared);
  EXPECT_EQ(error_kind(own), ErrorKind::kPermission);
  EXPECT_TRUE(says(own, "is that of 'cluster', and this worker is 'a'")) << own;
  EXPECT_TRUE(says(own, "shared_certificate")) << own;
  shared.shared_certificate = true;
  std::unique_ptr<Peer> a = peer("a", shared);
  std::unique_ptr<Peer> b = listener("b", shared);
  StatusOr<End> end = world_->dial(*a, b->address);
  ASSERT_TRUE(end.ok()) << end.status();
  // A worker without that option still requires names.
  std::unique_ptr<Peer> c = listener("c", files_.make("c"));
  const Status strict = refusal(*a, c->address);
  EXPECT_TRUE(says(strict, "that of 'cluster', and not of 'a'")) << strict;
}

TEST_F(GrpcTls, PlainTextIsTurnedAway) {
  std::unique_ptr<Peer> plain = peer("a", {});
  std::unique_ptr<Peer> b = listener("b", files_.make("b"));
  const Status told = refusal(*plain, b->address);
  EXPECT_TRUE(says(told, "it wants TLS, and this worker has no credentials")) << told;
  // A dialler that ignores the hint in the address is cut off.
  StatusOr<End> end = world_->dial(*plain, tcp_part(b->address), absl::Seconds(60));
  ASSERT_FALSE(end.ok());
  EXPECT_EQ(error_kind(end.status()), ErrorKind::kUnavailable) << end.status();
  EXPECT_TRUE(says(end.status(), "it takes no plain text, perhaps")) << end.status();
  EXPECT_EQ(b->acceptor->hellos(), 0);
}

TEST_F(GrpcTls, PlainTextIsNotSpoken) {
  std::unique_ptr<Peer> a = peer("a", files_.make("a"));
  std::unique_ptr<Peer> plain = listener("b", {});
  const Status status = refusal(*a, plain->address);
  EXPECT_TRUE(says(status, "it speaks plain text, and this worker has credentials")) << status;
  EXPECT_EQ(plain->acceptor->hellos(), 0);
}

TEST_F(GrpcTls, NewConnectionsUseNewFilesAndOldOnesLiveOn) {
  const Credentials of_b = files_.make("b");
  std::unique_ptr<Peer> a = peer("a", files_.make("a"));
  std::unique_ptr<Peer> b = listener("b", of_b);
  StatusOr<End> old = world_->dial(*a, b->address);
  ASSERT_TRUE(old.ok()) << old.status();
  const End old_there = b->acceptor->accepted(0);

  const auto shown_by_b = [&] {
    RawStream stream(tcp_part(b->address), "/weft.v1.Transport/Lane0",
                     raw_channel_credentials(files_.make("looker")));
    return stream.started() ? stream.peer_certificate() : std::string();
  };
  const std::string first = read_text(of_b.cert_file);
  EXPECT_EQ(shown_by_b(), first);
  files_.make("b");  // over the old files
  files_.make("a");
  const std::string second = read_text(of_b.cert_file);
  ASSERT_NE(first, second);
  const absl::Time bound = absl::Now() + absl::Seconds(60);
  std::string shown;
  while ((shown = shown_by_b()) != second && absl::Now() < bound) {
    // Between the two files of a pair no peer gets in, at most for one interval.
    EXPECT_TRUE(shown == first || shown.empty());
  }
  EXPECT_EQ(shown, second);
  StatusOr<End> fresh = world_->dial(*a, b->address);
  ASSERT_TRUE(fresh.ok()) << fresh.status();
  expect_traffic(*fresh, b->acceptor->accepted(1));
  EXPECT_EQ(old->handler->lost_calls(), 0);
  expect_traffic(*old, old_there);
}

// ---- the cluster token
// ---------------------------------------------------------------------------

TEST_F(GrpcTls, ATokenThatIsNotOursIsRefusedAndNeverShown) {
  Credentials with = files_.make("b");
  with.token = kToken;
  std::unique_ptr<Peer> b = listener("b", with);

  Credentials same = files_.make("good");
  same.token_file = files_.write("token", std::string("  ") + kToken + "\n");
  std::unique_ptr<Peer> good = peer("good", same);
  StatusOr<End> end = world_->dial(*good, b->address);
  ASSERT_TRUE(end.ok()) << end.status();
  expect_traffic(*end, b->acceptor->accepted());
  const int hellos = b->acceptor->hellos();

  Credentials other = files_.make("bad");
  other.token = "correct-horse-battery-stapler";
  std::unique_ptr<Peer> bad = peer("bad", other);
  const Status wrong = refusal(*bad, b->address);
  EXPECT_TRUE(says(wrong, "the cluster token of 'bad' is not the one that is known here")) << wrong;
  std::unique_ptr<Peer> none = peer("none", files_.make("none"));
  const Status without = refusal(*none, b->address);
  EXPECT_TRUE(says(without, "'none' sends no cluster token")) << without;
  std::unique_ptr<Peer> open = listener("open", files_.make("open"));
  const Status unasked = refusal(*good, open->address);
  EXPECT_TRUE(says(unasked, "'good' sends a cluster token, and there is none here")) << unasked;
  EXPECT_EQ(b->acceptor->hellos(), hellos);
  for (const Status& status : {wrong, without, unasked}) {
    EXPECT_FALSE(says(status, "horse")) << status;
  }
  EXPECT_EQ(end->connection->describe().find("horse"), std::string::npos);
}

TEST_F(GrpcTls, ATokenWithoutTlsIsRefused) {
  Credentials token;
  token.token = kToken;
  const Status alone = start_error("a", token);
  EXPECT_EQ(error_kind(alone), ErrorKind::kPermission);
  EXPECT_TRUE(says(alone, "a cluster token travels only inside TLS")) << alone;
  EXPECT_FALSE(says(alone, "horse")) << alone;
  Credentials weak = files_.make("a");
  weak.token = "horse";
  const Status too_short = start_error("a", weak);
  EXPECT_TRUE(says(too_short, "has 5 bytes")) << too_short;
  EXPECT_FALSE(says(too_short, "horse")) << too_short;
}

TEST_F(GrpcTls, AHelloWithAnEndlessTokenIsAProtocolError) {
  Credentials with = files_.make("b");
  with.token = kToken;
  std::unique_ptr<Peer> b = listener("b", with);
  RawStream stream(tcp_part(b->address), "/weft.v1.Transport/Lane0",
                   raw_channel_credentials(files_.make("a")));
  ASSERT_TRUE(stream.started());
  Hello hello = b->hello;
  hello.name = "a";
  hello.connection_id = 1;
  hello.max_frame_bytes = 1 << 20;
  const Frame frame =
      make_frame(FrameKind::kHello, internal::encode_hello(hello, 0, std::string(2000, 't')), "");
  std::string bytes(internal::frame_bytes(frame), '\0');
  internal::encode_frame(frame, bytes.data());
  ASSERT_TRUE(stream.write(bytes));
  const std::optional<std::string> answer = stream.read();
  ASSERT_TRUE(answer.has_value());
  EXPECT_NE(answer->find("a token of 2000 bytes"), std::string::npos);
  EXPECT_EQ(b->acceptor->hellos(), 0);
}

// ---- who gets what
// -------------------------------------------------------------------------------

TEST_F(GrpcTls, WithCredentialsListeningBeyondLoopbackNeedsNoOtherWord) {
  std::unique_ptr<Peer> plain = peer("a", {});
  ListenOptions everywhere;
  everywhere.host = "0.0.0.0";
  everywhere.advertise = "127.0.0.1";
  EXPECT_EQ(error_kind(world_->listen(*plain, everywhere)), ErrorKind::kPermission);
  std::unique_ptr<Peer> safe = peer("b", files_.make("b"));
  const Status listening = world_->listen(*safe, everywhere);
  EXPECT_TRUE(listening.ok()) << listening;
}

TEST_F(GrpcTls, TheHealthCheckWantsACertificateToo) {
  std::unique_ptr<Peer> b = listener("b", files_.make("b"));
  std::string answer;
  const std::string method = "/grpc.health.v1.Health/Check";
  EXPECT_FALSE(raw_call(tcp_part(b->address), method, "", &answer).ok());
  TlsFiles others;
  EXPECT_FALSE(
      raw_call(tcp_part(b->address), method, "", &answer, raw_channel_credentials(others.make("x")))
          .ok());
  const grpc::Status with = raw_call(tcp_part(b->address), method, "", &answer,
                                     raw_channel_credentials(files_.make("x")));
  ASSERT_TRUE(with.ok()) << with.error_message();
  EXPECT_EQ(answer, "\x08\x01");  // SERVING
}

TEST_F(GrpcTls, AHundredStrangersLeaveNoTrace) {
  std::unique_ptr<Peer> b = listener("b", files_.make("b"));
  TlsFiles others;
  const auto foreign = raw_channel_credentials(others.make("x"));
  const auto before = b->transport->counters();
  for (int i = 0; i < 100; ++i) {
    RawStream stranger(tcp_part(b->address), "/weft.v1.Transport/Lane1",
                       i % 2 == 0 ? foreign : nullptr);
    EXPECT_FALSE(stranger.started());
  }
  // No byte of theirs was a frame, and nothing was kept for them.
  for (const auto& [name, value] : b->transport->counters()) {
    for (const auto& [old_name, old_value] : before) {
      if (name != old_name || name.rfind("lane", 0) != 0) continue;
      EXPECT_EQ(value, old_value) << name;
    }
  }
  EXPECT_EQ(b->acceptor->hellos(), 0);
  std::unique_ptr<Peer> a = peer("a", files_.make("a"));
  EXPECT_TRUE(world_->dial(*a, b->address).ok());
}

// ---- files
// ---------------------------------------------------------------------------------------

TEST_F(GrpcTls, MistakesInTheFilesAreNamedAtTheStart) {
  const Credentials good = files_.make("a");
  Credentials none = good;
  none.key_file = files_.directory() + "/nothing.key";
  const Status missing = start_error("a", none);
  EXPECT_TRUE(says(missing, "cannot read the key file '" + none.key_file + "'")) << missing;
  EXPECT_TRUE(says(missing, "No such file") && says(missing, "WEFT_TLS_KEY")) << missing;

  Credentials half = good;
  half.cert_file.clear();
  EXPECT_TRUE(says(start_error("a", half), "no cert_file (WEFT_TLS_CERT)"));

  Credentials other_key = good;
  other_key.key_file = files_.make("c").key_file;
  const Status unfit = start_error("a", other_key);
  EXPECT_TRUE(says(unfit, "the key file '" + other_key.key_file + "' does not fit")) << unfit;

  Credentials junk = good;
  junk.cert_file = files_.write("junk.pem", "-----BEGIN CERTIFICATE-----\nnonsense\n");
  EXPECT_TRUE(says(start_error("a", junk), "holds no certificate")) << start_error("a", junk);
  junk = good;
  junk.key_file = files_.write("junk.key", "no key");
  EXPECT_TRUE(says(start_error("a", junk), "holds no key")) << start_error("a", junk);
  junk = good;
  junk.ca_file = files_.write("junk.ca", "");
  EXPECT_TRUE(says(start_error("a", junk), "the CA file '" + junk.ca_file));

  TlsFiles others;
  Credentials wrong_ca = good;
  wrong_ca.ca_file = others.directory() + "/ca.pem";
  const Status unsigned_by = start_error("a", wrong_ca);
  EXPECT_TRUE(says(unsigned_by, "no authority in the CA file '" + wrong_ca.ca_file)) << unsigned_by;

  const Credentials future = files_.make("a", {.valid_from = absl::Minutes(10)});
  EXPECT_TRUE(says(start_error("a", future), "is not valid before"));

  Credentials hasty = files_.make("a");
  hasty.refresh = absl::Milliseconds(1500);
  EXPECT_TRUE(says(start_error("a", hasty), "whole seconds"));
  const std::string key = read_text(good.key_file).substr(40, 40);
  for (const Status& status : {missing, unfit, unsigned_by}) EXPECT_FALSE(says(status, key));
}

TEST(TlsIdentity, NamesInCertificates) {
  using internal::identities_of;
  using internal::Identity;
  using Identities = std::vector<Identity>;
  EXPECT_EQ(identities_of({}, "ps0"), (Identities{{"ps0", std::nullopt}}));
  EXPECT_EQ(identities_of({}, ""), Identities());
  EXPECT_EQ(identities_of({"https://x", "weft://worker/ps0/3", "weft://worker/ps1"}, "cn"),
            (Identities{{"ps0", 3u}, {"ps1", std::nullopt}}));
  // One that cannot be read gives no right, to the common name neither.
  EXPECT_EQ(identities_of({"weft://worker/ps0/x"}, "cn"), Identities());
  EXPECT_EQ(identities_of({"weft://worker/"}, "cn"), Identities());
  EXPECT_EQ(identities_of({"https://x"}, "cn"), (Identities{{"cn", std::nullopt}}));
  const Identities some = {{"ps0", 3u}, {"ps1", std::nullopt}};
  EXPECT_TRUE(internal::matches(some, "ps0", 3));
  EXPECT_FALSE(internal::matches(some, "ps0", 4));
  EXPECT_TRUE(internal::matches(some, "ps0", std::nullopt));
  EXPECT_TRUE(internal::matches(some, "ps1", 9));
  EXPECT_FALSE(internal::matches(some, "ps", std::nullopt));
  EXPECT_FALSE(internal::matches({}, "", std::nullopt));
  EXPECT_TRUE(internal::same_secret("abc", "abc"));
  EXPECT_FALSE(internal::same_secret("abc", "abd"));
  EXPECT_FALSE(internal::same_secret("abc", "ab"));
}

}  // namespace
}  // namespace weft::testing
