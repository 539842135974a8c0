// Ids and byte budgets.
#include <set>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/hash/hash.h"
#include "gtest/gtest.h"
#include "weft/common/byte_budget.h"
#include "weft/common/error.h"
#include "weft/common/id.h"
#include "weft/common/sim.h"

namespace weft {
namespace {

TEST(Id, IsPrintedComparedAndHashed) {
  EXPECT_EQ(to_string(WorkerId(3)), "3");
  EXPECT_EQ(to_string(Incarnation(0xbeef)), "000000000000beef");
  EXPECT_EQ(to_string(CallId(~uint64_t{0})), "18446744073709551615");
  EXPECT_EQ(to_string(JobId(0x12, 0xab)), "000000000000001200000000000000ab");
  EXPECT_LT(WorkerId(1), WorkerId(2));
  EXPECT_EQ(CallId(7), CallId(7));
  EXPECT_LT(JobId(1, ~uint64_t{0}), JobId(2, 0));
  EXPECT_EQ((std::set<CallId>{CallId(2), CallId(1), CallId(2)}).size(), 2u);
  EXPECT_EQ((std::unordered_set<JobId>{JobId(1, 2), JobId(1, 2), JobId(2, 1)}).size(), 2u);
  EXPECT_EQ(absl::HashOf(Incarnation(9)), absl::HashOf(Incarnation(9)));
  EXPECT_NE(absl::HashOf(JobId(1, 2)), absl::HashOf(JobId(2, 1)));
  static_assert(!std::is_convertible_v<CallId, WorkerId>);
  static_assert(!std::is_constructible_v<WorkerId, CallId>);
  static_assert(!std::is_convertible_v<uint32_t, WorkerId>);
}

TEST(Id, JobIdIsReadBack) {
  const JobId id(0x0123456789abcdefu, 0xfedcba9876543210u);
  EXPECT_EQ(JobId::parse(to_string(id)), id);
  EXPECT_EQ(JobId::parse("FF"), JobId(0, 255));
  EXPECT_EQ(JobId::parse("10000000000000000"), JobId(1, 0));
  EXPECT_FALSE(JobId::parse("").has_value());
  EXPECT_FALSE(JobId::parse("xyz").has_value());
  EXPECT_FALSE(JobId::parse("0x12").has_value());
  EXPECT_FALSE(JobId::parse(std::string(33, '1')).has_value());
  EXPECT_FALSE(JobId::parse(std::string_view("1\0", 2)).has_value());
}

TEST(Id, RandomOnesComeFromTheRuntime) {
  SimRuntime a({.seed = 5});
  SimRuntime b({.seed = 5});
  SimRuntime c({.seed = 6});
  const JobId first = random_job_id(a.random());
  EXPECT_EQ(first, random_job_id(b.random()));
  EXPECT_NE(first, random_job_id(c.random()));
  EXPECT_FALSE(first.is_zero());
  EXPECT_NE(random_incarnation(a.random()), random_incarnation(a.random()));
}

TEST(ByteBudget, RefusesWhatDoesNotFit) {
  ByteBudget budget(100, "receive from ps0");
  EXPECT_TRUE(budget.charge(60).ok());
  EXPECT_TRUE(budget.charge(40).ok());
  const absl::Status refused = budget.charge(1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(error_kind(refused), ErrorKind::kResource);
  for (const char* part : {"receive from ps0", "1 bytes asked", "100 of 100"}) {
    EXPECT_NE(std::string(refused.message()).find(part), std::string::npos) << refused;
  }
  EXPECT_EQ(budget.used(), 100u);
  EXPECT_EQ(budget.refused(), 1u);
  budget.release(100);
  EXPECT_EQ(budget.used(), 0u);
  EXPECT_EQ(budget.peak(), 100u);
}

TEST(ByteBudget, CannotBeOverflownByAHostileLength) {
  ByteBudget budget(ByteBudget::kUnlimited, "all");
  EXPECT_TRUE(budget.charge(10).ok());
  EXPECT_FALSE(budget.charge(~uint64_t{0}).ok());
  EXPECT_TRUE(budget.charge(~uint64_t{0} - 10).ok());
  EXPECT_FALSE(budget.charge(1).ok());
  budget.release(~uint64_t{0});
  ByteBudget none(0, "none");
  EXPECT_TRUE(none.charge(0).ok());
  EXPECT_FALSE(none.charge(1).ok());
}

TEST(ByteBudget, ParentRefusesForAllChildrenAndNothingIsLeftCharged) {
  ByteBudget worker(100, "worker");
  ByteBudget a(80, "a", &worker);
  ByteBudget b(80, "b", &worker);
  EXPECT_TRUE(a.charge(70).ok());
  const absl::Status refused = b.charge(40);
  EXPECT_NE(std::string(refused.message()).find("'worker'"), std::string::npos) << refused;
  EXPECT_EQ(b.used(), 0u);
  EXPECT_EQ(b.refused(), 0u);
  EXPECT_EQ(worker.refused(), 1u);
  EXPECT_EQ(worker.used(), 70u);
  EXPECT_TRUE(b.charge(30).ok());
  a.release(70);
  b.release(30);
  EXPECT_EQ(worker.used(), 0u);
}

TEST(ByteBudget, ChargeGivesBack) {
  ByteBudget budget(100, "x");
  {
    auto charge = ByteCharge::make(&budget, 60);
    ASSERT_TRUE(charge.ok());
    ByteCharge moved = *std::move(charge);
    EXPECT_EQ(budget.used(), 60u);
    EXPECT_TRUE(moved.resize(90).ok());
    EXPECT_FALSE(moved.resize(101).ok());
    EXPECT_EQ(moved.bytes(), 90u);
    EXPECT_TRUE(moved.resize(20).ok());
    EXPECT_EQ(budget.used(), 20u);
    auto other = ByteCharge::make(&budget, 5);
    ASSERT_TRUE(other.ok());
    moved = *std::move(other);
    EXPECT_EQ(budget.used(), 5u);
  }
  EXPECT_EQ(budget.used(), 0u);
  EXPECT_FALSE(ByteCharge::make(&budget, 101).ok());
}

TEST(ByteBudget, ThreadsNeverPassTheLimit) {
  ByteBudget worker(1000, "worker");
  ByteBudget peer(900, "peer", &worker);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      ByteBudget* mine = t % 2 == 0 ? &peer : &worker;
      for (int i = 0; i < 2000; ++i) {
        auto charge = ByteCharge::make(mine, static_cast<uint64_t>(100 + i % 300));
        EXPECT_LE(worker.used(), 1000u);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(worker.used(), 0u);
  EXPECT_EQ(peer.used(), 0u);
  EXPECT_LE(worker.peak(), 1000u);
  EXPECT_LE(peer.peak(), 900u);
}

TEST(ByteBudgetDeathTest, GivingBackTooMuchIsOurBug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        ByteBudget budget(10, "mine");
        budget.release(1);
      },
      "check failed.*budget 'mine'");
}

}  // namespace
}  // namespace weft
