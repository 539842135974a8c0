// TcpStore with credentials: who is let in, and what the others are told before their deadline.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "weft/store/tcp_store.h"
#include "weft/tests/testing/tls_files.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kToken[] = "correct-horse-battery-staple";

class TcpStoreTls : public ::testing::Test {
 protected:
  std::unique_ptr<TcpStoreServer> start(const Credentials& credentials) {
    auto server = TcpStoreServer::start({.credentials = credentials}, runtime_);
    EXPECT_TRUE(server.ok()) << server.status();
    return server.ok() ? *std::move(server) : nullptr;
  }
  StatusOr<std::shared_ptr<TcpStore>> connect(const TcpStoreServer& server,
                                              const Credentials& credentials,
                                              Timeout timeout = std::chrono::minutes(1)) {
    return TcpStore::connect("127.0.0.1", server.port(),
                             {.timeout = timeout, .credentials = credentials}, runtime_);
  }
  // The error's text; its kind is permission, so no deadline has ended it.
  std::string refusal(const TcpStoreServer& server, const Credentials& credentials) {
    const Status status = connect(server, credentials).status();
    EXPECT_EQ(error_kind(status), ErrorKind::kPermission) << status;
    return std::string(status.message());
  }

  std::shared_ptr<Runtime> runtime_ = make_system_runtime();
  TlsFiles files_;
};

TEST_F(TcpStoreTls, EveryCertificateOfTheAuthorityIsLetIn) {
  const auto server = start(files_.make("ps0"));
  for (const char* name : {"trainer0", "trainer1"}) {
    auto store = connect(*server, files_.make(name));
    ASSERT_TRUE(store.ok()) << store.status();
    EXPECT_TRUE((*store)->set("k", name).ok());
    EXPECT_EQ(*(*store)->get("k"), name);
  }
}

TEST_F(TcpStoreTls, StrangersAreTurnedAwayAtOnce) {
  const auto server = start(files_.make("ps0"));
  TlsFiles others;
  EXPECT_THAT(refusal(*server, others.make("x")), HasSubstr("its certificate is not believed"));
  // One that believes the server, which does not believe it.
  const Credentials foreign = others.make("y");
  others.write("ca.pem", read_text(others.directory() + "/ca.pem") +
                             read_text(files_.directory() + "/ca.pem"));
  EXPECT_THAT(refusal(*server, foreign), HasSubstr("when it had seen our certificate"));
  EXPECT_EQ(server->num_clients(), 0);
}

TEST_F(TcpStoreTls, PlainTextAndTlsDoNotMix) {
  const auto server = start(files_.make("ps0"));
  const Status plain = connect(*server, {}, std::chrono::milliseconds(300)).status();
  EXPECT_EQ(error_kind(plain), ErrorKind::kUnavailable) << plain;
  EXPECT_THAT(std::string(plain.message()), HasSubstr("it takes no plain text, perhaps"));
  const auto open = start({});
  EXPECT_THAT(refusal(*open, files_.make("a")), HasSubstr("it speaks plain text"));
  EXPECT_EQ(server->num_clients(), 0);
}

TEST_F(TcpStoreTls, TheTokenIsWantedOfEveryone) {
  Credentials with = files_.make("ps0");
  with.token = kToken;
  const auto server = start(with);
  EXPECT_TRUE(connect(*server, with).ok());
  EXPECT_THAT(refusal(*server, files_.make("a")), HasSubstr("sends no cluster token"));
  Credentials wrong = files_.make("b");
  wrong.token = "wrong-horse-battery-staple";
  EXPECT_THAT(refusal(*server, wrong), Not(HasSubstr("horse")));
}

TEST_F(TcpStoreTls, ListeningBeyondLoopbackIsAllowedWithCredentials) {
  EXPECT_EQ(error_kind(TcpStoreServer::start({.host = "0.0.0.0"}, runtime_).status()),
            ErrorKind::kPermission);
  const Status safe =
      TcpStoreServer::start({.host = "0.0.0.0", .credentials = files_.make("ps0")}, runtime_)
          .status();
  EXPECT_TRUE(safe.ok()) << safe;
}

}  // namespace
}  // namespace weft::testing
