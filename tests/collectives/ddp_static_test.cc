// DistributedDataParallel of a static graph: together with no_sync(), with parameters that have no
// part in it, with a backward inside of a node; and a graph that changes.

#include <torch/autograd.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/tests/collectives/ddp_world.h"
#include "weft/tests/testing/checks.h"
#include "weft/tests/testing/modules.h"

namespace weft::testing {
namespace {

struct StaticNetImpl : torch::nn::Module {
  StaticNetImpl() {
    in = register_module("in", torch::nn::Linear(3, 4));
    twice = register_module("twice", torch::nn::Linear(4, 4));
    unused = register_module("unused", torch::nn::Linear(4, 4));
    out = register_module("out", torch::nn::Linear(4, 2));
    to(torch::kFloat64);
  }
  at::Tensor forward(const at::Tensor& x, bool with_unused = false, bool with_twice = true) {
    at::Tensor h = torch::tanh(in(x));
    if (with_twice) h = torch::tanh(twice(torch::tanh(twice(h))));
    if (with_unused) h = torch::tanh(unused(h));
    return out(h);
  }
  torch::nn::Linear in = nullptr, twice = nullptr, unused = nullptr, out = nullptr;
};
using StaticNet = std::shared_ptr<StaticNetImpl>;

// Small buckets, so that there are several.
DistributedDataParallelOptions static_options(bool is_static, bool views = false) {
  return {.bucket_cap_mb = 0.0002,
          .first_bucket_mb = 0.0001,
          .find_unused_parameters = !is_static,
          .static_graph = is_static,
          .gradient_as_bucket_view = views};
}

at::Tensor static_loss(const at::Tensor& out, int step, int micro, int rank) {
  return (out - (0.1 * step + 0.3 * micro - 0.2 * rank)).pow(2).mean();
}
at::Tensor static_input(int step, int micro, int rank) {
  return torch::linspace(-1 + 0.1 * step, 1 + 0.2 * rank, 6, torch::kFloat64).view({2, 3}) *
         (1 + micro);
}

void expect_same_parameters(const StaticNet& got, const StaticNet& want, double bound) {
  for (const auto& item : want->named_parameters()) {
    SCOPED_TRACE(item.key());
    expect_near(got->named_parameters()[item.key()], item.value(), bound);
  }
}

// Micro-batches, whose first backward is reduced or not, with a static graph or without.
TEST(DdpStatic, DB_3_and_CL_4_with_no_sync) {
  constexpr int kSteps = 5;
  for (const int micro : {1, 2, 4}) {
    for (const bool first_synced : {true, false}) {
      for (const bool is_static : {true, false}) {
        SCOPED_TRACE(std::to_string(micro) + (first_synced ? " synced" : " not synced") +
                     (is_static ? " static" : ""));
        const auto micros = [&](int step) { return step == 0 && first_synced ? 1 : micro; };
        const auto start = std::make_shared<StaticNetImpl>();
        const StaticNet want = copy_of(start);
        torch::optim::SGD optimize_one(want->parameters(), torch::optim::SGDOptions(0.1));
        for (int s = 0; s < kSteps; ++s) {
          optimize_one.zero_grad();
          for (int m = 0; m < micros(s); ++m) {
            for (int r = 0; r < 2; ++r) {
              const at::Tensor out = want->forward(static_input(s, m, r));
              (static_loss(out, s, m, r) / 2).backward();
            }
          }
          optimize_one.step();
        }
        run_ranks(2, [&](ProcessGroup& group) {
          const int rank = group.rank();
          const StaticNet net = copy_of(start);
          DistributedDataParallel ddp(net, group, static_options(is_static, micro == 2));
          torch::optim::SGD optimize(net->parameters(), torch::optim::SGDOptions(0.1));
          for (int s = 0; s < kSteps; ++s) {
            ddp.zero_grad();
            for (int m = 0; m + 1 < micros(s); ++m) {
              const auto local = ddp.no_sync();
              static_loss(ddp.forward(static_input(s, m, rank)), s, m, rank).backward();
            }
            const int last = micros(s) - 1;
            static_loss(ddp.forward(static_input(s, last, rank)), s, last, rank).backward();
            optimize.step();
          }
          EXPECT_EQ(ddp.sight().reductions, kSteps);
          expect_same_parameters(net, want, 1e-12);
          std::vector<at::Tensor> all(2);
          for (at::Tensor& one : all) one = torch::empty_like(net->out->weight);
          group.all_gather(all, net->out->weight.detach());
          EXPECT_TRUE(torch::equal(all[0], all[1]));
        });
      }
    }
  }
}

// The first reduction leaves at its end, the later ones bucket by bucket in the order of arrival,
// and say no more which parameters are used.
TEST(DdpStatic, BucketsLeaveEarlyAfterTheFirst) {
  run_ranks(2, [](ProcessGroup& group) {
    const auto net = std::make_shared<StaticNetImpl>();
    DistributedDataParallel ddp(net, group, static_options(true));
    const auto step = [&] { ddp.forward(static_input(1, 0, group.rank())).sum().backward(); };
    step();
    EXPECT_EQ(ddp.sight().launched_early, 0);
    EXPECT_TRUE(ddp.sight().rebuilt);
    EXPECT_EQ(ddp.sight().buckets.back().back().substr(0, 7), "unused.");
    step();
    EXPECT_GE(ddp.sight().launched_early, 1);
    EXPECT_FALSE(net->unused->weight.grad().defined());
  });
}

// Two forwards before one backward, in both patterns of the peer's reports.
TEST(DdpStatic, DB_4_and_DB_8_two_forwards_before_a_backward) {
  run_ranks(2, [](ProcessGroup& group) {
    torch::nn::Linear net(2, 1);
    DistributedDataParallel ddp(net, group, {.static_graph = true});
    const at::Tensor x = torch::ones({1, 2}) * (1 + group.rank());
    for (int i = 0; i < 3; ++i) {
      ddp.zero_grad();
      (ddp.forward(x).sum() + ddp.forward(x * 2).sum()).backward();
      expect_near(net->weight.grad(), torch::full({1, 2}, 4.5F), 1e-6);
      ddp.zero_grad();
      const at::Tensor first = ddp.forward(x).sum();
      const at::Tensor second = ddp.forward(x * 2).sum();
      first.backward();
      second.backward();
      // The second one reduces the sum, as any backward without zero_grad() between does.
      expect_near(net->weight.grad(), torch::full({1, 2}, 4.5F), 1e-6);
    }
  });
}

// Computes its part again in the backward, and runs a backward of its own.
class Checkpoint : public torch::autograd::Function<Checkpoint> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            torch::nn::Linear* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = static_cast<int64_t>(reinterpret_cast<intptr_t>(layer));
    return torch::tanh((*layer)(x));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const torch::AutoGradMode with_grad(true);
    auto& layer = *reinterpret_cast<torch::nn::Linear*>(
        static_cast<intptr_t>(context->saved_data["layer"].toInt()));
    const at::Tensor x = context->get_saved_variables()[0].detach().set_requires_grad(true);
    torch::tanh(layer(x)).backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};

struct CheckpointedImpl : torch::nn::Module {
  CheckpointedImpl() {
    in = register_module("in", torch::nn::Linear(3, 4));
    twice = register_module("twice", torch::nn::Linear(4, 4));
    out = register_module("out", torch::nn::Linear(4, 2));
    to(torch::kFloat64);
  }
  at::Tensor forward(const at::Tensor& x, bool checkpoints) {
    const auto layer = [&](const at::Tensor& h) {
      return checkpoints ? Checkpoint::apply(h, &twice) : torch::tanh(twice(h));
    };
    return out(layer(layer(torch::tanh(in(x)))));
  }
  torch::nn::Linear in = nullptr, twice = nullptr, out = nullptr;
};

TEST(DdpStatic, CL_4_a_backward_inside_of_a_node) {
  const auto want = std::make_shared<CheckpointedImpl>();
  run_ranks(2, [&](ProcessGroup& group) {
    const auto net = std::make_shared<CheckpointedImpl>();
    {
      const torch::NoGradGuard no_grad;
      for (const auto& item : net->named_parameters()) {
        item.value().copy_(want->named_parameters()[item.key()]);
      }
    }
    DistributedDataParallel ddp(net, group, static_options(true));
    for (int s = 0; s < 3; ++s) {
      std::vector<at::Tensor> parameters = want->parameters();
      at::Tensor sum = torch::zeros({}, torch::kFloat64);
      for (int r = 0; r < 2; ++r) {
        sum = sum + static_loss(want->forward(static_input(s, 0, r), false), s, 0, r) / 2;
      }
      const auto gradients = torch::autograd::grad({sum}, parameters);
      ddp.zero_grad();
      const int rank = group.rank();
      static_loss(ddp.forward(static_input(s, 0, rank), true), s, 0, rank).backward();
      for (size_t i = 0; i < parameters.size(); ++i) {
        expect_near(net->parameters()[i].grad(), gradients[i], 1e-12);
      }
    }
    EXPECT_EQ(ddp.sight().reductions, 3);
  });
}

// In the same backward, by name, on every rank; the next one works.
TEST(BadInputDdp, BadInput_a_static_graph_that_changes) {
  run_ranks(2, [](ProcessGroup& group) {
    const auto net = std::make_shared<StaticNetImpl>();
    DistributedDataParallel ddp(net, group, static_options(true));
    const at::Tensor x = static_input(0, 0, group.rank());
    const auto works = [&] {
      ddp.zero_grad();
      ddp.forward(x).sum().backward();
    };
    works();
    // More than before, on one rank...
    expect_error(error_of([&] { ddp.forward(x, group.rank() == 1).sum().backward(); }),
                 ErrorKind::kState,
                 {"rank 1: the graph is not static", "'unused.",
                  "was ready 1 times, 0 in the first", "find_unused_parameters"});
    works();
    // ...and less.
    expect_error(
        error_of([&] { ddp.forward(x, false, group.rank() == 1).sum().backward(); }),
        ErrorKind::kState,
        {"rank 0: the graph is not static", "'twice.", "was ready 0 times, 1 in the first"});
    works();
    EXPECT_TRUE(group.failure().ok());
  });
}

}  // namespace
}  // namespace weft::testing
