// remote, to_here, methods, local objects and sharing: RPC-85 to RPC-109, on each transport.

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "ATen/ops/equal.h"
#include "ATen/ops/ones.h"
#include "weft/tests/rref/fixture.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

class RRefApi : public RRefTest {};

TEST_P(RRefApi, RPC_85_builtin_remote_ret_and_RPC_87_py_udf_remote) {
  auto c = make();
  {
    const at::Tensor x = at::ones({2, 3});
    auto sum = remote((*c)[0], "worker1", &add_tensors, x, x);
    static_assert(std::is_same_v<decltype(sum), RRef<at::Tensor>>);
    EXPECT_FALSE(sum.is_owner());
    EXPECT_EQ(sum.owner_name(), "worker1");
    EXPECT_EQ(sum.owner(), (*c)[1].info());
    EXPECT_TRUE(at::equal(sum.to_here(), add_tensors(x, x)));
    EXPECT_TRUE(sum.ready());
    eventually((*c)[0], [&] { return sum.confirmed_by_owner(); }, "its call's answer says so");
    EXPECT_EQ(counter((*c)[1], "rref_owners"), 1);
    EXPECT_EQ(counter((*c)[1], "rref_forks"), 1);
    EXPECT_EQ(counter((*c)[0], "rref_users"), 1);
    auto other = sum;  // a handle, not a share
    EXPECT_EQ(counter((*c)[0], "rref_users"), 1);
    EXPECT_EQ(other, sum);
    sum.reset();
    EXPECT_TRUE(at::equal(other.to_here_async().wait(), add_tensors(x, x)));
  }
  expect_nothing_left(*c);
}

TEST_P(RRefApi, DEF_2_a_fetch_is_what_the_object_was) {
  const auto plan = std::make_shared<FaultPlan>(7);
  auto c = make({.plan = plan});
  {
    auto held = remote((*c)[0], "worker1", &echo, at::ones({kMiB}));
    held.to_here();
    plan->add({.fault = Fault::kDelay,
               .kind = FrameKind::kChunk,
               .from = "worker1",
               .times = 1,
               .delay = absl::Milliseconds(300)});
    const Future<at::Tensor> fetched = held.to_here_async();
    rpc_sync((*c)[0], "worker1", FunctionRef<void(RRef<at::Tensor>)>{"own.add_one"}, held);
    EXPECT_EQ(fetched.wait().max().item<double>(), 1) << "the fetched value changed on its way";
    EXPECT_EQ(held.to_here().max().item<double>(), 2);
    plan->clear();
  }
  expect_nothing_left(*c);
}

TEST_P(RRefApi, DEF_10_methods_of_an_object_may_wait_for_each_others_calls) {
  auto c = make();
  {
    auto pairs = remote<Batch>((*c)[0], "worker1");
    const Future<int64_t> one = pairs.rpc_async(&Batch::add, 20);
    const Future<int64_t> two = pairs.rpc_async(&Batch::add, 22);
    EXPECT_EQ(one.try_wait(20s).value_or(0), 42);
    EXPECT_EQ(two.try_wait(20s).value_or(0), 42);
  }
  expect_nothing_left(*c);
}

TEST_P(RRefApi, RPC_86_builtin_remote_self) {
  auto c = make({.size = 1});
  {
    auto sum = remote((*c)[0], "worker0", &add, 40, 2);
    EXPECT_TRUE(sum.is_owner());
    EXPECT_TRUE(sum.confirmed_by_owner());
    EXPECT_EQ(sum.to_here(), 42);
    EXPECT_EQ(*sum.local_value(), 42);
    auto failed = remote((*c)[0], 0, &throw_error, "runtime");
    expect_error(error_of([&] { failed.to_here(); }), ErrorKind::kUser, {"it broke"});
    expect_error(error_of([&] { failed.local_value(); }), ErrorKind::kUser, {"it broke"});
  }
  expect_nothing_left(*c);
  EXPECT_EQ(counter((*c)[0], "rref_control_items"), 0);
}

TEST_P(RRefApi, RPC_88_multi_remote) {
  auto c = make();
  {
    std::vector<IntRef> refs;
    for (int i = 0; i < 100; ++i) refs.push_back(remote((*c)[0], 1 + i % 2, &add, i, 1));
    std::vector<Future<int64_t>> values;
    for (const IntRef& r : refs) values.push_back(r.to_here_async());
    for (int i = 0; i < 100; ++i) EXPECT_EQ(values[static_cast<size_t>(i)].wait(), i + 1);
  }
  expect_nothing_left(*c);
}

TEST_P(RRefApi, RPC_89_py_rref_args_and_RPC_90_py_rpc_rref_args) {
  auto c = make();
  {
    auto a = remote((*c)[0], 1, &add, 1, 2);
    auto b = remote((*c)[0], 1, &add, 3, 4);
    EXPECT_EQ(rpc_sync((*c)[0], 1, &fetch_both, a, b), 10) << "at their owner";
    EXPECT_EQ(rpc_sync((*c)[0], 2, &fetch_both, a, b), 10) << "at a third worker";
    EXPECT_EQ(rpc_sync((*c)[0], 0, &fetch_both, a, b), 10) << "here";
    EXPECT_EQ(remote((*c)[0], 1, &fetch_both, a, b).to_here(), 10);
    EXPECT_EQ(remote((*c)[0], 2, &fetch_both, a, b).to_here(), 10);
    EXPECT_EQ(rpc_sync((*c)[0], 2, &fetch_async, a), 3);
  }
  expect_nothing_left(*c);
}

TEST_P(RRefApi, RPC_91_py_rref_args_user_share) {
  auto c = make();
  {
    auto a = remote((*c)[0], 1, &add, 1, 2);
    EXPECT_EQ(rpc_sync((*c)[0], 2, &fetch, a), 3);
    // The handle goes while its child is not confirmed.
    auto f = rpc_async((*c)[0], 2, &fetch, remote((*c)[0], 1, &add, 5, 5));
    EXPECT_EQ(f.wait(), 10);
  }
  expect_nothing_left(*c);
}

TEST_P(RRefApi, RPC_92_nested_remote_and_RPC_93_nested_rref) {
  auto c = make();
  {
    auto inner = remote((*c)[0], 1, &make_at, "worker2", 20, 22);
    static_assert(std::is_same_v<decltype(inner), RRef<RRef<int64_t>>>);
    const IntRef value = inner.to_here();
    EXPECT_EQ(value.owner_name(), "worker2");
    EXPECT_EQ(value.to_here(), 42);
    EXPECT_EQ(kind_of<RRef<RRef<int64_t>>>(), "rref<rref<int>>");
    EXPECT_EQ(kind_of<RRef<Table>>(), "rref<object>");
  }
  expect_nothing_left(*c);
}

TEST_P(RRefApi, RPC_94_nested_rref_stress) {
  auto c = make();
  {
    std::vector<RRef<IntRef>> all;
    for (int i = 0; i < 20; ++i) {
      all.push_back(remote((*c)[0], 1 + i % 2, &make_at, i % 3 == 0 ? "worker0" : "worker2", i, i));
    }
    for (int i = 0; i < 20; ++i) EXPECT_EQ(all[static_cast<size_t>(i)].to_here().to_here(), 2 * i);
  }
  expect_nothing_left(*c);
}

TEST_P(RRefApi, RPC_95_rref_forward_chain) {
  auto c = make({.size = 4});
  {
    auto x = remote((*c)[0], 1, &add, 1, 2);
    const std::vector<std::string> path = {"worker3", "worker2", "worker0", "worker1",
                                           "worker1", "worker2", "worker3", "worker0"};
    EXPECT_EQ(rpc_sync((*c)[0], 2, &forward, path, x), 3);
  }
  expect_nothing_left(*c);
}

TEST_P(RRefApi, RPC_96_rpc_return_rref_and_RPC_97_return_local_rrefs) {
  auto c = make();
  {
    const IntRef far = rpc_sync((*c)[0], 1, &make_at, "worker2", 1, 2);
    EXPECT_EQ(far.owner_name(), "worker2");
    EXPECT_EQ(far.to_here(), 3);
    const IntRef theirs = rpc_sync((*c)[0], 1, &make_here, 5);
    EXPECT_EQ(theirs.owner_name(), "worker1");
    EXPECT_EQ(theirs.to_here(), 5);
    const IntRef back = rpc_sync((*c)[0], 2, &give_back, theirs);
    EXPECT_EQ(back.id(), theirs.id());
    EXPECT_EQ(back.to_here(), 5);
    const IntRef mine = rpc_sync((*c)[0], 0, &make_here, 6);
    EXPECT_TRUE(mine.is_owner());
    EXPECT_EQ(*mine.local_value(), 6);
    const IntRef home = rpc_sync((*c)[0], 1, &make_at, "worker0", 3, 4);
    EXPECT_TRUE(home.is_owner()) << "its creator is worker1, its owner this one";
    EXPECT_EQ(*home.local_value(), 7);
  }
  expect_nothing_left(*c);
}

TEST_P(RRefApi, RPC_98_pass_local_rrefs_and_RPC_106_local_rref_no_fork) {
  auto c = make();
  {
    auto mine = IntRef::local((*c)[0], 9);
    EXPECT_TRUE(mine.is_owner());
    EXPECT_EQ(mine.to_here(), 9);
    EXPECT_EQ(*mine.local_value(), 9);
    EXPECT_EQ(counter((*c)[0], "rref_forks"), 0);
    EXPECT_EQ(counter((*c)[0], "rref_control_items"), 0);
    EXPECT_EQ(rpc_sync((*c)[0], 1, &fetch, mine), 9);
    EXPECT_EQ(rpc_sync((*c)[0], 1, &forward, std::vector<std::string>{"worker2"}, mine), 9);
    EXPECT_EQ(remote((*c)[0], 2, &fetch, mine).to_here(), 9);
  }
  expect_nothing_left(*c);
}

TEST_P(RRefApi, RPC_99_self_remote_rref_through_all_paths) {
  auto c = make();
  {
    auto self = remote((*c)[0], 0, &add, 1, 1);
    EXPECT_EQ(rpc_sync((*c)[0], 1, &fetch, self), 2);
    EXPECT_EQ(rpc_sync((*c)[0], 0, &fetch, self), 2);
    EXPECT_EQ(remote((*c)[0], 1, &fetch, self).to_here(), 2);
    EXPECT_EQ(remote((*c)[0], 0, &fetch, self).to_here(), 2);
  }
  expect_nothing_left(*c);
}

TEST_P(RRefApi, RPC_100_remote_same_worker) {
  auto c = make();
  {
    auto a = remote((*c)[0], 1, &add, 1, 2);
    auto b = remote((*c)[0], 1, &add, 3, 4);
    EXPECT_EQ(remote((*c)[0], 1, &local_sum, a, b).to_here(), 10);
  }
  expect_nothing_left(*c);
}

TEST_P(RRefApi, RPC_101_call_method_on_rref_and_RPC_102_rref_proxy_class_and_RPC_103_reuse) {
  auto c = make();
  {
    auto table = remote<Table>((*c)[0], "worker1", 40);
    auto labelled = remote<Table>((*c)[0], "worker1", {.deadline = 10s}, 1, "one");
    static_assert(std::is_same_v<decltype(table), RRef<Table>>);
    EXPECT_EQ(table.rpc_sync(&Table::rows), 40);
    EXPECT_EQ(table.rpc_async(&Table::grow, 2).wait(), 42);
    EXPECT_EQ(table.rpc_async({.deadline = 5s}, &Table::grow, 1).wait(), 43);
    EXPECT_EQ(table.remote(&Table::grow, 1).to_here(), 44);
    EXPECT_EQ(*table.try_rpc_sync(&Table::rows), 44);
    EXPECT_EQ(labelled.rpc_sync(&Table::label), "one");
    EXPECT_EQ(table.rpc_sync(FunctionRef<int64_t(int64_t)>{"own.Table.grow"}, 6), 50);
    EXPECT_EQ(rpc_sync((*c)[0], 2, &rows_of, table), 50);
    EXPECT_EQ(rpc_sync((*c)[0], 1, &rows_of, table), 50);
    const auto add_one = remote((*c)[0], 2, &add, 0, 1);
    EXPECT_EQ(table.rpc_sync(&Table::add_of, add_one), 51) << "an RRef as argument of a method";
    EXPECT_EQ(Table::alive(), 2);
  }
  expect_nothing_left(*c);
}

TEST_P(RRefApi, RPC_83_async_class_rref_proxy) {
  auto c = make();
  {
    auto table = remote<Table>((*c)[0], 1, 1);
    EXPECT_EQ(table.rpc_sync(&Table::grow_later, "worker2", 1), 2);
    EXPECT_EQ(table.rpc_async(&Table::grow_later, "worker2", 1).wait(), 3);
    EXPECT_EQ(table.remote(&Table::grow_later, "worker2", 1).to_here(), 4);
  }
  expect_nothing_left(*c);
}

TEST_P(RRefApi, RRefsTravelInContainersAndStructs) {
  auto c = make();
  {
    Parcel parcel;
    for (int i = 0; i < 3; ++i) parcel.list.push_back(remote((*c)[0], i, &add, i, 0));
    parcel.by_name["ten"] = IntRef::local((*c)[0], 10);
    parcel.table = remote<Table>((*c)[0], 2, 100);
    for (int to = 0; to < 3; ++to) EXPECT_EQ(rpc_sync((*c)[0], to, &fetch_parcel, parcel), 113);
    const auto all = rpc_async((*c)[0], std::vector<Destination>{0, 1, 2}, &fetch_parcel, parcel);
    for (const auto& f : all) EXPECT_EQ(f.wait(), 113);
    std::vector<IntRef> many;
    for (int i = 0; i < 1000; ++i) many.push_back(remote((*c)[0], 1 + i % 2, &add, 1, 0));
    EXPECT_EQ(rpc_sync((*c)[0], 1, &fetch_parcel, Parcel{many, {}, {}}), 1000);
  }
  expect_nothing_left(*c);
}

// a.remote(&f).rpc_async(&g): the last call is sent before the first value is there.
TEST_P(RRefApi, ChainsOverOneOwnerCostOneRoundTrip) {
  auto c = make();
  {
    auto gate = remote((*c)[0], 1, FunctionRef<int64_t()>{"own.wait_at_gate"});
    lib_.hold->wait_arrived(1);
    const int64_t issued = counter((*c)[0], "calls_issued");
    auto table = remote<Table>((*c)[0], 1, 5);
    auto point = table.remote(&Table::point, 1.5);
    EXPECT_EQ(point.to_here().x, 5);
    EXPECT_EQ(counter((*c)[0], "calls_issued"), issued + 3) << "no question but these calls";
    // Parked at the owner, on no thread: there are 4.
    std::vector<Future<int64_t>> waiting;
    for (int i = 0; i < 20; ++i) waiting.push_back(gate.to_here_async());
    eventually((*c)[1], [&] { return counter((*c)[1], "rref_parked_uses") == 20; }, "parked");
    EXPECT_EQ(rpc_sync((*c)[0], 1, &add, 1, 1), 2);
    lib_.hold->open();
    for (const auto& f : waiting) EXPECT_EQ(f.wait(), 7);
  }
  expect_nothing_left(*c);
}

TEST_P(RRefApi, RPC_107_remote_with_exception_and_RPC_108_remote_throw_and_X7) {
  auto c = make();
  {
    auto failed = remote((*c)[0], 1, &throw_error, "weft");
    const Status here = failed.try_to_here().status();
    expect_error(here, ErrorKind::kUser, {"weft text"});
    EXPECT_EQ(here.code(), absl::StatusCode::kAlreadyExists);
    EXPECT_EQ(error_details(here).origin, "worker1");
    EXPECT_EQ(error_details(here).payload, std::string("pay\0load", 8));
    EXPECT_NE(error_details(here).remote_trace.find("test.throw_error"), std::string::npos);
    eventually((*c)[0], [&] { return failed.confirmed_by_owner(); }, "the call has done its part");
    // Every holder gets it, every time.
    const Status third = error_of([&] { rpc_sync((*c)[0], 2, &fetch, failed); });
    expect_error(third, ErrorKind::kUser, {"weft text"});
    EXPECT_EQ(error_details(third).origin, "worker1");
    const Status owner = error_of([&] { rpc_sync((*c)[0], 1, &fetch, failed); });
    expect_error(owner, ErrorKind::kUser, {"weft text"});
    // A method's error is as that of any call; through a chain it is the chain's.
    auto table = remote<Table>((*c)[0], 1, 1);
    expect_error(error_of([&] { table.rpc_sync(&Table::fail, "out_of_range"); }), ErrorKind::kUser,
                 {"too far"});
    auto lost = table.remote(&Table::fail, "c10");
    expect_error(error_of([&] { lost.to_here(); }), ErrorKind::kUser, {"size of tensor"});
    for (const char* what : {"int", "odd", "nul", "long"}) {
      const Status through = remote((*c)[0], 1, &throw_error, what).try_to_here().status();
      const Status plain = try_rpc_sync((*c)[0], 1, &throw_error, what).status();
      EXPECT_EQ(through.code(), plain.code()) << what;
      EXPECT_EQ(through.message(), plain.message()) << what;
    }
  }
  expect_nothing_left(*c);
}

// RREF-3.
TEST_P(RRefApi, RPC_109_user_rrefs_confirmed) {
  auto c = make();
  {
    auto gate = remote((*c)[0], 1, FunctionRef<int64_t()>{"own.wait_at_gate"});
    for (int i = 0; i < 10; ++i) {
      EXPECT_TRUE(rpc_sync((*c)[0], 2, &was_confirmed, remote((*c)[0], 1, &add, 1, i)));
      EXPECT_TRUE(remote((*c)[0], 2, &was_confirmed, gate).to_here());
    }
    lib_.hold->open();
  }
  expect_nothing_left(*c);
}

// X14(a).
TEST_P(RRefApi, X14_known_while_the_function_runs) {
  auto c = make();
  {
    auto held = remote((*c)[0], 1, FunctionRef<int64_t()>{"own.wait_at_gate"});
    lib_.hold->wait_arrived(1);
    eventually((*c)[0], [&] { return held.confirmed_by_owner(); }, "it must become known");
    EXPECT_FALSE(held.ready());
    EXPECT_EQ(counter((*c)[1], "rref_owners"), 1);
    lib_.hold->open();
    EXPECT_EQ(held.to_here(), 7);
    EXPECT_TRUE(held.ready());
  }
  expect_nothing_left(*c);
}

// RREF-1: also when every handle goes before the function has ended, or begun.
TEST_P(RRefApi, DroppedWhileTheFunctionRuns) {
  auto c = make();
  {
    auto held = remote((*c)[0], 1, FunctionRef<int64_t()>{"own.wait_at_gate"});
    lib_.hold->wait_arrived(1);
  }
  for (int i = 0; i < 50; ++i) remote<Table>((*c)[0], 1, i);
  lib_.hold->open();
  expect_nothing_left(*c);
  eventually((*c)[0], [] { return Table::alive() == 0; }, "objects");
}

// RREF-9, counted. An answer that takes long does not speak for its arrivals any more, and on a
// busy machine any may: what counts is the least of some lives.
TEST_P(RRefApi, MessagesOfALife) {
  auto c = make();
  const auto items = [&] {
    int64_t sum = 0;
    for (int i = 0; i < 3; ++i) sum += counter((*c)[static_cast<size_t>(i)], "rref_control_items");
    return sum;
  };
  const auto expect_items = [&](int64_t want, const std::function<void()>& live) {
    int64_t least = std::numeric_limits<int64_t>::max();
    for (int i = 0; i < 50 && least > want; ++i) {
      const int64_t before = items();
      live();
      expect_nothing_left(*c);
      least = std::min(least, items() - before);
    }
    EXPECT_EQ(least, want);
  };
  {
    SCOPED_TRACE("one delete");
    expect_items(1, [&] { EXPECT_EQ(remote((*c)[0], 1, &add, 1, 2).to_here(), 3); });
  }
  {
    SCOPED_TRACE("to its owner: nothing more, the answer says it");
    expect_items(1, [&] {
      auto x = remote((*c)[0], 1, &add, 1, 2);
      EXPECT_EQ(rpc_sync((*c)[0], 1, &fetch, x), 3);
    });
  }
  {
    SCOPED_TRACE("to a third worker: one fork, and a delete for each");
    expect_items(3, [&] {
      auto x = remote((*c)[0], 1, &add, 1, 2);
      EXPECT_EQ(rpc_sync((*c)[0], 2, &fetch, x), 3);
    });
  }
  {
    SCOPED_TRACE("from its owner: one delete");
    expect_items(1, [&] {
      auto mine = IntRef::local((*c)[0], 5);
      EXPECT_EQ(rpc_sync((*c)[0], 1, &fetch, mine), 5);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Nets, RRefApi, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
