// RRef<T>::creation(): the future that tells when the object is there.

#include <vector>

#include "weft/tests/rref/fixture.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

class RRefCreation : public RRefTest {};

TEST_P(RRefCreation, DEF_32_completes_when_the_object_is_there) {
  auto c = make();
  {
    auto there = remote((*c)[0], 1, kOwnWaitAtGate);
    auto here = remote((*c)[0], 0, kOwnWaitAtGate);
    lib_.hold->wait_arrived(2);
    const std::vector<Future<void>> created = {there.creation(), here.creation()};
    for (const auto& f : created) EXPECT_FALSE(f.done());
    lib_.hold->open();
    for (const auto& f : created) EXPECT_EQ(f.try_wait(), absl::OkStatus());
    for (const auto& x : {there, here}) {
      EXPECT_TRUE(x.ready());
      EXPECT_EQ(x.to_here(), 7);
    }
    auto table = remote<Table>((*c)[0], 1, 5, "a class");
    table.creation().wait();
    const auto grown = table.remote(&Table::grow, 2);
    EXPECT_EQ(grown.creation().try_wait(), absl::OkStatus());
    EXPECT_EQ(table.rpc_sync(&Table::rows), 7) << "the method had run";
    EXPECT_EQ(IntRef::local((*c)[0], 3).creation().try_wait(), absl::OkStatus());
  }
  expect_nothing_left(*c);
}

TEST_P(RRefCreation, DEF_32_gives_the_error_that_uses_get) {
  auto c = make();
  {
    auto failed = remote<Table>((*c)[0], 1, -1);
    const Status why = failed.creation().try_wait();
    expect_error(why, ErrorKind::kUser, {"a table of -1 rows"});
    EXPECT_EQ(error_details(why).origin, "worker1");
    const Status use = failed.try_rpc_sync(&Table::rows).status();
    EXPECT_EQ(use.code(), why.code());
    EXPECT_EQ(use.message(), why.message());
    expect_error(failed.creation().try_wait(), ErrorKind::kUser, {"a table of -1 rows"});
    auto here = remote<Table>((*c)[0], 0, -1);
    expect_error(here.creation().try_wait(), ErrorKind::kUser, {"a table of -1 rows"});

    auto late = remote((*c)[0], 1, {.deadline = 200ms}, kOwnWaitAtGate);
    expect_error(late.creation().try_wait(), ErrorKind::kDeadline, {"deadline of 200ms"});
    lib_.hold->open();
    expect_error(IntRef().creation().try_wait(), ErrorKind::kState, {"refers to nothing"});
  }
  expect_nothing_left(*c);
}

TEST_P(RRefCreation, DEF_32_every_holder_may_wait_and_none_for_a_turn) {
  auto c = make();
  {
    auto x = remote((*c)[0], 1, kOwnWaitAtGate);
    lib_.hold->wait_arrived(1);
    std::vector<Future<int64_t>> waiting;
    for (const int at : {0, 1, 2}) waiting.push_back(rpc_async((*c)[0], at, &await_creation, x));
    eventually((*c)[1], [&] { return counter((*c)[1], "rref_parked_uses") == 3; }, "they wait");
    lib_.hold->open();
    for (const auto& f : waiting) EXPECT_EQ(f.try_wait().value_or(0), 7);
    auto pairs = remote<Batch>((*c)[0], 1);
    auto busy = remote<Table>((*c)[0], 1, 1);
    const IntRef held = remote((*c)[0], 2, FunctionRef<int64_t()>{"own.wait_at_second_gate"});
    lib_.second->wait_arrived(1);
    const auto turn = busy.rpc_async(&Table::add_of, held);
    eventually((*c)[2], [&] { return counter((*c)[2], "rref_parked_uses") == 1; }, "it runs");
    EXPECT_EQ(busy.creation().try_wait(), absl::OkStatus()) << "a method of it runs";
    EXPECT_EQ(pairs.creation().try_wait(), absl::OkStatus()) << "an object that cannot be sent";
    lib_.second->open();
    EXPECT_EQ(turn.try_wait().value_or(0), 9);
  }
  expect_nothing_left(*c);
}

TEST_P(RRefCreation, DEF_32_cancel_ends_the_wait_alone) {
  auto c = make();
  {
    auto x = remote((*c)[0], 1, kOwnWaitAtGate);
    lib_.hold->wait_arrived(1);
    Future<void> mine = x.creation();
    std::vector<Future<void>> others;
    for (int i = 0; i < 1000; ++i) others.push_back(x.creation());
    EXPECT_TRUE(mine.cancel());
    expect_error(mine.try_wait(), ErrorKind::kCancelled, {});
    expect_error(x.creation({.deadline = 50ms}).try_wait(), ErrorKind::kDeadline, {"50ms"});
    EXPECT_FALSE(others.front().done());
    lib_.hold->open();
    for (const auto& f : others) EXPECT_EQ(f.try_wait(), absl::OkStatus());
    EXPECT_EQ(x.to_here(), 7);
    EXPECT_EQ(x.creation({.deadline = 20s}).try_wait(), absl::OkStatus());
  }
  expect_nothing_left(*c);
}

TEST_P(RRefCreation, DEF_32_outlives_the_last_handle_and_ends_with_the_worker) {
  auto c = make({.size = 2, .fail_on_leak = false});
  auto x = remote((*c)[0], 1, kOwnWaitAtGate);
  const Future<void> dropped = x.creation();
  lib_.hold->wait_arrived(1);
  x.reset();
  lib_.hold->open();
  EXPECT_EQ(dropped.try_wait(), absl::OkStatus());
  expect_nothing_left(*c);

  auto made = remote((*c)[0], 1, &add, 1, 2);
  EXPECT_EQ(made.to_here(), 3);
  auto mine = IntRef::local((*c)[0], 1);
  c->shutdown_all({.deadline = 20s});
  expect_error(made.creation().try_wait(), ErrorKind::kState, {});
  expect_error(mine.creation().try_wait(), ErrorKind::kState, {});
}

INSTANTIATE_TEST_SUITE_P(Nets, RRefCreation, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
