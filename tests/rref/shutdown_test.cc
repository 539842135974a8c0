// Counts after each step, what is alive at shutdown, nested fetches, and many lives.

#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/tests/rref/fixture.h"
#include "weft/tests/testing/environment.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

class RRefShutdown : public RRefTest {};

TEST_P(RRefShutdown, RPC_110_rref_context_debug_info) {
  auto c = make();
  const auto expect = [&](size_t worker, int owners, int forks, int users) {
    eventually((*c)[worker],
               [&] {
                 return counter((*c)[worker], "rref_owners") == owners &&
                        counter((*c)[worker], "rref_forks") == forks &&
                        counter((*c)[worker], "rref_users") == users;
               },
               absl::StrCat("worker", worker, " should have ", owners, " ", forks, " ", users));
  };
  {
    auto mine = IntRef::local((*c)[0], 1);
    expect(0, 1, 0, 0);
    IntRef back = rpc_sync((*c)[0], 1, &give_back, mine);
    EXPECT_TRUE(back.is_owner());
    expect(0, 1, 0, 0);
    expect(1, 0, 0, 0);
    auto there = remote((*c)[0], 1, &add, 1, 2);
    there.to_here();
    expect(0, 1, 0, 1);
    expect(1, 1, 1, 0);
    const auto held = remote((*c)[0], 2, &give_back, there);  // worker2 keeps a share in it
    held.to_here();
    expect(1, 1, 2, 0);
    expect(2, 1, 1, 1);
  }
  for (size_t i = 0; i < 3; ++i) expect(i, 0, 0, 0);
  expect_nothing_left(*c);
}

TEST_P(RRefShutdown, RPC_111_rref_leak) {
  auto c = make({.fail_on_leak = true});
  IntRef leaked;
  {
    leaked = remote((*c)[0], "worker1", &add, 1, 2);
    EXPECT_EQ(leaked.to_here(), 3);
    const std::vector<LiveRRef> here = live_rrefs((*c)[0]);
    ASSERT_EQ(here.size(), 1U);
    EXPECT_EQ(here[0].id, leaked.id());
    EXPECT_EQ(here[0].owner, "'worker1'");
    EXPECT_EQ(here[0].holder, "'worker0'");
    EXPECT_EQ(here[0].created_at.rfind("shutdown_test.cc:", 0), 0U) << here[0].created_at;
    EXPECT_GE(here[0].age, absl::ZeroDuration());
    const std::vector<LiveRRef> there = live_rrefs((*c)[1]);
    ASSERT_EQ(there.size(), 1U);
    EXPECT_EQ(there[0].holder, "'worker0'");
  }
  const auto results = c->shutdown_all();
  expect_error(
      results[0].status, ErrorKind::kState,
      {"RRefs still alive", "of 'worker1', held by 'worker0'", "shutdown_test.cc:", " old"});
  // So does its owner: no worker gives anything back before all have looked.
  expect_error(results[1].status, ErrorKind::kState, {"RRefs still alive", "held by 'worker0'"});
  EXPECT_TRUE(results[2].status.ok()) << results[2].status;
  // Taken back all the same.
  for (size_t i = 0; i < 3; ++i) {
    for (const char* name : {"rref_forks", "rref_users", "rref_owners", "rref_unacknowledged"}) {
      EXPECT_EQ(counter((*c)[i], name), 0) << i << name;
    }
  }
}

TEST_P(RRefShutdown, RPC_112_ignore_rref_leak_and_X12_a_live_leak) {
  auto c = make({.fail_on_leak = false});
  std::vector<IntRef> leaked;
  std::vector<RRef<Table>> tables;
  for (int i = 0; i < 10; ++i) {
    leaked.push_back(remote((*c)[static_cast<size_t>(i) % 3], (i + 1) % 3, &add, 1, i));
    tables.push_back(remote<Table>((*c)[0], 1 + i % 2, i));
  }
  c->shutdown();
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(counter((*c)[i], "rref_forks"), 0);
    EXPECT_EQ(counter((*c)[i], "rref_unacknowledged"), 0);
  }
  EXPECT_EQ(Table::alive(), 0);
}

// A handle that keeps itself: it will never be dropped.
TEST_P(RRefShutdown, RPC_113_handles_in_a_cycle_are_swept) {
  struct Cycle {
    std::shared_ptr<Cycle> self;
    IntRef held;
  };
  auto c = make({.fail_on_leak = false});
  auto cycle = std::make_shared<Cycle>();
  cycle->self = cycle;
  cycle->held = remote((*c)[0], 1, &add, 1, 2);
  EXPECT_EQ(cycle->held.to_here(), 3);
  const std::weak_ptr<Cycle> weak = cycle;
  cycle.reset();
  c->shutdown();
  EXPECT_EQ(counter((*c)[1], "rref_owners"), 0);
  weak.lock()->self.reset();  // for the sanitizers
}

TEST_P(RRefShutdown, HandlesOutliveTheirWorker) {
  IntRef x;
  RRef<Table> table;
  {
    auto c = make({.fail_on_leak = false});
    x = remote((*c)[0], 1, &add, 1, 2);
    table = RRef<Table>::local((*c)[0], Table(3));
    EXPECT_EQ(table.local_value()->rows(), 3);
    EXPECT_EQ(table.rpc_sync(&Table::grow, 1), 4);
  }
  expect_error(x.try_to_here().status(), ErrorKind::kState, {"shut down"});
  EXPECT_EQ(x.owner_name(), "worker1");
  const IntRef copy = x;
  EXPECT_EQ(copy, x);
}

// X8: each level waits in to_here for the next, on workers with one thread.
int64_t dig(CallContext& context, std::vector<std::string> ring, int64_t depth) {
  if (depth == 0) return 0;
  const std::string& next = ring[static_cast<size_t>(depth) % ring.size()];
  return 1 + remote(context.worker(), next, &dig, ring, depth - 1).to_here();
}

TEST_P(RRefShutdown, X8_nested_to_here) {
  Library own("dig");
  own.def("dig", &dig);
  lib_.library.merge(own);
  auto c = make({.size = 3, .threads = 1});
  EXPECT_EQ(rpc_sync((*c)[0], 1, &dig, std::vector<std::string>{"worker0", "worker1"}, 100), 100);
  EXPECT_EQ(
      rpc_sync((*c)[0], 1, &dig, std::vector<std::string>{"worker0", "worker1", "worker2"}, 100),
      100);
  EXPECT_EQ(rpc_sync((*c)[0], 0, &dig, std::vector<std::string>{"worker0"}, 100), 100);
  expect_nothing_left(*c);
}

// Created, shared with a third worker, dropped: nothing stays, not even a tombstone for each.
TEST_P(RRefShutdown, ManyLives) {
  const int cycles = weft::testing::environment_number("WEFT_RREF_CYCLES", 10'000);
  auto c = make();
  std::vector<Future<int64_t>> under_way;
  for (int i = 0; i < cycles; ++i) {
    auto x = remote((*c)[0], 1, &add, i, 1);
    under_way.push_back(rpc_async((*c)[0], 2, &fetch_async, x));
    if (under_way.size() < 100) continue;
    for (const auto& f : under_way) f.wait();
    under_way.clear();
  }
  expect_nothing_left(*c);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_LT(counter((*c)[i], "rref_tombstones"), 300) << i;
    EXPECT_EQ(counter((*c)[i], "rref_faults"), 0) << i;
    EXPECT_EQ(counter((*c)[i], "rref_control_resent"), 0) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Nets, RRefShutdown, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
