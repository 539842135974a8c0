// DistributedDataParallel against one process with the joined batch.

#include "weft/collectives/ddp/distributed_data_parallel.h"

#include <algorithm>
#include <atomic>

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "weft/tests/collectives/ddp_world.h"
#include "weft/tests/testing/checks.h"
#include "weft/tests/testing/modules.h"

namespace weft::testing {
namespace {

using torch::indexing::Slice;

// A layer that is used twice, one that is frozen, one that only some batches use.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    in = register_module("in", torch::nn::Linear(6, 8));
    twice = register_module("twice", torch::nn::Linear(8, 8));
    frozen = register_module("frozen", torch::nn::Linear(8, 8));
    sometimes = register_module("sometimes", torch::nn::Linear(8, 8));
    out = register_module("out", torch::nn::Linear(8, 3));
    for (at::Tensor& one : frozen->parameters()) one.set_requires_grad(false);
    to(torch::kFloat64);
  }
  at::Tensor forward(const at::Tensor& x, bool with_sometimes = true) {
    at::Tensor h = torch::tanh(in(x));
    h = torch::tanh(twice(torch::tanh(twice(h))));
    h = torch::tanh(frozen(h));
    if (with_sometimes) h = torch::tanh(sometimes(h));
    return out(h);
  }
  torch::nn::Linear in = nullptr, twice = nullptr, frozen = nullptr, sometimes = nullptr,
                    out = nullptr;
};
TORCH_MODULE(Net);

using Options = DistributedDataParallelOptions;

at::Tensor mse(const at::Tensor& out, const at::Tensor& want) { return (out - want).pow(2).mean(); }

template <class Holder>
Holder clone_of(const Holder& from) {
  return Holder(copy_of(from.ptr()));
}

std::vector<at::Tensor> copies(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& one : module.parameters()) all.push_back(one.detach().clone());
  return all;
}

void expect_close(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want,
                  double bound) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_LE((got[i] - want[i]).abs().max().item<double>(), bound) << "tensor " << i;
  }
}

struct Case {
  std::string name{};
  int ranks = 2;
  Options options{};
  int micro = 1;  // batches that add up in a step, all but the last under no_sync()
  bool adam = false;
  bool always = true;  // off: `sometimes` has no part in odd steps, and never on other ranks than 0
};

class DdpParity : public ::testing::TestWithParam<Case> {
 protected:
  static constexpr int kSteps = 20;
  static constexpr int64_t kBatch = 12;

  static bool uses(int step, int rank) { return GetParam().always || (step % 2 == 0 && rank == 0); }
  static std::unique_ptr<torch::optim::Optimizer> optimizer(torch::nn::Module& net) {
    if (GetParam().adam) {
      return std::make_unique<torch::optim::Adam>(net.parameters(),
                                                  torch::optim::AdamOptions(0.02));
    }
    return std::make_unique<torch::optim::SGD>(net.parameters(),
                                               torch::optim::SGDOptions(0.1).momentum(0.9));
  }
  static std::pair<at::Tensor, at::Tensor> part(const at::Tensor& x, const at::Tensor& y, int step,
                                                int micro, int rank) {
    const int64_t index = (step * GetParam().micro + micro) * GetParam().ranks + rank;
    const int64_t begin = index * 5 % (x.size(0) - kBatch);
    return {x.index({Slice(begin, begin + kBatch)}), y.index({Slice(begin, begin + kBatch)})};
  }
  // One process; its loss is the mean of those that the ranks have.
  static std::vector<at::Tensor> joined(const Net& start, const at::Tensor& x,
                                        const at::Tensor& y) {
    Net net = clone_of(start);
    const auto optimize = optimizer(*net);
    const Case& c = GetParam();
    for (int s = 0; s < kSteps; ++s) {
      // A gradient in a bucket is zeroed, and then momentum moves its parameter.
      optimize->zero_grad(!c.options.gradient_as_bucket_view);
      for (int m = 0; m < c.micro; ++m) {
        for (int r = 0; r < c.ranks; ++r) {
          const auto [bx, by] = part(x, y, s, m, r);
          (mse(net->forward(bx, uses(s, r)), by) / c.ranks).backward();
        }
      }
      optimize->step();
    }
    return copies(*net);
  }
};

TEST_P(DdpParity, DB_2_and_DB_6_EqualsOneProcessWithTheJoinedBatch) {
  const Case& c = GetParam();
  torch::manual_seed(7);
  const at::Tensor x = torch::randn({100, 6}, torch::kFloat64);
  const at::Tensor y = torch::randn({100, 3}, torch::kFloat64);
  std::vector<Net> nets;
  for (int r = 0; r < c.ranks; ++r) nets.emplace_back();  // each begins elsewhere
  const std::vector<at::Tensor> want = joined(nets[0], x, y);
  run_ranks(c.ranks, [&](ProcessGroup& group) {
    const int rank = group.rank();
    Net net = nets[static_cast<size_t>(rank)];
    DistributedDataParallel ddp(net, group, c.options);
    const auto optimize = optimizer(*net);
    for (int s = 0; s < kSteps; ++s) {
      ddp.zero_grad();
      for (int m = 0; m + 1 < c.micro; ++m) {
        const auto local = ddp.no_sync();
        const auto [bx, by] = part(x, y, s, m, rank);
        mse(ddp.forward(bx, uses(s, rank)), by).backward();
      }
      const auto [bx, by] = part(x, y, s, c.micro - 1, rank);
      mse(ddp.forward(bx, uses(s, rank)), by).backward();
      optimize->step();
    }
    EXPECT_EQ(ddp.sight().reductions, kSteps);
  });
  expect_close(copies(*nets[0]), want, 1e-10);
  for (int r = 1; r < c.ranks; ++r) {
    expect_close(copies(*nets[static_cast<size_t>(r)]), copies(*nets[0]), 0);
  }
}

Options small(Options options = {}) {
  options.bucket_cap_mb = 0.0005;
  options.first_bucket_mb = 0.0001;
  return options;
}

INSTANTIATE_TEST_SUITE_P(
    Cases, DdpParity,
    ::testing::Values(
        Case{.name = "plain"}, Case{.name = "three_ranks_adam", .ranks = 3, .adam = true},
        Case{.name = "buckets", .ranks = 3, .options = small()},
        Case{.name = "views", .options = small({.gradient_as_bucket_view = true})},
        Case{.name = "no_sync", .options = small(), .micro = 4},
        Case{.name = "no_sync_views_adam",
             .options = small({.gradient_as_bucket_view = true}),
             .micro = 4,
             .adam = true},
        Case{.name = "unused", .options = small({.find_unused_parameters = true}), .always = false},
        Case{.name = "unused_views_no_sync",
             .ranks = 3,
             .options = small({.find_unused_parameters = true, .gradient_as_bucket_view = true}),
             .micro = 2,
             .always = false}),
    [](const auto& info) { return info.param.name; });

struct SparseImpl : torch::nn::Module {
  SparseImpl() {
    table = register_module("table",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(20, 4).sparse(true)));
    out = register_module("out", torch::nn::Linear(4, 1));
    to(torch::kFloat64);
  }
  at::Tensor forward(const at::Tensor& ids) { return out(table(ids)); }
  torch::nn::Embedding table = nullptr;
  torch::nn::Linear out = nullptr;
};
TORCH_MODULE(Sparse);

TEST(Ddp, SparseGradientsAreReducedAsSuch) {
  torch::manual_seed(3);
  const at::Tensor ids = torch::randint(0, 20, {2, 9}, torch::kLong);
  Sparse single;
  std::vector<Sparse> nets = {clone_of(single), clone_of(single)};
  for (int r = 0; r < 2; ++r) (single->forward(ids[r]).pow(2).mean() / 2).backward();
  run_ranks(2, [&](ProcessGroup& group) {
    Sparse net = nets[static_cast<size_t>(group.rank())];
    DistributedDataParallel ddp(net, group);
    ddp.forward(ids[group.rank()]).pow(2).mean().backward();
    const at::Tensor grad = net->table->weight.grad();
    ASSERT_TRUE(grad.is_sparse());
    expect_close({grad.to_dense(), net->out->weight.grad()},
                 {single->table->weight.grad().to_dense(), single->out->weight.grad()}, 1e-12);
  });
}

// Parameters and gradients with strides of their own.
TEST(Ddp, DB_16_ChannelsLast) {
  torch::manual_seed(3);
  const at::Tensor x = torch::randn({2, 4, 3, 6, 6}, torch::kFloat64);
  const auto make = [] {
    torch::nn::Conv2d conv(torch::nn::Conv2dOptions(3, 5, 3));
    conv->to(torch::kFloat64);
    return conv;
  };
  torch::nn::Conv2d single = make();
  for (int r = 0; r < 2; ++r) (single(x[r]).pow(2).mean() / 2).backward();
  run_ranks(2, [&](ProcessGroup& group) {
    torch::nn::Conv2d net = make();
    {
      const torch::NoGradGuard no_grad;
      net->weight.set_data(single->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
      net->bias.copy_(single->bias);
    }
    DistributedDataParallel ddp(net, group);
    ddp.forward(x[group.rank()].contiguous(at::MemoryFormat::ChannelsLast))
        .pow(2)
        .mean()
        .backward();
    expect_close({net->weight.grad()}, {single->weight.grad()}, 1e-12);
  });
}

// The gradient of what is conjugated first arrives as a view whose memory holds its conjugate.
TEST(Ddp, DB_16_GradientsThatAreConjugateViews) {
  torch::manual_seed(3);
  struct Filter : torch::nn::Module {
    Filter() { weight = register_parameter("weight", torch::randn({3}, torch::kComplexDouble)); }
    at::Tensor forward(const at::Tensor& x) { return (weight.conj() * x).abs(); }
    at::Tensor weight;
  };
  const at::Tensor x = torch::randn({2, 2, 3}, torch::kComplexDouble);
  const auto single = std::make_shared<Filter>();
  for (int step = 0; step < 2; ++step) {
    for (int r = 0; r < 2; ++r) (single->forward(x[step][r]).sum() / 2).backward();
  }
  const auto alone = std::make_shared<Filter>();
  alone->forward(x[0][0]).sum().backward();
  ASSERT_TRUE(alone->weight.grad().is_conj());
  for (const bool bucket_view : {false, true}) {
    run_ranks(2, [&](ProcessGroup& group) {
      const auto net = std::make_shared<Filter>();
      {
        const torch::NoGradGuard no_grad;
        net->weight.copy_(single->weight);
      }
      DistributedDataParallel ddp(net, group, {.gradient_as_bucket_view = bucket_view});
      ddp.forward(x[0][group.rank()]).sum().backward();
      const at::Tensor first = net->weight.grad().clone();
      ddp.zero_grad(/*set_to_none=*/false);
      ddp.forward(x[1][group.rank()]).sum().backward();
      expect_close({first + net->weight.grad()}, {single->weight.grad()}, 1e-12);
    });
  }
}

// Autograd tells a graph that has kept a gradient that it has changed.
TEST(Ddp, AMeanRaisesTheVersionOfItsGradient) {
  torch::nn::Linear single(2, 3);
  single->forward(torch::ones({1, 2})).sum().backward();
  run_ranks(2, [&](ProcessGroup& group) {
    torch::nn::Linear net(2, 3);
    DistributedDataParallel ddp(net, group);
    ddp.forward(torch::ones({1, 2})).sum().backward();
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_GT(net->parameters()[i].grad()._version(), single->parameters()[i].grad()._version());
    }
  });
}

TEST(Ddp, BuffersAreThoseOfRank0) {
  run_ranks(3, [](ProcessGroup& group) {
    torch::nn::BatchNorm1d norm(4);
    DistributedDataParallel ddp(norm, group);
    for (int i = 0; i < 3; ++i) {
      const at::Tensor x = torch::arange(32.0).view({8, 4}) * (1 + i + group.rank());
      ddp.forward(x).sum().backward();
    }
    ddp.sync_buffers();
    std::vector<at::Tensor> all;
    for (int r = 0; r < 3; ++r) all.push_back(torch::empty({4}));
    group.all_gather(all, norm->running_var);
    EXPECT_TRUE(torch::equal(all[0], all[1]));
    EXPECT_TRUE(torch::equal(all[0], all[2]));
    EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 3);
  });
}

// A bucket leaves while the backward still runs; after the first reduction, in rank 0's order.
TEST(Ddp, TheFirstBucketLeavesBeforeTheLastGradientIsReady) {
  run_ranks(2, [](ProcessGroup& group) {
    Net net;
    DistributedDataParallel ddp(net, group, small());
    const at::Tensor x = torch::randn({4, 6}, torch::kFloat64);
    ddp.forward(x).sum().backward();
    const DdpSight first = ddp.sight();
    EXPECT_GT(first.buckets.size(), 2U);
    EXPECT_GE(first.launched_early, 1);
    EXPECT_TRUE(first.rebuilt);
    EXPECT_EQ(first.buckets.front().front().substr(0, 4), "out.");
    EXPECT_EQ(first.buckets.back().back().substr(0, 3), "in.");
    const uint64_t before = group.sequence();
    ddp.forward(x).sum().backward();
    // DDP-1: one operation for each bucket, and one to agree.
    EXPECT_EQ(group.sequence() - before, first.buckets.size() + 1);
  });
}

// The same by events: what leaves, and the gradient of the first layer, which comes last.
TEST(Ddp, TheFirstBucketLeavesBeforeTheLastGradientIsReadyByEvents) {
  run_ranks(2, [](ProcessGroup& group) {
    Net net;
    DistributedDataParallel ddp(net, group, small());
    std::vector<std::string> events;  // all of one thread: the backward's
    ddp.register_comm_hook([&events](ProcessGroup& of, const GradBucket& bucket) {
      events.push_back("bucket " + std::to_string(bucket.index));
      return allreduce_hook(of, bucket);
    });
    net->in->weight.register_hook([&events](const at::Tensor&) { events.push_back("gradient"); });
    for (int i = 0; i < 2; ++i) {
      events.clear();
      ddp.forward(torch::randn({4, 6}, torch::kFloat64)).sum().backward();
      EXPECT_EQ(events.front(), "bucket 0");
      EXPECT_NE(std::find(events.begin() + 1, events.end(), "gradient"), events.end());
      EXPECT_EQ(events.size(), ddp.sight().buckets.size() + 1);
    }
  });
}

struct ManyImpl : torch::nn::Module {
  ManyImpl() { a = register_module("a", torch::nn::Linear(2, 2)); }
  std::tuple<at::Tensor, std::vector<at::Tensor>, std::optional<at::Tensor>,
             std::map<std::string, at::Tensor>>
  forward(const at::Tensor& x) {
    const at::Tensor y = a(x);
    return {y, {y * 2, x}, y * 3, {{"four", y * 4}}};
  }
  torch::nn::Linear a = nullptr;
};

TEST(Ddp, OutputsOfManyKinds) {
  run_ranks(2, [](ProcessGroup& group) {
    const auto net = std::make_shared<ManyImpl>();
    DistributedDataParallel ddp(net, group);
    const at::Tensor x = torch::ones({1, 2}) * (1 + group.rank());
    auto [one, two, three, four] = ddp.forward(x);
    EXPECT_TRUE(torch::equal(one.relu_(), ddp.module()->a(x).relu()));  // in place
    (one.sum() * 0 + two[0].sum() + three->sum() + four.at("four").sum()).backward();
    expect_close({net->a->weight.grad()}, {torch::full({2, 2}, 13.5F)}, 1e-5);  // 9 x 1.5
    EXPECT_FALSE(two[1].requires_grad());
  });
}

// Two forwards and one backward; a forward without one; two backwards of one forward.
TEST(Ddp, DB_4_and_DB_8_ForwardsAndBackwardsNeedNotAlternate) {
  for (const bool find_unused : {false, true}) {
    run_ranks(2, [find_unused](ProcessGroup& group) {
      torch::nn::Linear net(2, 1);
      DistributedDataParallel ddp(net, group, {.find_unused_parameters = find_unused});
      const at::Tensor x = torch::ones({1, 2}) * (1 + group.rank());
      const at::Tensor dropped = ddp.forward(x * 100);
      (ddp.forward(x).sum() + ddp.forward(x * 2).sum()).backward();
      expect_close({net->weight.grad()}, {torch::full({1, 2}, 4.5F)}, 1e-6);
      ddp.zero_grad();
      const at::Tensor loss = ddp.forward(x).sum();
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
      expect_close({net->weight.grad()}, {torch::full({1, 2}, 3.0F)}, 1e-6);
      EXPECT_EQ(ddp.sight().reductions, 3);
    });
  }
}

// DDP-5.
TEST(Ddp, DB_17_HooksAreGoneWithTheirOwner) {
  run_ranks(2, [](ProcessGroup& group) {
    torch::nn::Linear net(2, 1);
    const at::Tensor x = torch::ones({1, 2}) * (1 + group.rank());
    for (int life = 0; life < 3; ++life) {
      DistributedDataParallel ddp(net, group);
      ddp.zero_grad();
      ddp.forward(x).sum().backward();
      expect_close({net->weight.grad()}, {torch::full({1, 2}, 1.5F)}, 1e-6);
    }
    net->zero_grad();
    const uint64_t before = group.sequence();
    net->forward(x).sum().backward();
    EXPECT_EQ(group.sequence(), before);
    expect_close({net->weight.grad()}, {x}, 1e-6);
  });
}

TEST(Ddp, DB_5_GradientsInBucketsAreZeroed) {
  run_ranks(2, [](ProcessGroup& group) {
    torch::nn::Linear net(2, 1);
    DistributedDataParallel ddp(net, group, {.gradient_as_bucket_view = true});
    const void* at = nullptr;
    for (const bool set_to_none : {true, false}) {
      ddp.forward(torch::ones({1, 2})).sum().backward();
      at = net->weight.grad().data_ptr();
      ddp.zero_grad(set_to_none);
      expect_close({net->weight.grad()}, {torch::zeros({1, 2})}, 0);
      EXPECT_EQ(net->weight.grad().data_ptr(), at);
    }
  });
}

TEST(Ddp, HooksReduceBuckets) {
  const auto with = [](const CommHook& hook, double bound) {
    run_ranks(3, [&](ProcessGroup& group) {
      Net net;
      DistributedDataParallel ddp(net, group, small());
      Net plain = clone_of(net);
      DistributedDataParallel want(plain, group, small());
      if (hook != nullptr) ddp.register_comm_hook(hook);
      const at::Tensor x = torch::ones({2, 6}, torch::kFloat64) * (1 + group.rank());
      for (int i = 0; i < 3; ++i) {
        ddp.zero_grad();
        want.zero_grad();
        ddp.forward(x).pow(2).sum().backward();
        want.forward(x).pow(2).sum().backward();
        for (size_t p = 0; p < net->parameters().size(); ++p) {
          const at::Tensor expected = plain->parameters()[p].grad();
          if (!expected.defined()) continue;
          const double largest = expected.abs().max().item<double>();
          expect_close({net->parameters()[p].grad()}, {expected}, bound * (1e-3 + largest));
        }
      }
      EXPECT_THROW(ddp.register_comm_hook(&allreduce_hook), Error);
    });
  };
  with(&allreduce_hook, 1e-12);
  with(&fp16_compress_hook, 5e-3);
  with(&bf16_compress_hook, 4e-2);
  // One of the user's, which gives a tensor of its own.
  std::atomic<int> last = 0;
  with(
      [&last](ProcessGroup& group, const GradBucket& bucket) {
        if (bucket.is_last()) ++last;
        EXPECT_EQ(bucket.gradients.size(), bucket.parameters.size());
        const at::Tensor copy = bucket.buffer.clone();
        return group.all_reduce_async(copy).then(
            [copy, ranks = group.size()] { return copy / ranks; });
      },
      1e-12);
  EXPECT_EQ(last.load(), 9);
}

TEST(BadInputDdp, BadInput_hooks_that_fail) {
  run_ranks(2, [](ProcessGroup& group) {
    torch::nn::Linear net(2, 1);
    DistributedDataParallel ddp(net, group);
    EXPECT_THROW(ddp.register_comm_hook(nullptr), Error);
    ddp.register_comm_hook([](ProcessGroup&, const GradBucket&) {
      return Future<at::Tensor>::ready(torch::ones({7}));
    });
    const Status failed = error_of([&] { ddp.forward(torch::ones({1, 2})).sum().backward(); });
    EXPECT_NE(std::string(failed.message()).find("7 elements for 3"), std::string::npos) << failed;
    EXPECT_FALSE(group.failure().ok());
  });
  run_ranks(2, [](ProcessGroup& group) {
    torch::nn::Linear net(2, 1);
    DistributedDataParallel ddp(net, group);
    ddp.register_comm_hook([](ProcessGroup& of, const GradBucket& bucket) {
      if (of.rank() == 1) throw std::runtime_error("a hook on purpose");
      return allreduce_hook(of, bucket);
    });
    const Status failed = error_of([&] { ddp.forward(torch::ones({1, 2})).sum().backward(); });
    EXPECT_NE(std::string(failed.message()).find("a hook on purpose"), std::string::npos) << failed;
    EXPECT_FALSE(group.failure().ok());
  });
}

}  // namespace
}  // namespace weft::testing
