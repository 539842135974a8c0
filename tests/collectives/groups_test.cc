// Groups of groups: new_group, split, several at once, memory of a group, who is missing.
#include <gtest/gtest.h>
#include <sched.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <latch>
#include <map>
#include <string>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/zeros.h"
#include "weft/collectives/broadcast_object.h"
#include "weft/collectives/point_operations.h"
#include "weft/collectives/sparse.h"
#include "weft/tests/collectives/world.h"

namespace weft::testing {
namespace {

class CollectiveGroups : public ::testing::TestWithParam<Setting> {
 protected:
  static double sum(ProcessGroup& group, double value) {
    const at::Tensor t = at::full({3}, value);
    group.all_reduce(t);
    return t[2].item<double>();
  }
};

TEST_P(CollectiveGroups, NewGroupOfSomeRanksInTheOrderOfTheList) {
  World(GetParam(), 4).run([](ProcessGroup& group) {
    const int rank = group.rank();
    ProcessGroup some;
    if (rank != 1) {
      some = group.new_group({3, 0, 2});
      EXPECT_EQ(some.size(), 3);
      EXPECT_EQ(some.rank(), rank == 3 ? 0 : rank == 0 ? 1 : 2);
      EXPECT_EQ(sum(some, rank), 5);
    }
    // A rank that is through here knows that all are through there.
    EXPECT_EQ(sum(group, rank), 6);
    if (rank != 1) {
      // Both are independent.
      some.abort("no more");
      EXPECT_FALSE(some.try_barrier().ok());
    }
    EXPECT_EQ(sum(group, rank), 6);
    expect_error(group.try_new_group({0, 9}).status(), ErrorKind::kInvalidArgument, {"rank 9"});
    expect_error(group.try_new_group({0, 0}).status(), ErrorKind::kInvalidArgument, {"twice"});
    if (rank == 1) {
      expect_error(group.try_new_group({0, 2}).status(), ErrorKind::kInvalidArgument,
                   {"not in its list"});
    }
  });
}

TEST_P(CollectiveGroups, SplitByColorAndKey) {
  World(GetParam(), 5).run([](ProcessGroup& group) {
    const int rank = group.rank();
    // Odd and even; ranks in reverse order.
    ProcessGroup half = group.split(rank % 2, -rank);
    EXPECT_EQ(half.size(), rank % 2 == 0 ? 3 : 2);
    EXPECT_EQ(half.rank(), (rank % 2 == 0 ? 4 - rank : 3 - rank) / 2);
    EXPECT_EQ(sum(half, rank), rank % 2 == 0 ? 6 : 4);
    // Again, with some that stay out, while the first ones live.
    ProcessGroup outer = group.split(rank == 2 ? -1 : 7);
    EXPECT_EQ(outer.valid(), rank != 2);
    if (rank != 2) {
      EXPECT_EQ(sum(outer, rank), 8);
    }
    EXPECT_EQ(sum(half, 1), half.size());
  });
}

TEST_P(CollectiveGroups, OverlappingGroupsAtTheSameTime) {
  World(GetParam(), 3).run([](ProcessGroup& group) {
    const int rank = group.rank();
    ProcessGroup one = group.new_group({0, 1, 2}, {.name = "one"});
    ProcessGroup two = group.new_group({0, 1, 2}, {.name = "two"});
    const at::Tensor a = at::full({50'000}, 1.0);
    const at::Tensor b = at::full({50'000}, 2.0);
    // The order of groups is each rank's own affair.
    Work first = (rank == 0 ? one : two).all_reduce_async(rank == 0 ? a : b);
    Work second = (rank == 0 ? two : one).all_reduce_async(rank == 0 ? b : a);
    second.wait();
    first.wait();
    EXPECT_TRUE(at::equal(a, at::full({50'000}, 3.0)));
    EXPECT_TRUE(at::equal(b, at::full({50'000}, 6.0)));
  });
}

TEST_P(CollectiveGroups, MemoryOfTheGroup) {
  World(GetParam(), 3).run([](ProcessGroup& group) {
    const int rank = group.rank();
    at::Tensor kept;
    for (const int64_t n : {1, 5000, 300'000}) {
      at::Tensor mine = group.empty({n, 2});
      EXPECT_EQ(mine.numel(), 2 * n);
      mine.fill_(rank + 1);
      group.all_reduce(mine, {.op = ReduceOp::kAvg});
      EXPECT_TRUE(at::equal(mine, at::full({n, 2}, 2.0)));
      // May be changed at once: no rank reads it any more.
      mine.fill_(rank);
      // A part of one, and one rank without: the others do as it does.
      at::Tensor part = rank == 1 ? at::full({n}, 1.0) : mine.view({-1}).slice(0, n, 2 * n);
      group.all_reduce(part);
      EXPECT_TRUE(at::equal(part, at::full({n}, 3.0)));
      kept = mine;
    }
    group.barrier();
    group = ProcessGroup();
    kept.fill_(7);  // outlives its group
    EXPECT_EQ(kept[0][0].item<double>(), 7);
  });
}

TEST_P(CollectiveGroups, CL_15_a_monitored_barrier_names_exactly_who_is_missing) {
  World(GetParam(), 4).run([](ProcessGroup& group) {
    group.monitored_barrier();
    group.monitored_barrier();
    if (group.rank() == 1 || group.rank() == 3) {
      // Hears of the end while it does something else.
      expect_error(group.try_recv(at::zeros({1}), 0).status(), ErrorKind::kDeadline, {"rank 0"});
      return;
    }
    const Status s = group.try_monitored_barrier({.timeout = absl::Milliseconds(300)});
    expect_error(s, ErrorKind::kDeadline, {"monitored_barrier #3", "rank 1", "rank 3"});
    EXPECT_EQ(s.message().find("waited for rank 2"), absl::string_view::npos) << s;
    EXPECT_EQ(s.message().find("; rank 2"), absl::string_view::npos) << s;
  });
}

TEST_P(CollectiveGroups, CL_23_survivors_make_a_new_group) {
  World(GetParam(), 4).run([](ProcessGroup& group) {
    if (group.rank() == 1) {
      group = ProcessGroup();
      return;
    }
    EXPECT_FALSE(group.try_all_reduce(at::zeros({100'000})).ok());
    ProcessGroup next = group.rebuild();
    EXPECT_EQ(next.generation(), 2u);
    EXPECT_EQ(next.previous_ranks(), (std::vector<int>{0, 2, 3}));
    EXPECT_EQ(next.previous_ranks()[static_cast<size_t>(next.rank())], group.rank());
    EXPECT_EQ(sum(next, group.rank()), 5);
    // The old one stays what it is, and the new one can be rebuilt as well.
    EXPECT_FALSE(group.try_barrier().ok());
    group = ProcessGroup();
    if (next.rank() == 0) {
      next = ProcessGroup();
      return;
    }
    EXPECT_FALSE(next.try_barrier().ok());
    ProcessGroup third = next.rebuild();
    EXPECT_EQ(third.generation(), 3u);
    EXPECT_EQ(third.size(), 2);
    EXPECT_EQ(sum(third, 1), 2);
  });
}

TEST_P(CollectiveGroups, ARebuildOfAllLeavesNoKey) {
  const World world(GetParam(), 3);
  world.run([](ProcessGroup& group) {
    for (uint32_t generation = 2; generation < 5; ++generation) {
      group = group.rebuild();
      EXPECT_EQ(group.generation(), generation);
    }
    const at::Tensor t = at::ones({3});
    group.all_reduce(t);
    EXPECT_EQ(t[0].item<double>(), 3);
  });
  EXPECT_EQ(*world.store->num_keys(), 0);
}

TEST_P(CollectiveGroups, WhoeverComesTooLateIsLeftOut) {
  const World world(GetParam(), 3);
  world.run([&](ProcessGroup& group) {
    if (group.rank() == 2) {
      // Alive, but busy until the others have gone on.
      ASSERT_TRUE(world.store->get("test/done").ok());
      expect_error(group.try_rebuild().status(), ErrorKind::kState, {"came too late", "0, 1"});
      return;
    }
    ProcessGroup next = group.rebuild({.timeout = absl::Milliseconds(300)});
    EXPECT_EQ(next.size(), 2);
    EXPECT_EQ(sum(next, 1), 2);
    if (next.rank() == 0) {
      ASSERT_TRUE(world.store->set("test/done", "1").ok());
    }
    EXPECT_EQ(sum(next, 2), 4);
  });
}

TEST_P(CollectiveGroups, BatchesOfSendsAndReceives) {
  World(GetParam(), 3).run([](ProcessGroup& group) {
    const int rank = group.rank();
    const int next = (rank + 1) % 3;
    const int previous = (rank + 2) % 3;
    at::Tensor one = at::zeros({500'000});
    at::Tensor two = at::zeros({2});
    // Receives stand first, and all send more than any buffer holds.
    const std::vector<Work> works = batch_isend_irecv(
        group, {irecv(one, previous, {.tag = 1}), irecv(two, previous, {.tag = 2}),
                isend(at::full({2}, rank + 10.0), next, {.tag = 2}),
                isend(at::full({500'000}, rank + 1.0), next, {.tag = 1})});
    ASSERT_EQ(works.size(), 4u);
    for (const Work& work : works) work.wait();
    EXPECT_TRUE(at::equal(one, at::full({500'000}, previous + 1.0)));
    EXPECT_TRUE(at::equal(two, at::full({2}, previous + 10.0)));
    EXPECT_EQ(works[0].source_rank(), previous);
    EXPECT_EQ(works[3].source_rank(), -1);
  });
}

TEST_P(CollectiveGroups, SparseTensors) {
  World(GetParam(), 3).run([](ProcessGroup& group) {
    const int rank = group.rank();
    // Row `rank`, and row 4 of all; rank 2 has nothing of its own.
    const int64_t entries = rank == 2 ? 1 : 2;
    at::Tensor dense = at::zeros({5, 2});
    dense[4].fill_(1);
    if (rank != 2) dense[rank].fill_(rank + 1);
    const at::Tensor mine = dense.to_sparse(1);
    EXPECT_EQ(mine._nnz(), entries);
    const at::Tensor sum = all_reduce_sparse(group, mine);
    EXPECT_TRUE(sum.is_coalesced());
    EXPECT_EQ(sum._nnz(), 3);
    at::Tensor want = at::zeros({5, 2});
    want[0].fill_(1);
    want[1].fill_(2);
    want[4].fill_(3);
    EXPECT_TRUE(at::equal(sum.to_dense(), want));
    expect_error(try_all_reduce_sparse(group, dense).status(), ErrorKind::kInvalidArgument,
                 {"not sparse"});
    expect_error(try_all_reduce_sparse(group, mine, {.op = ReduceOp::kMax}).status(),
                 ErrorKind::kInvalidArgument, {"only sum and avg"});
    const at::Tensor other = at::zeros({rank == 0 ? 5 : 6, 2}).to_sparse(1);
    expect_error(try_all_reduce_sparse(group, other).status(), ErrorKind::kInvalidArgument,
                 {"other sizes"});
  });
}

TEST_P(CollectiveGroups, Objects) {
  using Value = std::map<std::string, std::vector<at::Tensor>>;
  World(GetParam(), 3).run([](ProcessGroup& group) {
    const bool root = group.rank() == 1;
    Value value;
    if (root) value = {{"a", {at::full({3}, 2.0), at::zeros({0, 4}, at::kLong)}}, {"none", {}}};
    const Value got = broadcast_object(group, value, {.root = 1});
    ASSERT_EQ(got.size(), 2u);
    EXPECT_TRUE(at::equal(got.at("a")[0], at::full({3}, 2.0)));
    EXPECT_EQ(got.at("a")[1].sizes(), at::IntArrayRef({0, 4}));
    EXPECT_EQ(broadcast_object(group, std::string(root ? "x" : ""), {.root = 1}), "x");
    // What cannot travel is an error on all ranks, and the group goes on.
    at::Tensor sparse = at::zeros({2, 2}).to_sparse(1);
    const Status bad = try_broadcast_object(group, sparse, {.root = 1}).status();
    expect_error(bad, ErrorKind::kInvalidArgument, {"do not carry"});
    EXPECT_EQ(sum(group, 1), 3);
  });
}

TEST_P(CollectiveGroups, TheFlightRecordHasTheLastOperations) {
  // An abort may overtake the last message of a barrier that only the rank that aborts has left.
  std::latch all_through(2);
  World(GetParam(), 2).run([&all_through](ProcessGroup& group) {
    for (int i = 0; i < 300; ++i) group.barrier();
    all_through.arrive_and_wait();
    group.abort("for the record");
    EXPECT_FALSE(group.try_barrier().ok());
    const std::string json = group.flight_record();
    EXPECT_NE(json.find("\"sequence\":300,\"state\":\"done\""), std::string::npos) << json;
    EXPECT_EQ(json.find("\"sequence\":44,"), std::string::npos) << json;
    EXPECT_NE(json.find("for the record"), std::string::npos) << json;
  });
}

size_t entries_of(const char* folder) {
  const std::filesystem::directory_iterator all(folder);
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

size_t shared_mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t out = 0;
  for (std::string line; std::getline(maps, line);) {
    out += line.find("memfd:weft") != std::string::npos ? 1 : 0;
  }
  return out;
}

// COLL-5: descriptors, threads, mappings and keys are back where they were.
TEST_P(CollectiveGroups, NothingIsLeftOfGroupsThatAreGone) {
  const World world(GetParam(), 3);
  const auto once = [&world](bool fails) {
    world.run([fails](ProcessGroup& group) {
      const at::Tensor t = group.empty({1000});
      Work work = group.all_reduce_async(t);
      ProcessGroup part = group.split(group.rank() % 2);
      work.wait();
      (void)group.try_barrier();  // one that another rank has left may abort already
      if (fails && group.rank() == 1) group.abort("on purpose");
    });
  };
  once(false);  // what a process makes once
  const size_t descriptors = entries_of("/proc/self/fd");
  const size_t threads = entries_of("/proc/self/task");
  for (int i = 0; i < 10; ++i) once(i % 2 == 1);
  EXPECT_EQ(entries_of("/proc/self/fd"), descriptors);
  EXPECT_EQ(shared_mappings(), 0u);
  EXPECT_EQ(*world.store->num_keys(), 0);
  // A thread that has been joined may be listed a moment longer.
  for (int i = 0; i < 10'000 && entries_of("/proc/self/task") > threads; ++i) sched_yield();
  EXPECT_LE(entries_of("/proc/self/task"), threads);
}

INSTANTIATE_TEST_SUITE_P(Backends, CollectiveGroups,
                         ::testing::Values(Setting(Backend::kInproc), Setting(Backend::kShm),
                                           Setting(Backend::kTcp), Setting::hosts()),
                         [](const auto& info) { return setting_text(info.param); });

}  // namespace
}  // namespace weft::testing
