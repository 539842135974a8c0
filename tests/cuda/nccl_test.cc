// Groups by NCCL on real GPUs, one rank on each, two at most; every result is compared with that of
// a group on the CPU, bit by bit. The program links nothing of CUDA, and skips with the reason where
// weft::nccl, libnccl or a GPU is missing.

#include <dlfcn.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "c10/core/DeviceGuard.h"
#include "gtest/gtest.h"
#include "weft/collectives/process_group.h"
#include "weft/common/runtime.h"
#include "weft/store/hash_store.h"
#include "weft/tests/cuda/gpus.h"

namespace weft::testing {
namespace {

class NcclGpu : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (::dlopen("libweft_nccl.so", RTLD_NOW | RTLD_LOCAL) == nullptr) {
      GTEST_SKIP() << "no GPU on this machine, or no weft::nccl: " << ::dlerror();
    }
    const int gpus = c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount();
    if (gpus == 0) GTEST_SKIP() << "no GPU on this machine";
    if (gpus < GetParam()) GTEST_SKIP() << "only one GPU on this machine";
  }

  // Each rank has a group on its GPU and one on the CPU.
  void run(const std::function<void(ProcessGroup& gpu, ProcessGroup& cpu)>& body) const {
    std::vector<std::unique_ptr<Thread>> threads;
    for (int rank = 0; rank < GetParam(); ++rank) {
      threads.push_back(runtime_->spawn("rank", [this, rank, &body] {
        const c10::DeviceGuard device(gpu(rank));
        auto on_gpu = make(rank, Backend::kNccl);
        auto on_cpu = make(rank, Backend::kShm);
        ASSERT_TRUE(on_gpu.ok()) << on_gpu.status();
        ASSERT_TRUE(on_cpu.ok()) << on_cpu.status();
        try {
          body(*on_gpu, *on_cpu);
        } catch (const std::exception& e) {
          ADD_FAILURE() << "rank " << rank << ": " << e.what();
          on_gpu->abort("the test has failed here");
          on_cpu->abort("the test has failed here");
        }
      }));
    }
    for (auto& thread : threads) thread->join();
  }
  StatusOr<ProcessGroup> make(int rank, Backend backend) const {
    ProcessGroupOptions out;
    out.name = backend == Backend::kNccl ? "gpu" : "cpu";
    out.backend = backend;
    out.store = store_->new_client();
    out.rank = rank;
    out.size = GetParam();
    out.timeout = absl::Seconds(60);
    out.init_timeout = absl::Seconds(60);
    out.runtime = runtime_;
    out.device = rank;
    return try_init_process_group(out);
  }

  const std::shared_ptr<Runtime> runtime_ = make_system_runtime();
  const std::shared_ptr<HashStore> store_ = std::make_shared<HashStore>(runtime_);
};

// Small whole numbers, which add up exactly in every type.
at::Tensor values(int64_t n, int rank, at::ScalarType type) {
  const at::Tensor x = (at::arange(n) + 3 * rank).remainder(4) + 1;
  return type == at::kBool ? x.remainder(2).to(at::kBool) : x.to(type);
}

std::string bytes(const at::Tensor& x) {
  const at::Tensor plain = x.cpu().contiguous();
  return {static_cast<const char*>(plain.const_data_ptr()), plain.nbytes()};
}

constexpr int64_t kSizes[] = {0, 1, 3, 1023, 100'003};
const at::ScalarType kTypes[] = {at::kBool,
                                 at::kByte,
                                 at::kChar,
                                 at::kInt,
                                 at::ScalarType::UInt32,
                                 at::kLong,
                                 at::ScalarType::UInt64,
                                 at::kHalf,
                                 at::kBFloat16,
                                 at::kFloat,
                                 at::kDouble,
                                 at::kComplexFloat,
                                 at::ScalarType::Float8_e4m3fn,
                                 at::ScalarType::Float8_e5m2};

TEST_P(NcclGpu, CL_21_every_reduction_equals_that_of_the_cpu) {
  run([](ProcessGroup& on_gpu, ProcessGroup& on_cpu) {
    int done = 0;
    for (const at::ScalarType type : kTypes) {
      for (const ReduceOp op :
           {ReduceOp(ReduceOp::kSum), ReduceOp(ReduceOp::kProd), ReduceOp(ReduceOp::kMin),
            ReduceOp(ReduceOp::kMax), ReduceOp(ReduceOp::kAvg), ReduceOp::premul_sum(0.5)}) {
        for (const int64_t n : kSizes) {
          const at::Tensor x = values(n, on_gpu.rank(), type);
          const at::Tensor y = x.to(gpu(on_gpu.rank()));
          const Status reduced = on_gpu.try_all_reduce(y, {.op = op});
          if (error_kind(reduced) == ErrorKind::kUnimplemented ||
              error_kind(reduced) == ErrorKind::kInvalidArgument) {
            continue;  // by name, on all ranks, before anything moves
          }
          ASSERT_TRUE(reduced.ok()) << reduced;
          on_cpu.all_reduce(x, {.op = op});
          ASSERT_EQ(bytes(y), bytes(x))
              << c10::toString(type) << " x " << n << ", reduction " << static_cast<int>(op.kind());
          ++done;
        }
      }
    }
    EXPECT_GE(done, 14 * 4 * 5 - 2 * 5 * 5) << "almost all of them are there";
  });
}

TEST_P(NcclGpu, CL_21_every_operation_equals_that_of_the_cpu) {
  run([](ProcessGroup& on_gpu, ProcessGroup& on_cpu) {
    const int size = on_gpu.size();
    const int rank = on_gpu.rank();
    const c10::Device device = gpu(rank);
    // Runs it on both, and compares what it writes.
    const auto both = [&](const char* what,
                          const std::function<TensorList(ProcessGroup&, c10::Device)>& body) {
      const TensorList theirs = body(on_cpu, c10::kCPU);
      const TensorList ours = body(on_gpu, device);
      ASSERT_EQ(ours.size(), theirs.size());
      for (size_t i = 0; i < ours.size(); ++i) {
        EXPECT_EQ(bytes(ours[i]), bytes(theirs[i])) << what << ", tensor " << i;
      }
    };
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kShort, at::kComplexDouble}) {
      const bool reduces = type == at::kFloat || type == at::kBFloat16;
      for (const int64_t n : {int64_t{4}, int64_t{1000}}) {
        const auto mine = [&](c10::Device d) { return values(n, rank, type).to(d); };
        const auto room = [&](c10::Device d, int64_t elements) {
          return at::zeros({elements}, at::TensorOptions().dtype(type)).to(d);
        };
        both("broadcast", [&](ProcessGroup& g, c10::Device d) {
          TensorList out = {mine(d), mine(d).view({2, -1}).t()};
          g.broadcast(out[0], {.root = size - 1});
          g.broadcast(out[1], {.root = size - 1});
          return out;
        });
        both("all_gather", [&](ProcessGroup& g, c10::Device d) {
          TensorList out;
          for (int r = 0; r < size; ++r) out.push_back(room(d, n + r));
          g.all_gather(out, values(n + rank, rank, type).to(d));
          out.push_back(room(d, size * n));
          g.all_gather_into_tensor(out.back(), mine(d));
          return out;
        });
        both("gather and scatter", [&](ProcessGroup& g, c10::Device d) {
          TensorList all;
          if (rank == 0) {
            for (int r = 0; r < size; ++r) all.push_back(room(d, n + r));
          }
          g.gather(all, values(n + rank, rank, type).to(d));
          const at::Tensor back = room(d, n + rank);
          g.scatter(back, all);
          all.push_back(back);
          return all;
        });
        both("all_to_all", [&](ProcessGroup& g, c10::Device d) {
          TensorList in;
          TensorList out;
          for (int r = 0; r < size; ++r) {
            in.push_back(values(n + r, rank, type).to(d));
            out.push_back(room(d, n + rank));
          }
          g.all_to_all(out, in);
          out.push_back(room(d, size * n));
          g.all_to_all_single(out.back(), values(size * n, rank, type).to(d));
          return out;
        });
        if (!reduces) continue;
        both("reduce", [&](ProcessGroup& g, c10::Device d) {
          TensorList out = {mine(d), mine(d).view({2, -1}).t()};
          g.reduce(out[0], {.root = size - 1});
          g.reduce(out[1], {.root = 0, .op = ReduceOp::kMax});
          return out;
        });
        both("reduce_scatter", [&](ProcessGroup& g, c10::Device d) {
          TensorList in;
          for (int r = 0; r < size; ++r) in.push_back(values(n + r, rank, type).to(d));
          TensorList out = {room(d, n + rank), room(d, n)};
          g.reduce_scatter(out[0], in);
          g.reduce_scatter_tensor(out[1], values(size * n, rank, type).to(d));
          return out;
        });
        both("coalesced", [&](ProcessGroup& g, c10::Device d) {
          TensorList out = {mine(d), room(d, 0), values(n, rank + 1, type).to(d).view({2, -1}).t()};
          g.all_reduce_coalesced(out);
          g.broadcast_coalesced(out);
          return out;
        });
        if (size < 2) continue;
        both("send and recv", [&](ProcessGroup& g, c10::Device d) {
          TensorList out = {room(d, n)};
          if (rank == 0) {
            g.send(mine(d), 1);
            g.recv(out[0], 1);
          } else {
            g.recv(out[0], 0);
            g.send(mine(d), 0);
          }
          return out;
        });
      }
    }
    on_gpu.barrier();
    on_gpu.monitored_barrier();
  });
}

// Has all that was queued on the current stream been done?
bool idle(c10::Device device) {
  return c10::impl::VirtualGuardImpl(c10::kCUDA).queryStream(current_stream(device));
}

TEST_P(NcclGpu, CL_21_nobody_waits_for_the_gpu) {
  run([](ProcessGroup& group, ProcessGroup&) {
    const c10::Device device = gpu(group.rank());
    const at::Tensor x = at::full({1 << 20}, 1.0F, on(group.rank()));
    group.all_reduce(x);  // connects
    group.barrier();
    delay(group.rank());
    x.fill_(2);
    group.all_reduce(x);
    EXPECT_FALSE(idle(device)) << "the operation waited for the kernels before it";
    const Work work = group.all_reduce_async(x);
    EXPECT_TRUE(work.is_completed());
    work.wait();
    EXPECT_FALSE(idle(device)) << "wait() waited for the GPU";
    // Queued behind the operations, on another stream.
    at::Tensor y;
    const auto ours = current_stream(device);
    {
      const c10::StreamGuard guard(new_stream(device));
      work.wait();
      y = x + 0;
      join_streams(ours, current_stream(device));
    }
    const double factor = group.size();
    EXPECT_TRUE(at::equal(y.cpu(), at::full({1 << 20}, 2 * factor * factor, at::kFloat)));
    group.barrier();
    EXPECT_TRUE(idle(device));
  });
}

TEST_P(NcclGpu, CL_21_an_abort_ends_a_pending_operation) {
  run([](ProcessGroup& group, ProcessGroup&) {
    const at::Tensor x = at::full({1 << 20}, 1.0F, on(group.rank()));
    group.barrier();
    delay(group.rank());
    group.all_reduce(x);
    Work barrier = group.barrier_async();
    group.abort("to see that it ends");
    const Status ended = barrier.try_wait(absl::Seconds(60));
    EXPECT_EQ(error_kind(ended), ErrorKind::kCancelled) << ended;
    EXPECT_FALSE(group.try_all_reduce(x).ok());
    // The GPU goes on.
    EXPECT_TRUE(at::equal((at::full({3}, 1.0F, on(group.rank())) + 1).cpu(), at::full({3}, 2.0F)));
  });
}

TEST_P(NcclGpu, CL_22_two_ranks_on_one_gpu_are_refused_by_name) {
  std::vector<std::unique_ptr<Thread>> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.push_back(runtime_->spawn("rank", [this, rank] {
      ProcessGroupOptions o;
      o.name = "crowd";
      o.backend = Backend::kNccl;
      o.store = store_->new_client();
      o.rank = rank;
      o.size = 2;
      o.init_timeout = absl::Seconds(60);
      o.runtime = runtime_;
      o.device = 0;
      o.environment = Environment();
      const Status refused = try_init_process_group(o).status();
      EXPECT_EQ(error_kind(refused), ErrorKind::kInvalidArgument) << refused;
      EXPECT_NE(std::string(refused.message()).find("one rank per GPU"), std::string::npos)
          << refused;
    }));
  }
  for (auto& thread : threads) thread->join();
}

TEST_P(NcclGpu, CL_21_a_group_splits) {
  run([](ProcessGroup& group, ProcessGroup&) {
    ProcessGroup alone = group.split(group.rank());
    ASSERT_EQ(alone.size(), 1);
    EXPECT_EQ(alone.backend(), "nccl");
    ProcessGroup turned = group.split(0, -group.rank());
    ASSERT_EQ(turned.size(), group.size());
    EXPECT_EQ(turned.rank(), group.size() - 1 - group.rank());
    const at::Tensor x = at::full({5}, 1.0F, on(group.rank()));
    alone.all_reduce(x);
    turned.all_reduce(x);
    EXPECT_TRUE(at::equal(x.cpu(), at::full({5}, static_cast<float>(group.size()))));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclGpu, ::testing::Values(1, 2),
                         [](const auto& info) { return std::to_string(info.param) + "_ranks"; });

}  // namespace
}  // namespace weft::testing
