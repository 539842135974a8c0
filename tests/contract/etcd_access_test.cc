// An etcd with users, with TLS and with several members: who gets in, what the others are told, and
// which member is asked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/store/etcd_store.h"
#include "weft/store/store.h"
#include "weft/tests/contract/etcd_process.h"
#include "weft/tests/contract/tcp_tools.h"
#include "weft/tests/testing/tls_files.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;

class EtcdAccess : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!EtcdProcess::missing().empty()) GTEST_SKIP() << EtcdProcess::missing();
  }
  void start(const EtcdSetup& setup = {}, const EtcdStoreOptions& client = {}) {
    etcd_ = std::make_unique<EtcdProcess>(setup, client);
    ASSERT_EQ(etcd_->problem(), "");
  }
  StatusOr<std::shared_ptr<Store>> open(const std::string& prefix, const std::string& query = "",
                                        const StoreOptions& options = {}) {
    const std::string at =
        absl::StrJoin(etcd_->endpoints(), ",", [](std::string* out, const EtcdEndpoint& endpoint) {
          absl::StrAppend(out, endpoint.host, ":", endpoint.port);
        });
    return open_store(absl::StrCat("etcd://", at, "/", prefix, query.empty() ? "" : "?", query),
                      options, runtime_);
  }
  void expect_refusal(const Status& status, ErrorKind kind, const std::string& words) {
    EXPECT_EQ(error_kind(status), kind) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
    EXPECT_EQ(std::string(status.message()).find("s3cret"), std::string::npos) << status;
  }

  std::shared_ptr<Runtime> runtime_ = make_system_runtime();
  TlsFiles files_;
  std::unique_ptr<EtcdProcess> etcd_;
};

TEST_F(EtcdAccess, AUserHasItsPrefix) {
  start();
  ASSERT_EQ(etcd_->enable_users("weft", "s3cret", "jobs"), "");
  const std::string user =
      absl::StrCat("user=weft&password_file=", files_.write("password", " s3cret\n"));
  auto store = open("jobs/1", user);
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_EQ(*(*store)->add("n", 2), 2);
  EXPECT_EQ((*store)->describe().find("s3cret"), std::string::npos);
  EXPECT_EQ((*store)->describe().find("user"), std::string::npos);
  // A restarted etcd knows no token that it gave before (ETCD-5), and a watch needs one, too.
  etcd_->kill();
  etcd_->start();
  ASSERT_EQ(etcd_->problem(), "");
  EXPECT_EQ(*(*store)->add("n", 2), 4);
  const auto waiter = runtime_->spawn("waiter", [&] {
    const StatusOr<std::string> got = (*store)->get("late");
    EXPECT_TRUE(got.ok()) << got.status();
  });
  EXPECT_TRUE((*open("jobs/1", user))->set("late", "").ok());
  waiter->join();
  expect_refusal(open("other", user).status(), ErrorKind::kPermission, "readwrite other/ --prefix");
}

TEST_F(EtcdAccess, BadInput_an_etcd_password) {
  start();
  const std::string wrong = files_.write("wrong", "s3cret!");
  expect_refusal(open("jobs", "user=weft&password_file=" + wrong).status(),
                 ErrorKind::kInvalidArgument, "leave user (user=) out");
  ASSERT_EQ(etcd_->enable_users("weft", "s3cret", "jobs"), "");
  expect_refusal(open("jobs", "user=weft&password_file=" + wrong).status(), ErrorKind::kPermission,
                 "is there a user 'weft', and is this the password?");
  expect_refusal(open("jobs", "user=another&password_file=" + wrong).status(),
                 ErrorKind::kPermission, "'another'");
  expect_refusal(open("jobs").status(), ErrorKind::kPermission, "give user and password_file");
}

TEST_F(EtcdAccess, TlsWithCertificatesOfBothSides) {
  const Credentials server = files_.make("etcd", {.dns = "localhost"});
  const Credentials client = files_.make("client");
  start({.cert_file = server.cert_file,
         .key_file = server.key_file,
         .client_ca_file = server.ca_file},
        {.ca_file = client.ca_file, .cert_file = client.cert_file, .key_file = client.key_file});
  const std::string ca = "ca=" + client.ca_file;
  const std::string own = absl::StrCat("&cert=", client.cert_file, "&key=", client.key_file);
  auto store = open("job", ca + own);
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_EQ(*(*store)->add("n", 1), 1);
  expect_refusal(open("job", ca).status(), ErrorKind::kPermission, "wants a client's certificate");
  const StoreOptions soon{.timeout = absl::Seconds(3)};
  expect_refusal(open("job", "", soon).status(), ErrorKind::kUnavailable, "does it want TLS");
  TlsFiles others;
  const Credentials stranger = others.make("client");
  expect_refusal(open("job", absl::StrCat("ca=", stranger.ca_file, own)).status(),
                 ErrorKind::kPermission, "is not believed");
  expect_refusal(
      open("job", absl::StrCat(ca, "&cert=", stranger.cert_file, "&key=", stranger.key_file))
          .status(),
      ErrorKind::kPermission, "does not believe");
}

TEST_F(EtcdAccess, BadInput_tls_to_an_etcd_of_plain_text) {
  start();
  expect_refusal(open("job", "ca=" + files_.make("client").ca_file).status(),
                 ErrorKind::kPermission, "speaks plain text");
}

TEST_F(EtcdAccess, BadInput_options_of_an_etcd) {
  const auto connect = [&](EtcdStoreOptions options, const std::string& host = "127.0.0.1") {
    options.prefix = "job";
    return EtcdStore::connect(host, 1, options, runtime_).status();
  };
  const auto invalid = ErrorKind::kInvalidArgument;
  expect_refusal(EtcdStore::connect({}, {.prefix = "job"}, runtime_).status(), invalid,
                 "1 to 64 endpoints");
  expect_refusal(connect({.password = "s3cret"}), invalid, "no user");
  expect_refusal(connect({.user = "weft"}), invalid, "give password_file");
  expect_refusal(connect({.user = "weft", .password = "s3cret", .password_file = "f"}), invalid,
                 "both password and password_file");
  expect_refusal(connect({.user = "weft", .password_file = "/no/such/file"}), invalid,
                 "/no/such/file");
  expect_refusal(connect({.user = "weft", .password_file = files_.write("empty", " \n")}), invalid,
                 "empty");
  expect_refusal(connect({.user = "weft", .password = "s3cret"}, "192.0.2.1"),
                 ErrorKind::kPermission, "in plain text: give ca_file");
  expect_refusal(connect({.cert_file = "c", .key_file = "k"}), invalid, "no ca_file");
  const Credentials own = files_.make("client");
  expect_refusal(connect({.ca_file = own.ca_file, .cert_file = own.cert_file}), invalid,
                 "together or not at all");
  expect_refusal(connect({.ca_file = own.key_file}), invalid, "holds no certificate");
  expect_refusal(connect({.ca_file = own.ca_file,
                          .cert_file = own.cert_file,
                          .key_file = files_.make("other").key_file}),
                 invalid, "does not fit");
  const auto old = launch::CertificateAuthority::make("old", absl::Now() - absl::Hours(2),
                                                      absl::Now() - absl::Hours(1));
  ASSERT_TRUE(old.ok()) << old.status();
  expect_refusal(connect({.ca_file = files_.write("old.pem", old->certificate())}),
                 ErrorKind::kPermission, "expired at");
  expect_refusal(open_store("etcd://weft:s3cret2@host/job", {}, runtime_).status(), invalid,
                 "?user=NAME&password_file=FILE");
}

// ETCD-4: the store goes on while most of the members do, and each change is made once.
TEST_F(EtcdAccess, AMemberThatIsLostOrSilentIsLeft) {
  start({.members = 3});
  auto store = open("job");
  ASSERT_TRUE(store.ok()) << store.status();
  int64_t sum = 0;
  const auto add = [&] {
    for (int i = 0; i < 5; ++i) {
      const StatusOr<int64_t> got = (*store)->add("n", 1);
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_EQ(*got, ++sum);
    }
  };
  add();
  for (size_t lost = 0; lost < 3; ++lost) {
    etcd_->kill(lost);
    add();
    etcd_->start();
    ASSERT_EQ(etcd_->problem(), "");
  }
  // Takes connections and says nothing, as a member that is stopped.
  const RawListener silent;
  std::vector<EtcdEndpoint> all = etcd_->endpoints();
  all.insert(all.begin(), EtcdEndpoint{"127.0.0.1", silent.port()});
  const absl::Time begin = runtime_->now();
  StatusOr<std::shared_ptr<EtcdStore>> other = EtcdStore::connect(all, {.prefix = "job"}, runtime_);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_GE(runtime_->now() - begin, absl::Milliseconds(4900))
      << "the first in the list is asked first";
  EXPECT_EQ(*(*other)->get("n"), absl::StrCat(sum));
  EXPECT_EQ(*(*other)->add("n", 1), sum + 1);
}

}  // namespace
}  // namespace weft::testing
