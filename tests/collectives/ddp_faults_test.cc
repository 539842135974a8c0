// DistributedDataParallel when something is wrong: an error on every rank, and the next one works.

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/tests/collectives/ddp_world.h"
#include "weft/tests/testing/checks.h"

namespace weft::testing {
namespace {

struct TwoImpl : torch::nn::Module {
  explicit TwoImpl(std::vector<int64_t> sizes, const std::string& second = "second") {
    first = register_module("first", torch::nn::Linear(sizes.at(0), sizes.at(1)));
    last = register_module(second, torch::nn::Linear(sizes.at(1), sizes.at(2)));
  }
  at::Tensor forward(const at::Tensor& x, bool both = true) {
    return both ? last(first(x)) : first(x);
  }
  torch::nn::Linear first = nullptr, last = nullptr;
};
using Two = std::shared_ptr<TwoImpl>;

template <class F>
Status status_of(F f) {
  try {
    f();
    return absl::OkStatus();
  } catch (...) {
    return status_from_current_exception();
  }
}

at::Tensor ones() { return torch::ones({1, 2}); }

void expect_works(const ProcessGroup& group, DistributedDataParallel<TwoImpl>& ddp) {
  ddp.zero_grad();
  ddp.forward(ones() * (1 + group.rank())).sum().backward();
  for (const at::Tensor& one : ddp.module()->parameters()) EXPECT_TRUE(one.grad().defined());
}

// CL-17 and the peer's DB7: what its check does not look at, too.
TEST(BadInputDdp, CL_17_and_DB_7_models_that_differ) {
  struct Case {
    std::function<Two()> other;
    std::vector<std::string> words;
  };
  const auto changed = [](std::function<void(TwoImpl&)> change) {
    return [change] {
      const auto net = std::make_shared<TwoImpl>(std::vector<int64_t>{2, 3, 2});
      change(*net);
      return net;
    };
  };
  const std::vector<Case> cases = {
      {[] {
         return std::make_shared<TwoImpl>(std::vector<int64_t>{2, 3, 4});
       },
       {"'second.weight'", "[2, 3]", "[4, 3]"}},
      {changed([](TwoImpl& net) { net.last->to(torch::kFloat64); }),
       {"'second.weight'", "CPUFloatType", "CPUDoubleType"}},
      {[] {
         return std::make_shared<TwoImpl>(std::vector<int64_t>{2, 3, 2}, "other");
       },
       {"'second.weight'", "'other.weight'"}},
      {changed([](TwoImpl& net) { net.last->bias.set_requires_grad(false); }),
       {"'second.bias'", "requires grad"}},
      {changed([](TwoImpl& net) { net.register_parameter("more", torch::ones({1})); }), {"'more'"}},
      {changed([](TwoImpl& net) { net.register_buffer("count", torch::ones({1})); }),
       {"buffer 'count'"}},
      {changed([](TwoImpl& net) {
         net.first->weight.set_data(net.first->weight.detach().t().contiguous().t());
       }),
       {"'first.weight'", "strides"}},
  };
  for (const Case& one : cases) {
    run_ranks(3, [&](ProcessGroup& group) {
      const Two net = group.rank() == 1 ? one.other()
                                        : std::make_shared<TwoImpl>(std::vector<int64_t>{2, 3, 2});
      std::vector<std::string> words = one.words;
      words.insert(words.end(), {"rank 0", "rank 1"});
      const Status failed = status_of([&] { DistributedDataParallel ddp(net, group); });
      expect_error(failed, ErrorKind::kInvalidArgument, words);
      EXPECT_TRUE(group.failure().ok());
    });
  }
}

TEST(BadInputDdp, BadInput_a_module_or_options_that_cannot_be) {
  run_ranks(1, [](ProcessGroup& group) {
    const auto fails = [&](const Two& net, const DistributedDataParallelOptions& options,
                           ErrorKind kind, const std::vector<std::string>& words) {
      expect_error(status_of([&] { DistributedDataParallel ddp(net, group, options); }), kind,
                   words);
    };
    const auto net = std::make_shared<TwoImpl>(std::vector<int64_t>{2, 3, 2});
    fails(net, {.bucket_cap_mb = 0}, ErrorKind::kInvalidArgument, {"bucket_cap_mb"});
    fails(net, {.ignored_parameters = {"first.wait"}}, ErrorKind::kInvalidArgument,
          {"'first.wait'"});
    expect_error(status_of([&] { DistributedDataParallel ddp(net, ProcessGroup()); }),
                 ErrorKind::kInvalidArgument, {"process group"});
    {
      DistributedDataParallel first(net, group);
      fails(net, {}, ErrorKind::kState, {"'first.weight'", "another DistributedDataParallel"});
      EXPECT_THROW(first.iteration(0), Error);
      net->last->to(torch::kFloat64);
      expect_error(status_of([&] { first.forward(ones()); }), ErrorKind::kState,
                   {"'second.weight'", "Double"});
    }
    for (at::Tensor& one : net->parameters()) one.set_requires_grad(false);
    fails(net, {}, ErrorKind::kInvalidArgument, {"no parameter that requires grad"});
  });
}

// DDP-2, in the same backward, by name, on every rank; DDP-4.
TEST(BadInputDdp, DB_1_a_parameter_without_gradient) {
  run_ranks(3, [](ProcessGroup& group) {
    const auto net = std::make_shared<TwoImpl>(std::vector<int64_t>{2, 3, 2});
    DistributedDataParallel ddp(net, group);
    for (int i = 0; i < 2; ++i) {
      const at::Tensor loss = ddp.forward(ones(), /*both=*/group.rank() != 1).sum();
      expect_error(status_of([&] { loss.backward(); }), ErrorKind::kState,
                   {"rank 1: no gradient for 2 of 4 parameters", "'second.weight', 'second.bias'",
                    "find_unused_parameters"});
      expect_works(group, ddp);
    }
    EXPECT_EQ(ddp.sight().reductions, 2);
  });
}

// A backward that throws on one rank when its first buckets have left.
TEST(BadInputDdp, BadInput_a_backward_that_fails_on_one_rank) {
  run_ranks(3, [](ProcessGroup& group) {
    const auto net = std::make_shared<TwoImpl>(std::vector<int64_t>{2, 3, 2});
    DistributedDataParallel ddp(net, group, {.bucket_cap_mb = 0.00001, .first_bucket_mb = 0.00001});
    expect_works(group, ddp);
    const at::Tensor x = ones().set_requires_grad(true);
    x.register_hook([&group](const at::Tensor&) {
      if (group.rank() == 2) throw std::runtime_error("on purpose");
    });
    const Status failed = status_of([&] { ddp.forward(x).sum().backward(); });
    if (group.rank() != 2) {
      expect_error(failed, ErrorKind::kState, {"rank 2: local backward", "failed before its end"});
    } else {
      expect_error(failed, ErrorKind::kUser, {"on purpose"});
    }
    expect_works(group, ddp);
    EXPECT_TRUE(group.failure().ok());
  });
}

// One that throws before it comes to the model: that rank goes on to the next step, where the
// others still are in this one.
TEST(BadInputDdp, BadInput_a_rank_that_is_a_step_ahead) {
  run_ranks(3, [](ProcessGroup& group) {
    const auto net = std::make_shared<TwoImpl>(std::vector<int64_t>{2, 3, 2});
    DistributedDataParallel ddp(net, group);
    expect_works(group, ddp);
    for (int i = group.rank() == 2 ? 0 : 1; i < 2; ++i) {
      const at::Tensor out = ddp.forward(ones());
      out.register_hook([i](const at::Tensor&) {
        if (i == 0) throw std::runtime_error("on purpose");
      });
      const Status failed = status_of([&] { out.sum().backward(); });
      if (i == 0) {
        expect_error(failed, ErrorKind::kUser, {"on purpose"});
      } else {
        expect_error(failed, ErrorKind::kState,
                     {"different forwards", "rank 0: its gradients are of forward 2",
                      "rank 2: its gradients are of forward 3"});
      }
    }
    expect_works(group, ddp);
    EXPECT_TRUE(group.failure().ok());
  });
}

// DDP-3: ranks whose backwards come in different orders.
TEST(BadInputDdp, BadInput_backwards_in_different_orders) {
  run_ranks(2, [](ProcessGroup& group) {
    const auto net = std::make_shared<TwoImpl>(std::vector<int64_t>{2, 3, 2});
    DistributedDataParallel ddp(net, group);
    std::vector<at::Tensor> losses = {ddp.forward(ones()).sum(), ddp.forward(ones() * 2).sum()};
    if (group.rank() == 1) std::swap(losses[0], losses[1]);
    for (const at::Tensor& one : losses) {
      expect_error(status_of([&] { one.backward(); }), ErrorKind::kState,
                   {"different forwards", "rank 0: its gradients are of forward",
                    "rank 1: its gradients are of forward"});
    }
    expect_works(group, ddp);
  });
}

// A rank that stops is found by the operation's deadline, or by its leaving.
TEST(BadInputDdp, DB_13_a_rank_that_stops) {
  run_ranks(3, [](ProcessGroup& group) {
    const auto net = std::make_shared<TwoImpl>(std::vector<int64_t>{2, 3, 2});
    DistributedDataParallel ddp(net, group);
    expect_works(group, ddp);
    if (group.rank() == 2) return;  // it leaves
    const Status failed = status_of([&] { ddp.forward(ones()).sum().backward(); });
    EXPECT_FALSE(failed.ok());
    EXPECT_NE(std::string(failed.message()).find("rank 2"), std::string::npos) << failed;
    const Status again = status_of([&] { ddp.forward(ones()).sum().backward(); });
    EXPECT_FALSE(again.ok());
  });
}

TEST(BadInputDdp, BadInput_destroyed_before_its_backward) {
  run_ranks(1, [](ProcessGroup& group) {
    const auto net = std::make_shared<TwoImpl>(std::vector<int64_t>{2, 3, 2});
    at::Tensor loss;
    {
      DistributedDataParallel ddp(net, group);
      loss = ddp.forward(ones()).sum();
    }
    loss.backward();  // an ordinary one
    EXPECT_TRUE(net->first->weight.grad().defined());
  });
}

}  // namespace
}  // namespace weft::testing
