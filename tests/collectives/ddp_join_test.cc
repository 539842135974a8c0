// Join: ranks with different numbers of batches, against one process.

#include "weft/collectives/ddp/join.h"

#include <algorithm>
#include <optional>

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/collectives/ddp/sync_batch_norm.h"
#include "weft/collectives/ddp/zero_redundancy_optimizer.h"
#include "weft/tests/collectives/ddp_world.h"
#include "weft/tests/testing/checks.h"

namespace weft::testing {
namespace {

struct JoinNetImpl : torch::nn::Module {
  explicit JoinNetImpl(bool sparse = false) {
    table = register_module("table",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 3).sparse(sparse)));
    norm = register_module("norm", torch::nn::BatchNorm1d(3));
    sometimes = register_module("sometimes", torch::nn::Linear(3, 3));
    out = register_module("out", torch::nn::Linear(3, 2));
    to(torch::kFloat64);
  }
  at::Tensor forward(const at::Tensor& ids, bool with_sometimes = true) {
    at::Tensor h = norm(table(ids));
    if (with_sometimes) h = torch::tanh(sometimes(h));
    return out(h);
  }
  torch::nn::Embedding table = nullptr;
  torch::nn::BatchNorm1d norm = nullptr;
  torch::nn::Linear sometimes = nullptr, out = nullptr;
};
using JoinNet = std::shared_ptr<JoinNetImpl>;

JoinNet join_net_like(const JoinNetImpl& from, bool sparse) {
  const auto to = std::make_shared<JoinNetImpl>(sparse);
  const torch::NoGradGuard no_grad;
  for (const auto& item : to->named_parameters()) {
    item.value().copy_(from.named_parameters()[item.key()]);
  }
  return to;
}

enum class Stepper { kSgd, kAdam, kZero };

struct JoinCase {
  std::string name{};
  DistributedDataParallelOptions options{};
  UnevenJoinOptions join{};
  std::vector<int> batches = {10, 12, 15};  // of each rank
  bool always = true;                       // off: `sometimes` has no part in odd steps
  bool sparse = false;
  int micro = 1;
  bool hook = false;
  Stepper stepper = Stepper::kSgd;
};

at::Tensor join_loss(const at::Tensor& out, int step, int micro, int rank) {
  return (out - (0.2 * (step % 5) - 0.1 * micro + 0.3 * rank)).pow(2).mean();
}
at::Tensor join_ids(int step, int micro, int rank) {
  return torch::tensor({step % 5, (step + rank + 1) % 5, (2 * micro + rank) % 5, 0}, torch::kLong);
}
template <class Net>
std::unique_ptr<torch::optim::Optimizer> join_optimizer(const JoinCase& c, Net& net) {
  if (c.stepper != Stepper::kSgd) {
    return std::make_unique<torch::optim::Adam>(net.parameters(), torch::optim::AdamOptions(0.02));
  }
  return std::make_unique<torch::optim::SGD>(net.parameters(), torch::optim::SGDOptions(0.1));
}
bool join_uses(const JoinCase& c, int step) { return c.always || step % 2 == 0; }

// Also of what is no weft::Error.
Status join_status_of(const std::function<void()>& fn) {
  try {
    fn();
    return absl::OkStatus();
  } catch (...) {
    return status_from_current_exception();
  }
}

class DdpJoin : public ::testing::TestWithParam<JoinCase> {
 protected:
  // One process, with the mean over all ranks, or over those that have batches.
  static JoinNet joined(const JoinCase& c, const JoinNetImpl& start) {
    const JoinNet net = join_net_like(start, c.sparse);
    const auto optimize = join_optimizer(c, *net);
    const auto ranks = static_cast<int>(c.batches.size());
    for (int s = 0; s < *std::max_element(c.batches.begin(), c.batches.end()); ++s) {
      optimize->zero_grad();
      int active = 0;
      for (const int one : c.batches) active += s < one ? 1 : 0;
      const int share = c.join.divide_by_initial_world_size ? ranks : active;
      for (int r = 0; r < ranks; ++r) {
        for (int m = 0; s < c.batches[static_cast<size_t>(r)] && m < c.micro; ++m) {
          (join_loss(net->forward(join_ids(s, m, r), join_uses(c, s)), s, m, r) / share).backward();
        }
      }
      optimize->step();
    }
    return net;
  }
};

TEST_P(DdpJoin, CL_4_and_DA_63_equals_one_process) {
  const JoinCase& c = GetParam();
  const JoinNetImpl start;
  const JoinNet want = joined(c, start);
  run_ranks(static_cast<int>(c.batches.size()), [&](ProcessGroup& group) {
    const int rank = group.rank();
    const JoinNet net = join_net_like(start, c.sparse);
    DistributedDataParallel ddp(net, group, c.options);
    if (c.hook) ddp.register_comm_hook(&allreduce_hook);
    std::unique_ptr<torch::optim::Optimizer> optimize;
    std::optional<ZeroRedundancyOptimizer<torch::optim::Adam>> zero;
    std::optional<Join> join;
    if (c.stepper == Stepper::kZero) {
      zero.emplace(net->parameters(), group, torch::optim::AdamOptions(0.02));
      join.emplace(std::initializer_list<internal::JoinableRef>{ddp, *zero}, c.join);
    } else {
      optimize = join_optimizer(c, *net);
      join.emplace(std::initializer_list<internal::JoinableRef>{ddp}, c.join);
    }
    for (int s = 0; s < c.batches[static_cast<size_t>(rank)]; ++s) {
      ddp.zero_grad();
      for (int m = 0; m + 1 < c.micro; ++m) {
        const auto local = ddp.no_sync();
        join_loss(ddp.forward(join_ids(s, m, rank), join_uses(c, s)), s, m, rank).backward();
      }
      const int m = c.micro - 1;
      join_loss(ddp.forward(join_ids(s, m, rank), join_uses(c, s)), s, m, rank).backward();
      zero.has_value() ? zero->step() : (void)optimize->step();
    }
    join->wait();
    for (const auto& item : net->named_parameters()) {
      const at::Tensor off = item.value() - want->named_parameters()[item.key()];
      EXPECT_LE(off.abs().max().item<double>(), 1e-10) << item.key() << " of rank " << rank;
    }
    std::vector<at::Tensor> all(static_cast<size_t>(group.size()));
    for (const auto& tensors : {net->parameters(), net->buffers()}) {
      for (const at::Tensor& one : tensors) {
        for (at::Tensor& to : all) to = torch::empty_like(one);
        group.all_gather(all, one.detach());
        for (const at::Tensor& other : all) EXPECT_TRUE(torch::equal(other, all[0]));
      }
    }
    // All ranks count the same forwards: they go on together.
    join.reset();
    ddp.zero_grad();
    join_loss(ddp.forward(join_ids(0, 0, rank)), 0, 0, rank).backward();
  });
}

DistributedDataParallelOptions join_small(DistributedDataParallelOptions options = {}) {
  options.bucket_cap_mb = 0.0001;
  options.first_bucket_mb = 0.0001;
  return options;
}

INSTANTIATE_TEST_SUITE_P(
    Cases, DdpJoin,
    ::testing::Values(
        JoinCase{.name = "plain", .options = join_small()},
        JoinCase{.name = "by_active",
                 .options = join_small(),
                 .join = {.divide_by_initial_world_size = false}},
        JoinCase{.name = "none_at_all", .options = join_small(), .batches = {3, 0, 2}},
        JoinCase{.name = "rank_0_first", .batches = {0, 4}},
        JoinCase{.name = "unused",
                 .options = join_small({.find_unused_parameters = true}),
                 .always = false},
        JoinCase{.name = "static_graph",
                 .options = join_small({.static_graph = true}),
                 .batches = {4, 0, 5}},
        JoinCase{.name = "views",
                 .options = join_small({.gradient_as_bucket_view = true}),
                 .join = {.divide_by_initial_world_size = false}},
        JoinCase{.name = "sparse",
                 .join = {.divide_by_initial_world_size = false},
                 .batches = {2, 4},
                 .sparse = true},
        JoinCase{.name = "no_sync", .options = join_small(), .batches = {5, 7}, .micro = 3},
        JoinCase{.name = "hook", .options = join_small(), .batches = {2, 4}, .hook = true},
        JoinCase{.name = "zero",
                 .options = join_small({.find_unused_parameters = true}),
                 .batches = {8, 3, 6},
                 .always = false,
                 .stepper = Stepper::kZero},
        JoinCase{.name = "zero_views",
                 .options = join_small({.gradient_as_bucket_view = true}),
                 .batches = {1, 5},
                 .stepper = Stepper::kZero}),
    [](const auto& info) { return info.param.name; });

at::Tensor join_ones() { return torch::ones({2, 2}); }

// A backward that fails on all ranks which have batches does not end a rank that waits.
TEST(BadInputDdp, BadInput_a_backward_that_fails_while_another_rank_waits) {
  run_ranks(3, [](ProcessGroup& group) {
    torch::nn::Linear net(2, 1);
    DistributedDataParallel ddp(net, group);
    Join join({ddp});
    for (int s = 0; s < 3 * group.rank(); ++s) {
      const at::Tensor x = join_ones().set_requires_grad(true);
      if (group.rank() == 1 && s == 1) {
        x.register_hook([](const at::Tensor&) { throw std::runtime_error("on purpose"); });
      }
      const auto backward = [&] { ddp.forward(x).sum().backward(); };
      if (s == 1) {
        const std::string word = group.rank() == 1 ? "on purpose" : "rank 1: local backward";
        EXPECT_NE(std::string(join_status_of(backward).message()).find(word), std::string::npos);
      } else {
        backward();
      }
    }
    join.wait();
    EXPECT_EQ(ddp.sight().reductions, 5);
    EXPECT_TRUE(group.failure().ok());
  });
}

struct OwnCollectiveImpl : torch::nn::Module {
  explicit OwnCollectiveImpl(ProcessGroup of) : group(std::move(of)) {
    layer = register_module("layer", torch::nn::Linear(2, 1));
  }
  at::Tensor forward(const at::Tensor& x, bool own) {
    if (own) group.all_reduce(torch::ones({1}));
    return layer(x);
  }
  ProcessGroup group;
  torch::nn::Linear layer = nullptr;
};

TEST(BadInputDdp, BadInput_collectives_of_a_module_under_a_join) {
  run_ranks(2, [](ProcessGroup& group) {
    struct NormedImpl : torch::nn::Module {
      explicit NormedImpl(const ProcessGroup& of) {
        norm = register_module("norm", SyncBatchNorm(of, 2));
      }
      at::Tensor forward(const at::Tensor& x) { return norm(x); }
      SyncBatchNorm norm = nullptr;
    };
    DistributedDataParallel normed(std::make_shared<NormedImpl>(group), group);
    expect_error(error_of([&] { Join join({normed}); }), ErrorKind::kInvalidArgument,
                 {"'norm'", "SyncBatchNorm"});
    const auto net = std::make_shared<OwnCollectiveImpl>(group);
    DistributedDataParallel ddp(net, group);
    Join join({ddp});
    ddp.forward(join_ones(), false).sum().backward();
    expect_error(error_of([&] { ddp.forward(join_ones(), true); }), ErrorKind::kState,
                 {"OwnCollectiveImpl", "1 operations"});
    ddp.forward(join_ones(), false).sum().backward();
    join.wait();
  });
}

// A rank that waits already meets an operation that it does not answer: both are named.
TEST(BadInputDdp, BadInput_a_collective_that_meets_a_waiting_rank) {
  run_ranks(2, [](ProcessGroup& group) {
    const auto net = std::make_shared<OwnCollectiveImpl>(group);
    DistributedDataParallel ddp(net, group);
    Join join({ddp});
    const Status failed = error_of([&] {
      if (group.rank() == 1) ddp.forward(join_ones(), true).sum().backward();
      join.wait();
    });
    EXPECT_NE(std::string(failed.message()).find("all_reduce"), std::string::npos) << failed;
    EXPECT_NE(std::string(failed.message()).find("all_gather"), std::string::npos) << failed;
  });
}

TEST(BadInputDdp, BadInput_joins_that_cannot_be) {
  run_ranks(2, [](ProcessGroup& group) {
    torch::nn::Linear net(2, 1);
    torch::nn::Linear other(2, 1);
    const ProcessGroup apart = group.new_group({0, 1}, {.name = "apart"});
    DistributedDataParallel ddp(net, group);
    DistributedDataParallel elsewhere(other, apart);
    const std::initializer_list<internal::JoinableRef> none;
    expect_error(error_of([&] { Join join(none); }), ErrorKind::kInvalidArgument, {"no part"});
    expect_error(error_of([&] {
                   Join join({ddp, elsewhere});
                 }),
                 ErrorKind::kInvalidArgument,
                 {"groups '" + group.name() + "' and '" + apart.name() + "'"});
    Join join({ddp});
    expect_error(error_of([&] { Join again({ddp}); }), ErrorKind::kState, {"another Join"});
    ddp.forward(join_ones()).sum().backward();
    join.wait();
    expect_error(error_of([&] { join.wait(); }), ErrorKind::kState, {"once"});
  });
}

TEST(BadInputDdp, BadInput_ranks_that_end_early) {
  run_ranks(3, [](ProcessGroup& group) {
    torch::nn::Linear net(2, 1);
    DistributedDataParallel ddp(net, group);
    Join join({ddp}, {.throw_on_early_termination = true});
    const Status failed = error_of([&] {
      for (int s = 0; s < (group.rank() == 2 ? 1 : 3); ++s) {
        ddp.forward(join_ones()).sum().backward();
      }
      join.wait();
    });
    EXPECT_NE(std::string(failed.message()).find("rank 2 has no batches left"), std::string::npos)
        << failed;
  });
  // One leaves by an exception.
  run_ranks(3, [](ProcessGroup& group) {
    torch::nn::Linear net(2, 1);
    DistributedDataParallel ddp(net, group);
    const auto train = [&] {
      Join join({ddp});
      for (int s = 0; s < 3; ++s) {
        if (group.rank() == 1 && s == 1) throw std::runtime_error("no more data");
        ddp.forward(join_ones()).sum().backward();
      }
      join.wait();
    };
    const Status failed = join_status_of(train);
    const std::string word =
        group.rank() == 1 ? "no more data" : "rank 1 has left a Join without wait()";
    EXPECT_NE(std::string(failed.message()).find(word), std::string::npos) << failed;
  });
}

}  // namespace
}  // namespace weft::testing
