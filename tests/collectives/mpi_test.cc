// Groups by MPI: what the tests of every backend (operations_test.cc) do not ask.
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/allclose.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/zeros.h"
#include "weft/collectives/mpi.h"
#include "weft/tests/collectives/world.h"

namespace weft::testing {
namespace {

#define EXPECT_TENSOR(a, b) EXPECT_TRUE(at::equal((a), (b))) << (a) << "\nis not\n" << (b)

// Half types are divided before they are added up where partial sums would leave their range, and
// then rounded once more.
bool are_same(const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  const bool half = a.scalar_type() == at::kHalf || a.scalar_type() == at::kBFloat16;
  if (!half || op.kind() != ReduceOp::kAvg) return at::equal(a, b);
  return at::allclose(a.to(at::kFloat), b.to(at::kFloat), /*rtol=*/0.01, /*atol=*/0);
}

// The same values by shared memory, whose arithmetic has tests of its own.
TEST(MpiGroups, EveryTypeAndReductionAsInSharedMemory) {
  const World world(Backend::kMpi, 3);
  const at::ScalarType types[] = {at::kBool,  at::kByte,   at::kChar,         at::kShort,
                                  at::kInt,   at::kLong,   at::kHalf,         at::kBFloat16,
                                  at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble};
  int compared = 0;
  world.run([&](ProcessGroup& group) {
    ProcessGroupOptions other = world.options(group.rank());
    other.name = "memory";
    other.backend = Backend::kShm;
    other.host_library = nullptr;
    ProcessGroup memory = init_process_group(other);
    for (const at::ScalarType type : types) {
      for (uint8_t kind = ReduceOp::kSum; kind <= ReduceOp::kBxor; ++kind) {
        const ReduceOp op = kind == ReduceOp::kPremulSum
                                ? ReduceOp::premul_sum(group.rank() + 1)
                                : ReduceOp(static_cast<ReduceOp::Kind>(kind));
        // Small whole numbers: every order of additions gives the same.
        const at::Tensor mine = ((at::arange(101) + 3 * group.rank()) % 5).to(type);
        at::Tensor by_mpi = mine.clone();
        at::Tensor by_memory = mine.clone();
        const Status one = group.try_all_reduce(by_mpi, {.op = op});
        const Status same = memory.try_all_reduce(by_memory, {.op = op});
        EXPECT_EQ(one.ok(), same.ok()) << type << " " << reduction_name(kind) << ": " << one;
        EXPECT_TRUE(are_same(by_mpi, by_memory, op)) << type << " " << reduction_name(kind);
        compared += one.ok() ? 1 : 0;
        at::Tensor part = at::zeros({33}).to(type);
        at::Tensor its = part.clone();
        const at::Tensor input = mine.slice(0, 0, 99).contiguous();
        EXPECT_EQ(group.try_reduce_scatter_tensor(part, input, {.op = op}).ok(),
                  memory.try_reduce_scatter_tensor(its, input, {.op = op}).ok());
        EXPECT_TRUE(are_same(part, its, op)) << type << " " << reduction_name(kind);
      }
    }
    EXPECT_GT(compared, 60);
  });
}

// Larger than a piece (8 MiB of all ranks, 1 MiB to one), and of different sizes.
TEST(MpiGroups, LargeTensorsGoInPieces) {
  World(Backend::kMpi, 3).run([](ProcessGroup& group) {
    const int rank = group.rank();
    const int64_t n = (20 << 20) / 4 + 7;
    at::Tensor t = at::arange(n, at::kInt) * (rank + 1);
    group.all_reduce(t);
    EXPECT_TRUE(at::equal(t, at::arange(n, at::kInt) * 6));
    t = at::arange(n, at::kInt) * rank;
    group.broadcast(t, {.root = 2});
    EXPECT_TRUE(at::equal(t, at::arange(n, at::kInt) * 2));
    t = at::full({n}, rank, at::kInt);
    group.reduce(t, {.root = 1});
    EXPECT_TRUE(at::equal(t, at::full({n}, rank == 1 ? 3 : rank, at::kInt)));

    const auto length = [](int r) { return int64_t{r} * (3 << 20) + 5; };
    TensorList all;
    for (int r = 0; r < 3; ++r) all.push_back(at::zeros({length(r)}, at::kInt));
    const auto own = [&](int r) { return at::arange(length(r), at::kInt) + r; };
    group.all_gather(all, own(rank));
    for (int r = 0; r < 3; ++r) EXPECT_TRUE(at::equal(all[static_cast<size_t>(r)], own(r))) << r;
    at::Tensor mine = at::zeros({length(rank)}, at::kInt);
    const TensorList inputs{own(0), own(1), own(2)};
    group.reduce_scatter(mine, inputs);
    EXPECT_TRUE(at::equal(mine, own(rank) * 3));
    group.scatter(mine, rank == 0 ? inputs : TensorList(), {.root = 0});
    EXPECT_TRUE(at::equal(mine, own(rank)));
    for (at::Tensor& one : all) one.zero_();
    group.gather(rank == 2 ? all : TensorList(), mine, {.root = 2});
    for (int r = 0; r < 3 && rank == 2; ++r) {
      EXPECT_TRUE(at::equal(all[static_cast<size_t>(r)], own(r))) << r;
    }
    // Row r of the table: what rank r sends to 0, 1 and 2.
    const auto part = [](int from, int to) {
      return at::arange((from * 3 + to) * (1 << 18) + 1, at::kInt) + 100 * from + to;
    };
    TensorList out{part(rank, 0), part(rank, 1), part(rank, 2)};
    TensorList in;
    for (int r = 0; r < 3; ++r) in.push_back(at::zeros_like(part(r, rank)));
    group.all_to_all(in, out);
    for (int r = 0; r < 3; ++r) {
      EXPECT_TRUE(at::equal(in[static_cast<size_t>(r)], part(r, rank))) << r;
    }
  });
}

// Each has a communicator of its own, also several at a time with operations in other orders.
TEST(MpiGroups, GroupsOfSomeRanksAtTheSameTime) {
  World(Backend::kMpi, 4).run([](ProcessGroup& group) {
    ProcessGroup half = group.split(group.rank() % 2);
    EXPECT_EQ(half.backend(), "mpi");
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 20; ++i) {
      ProcessGroup& one = (i + group.rank()) % 2 == 0 ? group : half;
      tensors.push_back(at::ones({1000}));
      works.push_back(one.all_reduce_async(tensors.back()));
    }
    for (const Work& work : works) work.wait();
    for (int i = 0; i < 20; ++i) {
      const double sum = (i + group.rank()) % 2 == 0 ? 4 : 2;
      EXPECT_TENSOR(tensors[static_cast<size_t>(i)], at::full({1000}, sum));
    }
    half = ProcessGroup();
    group.barrier();
  });
}

TEST(MpiGroups, OperationsThatAreToBeComparedAreAnErrorWhenTheyDiffer) {
  World(Backend::kMpi, 3)
      .run([](ProcessGroupOptions& o) { o.compare_operations = true; },
           [](ProcessGroup& group) {
             at::Tensor t = at::ones({10});
             group.all_reduce(t);
             const Status s =
                 group.rank() == 1 ? group.try_broadcast(t, {.root = 1}) : group.try_all_reduce(t);
             expect_error(s, ErrorKind::kInvalidArgument, {"all_reduce", "broadcast"});
             EXPECT_TENSOR(t, at::full({10}, 3.0));
           });
}

TEST(MpiGroups, BadInput_SizesOfAllToAllThatDiffer) {
  World(Backend::kMpi, 2).run([](ProcessGroup& group) {
    const int rank = group.rank();
    // Rank 0 sends 12 bytes where rank 1 expects 8.
    TensorList out{at::ones({1}), at::ones({rank == 0 ? 3 : 1})};
    TensorList in{at::zeros({rank == 0 ? 1 : 2}), at::zeros({1})};
    const Status s = group.try_all_to_all(in, out);
    if (rank == 1) expect_error(s, ErrorKind::kInvalidArgument, {"rank 0", "8"});
    expect_error(group.try_barrier(), ErrorKind::kInvalidArgument, {"rank 0", "8"});
  });
}

// MPI cannot call an operation back: the group ends, and what MPI still has is kept.
TEST(MpiGroups, ARankThatDoesNotComeIsADeadlineForAll) {
  World(Backend::kMpi, 3).run([](ProcessGroup& group) {
    group.barrier();
    const at::Tensor t = at::ones({1000});
    if (group.rank() == 2) {
      // The message that does not come ends with the group.
      expect_error(group.try_recv(t, 0).status(), ErrorKind::kDeadline, {"all_reduce"});
    } else {
      expect_error(group.try_all_reduce(t, {.timeout = absl::Milliseconds(200)}),
                   ErrorKind::kDeadline, {"all_reduce #2", "MPI_Iallreduce"});
    }
    EXPECT_TENSOR(t, at::ones({1000}));
    expect_error(group.try_barrier(), ErrorKind::kDeadline, {"all_reduce"});
    // A group of the next generation has a communicator of its own.
    ProcessGroup next = group.rebuild();
    EXPECT_EQ(next.backend(), "mpi");
    next.all_reduce(t);
    EXPECT_TENSOR(t, at::full({1000}, 3.0));
  });
}

TEST(MpiGroups, AnAbortEndsWhatOthersWaitFor) {
  World(Backend::kMpi, 3).run([](ProcessGroup& group) {
    at::Tensor t = at::ones({1000});
    if (group.rank() == 1) {
      group.recv(t, 0);
      group.abort("it is enough");
    } else {
      if (group.rank() == 0) group.send(t, 1);
      expect_error(group.try_all_reduce(t), ErrorKind::kCancelled, {"rank 1", "it is enough"});
    }
  });
}

TEST(MpiGroups, ARankThatHasLeftIsAnErrorOfWhatComesAfter) {
  World(Backend::kMpi, 2).run([](ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 1) {
      group = ProcessGroup();
      return;
    }
    expect_error(group.try_barrier(), ErrorKind::kPeerLost, {"rank 1", "left"});
  });
}

TEST(MpiGroups, BadInput_NoLibrary) {
  World world(Backend::kMpi, 1);
  ProcessGroupOptions o = world.options(0);
  o.host_library = nullptr;
  expect_error(try_init_process_group(o).status(), ErrorKind::kInvalidArgument,
               {"backend mpi", "weft::Mpi"});
}

TEST(MpiGroups, BadInput_FinalizedWhileAGroupLives) {
  World(Backend::kMpi, 5).run([](ProcessGroup& group) {
    StatusOr<std::unique_ptr<Mpi>> second = Mpi::try_init();
    ASSERT_TRUE(second.ok()) << second.status();  // MPI is there already, and stays
    EXPECT_EQ((*second)->rank(), group.rank());
    ProcessGroupOptions o;
    o.backend = Backend::kMpi;
    o.host_library = (*second)->library();
    o.rendezvous = "file://" + mpi_seat().folder + "/second?run_id=test";
    o.rank = group.rank();
    o.size = group.size();
    ProcessGroup other = init_process_group(o);
    other.barrier();
    expect_error((*second)->try_finalize(), ErrorKind::kState, {"1 process group"});
    other = ProcessGroup();
    EXPECT_TRUE((*second)->try_finalize().ok());
    expect_error(try_init_process_group(o).status(), ErrorKind::kState, {"finalized"});
    group.barrier();
  });
}

}  // namespace
}  // namespace weft::testing
