// weft::nccl on GPUs that are made of host memory and a libnccl that is made of threads: results,
// and what waits for what. Streams there do only what is waited for, so an order that is
// missing shows.

#include <latch>
#include <vector>

#include "ATen/ops/arange.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "weft/collectives/point_operations.h"
#include "weft/tests/cuda/fake_nccl_world.h"

namespace weft::testing {
namespace {

class NcclStreams : public FakeNcclTest {};

at::Tensor numbers(int64_t n, float first) { return at::arange(n).to(at::kFloat) + first; }

TEST_F(NcclStreams, ReducesBroadcastsAndMeets) {
  run([](ProcessGroup& group) {
    EXPECT_EQ(group.backend(), "nccl");
    const auto rank = static_cast<float>(group.rank());
    const at::Tensor x = on_gpu_of(group, numbers(1000, rank));
    group.all_reduce(x);
    const at::Tensor y = on_gpu_of(group, numbers(7, rank));
    group.broadcast(y, {.root = 1});
    group.barrier();
    EXPECT_TRUE(at::equal(settled(x), numbers(1000, 0) + numbers(1000, 1)));
    EXPECT_TRUE(at::equal(settled(y), numbers(7, 1)));
    group.barrier_async().wait();
  });
  EXPECT_EQ(fake_nccl::aborted(), 0u);
}

// CL-21: no host waits, the reader's stream does.
TEST_F(NcclStreams, CL_21_a_result_makes_the_stream_wait_and_not_the_thread) {
  const size_t blocking = fake_cuda::blocking_calls();
  std::latch queued(2);
  run([&](ProcessGroup& group) {
    const at::Tensor x = on_gpu_of(group, at::full({10}, 1.0F));
    const at::Tensor y = on_gpu_of(group, at::full({10}, 2.0F));
    group.barrier();
    fake_nccl::hold_operations(true);
    group.all_reduce(x);
    const auto read_x = queue_read(x);
    Work work = group.all_reduce_async(y);
    EXPECT_TRUE(work.is_completed());
    work.wait();
    const auto read_y = queue_read(y);
    fake_cuda::run_all();
    EXPECT_TRUE(read_x->empty()) << "the reader did not wait for the operation";
    EXPECT_TRUE(read_y->empty()) << "the reader did not wait for the operation";
    queued.arrive_and_wait();
    fake_nccl::hold_operations(false);
    group.barrier();
    fake_cuda::run_all();
    EXPECT_EQ(*read_x, std::vector<float>(10, 2.0F));
    EXPECT_EQ(*read_y, std::vector<float>(10, 4.0F));
  });
  EXPECT_EQ(fake_cuda::blocking_calls(), blocking);
}

TEST_F(NcclStreams, AnOperationComesAfterWhatTheCallerHasQueued) {
  run([](ProcessGroup& group) {
    const at::Tensor x = on_gpu_of(group, at::zeros({10}));
    const auto gate = std::make_shared<std::atomic<bool>>(false);
    queue_fill(x, 3, gate);
    group.all_reduce(x);
    const auto seen = queue_read(x);
    fake_cuda::run_all();
    EXPECT_TRUE(seen->empty());
    gate->store(true);
    group.barrier();
    fake_cuda::run_all();
    EXPECT_EQ(*seen, std::vector<float>(10, 6.0F));
  });
}

// FUTURE-4 for operations: what a continuation queues comes after the operation.
TEST_F(NcclStreams, AContinuationComesAfterTheOperation) {
  run([](ProcessGroup& group) {
    const at::Tensor x = on_gpu_of(group, at::full({10}, 1.0F));
    const auto later = group.all_reduce_async(x).then([x] { return queue_read(x); });
    const auto read = later.wait();
    group.barrier();
    fake_cuda::run_all();
    EXPECT_EQ(*read, std::vector<float>(10, 2.0F));
  });
}

// COLL-6: a rank that leaves has done its part of what it has queued.
TEST_F(NcclStreams, ARankThatLeavesEndsWhatItHasQueued) {
  std::vector<at::Tensor> results(2);
  run([&](ProcessGroup& group) {
    const at::Tensor x = on_gpu_of(group, numbers(100, static_cast<float>(group.rank())));
    for (int i = 0; i < 10; ++i) group.all_reduce(x);
    results[static_cast<size_t>(group.rank())] = x;
  });
  const at::Tensor wanted = (numbers(100, 0) + numbers(100, 1)) * 512;
  for (const at::Tensor& x : results) EXPECT_TRUE(at::equal(settled(x), wanted));
  EXPECT_EQ(fake_nccl::aborted(), 0u);
}

TEST_F(NcclStreams, EveryOperation) {
  run([](ProcessGroup& group) {
    const int rank = group.rank();
    const int other = 1 - rank;
    const auto mine = [&](int64_t n) {
      return on_gpu_of(group, numbers(n, static_cast<float>(10 * rank)));
    };
    const auto room = [&](int64_t n) { return on_gpu_of(group, at::zeros({n})); };
    const auto is = [](const at::Tensor& x, const at::Tensor& wanted) {
      EXPECT_TRUE(at::equal(settled(x), wanted)) << settled(x);
    };
    const at::Tensor sums = numbers(6, 0) + numbers(6, 10);
    const at::Tensor both = at::cat({numbers(3, 0), numbers(3, 10)});
    const at::Tensor reduced = mine(6);
    group.reduce(reduced, {.root = 1});
    TensorList gathered = {room(3), room(3)};
    group.all_gather(gathered, mine(3));
    const at::Tensor whole = room(6);
    group.all_gather_into_tensor(whole, mine(3));
    TensorList at_root = rank == 0 ? TensorList{room(3), room(3)} : TensorList();
    group.gather(at_root, mine(3));
    const at::Tensor part = room(3);
    group.scatter(part, at_root);
    const at::Tensor own_sum = room(3);
    group.reduce_scatter_tensor(own_sum, mine(6));
    const at::Tensor uneven = room(2 + rank);
    group.reduce_scatter(uneven, {mine(2), mine(3)});
    TensorList swapped = {room(1 + rank), room(1 + rank)};
    group.all_to_all(swapped, {mine(1), mine(2)});
    const at::Tensor single = room(4);
    group.all_to_all_single(single, mine(4));
    TensorList two = {mine(2), mine(4)};
    group.all_reduce_coalesced(two, {.op = ReduceOp::kMax});
    const at::Tensor scaled = mine(2);
    group.all_reduce(scaled, {.op = ReduceOp::premul_sum(0.5)});
    // Each sends before it receives: alone, each would wait for the other.
    const at::Tensor theirs = room(5);
    const auto works = batch_isend_irecv(group, {isend(mine(5), other), irecv(theirs, other)});
    for (const Work& work : works) work.wait();
    EXPECT_EQ(works[1].source_rank(), other);
    group.monitored_barrier();
    group.barrier();
    is(reduced, rank == 1 ? sums : numbers(6, 0));
    is(gathered[0], numbers(3, 0));
    is(gathered[1], numbers(3, 10));
    is(whole, both);
    if (rank == 0) is(at_root[1], numbers(3, 10));
    is(part, numbers(3, static_cast<float>(10 * rank)));
    is(own_sum, sums.narrow(0, 3 * rank, 3));
    is(uneven, sums.narrow(0, 0, 2 + rank));
    is(swapped[0], numbers(1 + rank, 0));
    is(swapped[1], numbers(1 + rank, 10));
    is(single,
       at::cat({numbers(4, 0).narrow(0, 2 * rank, 2), numbers(4, 10).narrow(0, 2 * rank, 2)}));
    is(two[1], numbers(4, 10));
    is(scaled, (numbers(2, 0) + numbers(2, 10)) * 0.5);
    is(theirs, numbers(5, static_cast<float>(10 * other)));
  });
}

// CL-21: NCCL leaves out the last elements of what one rank scales.
TEST_F(NcclStreams, CL_21_OneRankAveragesAllElements) {
  run_ranks(
      [&](int rank) {
        StatusOr<ProcessGroup> group = try_init_process_group(options(rank, 1));
        ASSERT_TRUE(group.ok()) << group.status();
        const at::Tensor in = on_gpu_of(*group, numbers(7, 1));
        const at::Tensor out = on_gpu_of(*group, at::zeros({7}));
        group->reduce_scatter_tensor(out, in, {.op = ReduceOp::kAvg});
        group->all_reduce(in, {.op = ReduceOp::kAvg});
        group->barrier();
        EXPECT_TRUE(at::equal(settled(out), numbers(7, 1)));
        EXPECT_TRUE(at::equal(settled(in), numbers(7, 1)));
      },
      1);
}

// Each comes after the one before it, whatever streams they are on.
TEST_F(NcclStreams, OperationsOnSeveralStreamsKeepTheirOrder) {
  run([](ProcessGroup& group) {
    const auto on_another_stream = [&](const std::function<void()>& body) {
      const c10::StreamGuard other(
          c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(gpu(group.rank())));
      body();
    };
    const at::Tensor x = on_gpu_of(group, at::zeros({10}));
    const auto gate = std::make_shared<std::atomic<bool>>(false);
    queue_fill(x, 3, gate);
    const Work first = group.all_reduce_async(x);
    std::shared_ptr<std::vector<float>> seen;
    std::shared_ptr<std::vector<float>> last;
    on_another_stream([&] {
      group.all_reduce(x);
      seen = queue_read(x);
    });
    on_another_stream([&] {
      const Work third = group.all_reduce_async(x);
      third.wait();
      last = queue_read(x);
    });
    fake_cuda::run_all();
    EXPECT_TRUE(seen->empty()) << "it did not wait for the operation before it";
    EXPECT_TRUE(last->empty()) << "it did not wait for the operation before it";
    gate->store(true);
    group.barrier();
    fake_cuda::run_all();
    EXPECT_EQ(*last, std::vector<float>(10, 24.0F));
  });
}

// Making an event costs a caller more than all else that it does for an operation.
TEST_F(NcclStreams, ABurstUsesTheEventsOfTheOneBefore) {
  constexpr size_t kBurst = 500;
  run_ranks(
      [&](int rank) {
        StatusOr<ProcessGroup> group = try_init_process_group(options(rank, 1));
        ASSERT_TRUE(group.ok()) << group.status();
        const at::Tensor x = on_gpu_of(*group, numbers(7, 1));
        const auto burst = [&] {
          const size_t before = fake_cuda::events_made();
          fake_nccl::hold_operations(true);
          for (size_t i = 0; i < kBurst; ++i) group->all_reduce(x);
          fake_nccl::hold_operations(false);
          group->barrier();
          return fake_cuda::events_made() - before;
        };
        EXPECT_GE(burst(), kBurst);
        // The event of the last operation may be waited for by the next one.
        for (int i = 0; i < 2; ++i) EXPECT_LE(burst(), 2u);
      },
      1);
}

TEST_F(NcclStreams, AGroupSplits) {
  run([](ProcessGroup& group) {
    ProcessGroup turned = group.split(0, -group.rank());
    EXPECT_EQ(turned.backend(), "nccl");
    EXPECT_EQ(turned.rank(), 1 - group.rank());
    const at::Tensor x = on_gpu_of(group, at::full({3}, 1.0F));
    turned.all_reduce(x);
    turned.barrier();
    EXPECT_TRUE(at::equal(settled(x), at::full({3}, 2.0F)));
    EXPECT_FALSE(group.split(-1).valid());
  });
}

TEST_F(NcclStreams, OnlyTheDeviceIsGiven) {
  run([](ProcessGroupOptions* o) { o->backend = Backend::kAuto; },
      [](ProcessGroup& group) {
        EXPECT_EQ(group.backend(), "nccl");
        const at::Tensor x = group.empty({4});
        EXPECT_EQ(x.device(), gpu(group.rank()));
        group.broadcast(x);
      });
}

}  // namespace
}  // namespace weft::testing
