// What every backend does when ranks differ, come late, leave or give up.
#include <gtest/gtest.h>

#include <functional>
#include <latch>
#include <vector>

#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/zeros.h"
#include "weft/tests/collectives/world.h"

namespace weft::testing {
namespace {

class CollectiveFailures : public ::testing::TestWithParam<Setting> {};

using Call = std::function<Status(ProcessGroup&)>;

// Rank 1 does another thing than the others: an error on all ranks that names both.
void expect_mismatch(const Setting& backend, int size, const Call& others, const Call& rank_1,
                     const std::vector<std::string>& words) {
  World(backend, size).run([&](ProcessGroup& group) {
    const Status s = group.rank() == 1 ? rank_1(group) : others(group);
    expect_error(s, ErrorKind::kInvalidArgument, words);
    // The group has failed for good, with the first cause.
    const Status later = group.try_barrier();
    expect_error(later, ErrorKind::kInvalidArgument, words);
    EXPECT_FALSE(group.failure().ok());
  });
}

TEST_P(CollectiveFailures, BadInput_an_algorithm_that_does_not_fit) {
  World(GetParam(), 2).run([](ProcessGroup& group) {
    const auto refused = [](const Status& s, const std::string& word) {
      expect_error(s, ErrorKind::kInvalidArgument, {word});
    };
    const at::Tensor t = at::zeros({2});
    refused(group.try_barrier({.algorithm = Algorithm::kRing}), "no such algorithm for it: ring");
    refused(group.try_all_reduce(t, {.algorithm = Algorithm::kBruck}), "Bruck");
    refused(group.try_all_reduce(t, {.algorithm = static_cast<Algorithm>(200)}), "unknown");
    refused(group.try_broadcast(t, {.algorithm = Algorithm::kRing}), "ring");
    const TensorList uneven = {at::zeros({1}), at::zeros({2})};
    const TensorList others = {at::zeros({1}), at::zeros({2})};
    refused(group.try_all_to_all(uneven, others, {.algorithm = Algorithm::kBruck}), "one length");
    refused(group.try_all_to_all_single(
                at::zeros({3}), at::zeros({3}),
                {.output_splits = {1, 2}, .input_splits = {1, 2}, .algorithm = Algorithm::kBruck}),
            "one length");
    if (group.rank() == 0) {
      const RootedOptions by_tree{.algorithm = Algorithm::kBinomialTree};
      refused(group.try_gather(uneven, at::zeros({1}), by_tree), "one length");
      refused(group.try_scatter(at::zeros({1}), uneven, by_tree), "one length");
    }
    group.barrier();
  });
  // What a rank alone cannot see is in the fingerprint.
  const auto exchange = [](int64_t n) -> Call {
    return [n](ProcessGroup& group) {
      return group.try_all_to_all_single(at::zeros({n}), at::ones({n}),
                                         {.algorithm = Algorithm::kBruck});
    };
  };
  expect_mismatch(GetParam(), 3, exchange(6), exchange(9), {"float32 x 6", "float32 x 9"});
}

TEST_P(CollectiveFailures, CL_15_and_G3_and_G9_what_differs_is_an_error_on_every_rank) {
  const auto reduce = [](int64_t n, at::ScalarType type = at::kFloat, ReduceOp op = {}) -> Call {
    return
        [=](ProcessGroup& group) { return group.try_all_reduce(at::zeros({n}, type), {.op = op}); };
  };
  for (const int size : {2, 3, 4}) {
    // G3: counts, and counts between which the algorithm changes.
    expect_mismatch(GetParam(), size, reduce(4), reduce(5), {"float32 x 4", "float32 x 5"});
    expect_mismatch(GetParam(), size, reduce(4), reduce(1'000'000), {"x 4", "x 1000000"});
    // G9: as many bytes.
    expect_mismatch(GetParam(), size, reduce(4), reduce(2, at::kDouble),
                    {"float32 x 4", "float64 x 2"});
    expect_mismatch(GetParam(), size, reduce(4), reduce(4, at::kFloat, ReduceOp::kMax),
                    {"sum", "max"});
    expect_mismatch(GetParam(), size, reduce(4),
                    [](ProcessGroup& group) { return group.try_barrier(); },
                    {"all_reduce #1", "barrier #1"});
    expect_mismatch(
        GetParam(), size,
        [](ProcessGroup& group) { return group.try_broadcast(at::zeros({4}), {.root = 0}); },
        [](ProcessGroup& group) { return group.try_broadcast(at::zeros({4}), {.root = 1}); },
        {"root 0", "root 1"});
    expect_mismatch(
        GetParam(), size,
        [](ProcessGroup& group) { return group.try_reduce(at::zeros({4}), {.root = 0}); },
        [](ProcessGroup& group) { return group.try_reduce(at::zeros({5}), {.root = 0}); },
        {"float32 x 4", "float32 x 5"});
    // Order.
    expect_mismatch(
        GetParam(), size,
        [&](ProcessGroup& group) {
          const Status first = reduce(4)(group);
          return first.ok() ? reduce(8)(group) : first;
        },
        [&](ProcessGroup& group) {
          const Status first = reduce(8)(group);
          return first.ok() ? reduce(4)(group) : first;
        },
        {"x 4", "x 8"});
  }
}

TEST_P(CollectiveFailures, AMessageOfAnotherSizeThanExpected) {
  World(GetParam(), 2).run([](ProcessGroup& group) {
    Status s;
    if (group.rank() == 0) {
      at::Tensor t = at::zeros({4});
      s = group.try_recv(t, 1).status();
      expect_error(s, ErrorKind::kInvalidArgument, {"float32 x 5", "Float x 4"});
    } else {
      group.send(at::zeros({5}), 0);
    }
    expect_error(group.try_barrier(), ErrorKind::kInvalidArgument, {"float32 x 5"});
  });
}

TEST_P(CollectiveFailures, G4_at_a_deadline_the_error_says_who_is_behind) {
  World(GetParam(), 3).run([](ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 2) {
      // Does something else, until the others have given up.
      expect_error(group.try_recv(at::zeros({1}), 0).status(), ErrorKind::kDeadline, {"rank "});
    } else {
      const Status s = group.try_all_reduce(at::zeros({4}), {.timeout = absl::Milliseconds(200)});
      expect_error(s, ErrorKind::kDeadline, {"all_reduce #2", "rank "});
    }
    expect_error(group.try_barrier(), ErrorKind::kDeadline, {"all_reduce #2"});
  });
}

// In a ring a rank waits for its neighbour, which itself waits for another one: every rank names
// the one that has not come.
TEST_P(CollectiveFailures, CL_14_at_a_deadline_a_waiting_neighbour_is_not_blamed) {
  World(GetParam(), 4).run([](ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 2) {
      expect_error(group.try_recv(at::zeros({1}), 0).status(), ErrorKind::kDeadline, {"rank "});
      return;
    }
    const Status s = group.try_all_reduce(
        at::zeros({400}), {.timeout = absl::Milliseconds(200), .algorithm = Algorithm::kRing});
    expect_error(s, ErrorKind::kDeadline,
                 {"all_reduce #2", "waited for rank 2, whose last operation was barrier #1"});
    for (const char* other : {"rank 0, whose", "rank 1, whose", "rank 3, whose"}) {
      EXPECT_EQ(std::string(s.message()).find(other), std::string::npos) << s;
    }
  });
}

TEST_P(CollectiveFailures, AbortEndsEveryOperationOfEveryRank) {
  World(GetParam(), 3).run([](ProcessGroup& group) {
    Status s;
    if (group.rank() == 0) {
      group.abort("enough");
      s = group.try_barrier();
    } else {
      const Work pending = group.all_reduce_async(at::zeros({4}));
      const Work behind = group.barrier_async();
      s = behind.try_wait();
      expect_error(pending.try_wait(), ErrorKind::kCancelled, {"aborted at rank 0: enough"});
    }
    expect_error(s, ErrorKind::kCancelled, {"aborted at rank 0: enough"});
  });
}

TEST_P(CollectiveFailures, G7_whoever_leaves_is_named) {
  std::latch all_through(3);
  World(GetParam(), 3).run([&all_through](ProcessGroup& group) {
    group.barrier();
    all_through.arrive_and_wait();
    if (group.rank() == 1) {
      group = ProcessGroup();
      return;
    }
    expect_error(group.try_all_reduce(at::zeros({1000})), ErrorKind::kPeerLost, {"rank 1"});
  });
}

TEST_P(CollectiveFailures, WorkOfAGroupThatIsLeftEnds) {
  std::latch all_through(2);
  World(GetParam(), 2).run([&all_through](ProcessGroup& group) {
    group.barrier();
    all_through.arrive_and_wait();
    if (group.rank() == 0) {
      const Work work = group.all_reduce_async(at::zeros({4}));
      group = ProcessGroup();
      expect_error(work.try_wait(), ErrorKind::kState, {"left", "under way"});
      expect_error(group.try_barrier(), ErrorKind::kState, {"no process group"});
    } else {
      expect_error(group.try_recv(at::zeros({1}), 0).status(), ErrorKind::kState, {"rank 0"});
    }
  });
}

TEST_P(CollectiveFailures, BadInput_members_that_do_not_come) {
  const World world(GetParam(), 3);
  world.run_ranks([&](int rank) {
    if (rank == 1) return;
    ProcessGroupOptions o = world.options(rank);
    o.init_timeout = absl::Milliseconds(300);
    const Status s = try_init_process_group(o).status();
    expect_error(s, ErrorKind::kDeadline, {"'world' of 3 lacks rank 1"});
  });
  // What is left over does not disturb the next try.
  world.run([](ProcessGroup& group) { group.barrier(); });
}

TEST_P(CollectiveFailures, BadInput_a_rank_twice) {
  if (GetParam().has_tls || GetParam().has_hosts) return;  // the store alone decides
  const World world(GetParam(), 2);
  world.run_ranks([&](int rank) {
    if (rank != 0) return;
    ProcessGroupOptions o = world.options(0);
    o.init_timeout = absl::Seconds(1);
    Status other;
    const auto twin = world.runtime->spawn("twin", [&] {
      // Waits until the first has written.
      ASSERT_TRUE(world.store->get("weft//collectives/world/m/0").ok());
      other = try_init_process_group(o).status();
    });
    const Status s = try_init_process_group(o).status();
    twin->join();
    expect_error(s, ErrorKind::kDeadline, {"lacks rank 1"});
    expect_error(other, ErrorKind::kState, {"a member of rank 0 already"});
  });
}

TEST_P(CollectiveFailures, BadInput_options) {
  const World world(GetParam(), 2);
  ProcessGroupOptions o = world.options(0);
  o.rank = 2;
  expect_error(try_init_process_group(o).status(), ErrorKind::kInvalidArgument, {"rank 2 of 2"});
  o = world.options(0);
  o.size = std::nullopt;
  expect_error(try_init_process_group(o).status(), ErrorKind::kInvalidArgument, {"rank and size"});
  o = world.options(0);
  o.name = "";
  expect_error(try_init_process_group(o).status(), ErrorKind::kInvalidArgument, {"name"});
}

TEST_P(CollectiveFailures, BadInput_and_G8_another_interface_without_credentials) {
  World world(GetParam(), 2);
  if (GetParam().backend != Backend::kTcp || GetParam().has_tls) return;
  ProcessGroupOptions o = world.options(0);
  o.listen_address = "0.0.0.0";
  expect_error(try_init_process_group(o).status(), ErrorKind::kPermission,
               {"0.0.0.0", "allow_insecure"});
  o.allow_insecure = true;
  expect_error(try_init_process_group(o).status(), ErrorKind::kInvalidArgument, {"interface"});
}

TEST_P(CollectiveFailures, NothingIsLeftAtTheStore) {
  const World world(GetParam(), 3);
  for (int i = 0; i < 3; ++i) {
    world.run([](ProcessGroup& group) { group.barrier(); });
  }
  EXPECT_EQ(*world.store->num_keys(), 0);
}

INSTANTIATE_TEST_SUITE_P(Backends, CollectiveFailures, ::testing::ValuesIn(all_settings()),
                         [](const auto& info) { return setting_text(info.param); });

}  // namespace
}  // namespace weft::testing
