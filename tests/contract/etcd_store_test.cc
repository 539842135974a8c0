// What EtcdStore alone promises: a change takes effect once, though answers are lost and etcd dies.
#include "weft/store/etcd_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/store/tcp_store.h"
#include "weft/tests/contract/etcd_process.h"
#include "weft/tests/contract/tcp_tools.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

class EtcdStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!EtcdProcess::missing().empty()) GTEST_SKIP() << EtcdProcess::missing();
    etcd_ = std::make_unique<EtcdProcess>();
    ASSERT_EQ(etcd_->problem(), "");
  }
  StatusOr<std::shared_ptr<EtcdStore>> connect(int port, Timeout timeout = {}) {
    return EtcdStore::connect("127.0.0.1", port, {.prefix = "job", .timeout = timeout}, runtime_);
  }

  std::shared_ptr<Runtime> runtime_ = make_system_runtime();
  std::unique_ptr<EtcdProcess> etcd_;
};

TEST_F(EtcdStoreTest, AnAnswerThatIsLostDoesNotApplyTwice) {
  Relay relay(etcd_->port());
  auto store = connect(relay.port());
  ASSERT_TRUE(store.ok()) << store.status();
  int cuts = 0;  // of reads and of writes: a change is both
  for (int i = 1; i <= 20; ++i) {
    relay.cut_answer(1 + i % 4);
    const StatusOr<int64_t> sum = (*store)->add("n", 1);
    ASSERT_TRUE(sum.ok()) << sum.status();
    EXPECT_EQ(*sum, i);
    cuts += relay.was_cut();
  }
  EXPECT_GT(cuts, 0);
  relay.cut_answer();
  EXPECT_EQ(*(*store)->compare_set("c", "", "mine"), "mine");
  relay.cut_answer();
  EXPECT_TRUE(*(*store)->delete_key("c"));
  auto direct = connect(etcd_->port());
  EXPECT_EQ(*(*direct)->get("n"), "20");
}

TEST_F(EtcdStoreTest, AKilledEtcdThatComesBackIsWaitedFor) {
  auto store = connect(etcd_->port());
  ASSERT_TRUE(store.ok()) << store.status();
  std::atomic<int> done{0};
  std::thread adder([&] {
    for (int i = 1; i <= 30; ++i) {
      const StatusOr<int64_t> sum = (*store)->add("n", 1);
      ASSERT_TRUE(sum.ok()) << sum.status();
      EXPECT_EQ(*sum, i);
      ++done;
    }
  });
  std::thread waiter([&] {
    const StatusOr<std::string> got = (*store)->get("go");
    EXPECT_TRUE(got.ok()) << got.status();
  });
  etcd_->kill();
  etcd_->start();
  EXPECT_EQ(etcd_->problem(), "");
  adder.join();
  EXPECT_EQ(done, 30);
  EXPECT_TRUE((*store)->set("go", "").ok());
  waiter.join();
}

TEST_F(EtcdStoreTest, AKilledEtcdIsUnavailableWithinTheDeadline) {
  auto store = connect(etcd_->port());
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_TRUE((*store)->set("k", "v").ok());
  etcd_->kill();
  EXPECT_EQ(error_kind((*store)->set("k", "v", 200ms)), ErrorKind::kUnavailable);
  EXPECT_EQ(error_kind((*store)->get("k", 200ms).status()), ErrorKind::kUnavailable);
  std::thread waiter([&] {
    EXPECT_EQ(error_kind((*store)->get("k", kInfinite).status()), ErrorKind::kCancelled);
  });
  (*store)->interrupt();
  waiter.join();
}

TEST_F(EtcdStoreTest, SomethingElseIsFoundOutAtOnce) {
  auto server = TcpStoreServer::start({}, runtime_);
  ASSERT_TRUE(server.ok()) << server.status();
  const Status status = connect((*server)->port(), 30s).status();
  EXPECT_EQ(error_kind(status), ErrorKind::kUnimplemented) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no etcd"));
}

TEST_F(EtcdStoreTest, RunsWithOtherPrefixesAreNotSeen) {
  auto store = connect(etcd_->port());
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_TRUE((*store)->set("k", "v").ok());
  auto longer = EtcdStore::connect("127.0.0.1", etcd_->port(), {.prefix = "job2"}, runtime_);
  EXPECT_EQ(*(*longer)->num_keys(), 0);
  EXPECT_EQ(error_kind(EtcdStore::connect("127.0.0.1", etcd_->port(), {}, runtime_).status()),
            ErrorKind::kInvalidArgument);
}

}  // namespace
}  // namespace weft::testing
