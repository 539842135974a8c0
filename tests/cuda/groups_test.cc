// CL-22: process groups on the backends of the CPU, with tensors on a GPU that two ranks share: results
// are those of CPU tensors, bit for bit, and come in the order of the streams.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/sin.h"
#include "ATen/ops/zeros.h"
#include "c10/core/StreamGuard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/tests/collectives/ddp_world.h"
#include "weft/tests/cuda/gpus.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;

class CudaGroups : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    const Gpus gpus = find_gpus();
    if (gpus.count == 0) GTEST_SKIP() << gpus.why;
  }
  static void on_ranks(int size, const std::function<void(ProcessGroup&)>& body) {
    run_ranks(
        size, make_system_runtime(), [&](ProcessGroup& group, InprocFabric&) { body(group); },
        [](ProcessGroupOptions& options) {
          options.backend = GetParam();
          if (options.backend != Backend::kInproc) options.fabric = nullptr;
        });
  }
};

// What rank `rank` brings: values whose sums round.
at::Tensor values(int64_t n, int rank, at::ScalarType type, c10::Device device) {
  const at::Tensor x = at::sin(at::arange(n, at::kDouble) * (0.37 + rank)) * 100;
  return x.to(type).to(device);
}

// Every operation on `device`; what all of them give, on the CPU.
std::vector<at::Tensor> all_operations(ProcessGroup& group, int64_t n, at::ScalarType type,
                                       c10::Device device) {
  const int rank = group.rank();
  const int size = group.size();
  const auto options = at::TensorOptions().dtype(type).device(device);
  const auto fresh = [&](int64_t length) { return at::zeros({length}, options); };
  std::vector<at::Tensor> out;
  const auto keep = [&](const at::Tensor& x) { out.push_back(x.cpu().clone()); };
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
    const at::Tensor x = values(n, rank, type, device);
    group.all_reduce(x, {.op = op});
    keep(x);
  }
  {
    // Columns of a matrix: neither contiguous nor the whole of their memory.
    const at::Tensor whole = values(4 * n, rank, type, device).view({n, 4});
    const at::Tensor x = whole.narrow(1, 1, 2).t();
    group.all_reduce(x);
    keep(whole);
  }
  {
    const at::Tensor a = values(n, rank, type, device);
    const at::Tensor b = values(n + 3, rank + 5, type, device);
    group.all_reduce_coalesced({a, b});
    keep(a);
    keep(b);
  }
  for (int root = 0; root < size; ++root) {
    at::Tensor x = values(n, rank, type, device);
    group.broadcast(x, {.root = root});
    keep(x);
    x = values(n, rank, type, device);
    group.reduce(x, {.root = root});
    keep(x);
  }
  {
    std::vector<at::Tensor> parts;
    for (int r = 0; r < size; ++r) parts.push_back(fresh(n + r));
    group.all_gather(parts, values(n + rank, rank, type, device));
    for (const at::Tensor& part : parts) keep(part);
    const at::Tensor joined = fresh(n * size);
    group.all_gather_into_tensor(joined, values(n, rank, type, device));
    keep(joined);
    const at::Tensor piece = fresh(n);
    group.reduce_scatter_tensor(piece, values(n * size, rank, type, device));
    keep(piece);
    const at::Tensor exchanged = fresh(n * size);
    group.all_to_all_single(exchanged, values(n * size, rank, type, device));
    keep(exchanged);
  }
  {
    std::vector<at::Tensor> parts;
    for (int r = 0; r < size && rank == 0; ++r) parts.push_back(fresh(n));
    group.gather(parts, values(n, rank, type, device));
    for (const at::Tensor& part : parts) keep(part);
    for (int r = 0; r < size && rank == 0; ++r) parts[static_cast<size_t>(r)].add_(1);
    const at::Tensor mine = fresh(n);
    group.scatter(mine, parts);
    keep(mine);
  }
  if (rank == 0) {
    group.send(values(n, 3, type, device), 1);
  } else if (rank == 1) {
    const at::Tensor x = fresh(n);
    EXPECT_EQ(group.recv(x), 0);
    keep(x);
  }
  return out;
}

TEST_P(CudaGroups, CL_22_results_are_those_of_the_cpu) {
  on_ranks(2, [](ProcessGroup& group) {
    // Sizes of one element, less than a slot, a slot and a bit, many slots.
    for (const int64_t n : {1, 1000, (1 << 18) + 1, 3'000'000}) {
      for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kLong}) {
        const auto want = all_operations(group, n, type, c10::kCPU);
        const auto got = all_operations(group, n, type, gpu(0));
        ASSERT_EQ(got.size(), want.size());
        for (size_t i = 0; i < got.size(); ++i) {
          EXPECT_TRUE(at::equal(got[i], want[i]))
              << "result " << i << " of " << n << " " << c10::toString(type);
        }
      }
    }
  });
}

// What is queued on the caller's stream comes before the operation, which comes before what is queued
// there after wait().
TEST_P(CudaGroups, CL_22_operations_come_in_the_order_of_the_callers_stream) {
  on_ranks(2, [](ProcessGroup& group) {
    const c10::StreamGuard guard(new_stream(gpu(0)));
    for (const bool async : {false, true}) {
      const at::Tensor x = at::zeros({1 << 20}, on(0));
      const at::Tensor y = at::zeros({2, 1 << 19}, on(0)).t();  // goes through a copy on the device
      delay(0);
      x.add_(1 + group.rank());
      y.add_(10 * (1 + group.rank()));
      if (async) {
        const Work first = group.all_reduce_async(x);
        const Work second = group.all_reduce_async(y);
        first.wait();
        second.wait();
      } else {
        group.all_reduce(x);
        group.all_reduce(y);
      }
      const at::Tensor doubled = x + x;
      EXPECT_TRUE(at::equal(doubled.cpu(), at::full({1 << 20}, 6, at::kFloat))) << async;
      EXPECT_TRUE(at::equal(y.cpu(), at::full({1 << 19, 2}, 30, at::kFloat))) << async;
    }
  });
}

// An operation that is issued returns at once, although the kernels before it are not done.
TEST_P(CudaGroups, CL_22_issuing_waits_for_no_kernel) {
  on_ranks(2, [](ProcessGroup& group) {
    const at::Tensor x = at::full({1 << 20}, 1, on(0));
    group.all_reduce(x);  // everything has been used once
    const c10::StreamGuard guard(new_stream(gpu(0)));
    x.fill_(1);
    for (int i = 0; i < 5; ++i) delay(0);
    c10::Event late(c10::kCUDA);
    late.record(current_stream(gpu(0)));
    x.add_(1);
    const Work work = group.all_reduce_async(x);
    EXPECT_FALSE(late.query()) << "all_reduce_async waited for the kernels before it";
    work.wait();
    EXPECT_TRUE(at::equal(x.cpu(), at::full({1 << 20}, 4, at::kFloat)));
  });
}

TEST_P(CudaGroups, BadInput_tensors_on_several_devices) {
  on_ranks(2, [](ProcessGroup& group) {
    const at::Tensor here = at::zeros({4});
    const at::Tensor there = at::zeros({4}, on(0));
    const Status mixed = group.try_all_reduce_coalesced({here, there});
    EXPECT_EQ(error_kind(mixed), ErrorKind::kInvalidArgument) << mixed;
    EXPECT_THAT(std::string(mixed.message()), HasSubstr("cuda:0"));
    EXPECT_FALSE(group.try_all_gather({here, here}, there).ok());
    // The group lives on.
    there.add_(1);
    group.all_reduce(there);
    EXPECT_TRUE(at::equal(there.cpu(), at::full({4}, 2, at::kFloat)));
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, CudaGroups,
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
