// open_store: every scheme, and what it says of URLs that are wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/store/prefix_store.h"
#include "weft/store/store.h"
#include "weft/tests/contract/etcd_process.h"
#include "weft/tests/contract/store_world.h"
#include "weft/tests/contract/tcp_tools.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;

class StoreUrl : public ::testing::Test {
 protected:
  std::shared_ptr<Store> open(const std::string& url, StoreOptions options = {}) {
    auto store = open_store(url, options, runtime_);
    EXPECT_TRUE(store.ok()) << store.status();
    return store.ok() ? *std::move(store) : nullptr;
  }
  std::shared_ptr<Runtime> runtime_ = make_system_runtime();
};

TEST_F(StoreUrl, Hash) {
  const auto a = open("hash://");
  ASSERT_TRUE(a->set("k", "v").ok());
  EXPECT_EQ(*open("hash://")->num_keys(), 0) << "each is a new one";
}

TEST_F(StoreUrl, File) {
  const std::string directory = make_temp_dir();
  const std::string url = "file://" + directory + "/store";
  ASSERT_TRUE(open(url, {.run_id = "r"})->set("k", "v").ok());
  EXPECT_EQ(*open(url + "?run_id=r")->get("k"), "v");
  EXPECT_EQ(*open(url + "?run_id=r2")->num_keys(), 0);
  const Status status = open_store(url, {}, runtime_).status();
  EXPECT_EQ(error_kind(status), ErrorKind::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("run id"));
  std::filesystem::remove_all(directory);
}

TEST_F(StoreUrl, TcpServerAndClients) {
  auto host = open("tcp://127.0.0.1:0", {.is_server = true});
  const auto client = open(host->describe());
  ASSERT_TRUE(client->set("k", "v").ok());
  EXPECT_EQ(*host->get("k"), "v");
}

TEST_F(StoreUrl, TcpHostStaysWhileAPrefixOfItIsUsed) {
  auto host = open("tcp://127.0.0.1:0", {.is_server = true});
  auto prefix = std::make_shared<PrefixStore>("p", host);
  host = nullptr;
  EXPECT_TRUE(prefix->set("k", "v").ok());
}

TEST_F(StoreUrl, TcpIpv6) {
  auto host = open_store("tcp://[::1]:0", {.is_server = true}, runtime_);
  if (!host.ok()) GTEST_SKIP() << "no IPv6 loopback: " << host.status();
  EXPECT_TRUE(open((*host)->describe())->set("k", "v").ok());
}

TEST_F(StoreUrl, TcpServerForAllInterfacesMustBeAllowed) {
  const Status status = open_store("tcp://0.0.0.0:0", {.is_server = true}, runtime_).status();
  EXPECT_EQ(error_kind(status), ErrorKind::kPermission) << status;
  EXPECT_TRUE(open("tcp://0.0.0.0:0?allow_insecure=1", {.is_server = true})->set("k", "v").ok());
}

TEST_F(StoreUrl, Etcd) {
  if (!EtcdProcess::missing().empty()) GTEST_SKIP() << EtcdProcess::missing();
  EtcdProcess etcd;
  ASSERT_EQ(etcd.problem(), "");
  const auto store = open(absl::StrCat("etcd://127.0.0.1:", etcd.port(), "/job/1"));
  ASSERT_TRUE(store->set("k", "v").ok());
  EXPECT_EQ(*open(store->describe())->get("k"), "v");
  EXPECT_EQ(*open(absl::StrCat("etcd://127.0.0.1:", etcd.port(), "/job"))->num_keys(), 0);
}

TEST_F(StoreUrl, WrongOnesAreNamed) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "begin with"},
      {"/tmp/store", "begin with"},
      {"redis://host:1", "redis"},
      {"env://", "weft::join"},
      {"hash://name", "no name"},
      {"file://relative", "absolute"},
      {"file:///tmp/x?run_id=r&color=red", "color"},
      {"tcp://", "no host"},
      {"tcp://host", "port"},
      {"tcp://host:", "port"},
      {"tcp://host:http", "port"},
      {"tcp://host:+5", "port"},
      {"tcp://host:65536", "port"},
      {"tcp://host:99999999999999", "port"},
      {"tcp://host:0", "port 0"},
      {"tcp://::1:5", "[]"},
      {"tcp://[::1:5", "]"},
      {"tcp://host:1?x=1", "x"},
      {"etcd://host:1", "prefix"},
      {"etcd://host:1/", "prefix"},
      {"etcd://:1/p", "no host"},
  };
  for (const auto& [url, part] : cases) {
    const Status status = open_store(url, {}, runtime_).status();
    EXPECT_EQ(error_kind(status), ErrorKind::kInvalidArgument) << url << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(part)) << url;
    EXPECT_THAT(std::string(status.message()), HasSubstr("'" + url + "'"));
  }
}

TEST_F(StoreUrl, AnUnreachableServerIsUnavailable) {
  const int port = RawListener().port();
  for (const std::string& url :
       {absl::StrCat("tcp://127.0.0.1:", port), absl::StrCat("etcd://127.0.0.1:", port, "/p")}) {
    const Status status = open_store(url, {.timeout = absl::Milliseconds(200)}, runtime_).status();
    EXPECT_EQ(error_kind(status), ErrorKind::kUnavailable) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("127.0.0.1:", port)));
  }
}

}  // namespace
}  // namespace weft::testing
