// SyncBatchNorm against BatchNorm over the batches of all ranks.

#include <numeric>
#include <sstream>

#include <torch/nn/modules/batchnorm.h>
#include <torch/serialize.h>

#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/collectives/ddp/sync_batch_norm.h"
#include "weft/tests/collectives/ddp_world.h"
#include "weft/tests/testing/checks.h"

namespace weft::testing {
namespace {

// Batches of `sizes`, which may differ and be empty; channels-last, too.
void compare(const std::vector<int64_t>& sizes, bool channels_last,
             std::optional<double> momentum) {
  torch::manual_seed(17);
  const auto ranks = static_cast<int>(sizes.size());
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  // A mean that is large beside the deviation: sums of squares would lose it.
  const at::Tensor x = torch::randn({2, total, 5, 3, 2}, torch::kFloat64) + 1e4;
  const at::Tensor dy = torch::randn({2, total, 5, 3, 2}, torch::kFloat64);
  torch::nn::BatchNorm2d joined(torch::nn::BatchNorm2dOptions(5).momentum(momentum));
  joined->to(torch::kFloat64);
  const at::Tensor in = x.clone().set_requires_grad(true);
  std::vector<at::Tensor> want;
  for (int64_t step = 0; step < 2; ++step) {
    want.push_back(joined->forward(in[step]));
    want.back().backward(dy[step], /*retain_graph=*/true);
  }
  run_ranks(ranks, [&](ProcessGroup& group) {
    const auto rank = static_cast<size_t>(group.rank());
    const int64_t begin =
        std::accumulate(sizes.begin(), sizes.begin() + static_cast<int64_t>(rank), int64_t{0});
    SyncBatchNorm norm(group, 5, SyncBatchNormOptions{.momentum = momentum});
    norm->to(torch::kFloat64);
    for (int64_t step = 0; step < 2; ++step) {
      at::Tensor mine = x[step].narrow(0, begin, sizes[rank]).clone();
      if (channels_last) mine = mine.contiguous(at::MemoryFormat::ChannelsLast);
      mine.set_requires_grad(true);
      const at::Tensor out = norm->forward(mine);
      out.backward(dy[step].narrow(0, begin, sizes[rank]));
      expect_near(out, want[static_cast<size_t>(step)].narrow(0, begin, sizes[rank]), 1e-9);
      expect_near(mine.grad(), in.grad()[step].narrow(0, begin, sizes[rank]), 1e-9);
    }
    expect_near(norm->running_mean, joined->running_mean, 1e-9);
    expect_near(norm->running_var, joined->running_var, 1e-9);
    // Those of the parameters are the rank's own part.
    for (at::Tensor grad : {norm->weight.grad(), norm->bias.grad()}) group.all_reduce(grad);
    expect_near(norm->weight.grad(), joined->weight.grad(), 1e-9);
    expect_near(norm->bias.grad(), joined->bias.grad(), 1e-9);
    norm->eval();
    joined->eval();
    if (rank == 0) expect_near(norm->forward(x[0]), joined->forward(x[0]), 1e-9);
  });
}

TEST(SyncBatchNorm, DB_14_EqualsTheJoinedBatchOnCpus) {
  compare({4, 4}, false, 0.1);
  compare({5, 1, 2}, true, 0.3);
  compare({3, 0, 4}, false, std::nullopt);
}

TEST(SyncBatchNorm, LoadsWhatABatchNormHasSaved) {
  std::stringstream stream;
  torch::nn::BatchNorm1d from(3);
  from->forward(torch::randn({8, 3}));
  torch::save(from, stream);
  run_ranks(1, [&](ProcessGroup& group) {
    SyncBatchNorm to(group, 3);
    torch::load(to, stream);
    expect_near(to->running_mean, from->running_mean, 0);
    expect_near(to->running_var, from->running_var, 0);
  });
}

// With a sample on each rank only.
TEST(SyncBatchNorm, InDataParallelism) {
  run_ranks(3, [](ProcessGroup& group) {
    SyncBatchNorm norm(group, 2);
    DistributedDataParallel ddp(norm, group, {.broadcast_buffers = false});
    for (int i = 0; i < 3; ++i) {
      const at::Tensor x = torch::arange(2.0).view({1, 2}) * (group.rank() + i);
      ddp.forward(x).pow(2).sum().backward();
    }
    for (const at::Tensor& one : {norm->weight.grad(), norm->running_var}) {
      std::vector<at::Tensor> all = {torch::empty({2}), torch::empty({2}), torch::empty({2})};
      group.all_gather(all, one);
      EXPECT_TRUE(torch::equal(all[0], all[1]));
      EXPECT_TRUE(torch::equal(all[0], all[2]));
    }
  });
}

TEST(SyncBatchNorm, BadInput_batches_without_variance) {
  run_ranks(2, [](ProcessGroup& group) {
    SyncBatchNorm norm(group, 2);
    const Status failed = error_of([&] { norm->forward(torch::ones({1 - group.rank(), 2})); });
    expect_error(failed, ErrorKind::kInvalidArgument, {"1 values for each feature"});
    expect_error(error_of([&] {
                   norm->forward(torch::ones({2, 3}));
                 }),
                 ErrorKind::kInvalidArgument, {"[2, 3]"});
    EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 0);
    (void)norm->forward(torch::ones({1, 2}));
    EXPECT_THROW(SyncBatchNorm(group, 0), Error);
    EXPECT_THROW(SyncBatchNorm(ProcessGroup(), 1), Error);
  });
}

}  // namespace
}  // namespace weft::testing
