// What a step of the hybrid sends by RPC: as much as the same step without data parallelism, and at
// most one message more per participant whose part ends with a reduction.

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <limits>
#include <thread>

#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/store/hash_store.h"
#include "weft/tests/dist_optim/fixture.h"

namespace weft::testing {
namespace {

constexpr int kTrainers = 2;
constexpr int kCountedSteps = 6;

struct LayerImpl : torch::nn::Module {
  LayerImpl() : inner(register_module("inner", torch::nn::Linear(3, 3))) { to(torch::kFloat64); }
  at::Tensor forward(const at::Tensor& x) { return inner(x); }
  torch::nn::Linear inner;
};

// A layer at each of workers 0 and 1, with or without data parallelism between them. Handlers call
// it, too.
struct Layers {
  struct One {
    ProcessGroup group{};
    std::shared_ptr<LayerImpl> net{};
    std::unique_ptr<DistributedDataParallel<LayerImpl>> ddp{};

    at::Tensor forward(const at::Tensor& x) {
      return ddp != nullptr ? ddp->forward(x) : net->forward(x);
    }
  };
  std::array<One, kTrainers> all{};
};
Layers* layers = nullptr;
at::Tensor through(int64_t trainer, const at::Tensor& x) {
  return layers->all.at(static_cast<size_t>(trainer)).forward(x);
}

class DdpHybridCounts : public DistOptimTest {
 protected:
  DdpHybridCounts() { library_.def("through", &through); }

  // The fewest that calls_in() has counted: releases ride along with other calls, or go in some of
  // their own when none comes in time, which is no matter of data parallelism.
  int64_t calls_of(bool with_ddp, const std::vector<size_t>& roots,
                   const std::function<void(OptimCluster&, size_t root)>& step) {
    int64_t fewest = std::numeric_limits<int64_t>::max();
    for (int i = 0; i < 5; ++i) fewest = std::min(fewest, calls_in(with_ddp, roots, step));
    return fewest;
  }
  // Calls of all workers in `steps`, which are the same again and again, on one thread for each of
  // `roots`. Releases included.
  int64_t calls_in(bool with_ddp, const std::vector<size_t>& roots,
                   const std::function<void(OptimCluster&, size_t root)>& step) {
    OptimCluster c = make();
    Layers made;
    layers = &made;
    const auto runtime = make_system_runtime();
    const auto store = std::make_shared<HashStore>(runtime);
    const auto fabric = std::make_shared<InprocFabric>(runtime);
    each({0, 1}, [&](size_t rank) {
      Layers::One& one = made.all.at(rank);
      one.net = std::make_shared<LayerImpl>();
      one.group = init_process_group({.store = store,
                                      .rank = static_cast<int>(rank),
                                      .size = kTrainers,
                                      .timeout = std::chrono::seconds(30),
                                      .runtime = runtime,
                                      .fabric = fabric});
      if (!with_ddp) return;
      one.ddp = std::make_unique<DistributedDataParallel<LayerImpl>>(
          one.net, one.group,
          DistributedDataParallelOptions{.bucket_cap_mb = 1e-6, .first_bucket_mb = 1e-6});
    });
    const auto take = [&](int steps) {
      each(roots, [&](size_t root) {
        for (int s = 0; s < steps; ++s) step(c, root);
      });
      expect_none(*c.cluster, "num_autograd_contexts");
      expect_none(*c.cluster, "calls_pending");
      return calls(c);
    };
    const int64_t before = take(1);  // connections, plans, the order of buckets
    const int64_t after = take(kCountedSteps);
    for (const Layers::One& one : made.all) {
      EXPECT_EQ(one.ddp != nullptr ? one.ddp->sight().reductions : 0,
                with_ddp ? kCountedSteps + 1 : 0);
    }
    made = {};
    return after - before;
  }
  static int64_t calls(OptimCluster& c) {
    int64_t sum = 0;
    for (size_t i = 0; i < c.cluster->size(); ++i) sum += counter(c[i], "calls_issued");
    return sum;
  }
  static void each(const std::vector<size_t>& all, const std::function<void(size_t)>& body) {
    std::vector<std::thread> threads;
    for (const size_t i : all) {
      threads.emplace_back([&body, i] {
        try {
          body(i);
        } catch (const std::exception& e) {
          ADD_FAILURE() << i << ": " << e.what();
        }
      });
    }
    for (std::thread& one : threads) one.join();
  }
};

// Trainers are the roots of passes that go to a server and back: not one message more.
TEST_P(DdpHybridCounts, AReducedStepOfATrainerSendsWhatOneAloneSends) {
  const auto step = [](OptimCluster& c, size_t root) {
    DistAutogradContext context(c[root]);
    const at::Tensor ids = torch::tensor({0, 2}, torch::kLong);
    const at::Tensor rows =
        rpc_sync(c[root], "worker2", FunctionRef<at::Tensor(at::Tensor)>{"app.rows"}, ids);
    context.backward({layers->all.at(root).forward(rows).pow(2).sum()});
  };
  library_.def("rows", [table = torch::ones({3, 3}, torch::kFloat64).set_requires_grad(true)](
                           const at::Tensor& ids) { return table.index_select(0, ids); });
  const int64_t alone = calls_of(false, {0, 1}, step);
  const int64_t reduced = calls_of(true, {0, 1}, step);
  EXPECT_GE(alone,
            kTrainers * kCountedSteps * 2);  // the look-up, and the pass; releases ride along
  EXPECT_EQ(reduced, alone);
}

// One pass through both replicas: each participant says in a message of its own that it is done.
TEST_P(DdpHybridCounts, AParticipantWhosePartEndsWithAReductionSaysSo) {
  const auto step = [](OptimCluster& c, size_t root) {
    DistAutogradContext context(c[root]);
    at::Tensor sum;
    std::vector<Future<at::Tensor>> there;
    for (int64_t trainer = 0; trainer < kTrainers; ++trainer) {
      const at::Tensor x = torch::full({2, 3}, 1.0 + static_cast<double>(trainer), torch::kFloat64)
                               .set_requires_grad(true);
      there.push_back(rpc_async(c[root], static_cast<int>(trainer), &through, trainer, x));
    }
    for (const Future<at::Tensor>& one : there) {
      const at::Tensor loss = one.wait().pow(2).sum();
      sum = sum.defined() ? sum + loss : loss;
    }
    context.backward({sum});
  };
  const int64_t alone = calls_of(false, {2}, step);
  const int64_t reduced = calls_of(true, {2}, step);
  EXPECT_GT(alone, 0);
  EXPECT_LE(reduced, alone + kTrainers * kCountedSteps);
  EXPECT_GE(reduced, alone);
}

INSTANTIATE_TEST_SUITE_P(Nets, DdpHybridCounts, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
