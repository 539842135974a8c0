// Data parallelism under the seeded scheduler: backwards that fail on a rank, parameters without
// gradient, deaths; in any order of messages.

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/common/sim.h"
#include "weft/tests/collectives/ddp_world.h"
#include "weft/tests/testing/environment.h"

namespace weft::testing {
namespace {

struct SimNetImpl : torch::nn::Module {
  SimNetImpl() {
    first = register_module("first", torch::nn::Linear(2, 3));
    second = register_module("second", torch::nn::Linear(3, 3));
    last = register_module("last", torch::nn::Linear(3, 1));
    to(torch::kFloat64);
    double at = 0;
    for (at::Tensor& one : parameters()) {
      const torch::NoGradGuard no_grad;
      one.copy_(torch::arange(one.numel(), torch::kFloat64).view(one.sizes()).mul(0.1).sub(at));
      at += 0.05;
    }
  }
  at::Tensor forward(const at::Tensor& x, bool all) {
    const at::Tensor h = torch::tanh(first(x));
    return last(all ? torch::tanh(second(h)) : h);
  }
  torch::nn::Linear first = nullptr, second = nullptr, last = nullptr;
};

enum class Fault { kNone, kThrows, kMissing, kDies };
constexpr int kSteps = 4;

struct Plan {
  int ranks = 2;
  bool find_unused = false;
  bool views = false;
  double bucket_mb = 1;
  std::vector<Fault> faults{};  // by step
  std::vector<int> at{};        // on which rank
};

Plan draw(SimRuntime& sim) {
  Plan plan;
  const auto below = [&sim](uint64_t n) { return static_cast<int>(sim.random().below(n)); };
  plan.ranks = 2 + below(3);
  plan.find_unused = below(3) == 0;
  plan.views = below(2) == 0;
  plan.bucket_mb = below(2) == 0 ? 1 : 0.00005;
  for (int i = 0; i < kSteps; ++i) {
    const int what = below(10);
    plan.faults.push_back(
        what < 2 ? Fault::kThrows
                 : (what < 4 ? Fault::kMissing : (what < 5 ? Fault::kDies : Fault::kNone)));
    plan.at.push_back(below(static_cast<uint64_t>(plan.ranks)));
  }
  return plan;
}

at::Tensor input(int step, int rank) {
  return torch::full({2, 2}, 0.3 * (step + 1) - 0.2 * rank, torch::kFloat64);
}
bool uses_all(const Plan& plan, int step, int rank) {
  const auto s = static_cast<size_t>(step);
  return plan.faults[s] != Fault::kMissing || plan.at[s] != rank;
}

// What each rank has after each step; undefined: it failed.
using Ended = std::vector<std::vector<at::Tensor>>;

at::Tensor flat(const torch::nn::Module& net) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& one : net.parameters()) all.push_back(one.detach().flatten());
  return torch::cat(all);
}
void step_by(const torch::nn::Module& net) {
  const torch::NoGradGuard no_grad;
  for (at::Tensor& one : net.parameters()) {
    if (one.grad().defined()) one.sub_(one.grad() * 0.1);
  }
}

void train(const Plan& plan, InprocFabric& fabric, ProcessGroup& group, Ended* ended) {
  const int rank = group.rank();
  const auto net = std::make_shared<SimNetImpl>();
  DistributedDataParallel ddp(net, group,
                              {.bucket_cap_mb = plan.bucket_mb,
                               .first_bucket_mb = plan.bucket_mb,
                               .find_unused_parameters = plan.find_unused,
                               .gradient_as_bucket_view = plan.views});
  for (int step = 0; step < kSteps; ++step) {
    const auto s = static_cast<size_t>(step);
    const bool here = plan.at[s] == rank;
    if (here && plan.faults[s] == Fault::kDies) {
      fabric.kill(rank);
      return;
    }
    try {
      ddp.zero_grad();
      const at::Tensor x = input(step, rank).set_requires_grad(true);
      if (here && plan.faults[s] == Fault::kThrows) {
        x.register_hook([](const at::Tensor&) { throw std::runtime_error("on purpose"); });
      }
      ddp.forward(x, uses_all(plan, step, rank)).pow(2).mean().backward();
      step_by(*net);
      (*ended)[static_cast<size_t>(rank)].push_back(flat(*net));
    } catch (const std::exception&) {
      (*ended)[static_cast<size_t>(rank)].emplace_back();
    }
  }
  // A rank that leaves ends the group for those that are still in an operation.
  (void)group.try_barrier();
}

// One process with all batches takes the steps that have succeeded.
std::vector<at::Tensor> expected(const Plan& plan, const std::vector<bool>& succeeded) {
  std::vector<at::Tensor> out;
  SimNetImpl net;
  for (int step = 0; step < kSteps; ++step) {
    if (!succeeded[static_cast<size_t>(step)]) {
      out.emplace_back();
      continue;
    }
    net.zero_grad();
    for (int r = 0; r < plan.ranks; ++r) {
      const at::Tensor x = input(step, r);
      (net.forward(x, uses_all(plan, step, r)).pow(2).mean() / plan.ranks).backward();
    }
    step_by(net);
    out.push_back(flat(net));
  }
  return out;
}

bool dies_before_a_step(const Plan& plan) {
  for (const Fault one : plan.faults) {
    if (one == Fault::kDies) return true;
    if (one == Fault::kNone) return false;
  }
  return false;
}

// DDP-2 and DDP-4: what succeeds on one rank succeeds on all that live, with equal parameters, which
// are those of one process; what fails fails on all, and only what is meant to.
uint64_t life(uint64_t seed, int* failures, int* steps) {
  SimRuntime sim({.seed = seed});
  const Plan plan = draw(sim);
  Ended ended(static_cast<size_t>(plan.ranks));
  const Status status = sim.run([&] {
    const std::shared_ptr<Runtime> runtime(&sim, [](Runtime*) {});
    run_ranks(plan.ranks, runtime, [&](ProcessGroup& group, InprocFabric& fabric) {
      try {
        train(plan, fabric, group, &ended);
      } catch (const Error&) {
        // A rank that dies then may do so while others still make theirs.
        if (!dies_before_a_step(plan)) throw;
      }
    });
  });
  EXPECT_TRUE(status.ok()) << "seed " << seed << ": " << status;
  std::vector<bool> succeeded;
  bool dead = false;
  size_t last_alive = kSteps;  // the last step that all ranks were alive for
  for (size_t s = 0; s < kSteps; ++s) {
    if (plan.faults[s] == Fault::kDies && !dead) {
      dead = true;
      last_alive = s - 1;
      // A rank whose backward fails does not wait for the others.
      while (s > 0 && last_alive > 0 && !succeeded[last_alive]) --last_alive;
    }
    const bool fails = dead || plan.faults[s] == Fault::kThrows ||
                       (plan.faults[s] == Fault::kMissing && !plan.find_unused);
    succeeded.push_back(!fails);
    fails ? ++*failures : ++*steps;
  }
  const std::vector<at::Tensor> want = expected(plan, succeeded);
  std::string text = "plan: find_unused " + std::to_string(plan.find_unused) + " views " +
                     std::to_string(plan.views) + " MiB " + std::to_string(plan.bucket_mb);
  for (size_t s = 0; s < kSteps; ++s) {
    text += ", " + std::to_string(static_cast<int>(plan.faults[s])) + " at " +
            std::to_string(plan.at[s]);
  }
  SCOPED_TRACE(text);
  std::vector<at::Tensor> firsts(kSteps);
  for (size_t r = 0; r < ended.size(); ++r) {
    for (size_t s = 0; s < ended[r].size(); ++s) {
      // The step before a death may be over at the one that dies, and not yet at others.
      if (s >= last_alive && dead && !ended[r][s].defined()) continue;
      EXPECT_EQ(ended[r][s].defined(), succeeded[s])
          << "seed " << seed << " rank " << r << " " << s;
      if (!ended[r][s].defined() || !succeeded[s]) continue;
      EXPECT_LE((ended[r][s] - want[s]).abs().max().item<double>(), 1e-12)
          << "seed " << seed << " rank " << r << " step " << s;
      at::Tensor& first = firsts[s];
      if (!first.defined()) first = ended[r][s];
      EXPECT_TRUE(torch::equal(ended[r][s], first)) << "seed " << seed << " rank " << r << " " << s;
    }
  }
  return sim.trace_hash();
}

TEST(DdpSim, RandomSchedules) {
  const auto schedules =
      weft::testing::environment_number<uint64_t>("WEFT_DDP_SIM_SCHEDULES", 1000);
  int failures = 0;
  int steps = 0;
  for (uint64_t seed = 1; seed <= schedules && !HasFailure(); ++seed) life(seed, &failures, &steps);
  EXPECT_GT(failures, 0);
  EXPECT_GT(steps, failures / 2);
  RecordProperty("schedules", static_cast<int>(schedules));
}

TEST(DdpSim, TheSameSeedGivesTheSameTrace) {
  int failures = 0;
  int steps = 0;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    EXPECT_EQ(life(seed, &failures, &steps), life(seed, &failures, &steps)) << "seed " << seed;
  }
}

}  // namespace
}  // namespace weft::testing
