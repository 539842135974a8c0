// DEF_24, DEF_25, DEF_26: a step applies everywhere or nowhere also when connections break, budgets
// are full and time is over, and what it reports is what has happened.

#include <torch/optim.h>
#include <torch/types.h>

#include <atomic>
#include <thread>

#include "weft/dist_optim/user_optimizer.h"
#include "weft/tests/dist_optim/fixture.h"
#include "weft/tests/testing/forwarding_runtime.h"
#include "weft/tests/testing/gate.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

constexpr int64_t kMiB = 1 << 20;

// What the next step of a class does when it has updated its parameters; once.
Mutex after_mutex;
std::function<void()> after_step ABSL_GUARDED_BY(after_mutex);

class Descent : public torch::optim::SGD {
 public:
  Descent(std::vector<at::Tensor> parameters, double rate) : SGD(std::move(parameters), rate) {}
  at::Tensor step(LossClosure closure) override {
    at::Tensor result = SGD::step(std::move(closure));
    std::function<void()> then;
    {
      MutexLock lock(&after_mutex);
      then.swap(after_step);
    }
    if (then != nullptr) then();
    return result;
  }
};

void then_do(std::function<void()> what) {
  MutexLock lock(&after_mutex);
  after_step = std::move(what);
}

// The system's, which a test can set forward.
class JumpingRuntime : public ForwardingRuntime {
 public:
  explicit JumpingRuntime(std::shared_ptr<Runtime> inner)
      : ForwardingRuntime(inner), clock_(inner->clock()) {}
  const Clock& clock() const override { return clock_; }
  void jump(absl::Duration by) { clock_.ahead.fetch_add(absl::ToInt64Milliseconds(by)); }

 private:
  struct Ahead : public Clock {
    explicit Ahead(const Clock& inner) : inner(inner) {}
    absl::Time now() const override { return inner.now() + absl::Milliseconds(ahead.load()); }
    const Clock& inner;
    std::atomic<int64_t> ahead{0};
  };
  Ahead clock_;
};

class DistOptimPhases : public DistOptimTest {
 protected:
  DistOptimPhases() {
    optimizer_<torch::optim::SGD, double>(library_, "SGD");
    optimizer_<Descent, double>(library_, "Descent");
    library_.def("hold", [this](const at::Tensor&) {
      MutexLock lock(&mutex_);
      held_.emplace_back();
      return held_.back().future();
    });
  }
  ~DistOptimPhases() override { answer_all(); }

  // Those of make(), with an environment or a runtime of one worker's own.
  OptimCluster make_with(int owners, std::function<void(int, JoinOptions*)> adjust) {
    ClusterOptions o{.size = owners + 1, .net = GetParam(), .library = library_};
    o.adjust = [adjust = std::move(adjust)](int i, JoinOptions* join) {
      join->services = {rref_service(), dist_autograd_service(), dist_optim_service()};
      adjust(i, join);
    };
    OptimCluster c{std::make_unique<Cluster>(o), {}, {}};
    for (int i = 1; i <= owners; ++i) {
      c.weights.push_back(remote<Weights>(c[0], i, torch::zeros({3, 3}, torch::kFloat64)));
      c.parameters.push_back(c.weights.back().rpc_sync(&Weights::parameter));
    }
    return c;
  }
  size_t held() {
    MutexLock lock(&mutex_);
    return held_.size();
  }
  void answer_all() {
    std::vector<Promise<int64_t>> all;
    {
      MutexLock lock(&mutex_);
      all.swap(held_);
    }
    for (Promise<int64_t>& one : all) one.set_value(1);
  }
  // Fills the send budget of `worker` by calls to `to` that are held.
  std::vector<Future<int64_t>> fill(const Worker& worker, int to, int64_t bytes) {
    std::vector<Future<int64_t>> out;
    for (; bytes >= 1; bytes /= 2) {
      while (true) {
        auto call = try_rpc_async(worker, to, hold_, torch::zeros({bytes}, torch::kByte));
        if (!call.ok() || call->has_error()) break;
        out.push_back(*std::move(call));
      }
    }
    return out;
  }

  const FunctionRef<int64_t(at::Tensor)> hold_{"app.hold"};
  Mutex mutex_;
  std::vector<Promise<int64_t>> held_ ABSL_GUARDED_BY(mutex_);
};

// One connection breaks at one message of a step, every process lives: the step is done, once.
TEST_P(DistOptimPhases, DEF_24_a_cut_at_any_message_of_a_step) {
  auto plan = std::make_shared<FaultPlan>(1);
  OptimCluster c = make(2, plan);
  DistributedOptimizer<optim::SGD> two(c[0], c.parameters, {.lr = 1});
  DistributedOptimizer<optim::SGD> one(c[0], {c.parameters[1]}, {.lr = 1});
  int64_t steps = 0;
  const auto cut = [&](const FaultRule& rule, auto& optimizer) {
    SCOPED_TRACE(std::string(fault_name(rule.fault)) + " of " +
                 std::string(frame_kind_name(*rule.kind)) + " " + std::to_string(rule.skip));
    DistAutogradContext context(c[0]);
    context.backward({c.weights[0].rpc_sync(&Weights::forward, input()).sum() +
                      c.weights[1].rpc_sync(&Weights::forward, input()).sum()});
    eventually([&] { return counter(c[0], "calls_pending") == 0; }, "answers to the backward");
    const int64_t lost = counter(c[0], "connections_lost");
    const int id = plan->add(rule);
    const StepReport report = optimizer.try_step(context, {.deadline = 10s});
    EXPECT_EQ(plan->hits(id), 1) << plan->log();
    plan->clear();
    // A step can end before worker0 hears of the break; the next forward may not run into it.
    eventually([&] { return counter(c[0], "connections_lost") > lost; }, "the connection's end");
    EXPECT_TRUE(report.status.ok()) << report.status;
    ++steps;
    EXPECT_EQ(optimizer.versions().back(), steps);
  };
  for (const Fault fault : {Fault::kFailAfter, Fault::kCut}) {
    for (const int64_t skip : {0, 1}) {
      cut({.fault = fault,
           .kind = FrameKind::kRequest,
           .from = "worker0",
           .to = "worker2",
           .skip = skip,
           .times = 1},
          two);
      cut({.fault = fault,
           .kind = FrameKind::kResponse,
           .from = "worker2",
           .to = "worker0",
           .skip = skip,
           .times = 1},
          two);
    }
    cut({.fault = fault,
         .kind = FrameKind::kRequest,
         .from = "worker0",
         .to = "worker2",
         .times = 1},
        one);
    cut({.fault = fault,
         .kind = FrameKind::kResponse,
         .from = "worker2",
         .to = "worker0",
         .times = 1},
        one);
  }
  expect_none(*c.cluster, "optimizer_reservations");
}

// The first phase fails at one owner; the other's cancel breaks with its connection.
TEST_P(DistOptimPhases, DEF_24_a_cut_at_a_cancel) {
  auto plan = std::make_shared<FaultPlan>(1);
  OptimCluster c = make(2, plan);
  DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 1});
  DistAutogradContext context(c[0]);
  const at::Tensor big = torch::full({3}, std::numeric_limits<double>::max(), torch::kFloat64);
  context.backward({(c.weights[0].rpc_sync(&Weights::forward, big) * 4).sum() +
                    c.weights[1].rpc_sync(&Weights::forward, input()).sum()});
  eventually([&] { return counter(c[0], "calls_pending") == 0; }, "answers to the backward");
  const int id = plan->add({.fault = Fault::kCut,
                            .kind = FrameKind::kRequest,
                            .from = "worker0",
                            .to = "worker2",
                            .skip = 1,
                            .times = 1});
  const StepReport report = optimizer.try_step(context, {.require_finite = true});
  EXPECT_EQ(error_kind(report.status), ErrorKind::kInvalidArgument) << report.status;
  EXPECT_EQ(plan->hits(id), 1);
  expect_none(*c.cluster, "optimizer_reservations");
}

// No room for what a step says: it waits.
TEST_P(DistOptimPhases, DEF_24_a_step_waits_for_room) {
  OptimCluster c = make_with(2, [](int i, JoinOptions* join) {
    if (i == 0) join->environment = Environment{{"WEFT_PEER_SEND_BUDGET", "1MiB"}};
  });
  DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 1});
  DistAutogradContext context(c[0]);
  context.backward({loss(c, input())});
  // What comes back later makes room.
  eventually([&] { return counter(c[0], "calls_pending") == 0; }, "answers to the backward");
  const std::vector<Future<int64_t>> calls = fill(c[0], 2, kMiB / 2);
  ASSERT_GE(calls.size(), 1U);
  const Future<StepReport> step = optimizer.step_async(context);
  EXPECT_TRUE(step.done() || counter(c[0], "calls_waiting_for_room") == 1);
  eventually([&] { return held() == calls.size(); }, "calls that are held");
  answer_all();
  const StepReport report = step.wait();
  EXPECT_TRUE(report.status.ok()) << report.status;
  EXPECT_EQ(report.updated, 2);
  for (const Future<int64_t>& one : calls) EXPECT_EQ(one.wait(), 1);
}

// The word to apply arrives when the reservation has expired.
TEST_P(DistOptimPhases, DEF_25_a_late_apply_is_not_executed) {
  auto plan = std::make_shared<FaultPlan>(1);
  OptimCluster c = make(2, plan);
  const OptimizerOptions how{.isolation = Isolation::kVersioned};
  DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 1}, how);
  const at::Tensor before = values(c)[1];
  DistAutogradContext context(c[0]);
  context.backward({loss(c, input())});
  eventually([&] { return counter(c[0], "calls_pending") == 0; }, "answers to the backward");
  plan->add({.fault = Fault::kDelay,
             .kind = FrameKind::kRequest,
             .from = "worker0",
             .to = "worker2",
             .skip = 1,
             .times = 1,
             .delay = absl::Seconds(1)});
  const StepReport report = optimizer.try_step(context, {.deadline = 300ms, .versions = {0, 0}});
  EXPECT_FALSE(report.status.ok());
  EXPECT_EQ(report.owners[0].outcome, StepOutcome::kApplied);
  EXPECT_EQ(report.owners[1].outcome, StepOutcome::kUnknown) << report.status;
  // Behind it on the same lane.
  EXPECT_EQ(optimizer.versions(), (std::vector<int64_t>{1, 0}));
  expect_equal(values(c)[1], before);
}

// No step follows there: the gradients go when the time is over.
TEST_P(DistOptimPhases, DEF_25_a_reservation_ends_with_its_time) {
  auto plan = std::make_shared<FaultPlan>(1);
  OptimCluster c = make(2, plan);
  DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 1});
  DistAutogradContext context(c[0]);
  context.backward({loss(c, input())});
  eventually([&] { return counter(c[0], "calls_pending") == 0; }, "answers to the backward");
  plan->add({.fault = Fault::kDrop,
             .kind = FrameKind::kRequest,
             .from = "worker0",
             .to = "worker2",
             .skip = 1});
  EXPECT_FALSE(optimizer.try_step(context, {.deadline = 300ms}).status.ok());
  plan->clear();
  expect_none(*c.cluster, "optimizer_reservations");
}

// The last fifth of a step's time is for questions; it begins while the owner applies the step. The
// question waits there, and is answered when that has ended.
TEST_P(DistOptimPhases, DEF_25_a_question_while_a_step_is_applied_waits_for_its_end) {
  const auto gate = std::make_shared<Gate>(make_system_runtime());
  OptimCluster c = make(1);
  DistributedOptimizer<Descent> optimizer(c[0], c.parameters, {}, 1.0);
  DistAutogradContext context(c[0]);
  context.backward({c.weights[0].rpc_sync(&Weights::forward, input()).sum()});
  then_do([gate] { gate->arrive_and_wait(); });
  StepReport report;
  std::thread step([&] { report = optimizer.try_step(context, {.deadline = 5s}); });
  gate->wait_arrived(1);
  eventually([&] { return counter(c[1], "handlers_running") >= 2; },
             "it was not asked what became of it");
  gate->open();
  step.join();
  EXPECT_EQ(report.owners.at(0).outcome, StepOutcome::kApplied) << report.status;
  EXPECT_EQ(optimizer.versions(), std::vector<int64_t>{1});
}

// OPT-3: another optimizer has locked the parameter, and stands still.
TEST_P(DistOptimPhases, OPT_3_a_hogwild_step_waits_for_no_lock) {
  const auto gate = std::make_shared<Gate>(make_system_runtime());
  OptimCluster c = make(1);
  DistributedOptimizer<Descent> locks(c[0], c.parameters, {}, 1.0);
  DistributedOptimizer<optim::SGD> hogwild(c[0], c.parameters, {.lr = 1},
                                           {.isolation = Isolation::kHogwild});
  DistAutogradContext context(c[0]);
  context.backward({c.weights[0].rpc_sync(&Weights::forward, input()).sum()});
  EXPECT_TRUE(hogwild.try_step(context).status.ok());  // its state is there now
  then_do([gate] { gate->arrive_and_wait(); });
  StepReport other;
  std::thread step([&] { other = locks.try_step(context, {.deadline = 60s}); });
  gate->wait_arrived(1);
  const StepReport report = hogwild.try_step(context, {.deadline = 5s});
  gate->open();
  step.join();
  EXPECT_TRUE(report.status.ok()) << report.status;
  EXPECT_TRUE(other.status.ok()) << other.status;
}

// The trainer's process stands still after the other owner has applied.
TEST_P(DistOptimPhases, DEF_25_the_local_part_is_applied_when_the_other_is) {
  const auto runtime = std::make_shared<JumpingRuntime>(make_system_runtime());
  OptimCluster c = make_with(1, [&](int i, JoinOptions* join) {
    if (i == 0) join->runtime = runtime;
  });
  const at::Tensor mine = torch::ones({3}, torch::kFloat64).set_requires_grad(true);
  const auto local = RRef<at::Tensor>::local(c[0], mine);
  DistributedOptimizer<Descent> optimizer(c[0], {local, c.parameters[0]}, {}, 1.0);
  DistAutogradContext context(c[0]);
  context.backward({c.weights[0].rpc_sync(&Weights::forward, mine).sum()});
  then_do([&] { runtime->jump(absl::Milliseconds(1100)); });
  const StepReport report = optimizer.try_step(context, {.deadline = 1s});
  EXPECT_TRUE(report.status.ok()) << report.status;
  EXPECT_EQ(optimizer.versions(), (std::vector<int64_t>{1, 1}));
}

// A class of LibTorch's, which updates by `p.data().add_()`, of which the tensor knows nothing.
TEST_P(DistOptimPhases, DEF_26_versions_count_the_steps_of_a_users_class) {
  OptimCluster c = make(2);
  const OptimizerOptions how{.isolation = Isolation::kVersioned};
  DistributedOptimizer<torch::optim::SGD> optimizer(c[0], c.parameters, how, 0.1);
  const std::vector<at::Tensor> before = values(c);
  DistAutogradContext context(c[0]);
  context.backward({loss(c, input())});
  EXPECT_EQ(optimizer.step(context, {.versions = {0, 0}}).updated, 2);
  EXPECT_FALSE(torch::equal(values(c)[0], before[0]));
  EXPECT_EQ(optimizer.versions(), (std::vector<int64_t>{1, 1}));
  expect_error(optimizer.try_step(context, {.versions = {0, 0}}).status, ErrorKind::kState,
               {"has been updated 1 times since version 0"});
}

INSTANTIATE_TEST_SUITE_P(Nets, DistOptimPhases, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
