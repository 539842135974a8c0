// Data parallelism with models on a GPU that two ranks share, on the backends of the CPU: DDP, its
// SyncBatchNorm, replicas on a GPU and the CPU, the hybrid with a server, and checkpoints that are
// loaded on another device.

#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <unistd.h>

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "c10/core/StreamGuard.h"
#include "gtest/gtest.h"
#include "weft/collectives/ddp/checkpoint.h"
#include "weft/collectives/ddp/data_parallel.h"
#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/collectives/ddp/sync_batch_norm.h"
#include "weft/dist_autograd/context.h"
#include "weft/dist_autograd/service.h"
#include "weft/dist_optim/optimizer.h"
#include "weft/dist_optim/service.h"
#include "weft/rpc/call.h"
#include "weft/rref/rref.h"
#include "weft/rref/service.h"
#include "weft/tests/collectives/ddp_world.h"
#include "weft/tests/cuda/gpu_ranks.h"
#include "weft/tests/cuda/gpu_test.h"

namespace weft::testing {
namespace {

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { NetImpl::reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(8, 16));
    last = register_module("last", torch::nn::Linear(16, 4));
  }
  at::Tensor forward(const at::Tensor& x) { return last(torch::tanh(first(x))); }
  torch::nn::Linear first = nullptr, last = nullptr;
};
using Net1 = std::shared_ptr<NetImpl>;

// The same values every time.
Net1 make_net(c10::Device device, at::ScalarType type = at::kFloat) {
  auto net = std::make_shared<NetImpl>();
  const torch::NoGradGuard no_grad;
  double phase = 0;
  for (at::Tensor& one : net->parameters()) {
    one.copy_(at::sin(at::arange(one.numel(), at::kDouble) + ++phase).view(one.sizes()) / 3);
  }
  net->to(device, type);
  return net;
}

at::Tensor batch(int step, int rank, at::ScalarType type = at::kFloat) {
  return at::cos(at::arange(32, at::kDouble) * (0.1 + step) + rank).view({4, 8}).to(type);
}

class CudaReplicas : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    const Gpus gpus = find_gpus();
    if (gpus.count == 0) GTEST_SKIP() << gpus.why;
  }
  // As threads: for what waits for no other rank in a backward.
  static void on_ranks(int size, const std::function<void(ProcessGroup&)>& body) {
    run_ranks(
        size, make_system_runtime(), [&](ProcessGroup& group, InprocFabric&) { body(group); },
        [](ProcessGroupOptions& options) {
          options.backend = GetParam();
          options.fabric = nullptr;
        });
  }
};

// CL-21: with one rank it is plain training.
TEST_P(CudaReplicas, CL_21_ddp_of_one_rank_equals_plain_training) {
  on_ranks(1, [](ProcessGroup& group) {
    const Net1 plain = make_net(gpu(0));
    const Net1 net = make_net(gpu(0));
    torch::optim::SGD plain_step(plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::SGD step(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    DistributedDataParallel ddp(net, group);
    for (int s = 0; s < 20; ++s) {
      const at::Tensor x = batch(s, 0).to(gpu(0));
      plain_step.zero_grad();
      plain->forward(x).pow(2).mean().backward();
      plain_step.step();
      step.zero_grad();
      ddp.forward(x).pow(2).mean().backward();
      step.step();
    }
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      EXPECT_TRUE(at::equal(net->parameters()[i], plain->parameters()[i])) << i;
    }
  });
}

// Two ranks, small buckets, with gradients in the buckets and beside them, on streams of the caller's:
// equal to each other bit for bit, and to one process with the joined batch.
TEST_P(CudaReplicas, DdpOfTwoRanksEqualsTheJoinedBatch) {
  on_processes(2, GetParam(), [](ProcessGroup& group) {
    const c10::StreamGuard guard(new_stream(gpu(0)));
    for (const bool view : {false, true}) {
      const Net1 joined = make_net(gpu(0), at::kDouble);
      const Net1 net = make_net(gpu(0), at::kDouble);
      torch::optim::SGD joined_step(joined->parameters(), torch::optim::SGDOptions(0.1));
      torch::optim::SGD step(net->parameters(), torch::optim::SGDOptions(0.1));
      DistributedDataParallel ddp(
          net, group,
          {.bucket_cap_mb = 0.0005, .first_bucket_mb = 0.0001, .gradient_as_bucket_view = view});
      for (int s = 0; s < 10; ++s) {
        at::Tensor sum = at::zeros({}, on(0).dtype(at::kDouble));
        joined_step.zero_grad();
        for (int r = 0; r < 2; ++r) {
          const at::Tensor x = batch(s, r, at::kDouble).to(gpu(0));
          sum = sum + joined->forward(x).pow(2).mean() / 2;
        }
        sum.backward();
        joined_step.step();
        if (view) {
          ddp.zero_grad();
        } else {
          step.zero_grad();
        }
        if (s % 3 == 2) delay(0);  // the gradients are late
        ddp.forward(batch(s, group.rank(), at::kDouble).to(gpu(0))).pow(2).mean().backward();
        step.step();
      }
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        const at::Tensor mine = net->parameters()[i].detach();
        expect_near(mine.cpu(), joined->parameters()[i].detach().cpu(), 1e-10);
        std::vector<at::Tensor> both = {at::empty_like(mine), at::empty_like(mine)};
        group.all_gather(both, mine);
        EXPECT_TRUE(at::equal(both[0], both[1])) << i;
      }
    }
  });
}

TEST_P(CudaReplicas, SyncBatchNormEqualsTheJoinedBatch) {
  const at::Tensor x = at::sin(at::arange(8 * 5 * 6, at::kDouble)).view({8, 5, 6});
  const at::Tensor dy = at::cos(at::arange(8 * 5 * 6, at::kDouble)).view({8, 5, 6});
  torch::nn::BatchNorm1d joined(5);
  joined->to(at::kDouble);
  const at::Tensor in = x.clone().set_requires_grad(true);
  const at::Tensor want = joined->forward(in);
  want.backward(dy);
  on_processes(2, GetParam(), [&](ProcessGroup& group) {
    // Parts of five and three samples.
    const int64_t begin = group.rank() == 0 ? 0 : 5;
    const int64_t n = group.rank() == 0 ? 5 : 3;
    SyncBatchNorm norm(group, 5);
    norm->to(gpu(0), at::kDouble);
    const at::Tensor mine = x.narrow(0, begin, n).to(gpu(0)).set_requires_grad(true);
    const at::Tensor out = norm->forward(mine);
    out.backward(dy.narrow(0, begin, n).to(gpu(0)));
    expect_near(out.cpu(), want.narrow(0, begin, n), 1e-9);
    expect_near(mine.grad().cpu(), in.grad().narrow(0, begin, n), 1e-9);
    expect_near(norm->running_var.cpu(), joined->running_var, 1e-9);
    group.all_reduce(norm->weight.grad());
    expect_near(norm->weight.grad().cpu(), joined->weight.grad(), 1e-9);
  });
}

// Replicas on the GPU and on the CPU, outputs on either.
TEST_P(CudaReplicas, DataParallelOnAGpuAndTheCpu) {
  for (const bool gpu_first : {true, false}) {
    const c10::Device first = gpu_first ? gpu(0) : c10::Device(c10::kCPU);
    const c10::Device second = gpu_first ? c10::Device(c10::kCPU) : gpu(0);
    const Net1 plain = make_net(first, at::kDouble);
    const Net1 net = make_net(first, at::kDouble);
    DataParallelOptions options;
    options.device_ids = {first, second};
    DataParallel replicas(net, options);
    const at::Tensor x = batch(1, 0, at::kDouble).to(first);
    const at::Tensor out = replicas.forward(x);
    EXPECT_EQ(out.device(), first);
    const at::Tensor want = plain->forward(x);
    expect_near(out.detach().cpu(), want.detach().cpu(), 1e-12);
    out.pow(2).sum().backward();
    want.pow(2).sum().backward();
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      ASSERT_TRUE(net->parameters()[i].grad().defined()) << i;
      EXPECT_EQ(net->parameters()[i].grad().device(), first);
      expect_near(net->parameters()[i].grad().cpu(), plain->parameters()[i].grad().cpu(), 1e-10);
    }
  }
}

// Written from a model on the GPU, loaded on the CPU and the other way, and training goes on.
TEST_P(CudaReplicas, CheckpointsAreLoadedOnAnyDevice) {
  on_ranks(2, [](ProcessGroup& group) {
    const auto train = [](NetImpl& net, torch::optim::Adam& adam, c10::Device device, int from,
                          int to) {
      for (int s = from; s < to; ++s) {
        adam.zero_grad();
        net.forward(batch(s, 0, at::kDouble).to(device)).pow(2).mean().backward();
        adam.step();
      }
    };
    const Net1 undisturbed = make_net(c10::kCPU, at::kDouble);
    torch::optim::Adam whole(undisturbed->parameters(), torch::optim::AdamOptions(0.05));
    train(*undisturbed, whole, c10::kCPU, 0, 10);
    for (const bool to_gpu : {false, true}) {
      const c10::Device from = to_gpu ? c10::Device(c10::kCPU) : gpu(0);
      const c10::Device to = to_gpu ? gpu(0) : c10::Device(c10::kCPU);
      const std::string path = ::testing::TempDir() + "/weft_cuda_checkpoint_" +
                               std::to_string(::getpid()) + (to_gpu ? "_cpu" : "_gpu");
      const Net1 before = make_net(from, at::kDouble);
      torch::optim::Adam first(before->parameters(), torch::optim::AdamOptions(0.05));
      train(*before, first, from, 0, 5);
      const TrainingState saved{.module = before.get(), .optimizer = &first, .step = 5};
      save_checkpoint(group, path, saved);
      const Net1 after = make_net(to, at::kDouble);
      torch::optim::Adam second(after->parameters(), torch::optim::AdamOptions(0.05));
      TrainingState loaded{.module = after.get(), .optimizer = &second};
      ASSERT_TRUE(load_checkpoint(group, path, &loaded).has_value());
      EXPECT_EQ(loaded.step, 5);
      train(*after, second, to, 5, 10);
      for (size_t i = 0; i < after->parameters().size(); ++i) {
        EXPECT_EQ(after->parameters()[i].device(), to);
        expect_near(after->parameters()[i].detach().cpu(), undisturbed->parameters()[i].detach(),
                    1e-10);
      }
      group.barrier();
      if (group.rank() == 0) std::remove(path.c_str());
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, CudaReplicas, ::testing::Values(Backend::kShm, Backend::kTcp),
                         [](const auto& info) {
                           return info.param == Backend::kShm ? "shm" : "tcp";
                         });

// ---- hybrid ------------------------------------------------------------------------------------

struct Table {
  Table() : weight(at::sin(at::arange(24, on(0))).view({3, 8}).set_requires_grad(true)) {}
  at::Tensor rows(const at::Tensor& ids) { return weight.index_select(0, ids); }
  RRef<at::Tensor> parameter(CallContext& context) {
    return RRef<at::Tensor>::local(context.worker(), weight);
  }
  at::Tensor value() const { return weight.detach(); }
  at::Tensor weight;
};
// The server's; each trainer asks it for one of its own.
RRef<Table> the_table;
RRef<Table> table() { return the_table; }

class CudaHybrid : public GpuTest {};

// Two trainers with dense parts on the GPU and rows of a table on the GPU of a server: equal to one
// process, and replicas to each other.
TEST_P(CudaHybrid, DA_64_ddp_dist_autograd_local_vs_remote_gpu) {
  Library lib("hybrid");
  lib.class_<Table>("Table")
      .constructor<>()
      .def("rows", &Table::rows)
      .def("parameter", &Table::parameter)
      .def("value", &Table::value);
  lib.def("table", &table);
  lib.merge(dist_optim_library());
  const auto c = start(3, std::move(lib), all_to_all(3, {{gpu(0), gpu(0)}}),
                       {rref_service(), dist_autograd_service(), dist_optim_service()});
  the_table = remote<Table>((*c)[0], "worker2");
  // One process.
  const Net1 want = make_net(gpu(0));
  at::Tensor own = Table().weight;
  constexpr int kSteps = 5;
  const auto ids = [](int step, int rank) {
    return at::arange(2, at::kLong).add(step + rank).remainder(3).to(gpu(0));
  };
  for (int s = 0; s < kSteps; ++s) {
    std::vector<at::Tensor> all = want->parameters();
    all.push_back(own);
    at::Tensor sum = at::zeros({}, on(0));
    for (int r = 0; r < 2; ++r) {
      sum = sum + want->forward(own.index_select(0, ids(s, r))).pow(2).mean();
    }
    const auto grads = torch::autograd::grad({sum}, all);
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < all.size(); ++i) {
      all[i].sub_(grads[i] * (i + 1 == all.size() ? 0.1 : 0.05));
    }
  }
  run_ranks(2, [&](ProcessGroup& group) {
    const Worker& worker = (*c)[static_cast<size_t>(group.rank())];
    const RRef<Table> mine = rpc_sync(worker, "worker0", &table);
    const Net1 net = make_net(gpu(0));
    DistributedDataParallel ddp(net, group);
    std::vector<RRef<at::Tensor>> parameters = {mine.rpc_sync(&Table::parameter)};
    for (const at::Tensor& one : net->parameters()) {
      parameters.push_back(RRef<at::Tensor>::local(worker, one));
    }
    DistributedOptimizer<optim::SGD> optimizer(worker, parameters, {.lr = 0.1});
    for (int s = 0; s < kSteps; ++s) {
      DistAutogradContext context(worker);
      const at::Tensor rows = mine.rpc_sync(&Table::rows, ids(s, group.rank()));
      ASSERT_EQ(rows.device(), gpu(0));
      const at::Tensor loss = ddp.forward(rows).pow(2).mean();
      group.barrier();
      context.backward({loss});
      group.barrier();
      optimizer.step(context);
      group.barrier();
    }
    follow_published(worker);
    expect_near(mine.rpc_sync(&Table::value).cpu(), own.detach().cpu(), 1e-5);
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      const at::Tensor dense = net->parameters()[i].detach();
      expect_near(dense.cpu(), want->parameters()[i].detach().cpu(), 1e-5);
      std::vector<at::Tensor> both = {at::empty_like(dense), at::empty_like(dense)};
      group.all_gather(both, dense);
      EXPECT_TRUE(at::equal(both[0], both[1])) << i;
    }
  });
  the_table = RRef<Table>();
}

INSTANTIATE_TEST_SUITE_P(Nets, CudaHybrid, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
