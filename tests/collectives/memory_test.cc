// Large tensors, which go in pieces, tensors of the group's memory, and what a small operation
// allocates.
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/allclose.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/remainder.h"
#include "ATen/ops/zeros.h"
#include "weft/tests/collectives/world.h"
#include "weft/tests/testing/forwarding_runtime.h"

// Sanitizers have operators of their own, which cannot be replaced beside theirs: there, nothing is
// counted.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define WEFT_COUNTS_ALLOCATIONS 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define WEFT_COUNTS_ALLOCATIONS 0
#endif
#endif
#ifndef WEFT_COUNTS_ALLOCATIONS
#define WEFT_COUNTS_ALLOCATIONS 1
#endif

#if WEFT_COUNTS_ALLOCATIONS
namespace {

// Allocations of this thread: ranks are threads.
thread_local int64_t allocations = 0;

}  // namespace

// Not inline: the compiler would see free() of what it takes for the standard operator's.
__attribute__((noinline)) void* operator new(size_t size) {
  ++allocations;
  if (void* p = std::malloc(size == 0 ? 1 : size)) return p;
  throw std::bad_alloc();
}
// The delete below also ends what this one gave.
__attribute__((noinline)) void* operator new(size_t size, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(size == 0 ? 1 : size);
}
__attribute__((noinline)) void operator delete(void* p) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, size_t) noexcept { std::free(p); }
#endif

namespace weft::testing {
namespace {

class CollectiveMemory : public ::testing::TestWithParam<Backend> {};

// Rank r has (i + r) % 7 at i: whole numbers, so that every order gives the same.
at::Tensor numbers(int64_t n, int rank) {
  return at::remainder(at::arange(n, at::kFloat) + rank, 7);
}

at::Tensor sum_of(int64_t n, int size) {
  at::Tensor out = at::zeros({n});
  for (int rank = 0; rank < size; ++rank) out += numbers(n, rank);
  return out;
}

// More than a chunk, a piece and a slice, and a rest; some ranks with the group's memory, some
// without, and all of them.
TEST_P(CollectiveMemory, LargeTensorsGoInPieces) {
  constexpr int64_t kElements = (1 << 20) + 3;
  for (const int size : {2, 3}) {
    const at::Tensor sum = sum_of(kElements, size);
    World(GetParam(), size).run([&](ProcessGroup& group) {
      for (const int of_the_group : {0, 1, size}) {
        const bool own = group.rank() < of_the_group;
        at::Tensor t = own ? group.empty({kElements}) : at::empty({kElements});
        for (int repeat = 0; repeat < 2; ++repeat) {
          t.copy_(numbers(kElements, group.rank()));
          group.all_reduce(t);
          EXPECT_TRUE(at::equal(t, sum)) << size << " ranks, " << of_the_group << " with memory";
        }
      }
      at::Tensor half = numbers(kElements, group.rank()).to(at::kHalf);
      group.all_reduce(half, {.algorithm = Algorithm::kRing});
      EXPECT_TRUE(at::equal(half.to(at::kFloat), sum));
    });
  }
}

// WRITES-1: with plain writes that seem slow, nearly all go around the caches, and bring the same.
TEST(CollectiveWrites, around_the_caches_bring_the_same_elements) {
  const auto slow = std::make_shared<SlowClock>(make_system_runtime(), absl::Microseconds(100));
  constexpr int64_t kElements = (1 << 19) + 3;
  for (const int size : {2, 3}) {
    const at::Tensor sum = sum_of(kElements, size);
    World({Backend::kShm}, size, slow).run([&](ProcessGroup& group) {
      const at::Tensor mine = numbers(kElements, group.rank());
      const at::Tensor of_the_group = group.empty({kElements});
      const int next = (group.rank() + 1) % size;
      const int previous = (group.rank() + size - 1) % size;
      for (int repeat = 0; repeat < 3; ++repeat) {
        for (const at::Tensor& t : {mine.clone(), of_the_group.copy_(mine)}) {
          group.all_reduce(t);
          EXPECT_TRUE(at::equal(t, sum)) << size << " " << repeat;
        }
        at::Tensor t = mine.clone();
        group.broadcast(t, {.root = 1});
        EXPECT_TRUE(at::equal(t, numbers(kElements, 1)));
        const at::Tensor all = at::zeros({size, kElements});
        group.all_gather_into_tensor(all, mine);
        for (int rank = 0; rank < size; ++rank) {
          EXPECT_TRUE(at::equal(all[rank], numbers(kElements, rank)));
        }
        const at::Tensor part = at::zeros({kElements});
        group.reduce_scatter_tensor(part, all);
        EXPECT_TRUE(at::equal(part, all[group.rank()] * size));
        // Over the rings.
        Work sent = group.send_async(mine, next);
        group.recv(t, previous);
        sent.wait();
        EXPECT_TRUE(at::equal(t, numbers(kElements, previous)));
      }
    });
  }
}

TEST_P(CollectiveMemory, ReduceScatterReadsTheInputWhereItIs) {
  for (const int size : {1, 2, 3}) {
    for (const int64_t n : {1, 5, 70'001}) {
      const at::Tensor sum = sum_of(n * size, size);
      World(GetParam(), size).run([&](ProcessGroup& group) {
        const int64_t begin = n * group.rank();
        for (const bool own : {false, true}) {
          const at::Tensor input = own ? group.empty({n * size}) : at::empty({n * size});
          const at::Tensor output = own ? group.empty({n}) : at::empty({n});
          const at::Tensor mine = numbers(n * size, group.rank());
          input.copy_(mine);
          group.reduce_scatter_tensor(output, input);
          EXPECT_TRUE(at::equal(output, sum.narrow(0, begin, n))) << size << " x " << n;
          EXPECT_TRUE(at::equal(input, mine));
          group.reduce_scatter_tensor(output, input, {.op = ReduceOp::kAvg});
          EXPECT_TRUE(at::allclose(output, sum.narrow(0, begin, n) / size));
          group.reduce_scatter_tensor(output, input, {.op = ReduceOp::premul_sum(2)});
          EXPECT_TRUE(at::equal(output, sum.narrow(0, begin, n) * 2));
          EXPECT_TRUE(at::equal(input, mine));
          // Into the input itself, at this rank's block and elsewhere.
          const at::Tensor inside = input.narrow(0, begin, n);
          group.reduce_scatter_tensor(inside, input);
          EXPECT_TRUE(at::equal(inside, sum.narrow(0, begin, n)));
          input.copy_(mine);
          const at::Tensor first = input.narrow(0, 0, n);
          group.reduce_scatter_tensor(first, input);
          EXPECT_TRUE(at::equal(first, sum.narrow(0, begin, n)));
        }
        // Blocks of different sizes, some of them empty.
        std::vector<at::Tensor> inputs;
        for (int r = 0; r < size; ++r) inputs.push_back(numbers(n * r, group.rank() + r));
        const at::Tensor output = at::empty({n * group.rank()});
        group.reduce_scatter(output, inputs);
        at::Tensor expected = at::zeros({n * group.rank()});
        for (int r = 0; r < size; ++r) expected += numbers(n * group.rank(), group.rank() + r);
        EXPECT_TRUE(at::equal(output, expected));
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, CollectiveMemory,
                         ::testing::Values(Backend::kInproc, Backend::kShm, Backend::kTcp),
                         [](const auto& info) { return setting_text(info.param); });

#if WEFT_COUNTS_ALLOCATIONS
class CollectiveAllocations : public ::testing::TestWithParam<Backend> {};

TEST_P(CollectiveAllocations, CL_13_a_small_all_reduce_allocates_nothing) {
  constexpr int kWarmUps = 20;
  constexpr int kOperations = 300;
  for (const int size : {2, 3}) {
    World(GetParam(), size).run([&](ProcessGroup& group) {
      const at::Tensor t = at::zeros({64});
      for (int i = 0; i < kWarmUps; ++i) group.all_reduce(t);
      const int64_t before = allocations;
      for (int i = 0; i < kOperations; ++i) group.all_reduce(t);
      EXPECT_EQ(allocations - before, 0) << "in " << kOperations << " operations of " << size;
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, CollectiveAllocations,
                         ::testing::Values(Backend::kShm, Backend::kTcp),
                         [](const auto& info) { return setting_text(info.param); });
#endif

}  // namespace
}  // namespace weft::testing
