// CL-22: process groups that work on host memory, with tensors on GPUs that are made of host memory
// (fake_runtime.h): the bytes come after the caller's kernels, go through the slots, and are there when
// the operation has ended. Streams do only what a test asks for.

#include <atomic>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "c10/core/StreamGuard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/common/metrics.h"
#include "weft/tests/collectives/ddp_world.h"
#include "weft/tests/cuda/fake_gpus.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kSlotFloats = (1 << 20) / 4;

class StagedGroups : public ::testing::TestWithParam<Backend> {
 protected:
  void TearDown() override {
    fake_cuda::hold_copies_to_devices(false);
    fake_cuda::hold_copies_to_host(false);
    fake_cuda::run_all();
  }
  static void on_ranks(int size, const std::function<void(ProcessGroup&)>& body,
                       const std::function<void(ProcessGroupOptions&)>& adjust = nullptr) {
    run_ranks(
        size, make_system_runtime(), [&](ProcessGroup& group, InprocFabric&) { body(group); },
        [&](ProcessGroupOptions& options) {
          options.backend = GetParam();
          if (options.backend != Backend::kInproc) options.fabric = nullptr;
          if (adjust != nullptr) adjust(options);
        });
  }
  static at::Tensor values(int64_t n, int rank) {
    return (at::arange(n).to(at::kFloat) + static_cast<double>(1 + rank)).contiguous();
  }
};

TEST_P(StagedGroups, CL_22_bytes_go_through_slots_and_are_counted) {
  const auto metrics = std::make_shared<Metrics>();
  std::atomic<uint64_t> want_pieces{0};
  std::atomic<uint64_t> want_bytes{0};
  const size_t before = fake_cuda::copies();
  on_ranks(
      2,
      [&](ProcessGroup& group) {
        for (const int64_t n :
             {int64_t{0}, int64_t{1}, kSlotFloats, kSlotFloats + 1, 20 * kSlotFloats}) {
          const at::Tensor x = with_bytes(values(n, group.rank()), gpu(0));
          const uint64_t version = x._version();
          group.all_reduce(x);
          EXPECT_TRUE(at::equal(settled(x), values(n, 0) + values(n, 1))) << n;
          EXPECT_GT(x._version(), version);
          const auto pieces = static_cast<uint64_t>((n + kSlotFloats - 1) / kSlotFloats);
          want_pieces += 2 * pieces;
          want_bytes += 2 * static_cast<uint64_t>(n) * 4;
        }
      },
      [&](ProcessGroupOptions& options) { options.metrics = metrics; });
  EXPECT_EQ(fake_cuda::copies() - before, want_pieces.load());
  EXPECT_THAT(metrics->text(), HasSubstr("weft_collectives_staged_bytes_total " +
                                         std::to_string(want_bytes.load())));
}

TEST_P(StagedGroups, CL_22_every_operation) {
  on_ranks(2, [](ProcessGroup& group) {
    const int rank = group.rank();
    const auto mine = [&](int64_t n) { return with_bytes(values(n, rank), gpu(0)); };
    const auto fresh = [](int64_t n) { return with_bytes(at::zeros({n}), gpu(0)); };
    at::Tensor x = mine(5);
    group.broadcast(x, {.root = 1});
    EXPECT_TRUE(at::equal(settled(x), values(5, 1)));
    x = mine(5);
    group.reduce(x, {.root = 1});
    EXPECT_TRUE(at::equal(settled(x), rank == 1 ? values(5, 0) + values(5, 1) : values(5, 0)));
    const std::vector<at::Tensor> parts = {fresh(4), fresh(6)};
    group.all_gather(parts, mine(4 + 2 * rank));
    EXPECT_TRUE(at::equal(settled(parts[0]), values(4, 0)));
    EXPECT_TRUE(at::equal(settled(parts[1]), values(6, 1)));
    const at::Tensor piece = fresh(3);
    group.reduce_scatter_tensor(piece, mine(6));
    EXPECT_TRUE(at::equal(settled(piece), (values(6, 0) + values(6, 1)).narrow(0, 3 * rank, 3)));
    const at::Tensor swapped = fresh(4);
    group.all_to_all_single(swapped, mine(4));
    EXPECT_TRUE(at::equal(settled(swapped).narrow(0, 2, 2), values(4, 1).narrow(0, 2 * rank, 2)));
    const std::vector<at::Tensor> all =
        rank == 0 ? std::vector<at::Tensor>{fresh(2), fresh(2)} : std::vector<at::Tensor>{};
    group.gather(all, mine(2));
    if (rank == 0) {
      EXPECT_TRUE(at::equal(settled(all[1]), values(2, 1)));
    }
    x = fresh(2);
    group.scatter(x, all);
    EXPECT_TRUE(at::equal(settled(x), values(2, rank)));
    if (rank == 0) group.send(mine(7), 1);
    if (rank == 1) {
      x = fresh(7);
      EXPECT_EQ(group.recv(x), 0);
      EXPECT_TRUE(at::equal(settled(x), values(7, 0)));
    }
  });
}

// The kernels that the caller has queued on its own stream come before the operation.
TEST_P(StagedGroups, CL_22_an_operation_waits_for_the_callers_stream) {
  const auto gate = std::make_shared<std::atomic<bool>>(false);
  const size_t blocking = fake_cuda::blocking_calls();
  std::latch both_have_looked(2);
  on_ranks(2, [&](ProcessGroup& group) {
    const at::Tensor x = with_bytes(at::zeros({100}), gpu(0));
    Work work;
    {
      const c10::StreamGuard guard(fresh());
      queue_fill(x, static_cast<float>(3 + group.rank()), gate);
      work = group.all_reduce_async(x);
    }
    EXPECT_FALSE(work.is_completed());
    both_have_looked.arrive_and_wait();
    gate->store(true);
    work.wait();
    EXPECT_TRUE(at::equal(settled(x), at::full({100}, 7.0F)));
  });
  EXPECT_EQ(fake_cuda::blocking_calls(), blocking) << "a thread waited for a device";
}

// The result is there when the operation has ended, for a reader on any stream.
TEST_P(StagedGroups, CL_22_an_operation_ends_when_its_bytes_are_there) {
  fake_cuda::hold_copies_to_devices(true);
  const size_t before = fake_cuda::copies();
  std::latch both_have_looked(2);
  on_ranks(2, [&](ProcessGroup& group) {
    const at::Tensor x = with_bytes(values(10, group.rank()), gpu(0));
    const Work work = group.all_reduce_async(x);
    // Both ranks, in and out.
    EXPECT_TRUE(fake_cuda::wait_for_copies(before + 4));
    EXPECT_FALSE(work.is_completed());
    both_have_looked.arrive_and_wait();
    fake_cuda::hold_copies_to_devices(false);
    work.wait();
    EXPECT_TRUE(at::equal(with_bytes(x, c10::kCPU), values(10, 0) + values(10, 1)));
  });
}

TEST_P(StagedGroups, BadInput_a_kernel_that_does_not_end_and_tensors_on_several_devices) {
  const auto never = std::make_shared<std::atomic<bool>>(false);
  on_ranks(2, [&](ProcessGroup& group) {
    const at::Tensor here = at::zeros({4});
    const at::Tensor there = with_bytes(here, gpu(0));
    const at::Tensor other = with_bytes(here, gpu(1));
    for (const auto& pair : {TensorList{here, there}, TensorList{there, other}}) {
      const Status mixed = group.try_all_reduce_coalesced(pair);
      EXPECT_EQ(error_kind(mixed), ErrorKind::kInvalidArgument) << mixed;
      EXPECT_THAT(std::string(mixed.message()), HasSubstr(pair[1].device().str()));
    }
    group.barrier();  // the group lives on
    const c10::StreamGuard guard(fresh());
    queue_fill(there, 1, never);
    if (group.rank() == 0) {
      const Status late = group.try_all_reduce(there, {.timeout = absl::Milliseconds(50)});
      EXPECT_EQ(error_kind(late), ErrorKind::kDeadline) << late;
      EXPECT_THAT(std::string(late.message()), HasSubstr("GPU"));
    } else {
      EXPECT_FALSE(group.try_all_reduce(there).ok());
    }
    never->store(true);  // the end of a group waits for its copies, for a while
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, StagedGroups,
                         ::testing::Values(Backend::kInproc, Backend::kShm, Backend::kTcp),
                         [](const auto& info) {
                           switch (info.param) {
                             case Backend::kShm: return "shm";
                             case Backend::kTcp: return "tcp";
                             default: return "inproc";
                           }
                         });

}  // namespace
}  // namespace weft::testing
