// What goes wrong with weft::nccl: bad input, libraries that cannot be used, operations that do not
// end, and ranks that fail.

#include <latch>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/arange.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "weft/tests/cuda/fake_nccl_world.h"

namespace weft::testing {
namespace {

class NcclFaults : public FakeNcclTest {
 protected:
  // One rank alone, which fails to make its group.
  Status making(const std::function<void(ProcessGroupOptions*)>& change) const {
    ProcessGroupOptions o = options(0, 1);
    change(&o);
    return try_init_process_group(o).status();
  }
};

struct Lines : LogSink {
  void write(Severity, std::string_view line) override {
    const std::lock_guard<std::mutex> lock(mutex);
    text += line;
  }
  std::mutex mutex;
  std::string text;
};

TEST_F(NcclFaults, BadInput_a_missing_libnccl) {
  const auto missing = [](ProcessGroupOptions* o) {
    o->environment = Environment{{"WEFT_NCCL_LIBRARY", "/nowhere/libnccl.so.2"}};
  };
  expect_error(making(missing), ErrorKind::kUnavailable, {"backend nccl", "/nowhere/libnccl.so.2"});
  // Where no rank named the backend there is another way.
  const auto lines = std::make_shared<Lines>();
  run(
      [&](ProcessGroupOptions* o) {
        missing(o);
        o->backend = Backend::kAuto;
        o->log = Logger({.name = "nccl", .rank = *o->rank, .sink = lines});
      },
      [](ProcessGroup& group) {
        EXPECT_NE(group.backend(), "nccl");
        const at::Tensor x = at::full({3}, 1.0F);
        group.all_reduce(x);
        EXPECT_TRUE(at::equal(x, at::full({3}, 2.0F)));
      });
  EXPECT_NE(lines->text.find("goes without NCCL"), std::string::npos) << lines->text;
  EXPECT_NE(lines->text.find("/nowhere/libnccl.so.2"), std::string::npos) << lines->text;
}

TEST_F(NcclFaults, BadInput_an_old_libnccl_or_one_that_lacks_a_function) {
  fake_nccl::set_version(2804);
  expect_error(making([](ProcessGroupOptions*) {}), ErrorKind::kUnavailable,
               {"NCCL 2.8.4", "2.14.0 or newer"});
  expect_error(making([](ProcessGroupOptions* o) {
                 o->environment = Environment{{"WEFT_NCCL_LIBRARY", WEFT_TEST_BARE_NCCL}};
               }),
               ErrorKind::kUnavailable, {"NCCL 2.28.9", "ncclGetUniqueId"});
}

TEST_F(NcclFaults, BadInput_a_gpu_that_is_not_there_or_taken_twice) {
  expect_error(making([](ProcessGroupOptions* o) { o->device = 7; }), ErrorKind::kInvalidArgument,
               {"cuda:7", "2 GPUs"});
  run_ranks([&](int rank) {
    ProcessGroupOptions o = options(rank);
    o.device = 1;
    expect_error(try_init_process_group(o).status(), ErrorKind::kInvalidArgument,
                 {"ranks 0 and 1", "NCCL 2.28.9", "one rank per GPU"});
  });
}

// CL-22: newer libraries take several ranks on one GPU when they are told to.
TEST_F(NcclFaults, CL_22_two_ranks_on_one_gpu_where_nccl_takes_them) {
  fake_nccl::set_version(23003);
  run(
      [](ProcessGroupOptions* o) {
        o->device = 0;
        o->environment->emplace("NCCL_MULTI_RANK_GPU_ENABLE", "1");
      },
      [](ProcessGroup& group) {
        const at::Tensor x = with_bytes(at::full({3}, 1.0F), gpu(0));
        group.all_reduce(x);
        group.barrier();
        EXPECT_TRUE(at::equal(settled(x), at::full({3}, 2.0F)));
      });
}

TEST_F(NcclFaults, BadInput_what_nccl_does_not_have) {
  run([](ProcessGroup& group) {
    const at::Tensor here = at::zeros({4});
    const at::Tensor x = on_gpu_of(group, here);
    const int other = 1 - group.rank();
    expect_error(group.try_all_reduce(here), ErrorKind::kInvalidArgument,
                 {"all_reduce", "tensor 0 is on cpu", "cuda:"});
    expect_error(group.try_all_reduce(with_bytes(here, gpu(other))), ErrorKind::kInvalidArgument,
                 {"all_reduce", "tensor 0 is on cuda:"});
    expect_error(group.try_all_reduce(on_gpu_of(group, here.to(at::kInt)), {.op = ReduceOp::kBand}),
                 ErrorKind::kUnimplemented, {"nccl", "Int", "band"});
    expect_error(group.try_all_reduce(on_gpu_of(group, here.to(at::kShort))),
                 ErrorKind::kUnimplemented, {"nccl", "Short", "sum"});
    expect_error(group.try_all_reduce(x, {.algorithm = Algorithm::kRing}),
                 ErrorKind::kUnimplemented, {"nccl", "ring"});
    expect_error(group.try_recv(x).status(), ErrorKind::kUnimplemented, {"any source"});
    expect_error(group.try_send(x, other, {.tag = 3}), ErrorKind::kUnimplemented, {"tags", "3"});
    expect_error(group.try_recv_any_shape(other).status(), ErrorKind::kUnimplemented,
                 {"unknown shape"});
    expect_error(group.all_reduce_async(here).try_wait(), ErrorKind::kInvalidArgument, {"cpu"});
    EXPECT_TRUE(group.try_barrier().ok()) << "the group lives on";
  });
}

// DEVICE-3, COLL-3.
TEST_F(NcclFaults, AnOperationThatDoesNotEndIsAbortedAtItsDeadline) {
  std::latch ready(2);
  run([&](ProcessGroup& group) {
    const at::Tensor x = on_gpu_of(group, at::zeros({4}));
    group.barrier();
    ready.arrive_and_wait();
    fake_nccl::hold_operations(true);
    // Rank 1 hears of it from rank 0.
    const absl::Duration timeout = group.rank() == 0 ? absl::Milliseconds(100) : absl::Seconds(60);
    group.all_reduce(x, {.timeout = timeout});
    const Status failed = group.try_barrier();
    expect_error(failed, ErrorKind::kDeadline, {"all_reduce #2", "the time given is over"});
    if (group.rank() == 1) expect_error(failed, ErrorKind::kDeadline, {"rank 0 says"});
    EXPECT_FALSE(group.failure().ok());
    expect_error(group.try_all_reduce(x), ErrorKind::kDeadline, {"has failed"});
  });
  EXPECT_EQ(fake_nccl::aborted(), 2u);
}

TEST_F(NcclFaults, AnErrorOfNcclInTheBackground) {
  std::latch ready(2);
  run([&](ProcessGroup& group) {
    const at::Tensor x = on_gpu_of(group, at::zeros({4}));
    group.barrier();
    ready.arrive_and_wait();
    fake_nccl::hold_operations(true);
    group.all_reduce(x);
    Work barrier = group.barrier_async();
    if (group.rank() == 1) fake_nccl::set_async_error(1, 6);  // ncclRemoteError
    const Status failed = barrier.try_wait();
    expect_error(failed, ErrorKind::kPeerLost,
                 {"all_reduce #2", "at rank 1 of 2", "network error", "the last words"});
    if (group.rank() == 0) expect_error(failed, ErrorKind::kPeerLost, {"rank 1 says"});
  });
}

TEST_F(NcclFaults, ACallOfNcclThatFails) {
  std::latch failed(2);
  run([&](ProcessGroup& group) {
    const at::Tensor x = on_gpu_of(group, at::zeros({4}));
    group.barrier();
    if (group.rank() == 0) {
      fake_nccl::fail_next("ncclBroadcast", 3);  // ncclInternalError
      expect_error(group.try_broadcast(x), ErrorKind::kInternal,
                   {"broadcast #2", "rank 0 of 2", "NCCL 2.28.9", "internal error"});
    }
    failed.arrive_and_wait();
    if (group.rank() == 0) return;
    (void)group.try_broadcast(x);
    expect_error(group.try_barrier(), ErrorKind::kInternal, {"rank 0 says", "broadcast #2"});
  });
}

TEST_F(NcclFaults, ARankThatDies) {
  const auto fabric = std::make_shared<InprocFabric>(runtime_);
  std::latch ready(2);
  run([&](ProcessGroupOptions* o) { o->fabric = fabric; },
      [&](ProcessGroup& group) {
        const at::Tensor x = on_gpu_of(group, at::zeros({4}));
        group.barrier();
        ready.arrive_and_wait();
        if (group.rank() == 0) {
          fabric->kill(0);
          return;
        }
        (void)group.try_all_reduce(x);
        expect_error(group.try_barrier(), ErrorKind::kPeerLost, {"all_reduce #2", "rank 0"});
      });
}

TEST_F(NcclFaults, AnAbortEndsWhatIsUnderWay) {
  std::latch ready(2);
  run([&](ProcessGroup& group) {
    const at::Tensor x = on_gpu_of(group, at::zeros({4}));
    group.barrier();
    ready.arrive_and_wait();
    fake_nccl::hold_operations(true);
    group.all_reduce(x);
    Work barrier = group.barrier_async();
    if (group.rank() == 1) group.abort("enough");
    expect_error(barrier.try_wait(), ErrorKind::kCancelled, {"aborted at rank 1", "enough"});
  });
}

TEST_F(NcclFaults, AGroupThatDoesNotConnectEndsAtItsDeadline) {
  fake_nccl::hold_connecting(true);
  run_ranks([&](int rank) {
    ProcessGroupOptions o = options(rank);
    o.init_timeout = absl::Milliseconds(300);
    const Status failed = try_init_process_group(o).status();
    EXPECT_FALSE(failed.ok());
    EXPECT_NE(std::string(failed.message()).find("NCCL 2.28.9 has not connected"),
              std::string::npos)
        << failed;
  });
}

// COLL-2, on request.
TEST_F(NcclFaults, RanksThatDifferWhereOperationsAreCompared) {
  run([](ProcessGroupOptions* o) { o->compare_operations = true; },
      [](ProcessGroup& group) {
        const at::Tensor x = on_gpu_of(group, at::full({4}, 1.0F));
        group.all_reduce(x);
        group.barrier();
        const at::Tensor y = on_gpu_of(group, at::zeros({group.rank() == 0 ? 8 : 9}));
        expect_error(group.try_all_reduce(y), ErrorKind::kInvalidArgument,
                     {"all_reduce #3", "float32 x 8", "float32 x 9"});
        EXPECT_TRUE(at::equal(settled(x), at::full({4}, 2.0F)));
      });
  EXPECT_EQ(fake_nccl::calls("ncclAllReduce"), 4u) << "nothing moves where operations differ";
}

TEST_F(NcclFaults, SurvivorsRebuild) {
  run([](ProcessGroup& group) {
    group.abort("to see what comes after it");
    ProcessGroup next = group.rebuild();
    EXPECT_EQ(next.backend(), "nccl");
    EXPECT_EQ(next.generation(), 2u);
    const at::Tensor x = on_gpu_of(next, at::full({4}, 1.0F));
    next.all_reduce(x);
    next.barrier();
    EXPECT_TRUE(at::equal(settled(x), at::full({4}, 2.0F)));
  });
}

}  // namespace
}  // namespace weft::testing
