// X13 with owners that die unheard: before the phases of a step, between them, after them, and in
// the middle of a backward that steps.

#include <torch/types.h>

#include <thread>

#include "weft/tests/dist_optim/fixture.h"
#include "weft/tests/testing/mortal_store.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

// The trainer "a" and two owners. A killed worker reaches neither network nor store any more.
class DistOptimKilled : public DistOptimTest {
 protected:
  void join() {
    ClusterOptions o;
    o.size = 3;
    o.net = GetParam();
    o.library = library_;
    o.names = {"a", "b", "c"};
    o.dynamic = true;
    o.lease = 1s;
    o.adjust = [this](int i, JoinOptions* join) {
      join->services = {rref_service(), dist_autograd_service(), dist_optim_service()};
      join->log_level = Severity::kOff;
      join->transport = faulty_transport(join->transport, plan_);
      stores_[static_cast<size_t>(i)] = hear_interrupts(join);
    };
    c_.cluster = std::make_unique<Cluster>(o);
    for (size_t i = 0; i < 3; ++i) {
      eventually([&] { return c_[i].worker_infos().size() == 3; }, "all are known");
    }
    for (const char* owner : {"b", "c"}) {
      const at::Tensor start = at::linspace(-1, 1, 9, torch::kFloat64).reshape({3, 3});
      c_.weights.push_back(remote<Weights>(c_[0], owner, start));
      c_.parameters.push_back(c_.weights.back().rpc_sync(&Weights::parameter));
    }
  }
  void kill(size_t i) {
    stores_[i]->interrupt();
    c_.cluster->network()->kill(c_[i].name());
  }
  void kill_c() { kill(2); }
  // What "a" says next to "c" is swallowed, from the `skip`th request on; then "c" dies.
  std::thread kill_at_request(int64_t skip) {
    const int id = plan_->add(
        {.fault = Fault::kDrop, .kind = FrameKind::kRequest, .from = "a", .to = "c", .skip = skip});
    return std::thread([this, id] {
      eventually([&] { return plan_->hits(id) > 0; }, "nothing was said");
      kill_c();
    });
  }
  // "c" has died: its connection broke under the message, or its death was known before.
  static void expect_lost(const Status& s, const std::vector<std::string>& words) {
    const ErrorKind kind = error_kind(s);
    EXPECT_TRUE(kind == ErrorKind::kMaybeExecuted || kind == ErrorKind::kPeerLost) << s;
    expect_error(s, kind, words);
  }
  // The version of b's parameter.
  int64_t version_of_b() {
    return DistributedOptimizer<optim::SGD>(c_[0], {c_.parameters[0]}).versions().at(0);
  }
  void end() {
    expect_none_at({0, 1}, "optimizer_reservations");
    (void)c_.cluster->shutdown_all({.deadline = 2s});
  }
  void expect_none_at(const std::vector<size_t>& workers, const std::string& name) {
    for (const size_t i : workers) {
      eventually([&] { return counter(c_[i], name) == 0; }, name + " are left");
    }
  }

  OptimCluster c_;
  const std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>(1);
  std::vector<std::shared_ptr<Store>> stores_{3};
};

TEST_P(DistOptimKilled, X13_before_the_phases_nothing_is_applied) {
  join();
  DistributedOptimizer<optim::SGD> optimizer(c_[0], c_.parameters, {.lr = 1});
  const at::Tensor before = c_.weights[0].rpc_sync(&Weights::value);
  {
    DistAutogradContext context(c_[0]);
    context.backward({loss(c_, input())});
    kill_c();
    const StepReport report = optimizer.try_step(context);
    expect_lost(report.status, {"owner 'c'", "'b' not applied, 'c' not applied"});
    EXPECT_EQ(report.owners[0].outcome, StepOutcome::kNotApplied);
    EXPECT_EQ(report.owners[1].outcome, StepOutcome::kNotApplied);
    EXPECT_TRUE(report.owners[0].error.ok());
  }
  expect_equal(c_.weights[0].rpc_sync(&Weights::value), before);
  EXPECT_EQ(version_of_b(), 0);
  end();
}

TEST_P(DistOptimKilled, X13_between_the_phases_the_report_says_so) {
  join();
  DistributedOptimizer<optim::SGD> optimizer(c_[0], c_.parameters, {.lr = 1});
  {
    DistAutogradContext context(c_[0]);
    context.backward({loss(c_, input())});
    std::thread killer = kill_at_request(1);  // the first is its prepare
    const StepReport report = optimizer.try_step(context);
    killer.join();
    expect_lost(report.status, {"owner 'c'", "'b' applied, 'c' unknown"});
    EXPECT_EQ(report.owners[0].outcome, StepOutcome::kApplied);
    EXPECT_EQ(report.owners[1].outcome, StepOutcome::kUnknown);
  }
  EXPECT_EQ(version_of_b(), 1);
  end();
}

TEST_P(DistOptimKilled, X13_after_the_phases_the_next_step_changes_nothing) {
  join();
  DistributedOptimizer<optim::SGD> optimizer(c_[0], c_.parameters, {.lr = 1});
  {
    DistAutogradContext context(c_[0]);
    context.backward({loss(c_, input())});
    EXPECT_EQ(optimizer.step(context).updated, 2);
    kill_c();
  }
  {
    DistAutogradContext context(c_[0]);
    context.backward({c_.weights[0].rpc_sync(&Weights::forward, input()).sum()});
    const StepReport report = optimizer.try_step(context);
    expect_lost(report.status, {"'b' not applied, 'c' not applied"});
  }
  EXPECT_EQ(version_of_b(), 1);
  // An optimizer without its parameters goes on.
  {
    DistributedOptimizer<optim::SGD> rest(c_[0], {c_.parameters[0]}, {.lr = 1});
    DistAutogradContext context(c_[0]);
    context.backward({c_.weights[0].rpc_sync(&Weights::forward, input()).sum()});
    EXPECT_EQ(rest.step(context).updated, 1);
  }
  EXPECT_EQ(version_of_b(), 2);
  end();
}

// The trainer dies between the phases: its part of the optimizer goes, and what it holds with it, long
// before the time of the step is over.
TEST_P(DistOptimKilled, X13_what_a_dead_trainer_has_reserved_is_free) {
  join();
  DistributedOptimizer<optim::SGD> optimizer(c_[0], c_.parameters, {.lr = 1});
  DistAutogradContext context(c_[0]);
  context.backward({loss(c_, input())});
  plan_->add(
      {.fault = Fault::kDrop, .kind = FrameKind::kRequest, .from = "a", .to = "c", .skip = 1});
  std::thread step([&] { (void)optimizer.try_step(context, {.deadline = 10min}); });
  eventually([&] { return counter(c_[1], "optimizer_steps") == 1; }, "applied at b");
  EXPECT_EQ(counter(c_[2], "optimizer_reservations"), 1);
  kill(0);
  eventually([&] { return counter(c_[2], "optimizers") == 0; }, "c's part is there");
  EXPECT_EQ(counter(c_[2], "optimizer_reservations"), 0);
  (void)c_.cluster->shutdown_all({.graceful = false, .deadline = 2s});
  step.join();
}

TEST_P(DistOptimKilled, X13_in_a_backward_that_steps) {
  join();
  DistributedOptimizer<optim::SGD> optimizer(c_[0], c_.parameters, {.lr = 1});
  {
    DistAutogradContext context(c_[0]);
    const at::Tensor l = loss(c_, input());
    std::thread killer = kill_at_request(0);
    const StepReport report = optimizer.try_backward_and_step(context, {l});
    killer.join();
    expect_error(report.status, ErrorKind::kPeerLost, {"in its backward", "'c' unknown"});
    const bool applied = report.owners[0].outcome == StepOutcome::kApplied;
    if (applied) {
      EXPECT_EQ(version_of_b(), 1);
    }
    EXPECT_EQ(report.owners[1].outcome, StepOutcome::kUnknown);
  }
  expect_none_at({0, 1}, "num_current_backward_passes");
  expect_none_at({0, 1}, "num_autograd_contexts");
  end();
}

INSTANTIATE_TEST_SUITE_P(Nets, DistOptimKilled, ::testing::Values(Net::kInproc), net_name);

}  // namespace
}  // namespace weft::testing
