// Groups of groups: new_group, split, several at once, memory of a group, who is missing.
#include <gtest/gtest.h>

#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "weft/tests/collectives/world.h"

namespace weft::testing {
namespace {

class CollectiveGroups : public ::testing::TestWithParam<Backend> {
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
    if (rank != 1) {
      ProcessGroup some = group.new_group({3, 0, 2});
      EXPECT_EQ(some.size(), 3);
      EXPECT_EQ(some.rank(), rank == 3 ? 0 : rank == 0 ? 1 : 2);
      EXPECT_EQ(sum(some, rank), 5);
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

INSTANTIATE_TEST_SUITE_P(Backends, CollectiveGroups,
                         ::testing::Values(Backend::kInproc, Backend::kShm, Backend::kTcp),
                         [](const auto& info) { return backend_text(info.param); });

}  // namespace
}  // namespace weft::testing
