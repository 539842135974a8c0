// DataParallel against the module alone.

#include "weft/collectives/ddp/data_parallel.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "gtest/gtest.h"
#include "weft/tests/testing/checks.h"

namespace weft::testing {
namespace {

using Chunks = std::vector<int64_t>;

// A layer that is frozen, one that only some chunks use.
struct SplitNetImpl : torch::nn::Cloneable<SplitNetImpl> {
  SplitNetImpl() { SplitNetImpl::reset(); }
  void reset() override {
    in = register_module("in", torch::nn::Linear(6, 8));
    frozen = register_module("frozen", torch::nn::Linear(8, 8));
    sometimes = register_module("sometimes", torch::nn::Linear(8, 8));
    out = register_module("out", torch::nn::Linear(8, 3));
    for (at::Tensor& one : frozen->parameters()) one.set_requires_grad(false);
    to(torch::kFloat64);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = torch::tanh(frozen(torch::tanh(in(x))));
    if (x.size(0) > 0 && x[0][0].item<double>() > 0) h = h + torch::tanh(sometimes(h));
    return out(h);
  }
  torch::nn::Linear in = nullptr, frozen = nullptr, sometimes = nullptr, out = nullptr;
};
TORCH_MODULE(SplitNet);

DataParallelOptions on_cpus(int64_t k) {
  DataParallelOptions out;
  out.device_ids.assign(static_cast<size_t>(k), at::kCPU);
  return out;
}

at::Tensor squared(const at::Tensor& out, const at::Tensor& want) {
  return (out - want).pow(2).mean();
}

std::vector<at::Tensor> take_grads(torch::nn::Module& module) {
  std::vector<at::Tensor> out;
  for (at::Tensor& one : module.parameters()) {
    out.push_back(one.grad().defined() ? one.grad().clone() : at::Tensor());
    one.mutable_grad() = at::Tensor();
  }
  return out;
}

void expect_about(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want,
                  double bound = 1e-12) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].defined(), want[i].defined()) << "tensor " << i;
    if (!got[i].defined()) continue;
    EXPECT_LE((got[i] - want[i]).abs().max().item<double>(), bound) << "tensor " << i;
  }
}

TEST(DataParallel, ChunksOfABatch) {
  EXPECT_EQ(even_chunks(5, 4), (Chunks{2, 2, 1}));
  EXPECT_EQ(even_chunks(0, 3), (Chunks{0}));
  EXPECT_EQ(even_chunks(8, 1), (Chunks{8}));
  EXPECT_EQ(balanced_chunks(52, 16, 3), (Chunks{16, 18, 18}));
  EXPECT_EQ(balanced_chunks(53, 16, 3), (Chunks{16, 19, 18}));
  EXPECT_EQ(balanced_chunks(52, 0, 3), (Chunks{0, 26, 26}));
  EXPECT_EQ(balanced_chunks(7, 1, 3), (Chunks{1, 3, 3}));
  EXPECT_EQ(balanced_chunks(10, 4, 3), (Chunks{4, 4, 2}));
  EXPECT_EQ(balanced_chunks(5, 2, 4), (Chunks{2, 2, 1}));
  EXPECT_EQ(balanced_chunks(7, 9, 3), (Chunks{3, 3, 1})) << "the last batch of an epoch";
  EXPECT_EQ(balanced_chunks(9, 3, 1), (Chunks{9}));
  EXPECT_EQ(balanced_chunks(0, 0, 3), (Chunks{0, 0}));
  // Nothing is lost or repeated, and no device of a balanced batch has two more than another.
  for (int64_t n = 0; n < 40; ++n) {
    for (int64_t k = 1; k < 6; ++k) {
      for (int64_t first = 0; first < 12; ++first) {
        const Chunks chunks = balanced_chunks(n, first, k);
        int64_t sum = 0;
        for (const int64_t one : chunks) sum += one;
        EXPECT_EQ(sum, n) << first << " of " << n << " over " << k;
        EXPECT_LE(chunks.size(), static_cast<size_t>(k));
      }
    }
  }
}

TEST(DataParallel, DB_15_EqualsTheModuleAlone) {
  torch::manual_seed(1);
  SplitNet net;
  for (const int64_t n : {1, 2, 5, 12}) {
    at::Tensor x = torch::randn({n, 6}, torch::kFloat64).requires_grad_();
    const at::Tensor y = torch::randn({n, 3}, torch::kFloat64);
    // One chunk uses the layer that is used sometimes, or the batch as a whole does not.
    x.mutable_data_ptr<double>()[0] = -1;
    for (int64_t i = 1; i < n; ++i) x.data()[i][0] = -1;
    const at::Tensor want = net->forward(x);
    const at::Tensor want_loss = squared(want, y);
    want_loss.backward();
    const at::Tensor want_x = x.grad().clone();
    const std::vector<at::Tensor> grads = take_grads(*net);
    for (const int64_t k : {1, 2, 3, 4}) {
      x.mutable_grad() = at::Tensor();
      DataParallel parallel(net, on_cpus(k));
      const at::Tensor out = parallel.forward(x);
      expect_about({out}, {want});
      squared(out, y).backward();
      expect_about({x.grad()}, {want_x});
      const std::vector<at::Tensor> got = take_grads(*net);
      expect_about(got, grads);
      // The same bits each time, and in the form that has the loss inside.
      squared(parallel(x), y).backward();
      const std::vector<at::Tensor> again = take_grads(*net);
      for (size_t i = 0; i < got.size(); ++i) {
        if (!got[i].defined()) continue;
        EXPECT_TRUE(got[i].equal(again[i])) << "tensor " << i;
      }
      const at::Tensor loss =
          parallel.step([](SplitNetImpl& replica, const at::Tensor& a,
                           const at::Tensor& b) { return squared(replica.forward(a), b); },
                        x, y);
      expect_about({loss}, {want_loss.detach()});
      EXPECT_FALSE(loss.requires_grad());
      expect_about(take_grads(*net), grads);
    }
  }
}

TEST(DataParallel, AParameterThatSomeReplicasDoNotUse) {
  torch::manual_seed(2);
  SplitNet net;
  at::Tensor x = torch::randn({4, 6}, torch::kFloat64);
  x[0][0] = -1;  // chunk 0 leaves the layer out, chunk 1 does not
  x[2][0] = 1;
  const at::Tensor y = torch::randn({4, 3}, torch::kFloat64);
  (squared(net->forward(x.narrow(0, 0, 2)), y.narrow(0, 0, 2)) / 2 +
   squared(net->forward(x.narrow(0, 2, 2)), y.narrow(0, 2, 2)) / 2)
      .backward();
  const std::vector<at::Tensor> want = take_grads(*net);
  DataParallel parallel(net, on_cpus(2));
  squared(parallel(x), y).backward();
  expect_about(take_grads(*net), want);
  // No replica uses it: no gradient.
  x[2][0] = -1;
  squared(parallel(x), y).backward();
  EXPECT_FALSE(net->sometimes->weight.grad().defined());
}

TEST(DataParallel, DB_15_StepsOfAnOptimizerReachAllReplicas) {
  torch::manual_seed(3);
  SplitNet alone;
  SplitNet net(std::dynamic_pointer_cast<SplitNetImpl>(alone->clone()));
  for (at::Tensor& one : net->frozen->parameters()) one.set_requires_grad(false);
  DataParallel parallel(net, on_cpus(3));
  torch::optim::SGD one(alone->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD many(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int i = 0; i < 10; ++i) {
    at::Tensor x = torch::randn({7, 6}, torch::kFloat64);
    x.select(1, 0).fill_(-1);
    const at::Tensor y = torch::randn({7, 3}, torch::kFloat64);
    one.zero_grad();
    many.zero_grad();
    squared(alone->forward(x), y).backward();
    squared(parallel(x), y).backward();
    one.step();
    many.step();
  }
  expect_about(net->parameters(), alone->parameters());
}

TEST(DataParallel, GradientsAddUpOverForwards) {
  torch::manual_seed(4);
  SplitNet net;
  const at::Tensor x = -torch::rand({6, 6}, torch::kFloat64);
  const at::Tensor y = torch::randn({6, 3}, torch::kFloat64);
  (squared(net->forward(x), y) + squared(net->forward(2 * x), y)).backward();
  const std::vector<at::Tensor> want = take_grads(*net);
  DataParallel parallel(net, on_cpus(2));
  const at::Tensor first = squared(parallel(x), y);
  const at::Tensor second = squared(parallel(2 * x), y);
  first.backward();
  second.backward();
  expect_about(take_grads(*net), want);
}

TEST(DataParallel, HooksOfAParameterRunOnceWithTheSum) {
  SplitNet net;
  DataParallel parallel(net, on_cpus(3));
  int calls = 0;
  at::Tensor seen;
  net->in->weight.register_hook([&](const at::Tensor& grad) {
    ++calls;
    seen = grad.clone();
  });
  squared(parallel(-torch::rand({6, 6}, torch::kFloat64)), torch::zeros({6, 3}, torch::kFloat64))
      .backward();
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(seen.equal(net->in->weight.grad()));
}

TEST(DataParallel, DB_15_RunningStatisticsAreThoseOfTheFirstReplica) {
  torch::nn::BatchNorm1d norm(3);
  torch::nn::BatchNorm1d first(3);
  const at::Tensor x = torch::randn({8, 3});
  DataParallel parallel(norm, on_cpus(2));
  for (int i = 0; i < 3; ++i) {
    parallel.forward(x);
    first->forward(x.narrow(0, 0, 4));
  }
  EXPECT_TRUE(norm->running_mean.equal(first->running_mean));
  EXPECT_TRUE(norm->running_var.equal(first->running_var));
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 3);
  // In evaluation all replicas use them.
  norm->eval();
  first->eval();
  const torch::NoGradGuard no_grad;
  EXPECT_TRUE(parallel.forward(x).equal(first->forward(x)));
}

struct StructuredImpl : torch::nn::Cloneable<StructuredImpl> {
  StructuredImpl() { StructuredImpl::reset(); }
  void reset() override { weight = register_parameter("weight", torch::full({1}, 2.0)); }
  using Out = std::tuple<std::vector<at::Tensor>, std::map<std::string, at::Tensor>,
                         std::optional<at::Tensor>, at::Tensor>;
  Out forward(const std::pair<at::Tensor, std::vector<at::Tensor>>& in, int times,
              const std::string& name) {
    const at::Tensor a = in.first * weight * times;
    return {{a, a + in.second[0]}, {{name, a * 2}}, std::nullopt, a.mean()};
  }
  at::Tensor weight;
};
TORCH_MODULE(Structured);

TEST(DataParallel, StructuresAndOtherArguments) {
  Structured net;
  DataParallel parallel(net, on_cpus(2));
  const at::Tensor a = torch::arange(6, torch::kFloat).view({3, 2});
  const at::Tensor b = torch::ones({3, 2});
  const auto [list, named, none, means] = parallel.forward(std::pair(a, std::vector{b}), 3, "x");
  ASSERT_EQ(list.size(), 2u);
  EXPECT_TRUE(list[0].equal(a * 6));
  EXPECT_TRUE(list[1].equal(a * 6 + 1));
  EXPECT_TRUE(named.at("x").equal(a * 12));
  EXPECT_FALSE(none.has_value());
  ASSERT_EQ(means.sizes(), at::IntArrayRef({2})) << "one of each replica";
  EXPECT_TRUE(means.allclose(torch::tensor({9.0f, 27.0f})));
  (list[1].sum() + means.sum()).backward();
  EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 3 * 15 + 3 * (1.5f + 4.5f));
}

TEST(DataParallel, ModulesWithoutParametersAndOtherDimensions) {
  torch::nn::ReLU relu;
  DataParallelOptions options = on_cpus(3);
  options.dim = 1;
  DataParallel parallel(relu, options);
  const at::Tensor x = torch::randn({2, 7}).requires_grad_();
  const at::Tensor out = parallel.forward(x);
  EXPECT_TRUE(out.equal(at::relu(x)));
  out.sum().backward();
  EXPECT_TRUE(x.grad().equal(x.gt(0).to(torch::kFloat)));
  // An empty batch, and a Sequential.
  EXPECT_EQ(parallel.forward(torch::zeros({2, 0})).sizes(), at::IntArrayRef({2, 0}));
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::ReLU());
  DataParallel sequence(net, on_cpus(2));
  const at::Tensor y = torch::randn({5, 4});
  EXPECT_TRUE(sequence.forward(y).allclose(net->forward(y)));
}

TEST(DataParallel, WithoutGradModeThereIsNoGraph) {
  SplitNet net;
  DataParallel parallel(net, on_cpus(2));
  const at::Tensor x = -torch::rand({4, 6}, torch::kFloat64);
  const torch::NoGradGuard no_grad;
  const at::Tensor out = parallel(x);
  EXPECT_FALSE(out.requires_grad());
  expect_about({out}, {net->forward(x)});
}

TEST(DataParallel, ReplicasDrawNoRandomNumbersOfTheProgram) {
  torch::manual_seed(7);
  SplitNet net;
  const at::Tensor x = -torch::rand({4, 6}, torch::kFloat64);
  const at::Tensor want = [&] {
    torch::manual_seed(8);
    net->forward(x);
    return torch::rand({3});
  }();
  torch::manual_seed(8);
  DataParallel(net, on_cpus(3)).forward(x);
  EXPECT_TRUE(torch::rand({3}).equal(want));
}

TEST(DataParallel, ABackwardOutlivesIt) {
  SplitNet net;
  const at::Tensor x = -torch::rand({4, 6}, torch::kFloat64);
  squared(net->forward(x), torch::zeros({4, 3}, torch::kFloat64)).backward();
  const std::vector<at::Tensor> want = take_grads(*net);
  at::Tensor loss;
  {
    DataParallel parallel(net, on_cpus(3));
    loss = squared(parallel(x), torch::zeros({4, 3}, torch::kFloat64));
  }
  loss.backward({}, /*retain_graph=*/true);
  expect_about(take_grads(*net), want);
  loss.backward();
  expect_about(take_grads(*net), want);
  const at::Tensor out = DataParallel(net, on_cpus(2)).forward(x);
  out.sum().backward();
  expect_error(error_of([&] { out.sum().backward(); }), ErrorKind::kState,
               {"a second backward", "retain_graph"});
}

TEST(DataParallel, BalancedBatches) {
  SplitNet net;
  const auto sizes_of = [&](int64_t batch, int64_t first, int64_t k) {
    BalancedDataParallel parallel(net, first, on_cpus(k));
    std::mutex mutex;
    std::map<SplitNetImpl*, int64_t> sizes;
    parallel.step(
        [&](SplitNetImpl& replica, const at::Tensor& x) {
          const std::lock_guard<std::mutex> lock(mutex);
          sizes[&replica] = x.size(0);
          return replica.forward(x).mean();
        },
        -torch::rand({batch, 6}, torch::kFloat64));
    const int64_t at_first = sizes.count(net.get()) > 0 ? sizes[net.get()] : 0;
    Chunks others;
    for (const auto& [replica, size] : sizes) {
      if (replica != net.get()) others.push_back(size);
    }
    std::sort(others.rbegin(), others.rend());
    others.insert(others.begin(), at_first);
    return others;
  };
  EXPECT_EQ(sizes_of(53, 16, 3), (Chunks{16, 19, 18}));
  EXPECT_EQ(sizes_of(52, 0, 3), (Chunks{0, 26, 26}));
  EXPECT_EQ(sizes_of(10, 4, 3), (Chunks{4, 4, 2}));
  // The gradients are those of the module alone, also where the first device has no forward.
  const at::Tensor x = -torch::rand({9, 6}, torch::kFloat64);
  const at::Tensor y = torch::randn({9, 3}, torch::kFloat64);
  take_grads(*net);
  squared(net->forward(x), y).backward();
  const std::vector<at::Tensor> want = take_grads(*net);
  for (const int64_t first : {0, 1, 3, 9}) {
    BalancedDataParallel parallel(net, first, on_cpus(3));
    squared(parallel(x), y).backward();
    expect_about(take_grads(*net), want);
  }
}

struct ThrowingImpl : torch::nn::Cloneable<ThrowingImpl> {
  ThrowingImpl() { ThrowingImpl::reset(); }
  void reset() override { weight = register_parameter("weight", torch::ones({1})); }
  at::Tensor forward(const at::Tensor& x) {
    if (x[0].item<float>() < 0) throw std::runtime_error("a negative sample");
    if (x[0].item<float>() > 90) return (x * weight).view({-1, 17});
    return x * weight;
  }
  at::Tensor weight;
};
TORCH_MODULE(Throwing);

TEST(DataParallel, BadInput_a_replica_that_throws) {
  Throwing net;
  DataParallel parallel(net, on_cpus(3));
  const auto fails = [&](const at::Tensor& x, const std::vector<std::string>& words) {
    expect_error(error_of([&] { parallel.forward(x); }), ErrorKind::kUser, words);
  };
  fails(torch::tensor({1.f, -2.f, 3.f}), {"replica 1 on cpu: a negative sample"});
  fails(torch::tensor({1.f, 2.f, 99.f}), {"replica 2 on cpu: shape '[-1, 17]' is invalid"});
  fails(torch::tensor({-1.f, -2.f, 3.f}), {"replica 0 on cpu"});
  // The next one works.
  const at::Tensor x = torch::tensor({1.f, 2.f, 3.f});
  parallel.forward(x).sum().backward();
  EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 6);
}

struct NoCloneImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
};
TORCH_MODULE(NoClone);

TEST(DataParallel, BadInput_batches_and_modules_that_cannot_be_divided) {
  const auto refuses = [](const std::function<void()>& fn, const std::vector<std::string>& words) {
    expect_error(error_of(fn), ErrorKind::kInvalidArgument, words);
  };
  Structured many;
  DataParallel parallel(many, on_cpus(2));
  const auto call = [&](const at::Tensor& a, const at::Tensor& b) {
    parallel.forward(std::pair(a, std::vector{b}), 1, "x");
  };
  refuses(
      [&] {
        call(torch::ones({4, 2}), torch::ones({3, 2}));
      },
      {"tensor 0 of the arguments has 4 along dim 0, tensor 1 has 3"});
  refuses(
      [&] {
        call(torch::ones({}), torch::ones({3, 2}));
      },
      {"tensor 0 of the arguments has no dim 0"});
  NoClone plain;
  refuses([&] { DataParallel(plain, on_cpus(2)).forward(torch::ones({4})); },
          {"clone()", "torch::nn::Cloneable"});
  torch::nn::Linear linear(2, 2);
  DataParallelOptions options;
  options.device_ids = {{at::kMeta, 0}};
  refuses([&] { DataParallel(linear, options); },
          {"parameter 'weight' is on cpu, the first device is meta"});
  options.device_ids = {{at::kMeta, 0}, {at::kMeta, 0}};
  refuses([&] { DataParallel(linear, options); }, {"meta:0 is given twice"});
  options = on_cpus(2);
  options.dim = -1;
  refuses([&] { DataParallel(linear, options); }, {"dim -1"});
  refuses([&] { BalancedDataParallel(linear, -1, on_cpus(2)); }, {"a first chunk of -1"});
  DataParallel whole(linear, on_cpus(2));
  refuses(
      [&] {
        whole.step([](auto& m, const at::Tensor& x) { return m.forward(x); }, torch::ones({4, 2}));
      },
      {"a loss for each replica has no dimensions"});
  // A second derivative is refused where it begins.
  const at::Tensor x = torch::ones({4, 2}).requires_grad_();
  const at::Tensor out = whole.forward(x).pow(2).sum();
  expect_error(
      error_of([&] { torch::autograd::grad({out}, {x}, {}, true, /*create_graph=*/true); }),
      ErrorKind::kUnimplemented, {"no second derivative"});
}

}  // namespace
}  // namespace weft::testing
