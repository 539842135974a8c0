// TLS on a socket that does not block: handshakes, bytes both ways, ends, hostile bytes, keys.
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "weft/common/runtime.h"
#include "weft/tests/contract/tls_pair.h"
#include "weft/tests/contract/transport_harness.h"
#include "weft/tests/testing/tls_files.h"
#include "weft/transport/tls_stream.h"

namespace weft::testing {
namespace {

using internal::Identity;
using internal::TlsCertificates;
using internal::TlsMoved;
using internal::TlsRole;
using internal::TlsState;
using internal::TlsStream;

// What was said on the raw socket, taken out of it.
std::string take(int fd) {
  std::string out(1u << 20, '\0');
  const ssize_t n = recv(fd, out.data(), out.size(), MSG_DONTWAIT);
  out.resize(n > 0 ? static_cast<size_t>(n) : 0);
  return out;
}
void put(int fd, std::string_view bytes) {
  ASSERT_EQ(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT),
            static_cast<ssize_t>(bytes.size()));
}

// Moves all of the pieces through a socket that takes them in parts.
void move_all(TlsStream& from, TlsStream& to, std::vector<std::string_view> pieces,
              std::string* out, size_t place) {
  size_t wanted = 0;
  for (std::string_view piece : pieces) wanted += piece.size();
  const size_t before = out->size();
  out->resize(before + wanted);
  for (size_t have = 0; have < wanted;) {
    StatusOr<TlsMoved> sent = from.write(pieces);
    ASSERT_TRUE(sent.ok()) << sent.status();
    EXPECT_EQ(sent->state == TlsState::kDone, !from.pending());
    for (size_t n = sent->bytes; n > 0;) {
      const size_t k = std::min(n, pieces.front().size());
      pieces.front().remove_prefix(k);
      n -= k;
      if (pieces.front().empty()) pieces.erase(pieces.begin());
    }
    while (true) {
      const size_t room = std::min(place, wanted - have);
      const StatusOr<TlsMoved> got = to.read({out->data() + before + have, room});
      ASSERT_TRUE(got.ok()) << got.status();
      have += got->bytes;
      if (got->state == TlsState::kWantRead || have == wanted) break;
      ASSERT_EQ(got->state, TlsState::kDone);
    }
  }
  EXPECT_FALSE(from.pending());
}

TEST(TlsStream, BytesPassBothWaysIntoMemoryOfTheCaller) {
  SocketPair sockets;
  auto [client, server] = tls_pair(sockets);
  EXPECT_TRUE(client->peer().empty()) << "there is no certificate";
  const std::string large = pattern(3'000'001, 1);
  const std::vector<std::string_view> pieces = {"head", large, "", "tail", large, "x"};
  std::string expected;
  for (std::string_view piece : pieces) expected += piece;
  for (const size_t place : {size_t{777}, size_t{16} << 10, expected.size()}) {
    std::string there;
    std::string back;
    ASSERT_NO_FATAL_FAILURE(move_all(*client, *server, pieces, &there, place));
    ASSERT_NO_FATAL_FAILURE(move_all(*server, *client, pieces, &back, place));
    EXPECT_TRUE(there == expected);
    EXPECT_TRUE(back == expected);
  }
}

TEST(TlsStream, SmallPiecesShareARecordAndLargeOnesHaveTheirOwn) {
  SocketPair sockets;
  auto [client, server] = tls_pair(sockets);
  // clang 14 lets no lambda capture a structured binding by name.
  const auto bytes_of = [&sockets, &client = client,
                         &server = server](std::vector<std::string_view> pieces) {
    const StatusOr<TlsMoved> sent = client->write(pieces);
    EXPECT_TRUE(sent.ok());
    std::string all(sent->bytes, '\0');
    int there = 0;
    EXPECT_EQ(ioctl(sockets.server.get(), FIONREAD, &there), 0);
    EXPECT_EQ(server->read(absl::MakeSpan(all))->bytes, all.size());
    return static_cast<size_t>(there) - all.size();
  };
  const std::string large(16u << 10, 'x');
  const size_t one = bytes_of({"a"});
  EXPECT_EQ(bytes_of({"a", "b", "c"}), one);
  EXPECT_EQ(bytes_of({"a", large, "b", "c"}), 3 * one);
  EXPECT_EQ(bytes_of({large, large}), 2 * one);
}

TEST(TlsStream, ReadingTakesNoMoreFromTheSocketThanItIsTold) {
  SocketPair sockets;
  auto [client, server] = tls_pair(sockets);
  const std::string sent = pattern(100'000, 1);
  ASSERT_EQ(client->write({{sent}})->bytes, sent.size());
  int before = 0;
  ASSERT_EQ(ioctl(sockets.server.get(), FIONREAD, &before), 0);
  std::string got(sent.size(), '?');
  const StatusOr<TlsMoved> moved = server->read(absl::MakeSpan(got), 20'000);
  ASSERT_TRUE(moved.ok());
  EXPECT_EQ(moved->socket_bytes, 20'000u);
  EXPECT_EQ(moved->state, TlsState::kDone) << "there is more";
  EXPECT_EQ(moved->bytes, internal::kTlsRecordText) << "the record that was whole";
  int left = 0;
  ASSERT_EQ(ioctl(sockets.server.get(), FIONREAD, &left), 0);
  EXPECT_EQ(before - left, 20'000);
}

// ---- ends --------------------------------------------------------------------------------------

TEST(TlsStream, TLS_2_AnEndIsTheOtherSidesWord) {
  char byte[8];
  for (const bool said : {true, false}) {
    for (const bool half : {true, false}) {
      SocketPair sockets;
      auto [client, server] = tls_pair(sockets);
      ASSERT_TRUE(client->write({{"last"}}).ok());
      if (said) {
        ASSERT_EQ(*client->close(), TlsState::kDone);
        ASSERT_EQ(*client->close(), TlsState::kDone) << "once is enough";
        EXPECT_EQ(error_kind(client->write({{"more"}}).status()), ErrorKind::kState);
      }
      if (half) {
        shutdown(sockets.client.get(), SHUT_WR);
      } else {
        client = nullptr;
        sockets.client.reset();
      }
      const StatusOr<TlsMoved> last = server->read({byte, 4});
      ASSERT_TRUE(last.ok()) << last.status();
      EXPECT_EQ(std::string_view(byte, 4), "last");
      StatusOr<TlsMoved> end = server->read({byte, 1});
      if (end.ok() && end->state == TlsState::kWantRead) end = server->read({byte, 1});
      if (said) {
        ASSERT_TRUE(end.ok()) << end.status();
        EXPECT_EQ(end->state, TlsState::kEnded);
      } else {
        EXPECT_EQ(error_kind(end.status()), ErrorKind::kUnavailable) << end.status();
      }
      if (!half || !said) continue;
      // The other direction goes on.
      ASSERT_TRUE(server->write({{"more"}}).ok());
      ASSERT_TRUE(client->read({byte, 4}).ok());
      EXPECT_EQ(std::string_view(byte, 4), "more");
    }
  }
}

TEST(TlsStream, APeerThatReadsNothingKeepsWhatIsPendingSmall) {
  SocketPair sockets;
  auto [client, server] = tls_pair(sockets);
  const std::string sent = pattern(8u << 20, 1);
  const StatusOr<TlsMoved> moved = client->write({{sent}});
  ASSERT_TRUE(moved.ok());
  EXPECT_EQ(moved->state, TlsState::kWantWrite);
  EXPECT_LT(moved->bytes, sent.size() / 2);
  EXPECT_TRUE(client->pending());
  for (int i = 0; i < 100; ++i) {
    const StatusOr<TlsMoved> more = client->write({{std::string_view(sent).substr(moved->bytes)}});
    ASSERT_TRUE(more.ok());
    EXPECT_EQ(more->bytes, 0u) << "nothing is sealed that cannot leave";
    EXPECT_EQ(*client->flush(), TlsState::kWantWrite);
  }
  // What it says meanwhile is read all the same.
  ASSERT_TRUE(server->write({{"slow"}}).ok());
  char text[4];
  ASSERT_EQ(client->read(text)->bytes, 4u);
  // It reads at last.
  std::string got(moved->bytes, '?');
  for (size_t have = 0; have < got.size();) {
    const StatusOr<TlsMoved> n = server->read({got.data() + have, got.size() - have});
    ASSERT_TRUE(n.ok());
    have += n->bytes;
    ASSERT_TRUE(client->flush().ok());
  }
  EXPECT_TRUE(got == sent.substr(0, got.size()));
}

TEST(TlsStream, APeerThatIsGoneIsAnErrorOfTheWriter) {
  SocketPair sockets;
  auto [client, server] = tls_pair(sockets);
  sockets.server.reset();
  EXPECT_EQ(error_kind(client->write({{"x"}}).status()), ErrorKind::kUnavailable);
}

// ---- hostile bytes -----------------------------------------------------------------------------

TEST(TlsStream, TLS_1_NoChangedByteIsHandedOut) {
  // Type, version, length, text and tag of a record.
  for (const size_t at : {0, 1, 3, 4, 5, 12, 20, 30, 40}) {
    SocketPair sockets;
    auto [client, server] = tls_pair(sockets);
    ASSERT_TRUE(client->write({{"nineteen characters"}}).ok());
    std::string record = take(sockets.server.get());
    ASSERT_EQ(record.size(), 5u + 19 + 1 + 16);
    record[at] = static_cast<char>(record[at] ^ 0x40);
    put(sockets.client.get(), record);
    // So that a longer length finds enough bytes.
    put(sockets.client.get(), std::string(20'000, 'x'));
    std::string got(19, '?');
    const StatusOr<TlsMoved> read = server->read(absl::MakeSpan(got));
    EXPECT_EQ(error_kind(read.status()), ErrorKind::kProtocol) << at << ": " << read.status();
    EXPECT_EQ(got, std::string(19, '?')) << at;
    EXPECT_EQ(error_kind(server->read(absl::MakeSpan(got)).status()), ErrorKind::kState);
    // The other side is told.
    EXPECT_EQ(error_kind(client->read(absl::MakeSpan(got)).status()), ErrorKind::kProtocol) << at;
  }
}

TEST(TlsStream, TLS_1_RecordsOpenInTheirOrderAndOnce) {
  const std::vector<std::vector<int>> orders = {{1}, {0, 0}, {0, 2}, {0, 1, 2}};
  for (const std::vector<int>& order : orders) {
    SocketPair sockets;
    auto [client, server] = tls_pair(sockets);
    std::vector<std::string> records;
    for (const char* text : {"a", "b", "c"}) {
      ASSERT_TRUE(client->write({{text}}).ok());
      records.push_back(take(sockets.server.get()));
    }
    Status status;
    for (const int i : order) {
      ASSERT_TRUE(status.ok()) << status;
      put(sockets.client.get(), records[static_cast<size_t>(i)]);
      char got = 0;
      status = server->read({&got, 1}).status();
    }
    EXPECT_EQ(error_kind(status), order.size() == 3 ? ErrorKind::kNone : ErrorKind::kProtocol)
        << status;
  }
}

TEST(TlsStream, BytesThatAreNoTlsEndTheHandshake) {
  const std::string key = *internal::random_tls_key();
  const std::vector<std::string> hostile = {
      std::string(64, '\0'),
      std::string(64, 'x'),
      "GET / HTTP/1.1\r\n\r\n",
      std::string("\x16\x03\x01\xff\xff", 5) + std::string(70'000, 'x'),
      std::string("\x17\x03\x03\x00\x10", 5) + std::string(16, 'x'),
      std::string("\x15\x03\x03\x00\x02\x02\x28", 7)};
  for (const TlsRole role : {TlsRole::kServer, TlsRole::kClient}) {
    for (size_t i = 0; i < hostile.size(); ++i) {
      SocketPair sockets;
      auto tls = *TlsStream::with_key(sockets.server.get(), role, key);
      put(sockets.client.get(), hostile[i]);
      Handshake shake{tls.get()};
      for (int step = 0; step < 5 && shake.step(); ++step) {
      }
      EXPECT_TRUE(error_kind(shake.status) == ErrorKind::kProtocol ||
                  error_kind(shake.status) == ErrorKind::kPermission)
          << i << ": " << shake.status;
    }
    // One that is cut, at each byte; the last one is silence.
    SocketPair whole;
    auto client = *TlsStream::with_key(whole.client.get(), TlsRole::kClient, key);
    ASSERT_EQ(*client->handshake(), TlsState::kWantRead);
    const std::string hello = take(whole.server.get());
    for (size_t at = 0; at < hello.size(); at += 17) {
      SocketPair sockets;
      auto tls = *TlsStream::with_key(sockets.server.get(), TlsRole::kServer, key);
      if (at > 0) put(sockets.client.get(), hello.substr(0, at));
      EXPECT_EQ(*tls->handshake(), TlsState::kWantRead) << "half of it is waited for";
      sockets.client.reset();
      EXPECT_EQ(error_kind(tls->handshake().status()), ErrorKind::kUnavailable);
    }
  }
}

// ---- who they are ------------------------------------------------------------------------------

TEST(TlsStream, WhoDoesNotHaveTheKeyIsRefused) {
  SocketPair sockets;
  auto client =
      *TlsStream::with_key(sockets.client.get(), TlsRole::kClient, *internal::random_tls_key());
  auto server =
      *TlsStream::with_key(sockets.server.get(), TlsRole::kServer, *internal::random_tls_key());
  Handshake c{client.get()};
  Handshake s{server.get()};
  shake_hands(&c, &s);
  EXPECT_EQ(error_kind(s.status), ErrorKind::kPermission) << s.status;
  EXPECT_EQ(error_kind(c.status), ErrorKind::kPermission) << c.status;
  for (const size_t bytes : {0, 16, 31, 33}) {
    EXPECT_EQ(error_kind(TlsStream::with_key(sockets.client.get(), TlsRole::kClient,
                                             std::string(bytes, 'k'))
                             .status()),
              ErrorKind::kInvalidArgument);
  }
}

class TlsCertificatesTest : public ::testing::Test {
 protected:
  std::shared_ptr<const TlsCertificates> load(TlsFiles& files, const std::string& name,
                                              const TlsFileOptions& options = {}) {
    auto out = TlsCertificates::load(files.make(name, options), *runtime_);
    EXPECT_TRUE(out.ok()) << out.status();
    return *std::move(out);
  }
  // Null: a key.
  void shake(const std::shared_ptr<const TlsCertificates>& client,
             const std::shared_ptr<const TlsCertificates>& server) {
    const auto make = [&](int fd, TlsRole role, const auto& certificates) {
      return certificates == nullptr ? *TlsStream::with_key(fd, role, key_)
                                     : *TlsStream::with_certificates(fd, role, certificates);
    };
    client_ = make(sockets_.client.get(), TlsRole::kClient, client);
    server_ = make(sockets_.server.get(), TlsRole::kServer, server);
    c_ = {client_.get()};
    s_ = {server_.get()};
    shake_hands(&c_, &s_);
  }
  Status client_reads() {
    char byte;
    return client_->read({&byte, 1}).status();
  }

  const std::shared_ptr<Runtime> runtime_ = make_system_runtime();
  const std::string key_ = *internal::random_tls_key();
  TlsFiles files_;
  SocketPair sockets_;
  std::unique_ptr<TlsStream> client_, server_;
  Handshake c_{nullptr}, s_{nullptr};
};

TEST_F(TlsCertificatesTest, EachSideLearnsTheNameOfTheOther) {
  shake(load(files_, "a"), load(files_, "b", {.rank = 3}));
  ASSERT_TRUE(c_.done && s_.done) << c_.status << s_.status;
  EXPECT_EQ(client_->peer(), (std::vector<Identity>{{"b", 3}}));
  EXPECT_EQ(server_->peer(), (std::vector<Identity>{{"a", std::nullopt}}));
  std::string got;
  ASSERT_NO_FATAL_FAILURE(move_all(*client_, *server_, {"bytes"}, &got, 100));
  EXPECT_EQ(got, "bytes");
}

TEST_F(TlsCertificatesTest, AClientOfAnotherAuthorityIsRefused) {
  TlsFiles others;
  // It believes the server, and not the other way round: so it must have our authority's file.
  Credentials stranger = others.make("a");
  auto ours = load(files_, "b");
  shake(load(others, "a"), ours);
  EXPECT_EQ(error_kind(c_.status), ErrorKind::kPermission) << c_.status;
  EXPECT_EQ(error_kind(s_.status), ErrorKind::kPermission) << s_.status;
  EXPECT_FALSE(s_.done);
}

TEST_F(TlsCertificatesTest, AKeyAndACertificateDoNotMeet) {
  for (const bool client_has_key : {true, false}) {
    sockets_ = SocketPair();
    const auto certificates = load(files_, "a");
    shake(client_has_key ? nullptr : certificates, client_has_key ? certificates : nullptr);
    EXPECT_FALSE(c_.done && s_.done);
    EXPECT_EQ(error_kind(s_.status), ErrorKind::kPermission) << s_.status;
    EXPECT_FALSE(c_.done) << "a client sees that at once";
    EXPECT_FALSE(c_.status.ok());
  }
}

TEST_F(TlsCertificatesTest, FilesThatAreWrongAreNamed) {
  Credentials missing = files_.make("a");
  missing.key_file += ".not";
  const Status status = TlsCertificates::load(missing, *runtime_).status();
  EXPECT_EQ(error_kind(status), ErrorKind::kInvalidArgument);
  EXPECT_NE(status.message().find(missing.key_file), std::string::npos) << status;
}

// ---- keys --------------------------------------------------------------------------------------

TEST(TlsStream, TLS_3_AKeySealsNoMoreThanItMay) {
  constexpr uint64_t kKeyBytes = 100'000;
  SocketPair sockets;
  auto [client, server] = tls_pair(sockets, kKeyBytes);
  const std::string sent = pattern(1'000'000, 1);
  for (int i = 0; i < 2; ++i) {
    std::string there;
    std::string back;
    ASSERT_NO_FATAL_FAILURE(move_all(*client, *server, {sent}, &there, 50'000));
    ASSERT_NO_FATAL_FAILURE(move_all(*server, *client, {sent, sent}, &back, 50'000));
    EXPECT_TRUE(there == sent);
    EXPECT_TRUE(back == sent + sent);
  }
  // Six full records and no seventh.
  const int64_t each = (kKeyBytes / internal::kTlsRecordText) * internal::kTlsRecordText;
  EXPECT_GE(client->key_updates(), 2'000'000 / static_cast<int64_t>(kKeyBytes) - 1);
  EXPECT_LE(client->key_updates(), 2'000'000 / each + 1);
  EXPECT_GE(server->key_updates(), 4'000'000 / static_cast<int64_t>(kKeyBytes) - 1);
  auto [rare, other] = tls_pair(SocketPair());
  (void)other;
  EXPECT_EQ(rare->key_updates(), 0);
}

TEST(TlsStream, OneThreadReadsWhileAnotherOneWrites) {
  SocketPair sockets;
  auto [client, server] = tls_pair(sockets, 300'000);
  const std::string sent = pattern(16u << 20, 1);
  const std::shared_ptr<Runtime> runtime = make_system_runtime();
  const auto write_all = [&](TlsStream& tls) {
    for (size_t at = 0; at < sent.size() || tls.pending();) {
      const StatusOr<TlsMoved> n = tls.write({{std::string_view(sent).substr(at)}});
      ASSERT_TRUE(n.ok()) << n.status();
      at += n->bytes;
    }
  };
  const auto read_all = [&](TlsStream& tls) {
    std::string got(sent.size(), '?');
    for (size_t have = 0; have < got.size();) {
      const StatusOr<TlsMoved> n = tls.read({got.data() + have, got.size() - have}, 100'000);
      ASSERT_TRUE(n.ok()) << n.status();
      have += n->bytes;
    }
    EXPECT_TRUE(got == sent);
  };
  std::vector<std::unique_ptr<Thread>> threads;
  for (TlsStream* tls : {client.get(), server.get()}) {
    threads.push_back(runtime->spawn("writer", [&, tls] { write_all(*tls); }));
    threads.push_back(runtime->spawn("reader", [&, tls] { read_all(*tls); }));
  }
  for (const auto& thread : threads) thread->join();
  EXPECT_GT(client->key_updates(), 40);
}

}  // namespace
}  // namespace weft::testing
