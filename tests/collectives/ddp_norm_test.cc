// SyncBatchNorm against BatchNorm over the batches of all ranks.

#include <numeric>
#include <sstream>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
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

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    using torch::nn::BatchNorm1d;
    const auto plain = torch::nn::BatchNorm1dOptions(4).affine(false);
    steps = register_module("steps",
                            torch::nn::Sequential(torch::nn::Linear(4, 4), BatchNorm1d(plain)));
  }
  at::Tensor forward(const at::Tensor& x) { return steps->forward(x); }
  torch::nn::Sequential steps = nullptr;
};
TORCH_MODULE(Block);

// In all places that a conversion reaches.
struct ConvertibleImpl : torch::nn::Module {
  ConvertibleImpl() {
    using torch::nn::BatchNorm1d;
    using torch::nn::BatchNorm1dOptions;
    using torch::nn::Linear;
    layers = register_module(
        "layers",
        torch::nn::Sequential(Linear(3, 4), BatchNorm1d(BatchNorm1dOptions(4).momentum(0.3)),
                              Block(), Linear(4, 4)));
    own = register_module("own", SyncBatchNorm(4, SyncBatchNormOptions{.momentum = std::nullopt}));
    any = torch::nn::AnyModule(torch::nn::BatchNorm1d(4));
    register_module("any", any.ptr());
    to(torch::kFloat64);
  }
  at::Tensor forward(const at::Tensor& x) {
    return any.forward(own(layers->forward(x)).tanh()) * 2;
  }
  void convert(const ProcessGroup& group) {
    unregister_module("any");
    EXPECT_EQ(convert_sync_batchnorm(any, group).size(), 1U);
    register_module("any", any.ptr());
    EXPECT_EQ(convert_sync_batchnorm(*this, group),
              (std::vector<std::string>{"layers.1", "layers.2.steps.1", "own"}));
  }
  torch::nn::Sequential layers = nullptr;
  SyncBatchNorm own = nullptr;
  torch::nn::AnyModule any;
};

// Two steps of a converted model on uneven batches, one of them empty, against the model as it was
// on the joined batch.
TEST(SyncBatchNorm, AConvertedModelEqualsTheJoinedBatch) {
  torch::manual_seed(5);
  const std::vector<int64_t> sizes = {5, 0, 2};
  const at::Tensor x = torch::randn({2, 7, 3}, torch::kFloat64);
  const auto joined = std::make_shared<ConvertibleImpl>();
  const auto train = [](ConvertibleImpl& net, torch::optim::SGD& optimizer, const at::Tensor& in) {
    optimizer.zero_grad();
    const at::Tensor out = net.forward(in);
    out.pow(3).sum().backward();
    return out.detach();
  };
  std::vector<std::shared_ptr<ConvertibleImpl>> nets;
  for (size_t r = 0; r < sizes.size(); ++r) {
    nets.push_back(std::make_shared<ConvertibleImpl>());
    const torch::NoGradGuard no_grad;
    for (const auto& item : joined->named_parameters()) {
      nets[r]->named_parameters()[item.key()].copy_(item.value());
    }
  }
  std::vector<at::Tensor> want;
  torch::optim::SGD optimizer(joined->parameters(), torch::optim::SGDOptions(0.01));
  for (int64_t step = 0; step < 2; ++step) {
    want.push_back(train(*joined, optimizer, x[step]));
    optimizer.step();
  }
  run_ranks(3, [&](ProcessGroup& group) {
    const auto rank = static_cast<size_t>(group.rank());
    ConvertibleImpl& net = *nets[rank];
    // An optimizer that was made before has the tensors of the converted model.
    torch::optim::SGD mine(net.parameters(), torch::optim::SGDOptions(0.01));
    net.convert(group);
    const int64_t begin =
        std::accumulate(sizes.begin(), sizes.begin() + static_cast<int64_t>(rank), int64_t{0});
    for (int64_t step = 0; step < 2; ++step) {
      const at::Tensor out = train(net, mine, x[step].narrow(0, begin, sizes[rank]));
      expect_near(out, want[static_cast<size_t>(step)].narrow(0, begin, sizes[rank]), 1e-9);
      for (at::Tensor& one : net.parameters()) {
        if (!one.grad().defined()) one.mutable_grad() = torch::zeros_like(one);
        group.all_reduce(one.mutable_grad());
      }
      mine.step();
    }
    for (const auto& item : joined->named_parameters()) {
      expect_near(net.named_parameters()[item.key()], item.value(), 1e-9);
    }
    for (const auto& item : joined->named_buffers()) {
      expect_near(net.named_buffers()[item.key()], item.value(), 1e-9);
    }
    net.eval();
    EXPECT_TRUE(net.layers->forward(x[0]).defined());  // each rank alone
    EXPECT_TRUE(convert_sync_batchnorm(net, group).empty());
  });
}

// A member of a module cannot be exchanged; then nothing is.
TEST(SyncBatchNorm, BadInput_a_normalization_that_cannot_be_converted) {
  struct Fixed : torch::nn::Module {
    Fixed() {
      layers = register_module("layers", torch::nn::Sequential(torch::nn::BatchNorm2d(2)));
      norm = register_module("norm", torch::nn::BatchNorm1d(4));
    }
    torch::nn::Sequential layers = nullptr;
    torch::nn::BatchNorm1d norm = nullptr;
  };
  run_ranks(1, [](ProcessGroup& group) {
    Fixed fixed;
    expect_error(error_of([&] { convert_sync_batchnorm(fixed, group); }),
                 ErrorKind::kInvalidArgument, {"BatchNorm 'norm' is a member"});
    EXPECT_NE(fixed.layers[0]->as<torch::nn::BatchNorm2d>(), nullptr);
    expect_error(error_of([&] { convert_sync_batchnorm(*fixed.norm, group); }),
                 ErrorKind::kInvalidArgument, {"BatchNorm1d"});
    expect_error(error_of([&] { convert_sync_batchnorm(*fixed.layers, ProcessGroup()); }),
                 ErrorKind::kInvalidArgument, {"no process group"});
    SyncBatchNorm alone(2);
    expect_error(error_of([&] {
                   alone->forward(torch::ones({1, 2}));
                 }),
                 ErrorKind::kInvalidArgument, {"1 values for each feature"});
    alone->train(false);
    EXPECT_EQ(convert_sync_batchnorm(*alone, group).size(), 1U);
    EXPECT_TRUE(alone->is_synchronized() && !alone->is_training());
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
