// Parameter servers with a trainer on a GPU: what it pulls and pushes is, bit for bit, what the same
// trainer on the CPU does, also when the kernels that make it are late.

#include <torch/types.h>

#include <functional>
#include <vector>

#include "c10/core/StreamGuard.h"
#include "gtest/gtest.h"
#include "weft/ps/layers.h"
#include "weft/tests/cuda/gpus.h"
#include "weft/tests/ps/fixture.h"

namespace weft::testing {
namespace {

class CudaTables : public PsTest {
 protected:
  void SetUp() override {
    const Gpus gpus = find_gpus();
    if (gpus.count == 0) GTEST_SKIP() << gpus.why;
  }
};

// Whole numbers and powers of two: every order of additions gives the same bits.
at::Tensor whole(int64_t rows, int64_t columns, int64_t seed) {
  return (torch::arange(rows * columns) * 7 + seed)
      .remainder(9)
      .sub(4)
      .to(at::kFloat)
      .view({rows, columns});
}

// What the tables hold after some steps of a trainer on `device`, and what it saw.
std::vector<at::Tensor> train(PsJob& job, const std::string& name, c10::Device device) {
  std::vector<at::Tensor> out;
  auto dense = ps::dense({16, 8}, ps::rule<optim::SGD>({.lr = 0.25}));
  auto rows = ps::sparse(4, ps::rule<optim::SGD>({.lr = 0.5}));
  ps::Table weights = job.clients[0].open_table(name + "_dense", dense);
  ps::Embedding layer(job.clients[0].open_table(name + "_rows", rows), {.device = device});
  const bool late = device.is_cuda();
  for (int64_t step = 0; step < 4; ++step) {
    const at::Tensor w = weights.pull().wait().to(device);
    out.push_back(w.cpu());
    at::Tensor push = (w * 0.5 + whole(16, 8, step).to(device));
    if (late) {
      delay(0);
      push = push + 0;  // after the delay
    }
    weights.push(push).wait();
    const at::Tensor ids = torch::arange(6).add(step).remainder(5).view({2, 3}).to(device);
    const at::Tensor found = layer.forward(ids);
    EXPECT_EQ(found.device(), device);
    out.push_back(found.detach().cpu());
    (found * whole(6, 4, step).view({2, 3, 4}).to(device)).sum().backward();
    layer.step().wait();
    const at::Tensor keys = torch::arange(3);
    at::Tensor gradient = whole(3, 4, step + 3).to(device);
    if (late) {
      delay(0);
      gradient = gradient + 0;
    }
    layer.table().push_rows(keys.to(device), gradient).wait();
  }
  out.push_back(weights.pull().wait());
  out.push_back(layer.table().pull_rows(torch::arange(5)).wait());
  return out;
}

TEST_P(CudaTables, PS_11_a_trainer_on_a_gpu_equals_one_on_the_cpu) {
  PsJob job(2, 1, GetParam());
  const auto want = train(job, "cpu", c10::kCPU);
  const c10::StreamGuard guard(new_stream(gpu(0)));
  const auto got = train(job, "gpu", gpu(0));
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(torch::equal(got[i], want[i])) << i << "\n" << got[i] << "\n" << want[i];
  }
}

INSTANTIATE_TEST_SUITE_P(Nets, CudaTables, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
