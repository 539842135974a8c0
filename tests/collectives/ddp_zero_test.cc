// ZeroRedundancyOptimizer against the same optimizer at every rank.

#include <numeric>

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/collectives/ddp/zero_redundancy_optimizer.h"
#include "weft/tests/collectives/ddp_world.h"
#include "weft/tests/testing/checks.h"

namespace weft::testing {
namespace {

struct TowerImpl : torch::nn::Module {
  TowerImpl() {
    for (int i = 0; i < 8; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(16, 16)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& one : layers) x = torch::tanh(one(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

int64_t state_elements(torch::optim::Optimizer& optimizer) {
  int64_t sum = 0;
  for (const auto& [key, state] : optimizer.state()) {
    const auto& adam = static_cast<const torch::optim::AdamParamState&>(*state);
    sum += adam.exp_avg().numel() + adam.exp_avg_sq().numel();
  }
  return sum;
}

TEST(Zero, EqualsTheWholeOptimizerWithAPartOfItsState) {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [ranks](ProcessGroup& group) {
      const auto net = std::make_shared<TowerImpl>();
      const auto whole = std::make_shared<TowerImpl>();
      DistributedDataParallel ddp(net, group);
      {
        const torch::NoGradGuard no_grad;
        for (size_t i = 0; i < net->parameters().size(); ++i) {
          whole->parameters()[i].copy_(net->parameters()[i]);
        }
      }
      DistributedDataParallel other(whole, group);
      const torch::optim::AdamOptions options(0.01);
      ZeroRedundancyOptimizer<torch::optim::Adam> optimizer(net->parameters(), group, options);
      torch::optim::Adam want(whole->parameters(), options);
      const at::Tensor x = torch::ones({2, 16}) * (1 + group.rank());
      for (int i = 0; i < 5; ++i) {
        optimizer.zero_grad();
        ddp.forward(x).pow(2).sum().backward();
        optimizer.step();
        want.zero_grad();
        other.forward(x).pow(2).sum().backward();
        want.step();
      }
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        EXPECT_TRUE(torch::equal(net->parameters()[i], whole->parameters()[i])) << i;
      }
      const double part = static_cast<double>(state_elements(*optimizer.local())) /
                          static_cast<double>(state_elements(want));
      EXPECT_LE(part, 1.0 / ranks + 0.1);
    });
  }
}

// Throws where it has the second parameter.
struct FailingSteps {
  FailingSteps(const std::vector<at::Tensor>& parameters, int64_t which)
      : fails(parameters.front().numel() == which) {}
  void step() const {
    if (fails) throw std::runtime_error("no step on purpose");
  }
  bool fails;
};

// Parameters that a rank has stepped reach all ranks or none.
TEST(Zero, BadInput_a_step_that_fails_on_one_rank) {
  run_ranks(3, [](ProcessGroup& group) {
    std::vector<at::Tensor> parameters;
    for (const int64_t n : {4, 3, 2}) parameters.push_back(torch::ones({n}).requires_grad_());
    ZeroRedundancyOptimizer<FailingSteps> optimizer(parameters, group, int64_t{3});
    try {
      optimizer.step();
      ADD_FAILURE() << "rank " << group.rank() << " has stepped";
    } catch (const std::exception& e) {
      EXPECT_NE(std::string(e.what()).find("no step on purpose"), std::string::npos) << e.what();
    }
    EXPECT_FALSE(group.failure().ok());
  });
}

TEST(Zero, MoreRanksThanParameters) {
  run_ranks(3, [](ProcessGroup& group) {
    torch::nn::Linear net(2, 1);
    DistributedDataParallel ddp(net, group);
    ZeroRedundancyOptimizer<torch::optim::Adam> optimizer(net->parameters(), group,
                                                          torch::optim::AdamOptions(0.1));
    EXPECT_EQ(optimizer.local().has_value(), group.rank() < 2);
    const at::Tensor before = net->weight.detach().clone();
    ddp.forward(torch::ones({1, 2})).sum().backward();
    optimizer.step();
    EXPECT_FALSE(torch::equal(net->weight, before));
    std::vector<at::Tensor> all(3);
    for (at::Tensor& one : all) one = torch::empty({1, 2});
    group.all_gather(all, net->weight.detach());
    EXPECT_TRUE(torch::equal(all[0], all[2]));
  });
}

TEST(Zero, BadInput_parameters_that_cannot_be_shared_out) {
  run_ranks(1, [](ProcessGroup& group) {
    const auto fails = [&](std::vector<at::Tensor> parameters, const std::string& word) {
      const Status s = error_of([&] {
        ZeroRedundancyOptimizer<torch::optim::Adam> one(std::move(parameters), group,
                                                        torch::optim::AdamOptions(0.1));
      });
      expect_error(s, ErrorKind::kInvalidArgument, {word});
    };
    const at::Tensor leaf = torch::ones({2}).set_requires_grad(true);
    fails({}, "no parameters");
    fails({leaf, at::Tensor()}, "parameter 1 of 2 is undefined");
    fails({leaf * 2}, "no leaf");
    fails({leaf, leaf}, "given before");
  });
}

}  // namespace
}  // namespace weft::testing
