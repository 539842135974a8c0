// X13: a step applies everywhere or nowhere, or says what became of it where; and errors of making
// an optimizer (DA-55, DA-56). Classes of users are in user_test.cc.

#include <torch/types.h>

#include <limits>

#include "weft/dist_autograd/ended_passes.h"
#include "weft/tests/dist_optim/fixture.h"

namespace weft::testing {
namespace {

using DistOptimFailure = DistOptimTest;

TEST_P(DistOptimFailure, X13_an_error_of_the_first_phase_changes_nothing_anywhere) {
  OptimCluster c = make(3);
  DistributedOptimizer<optim::Adam> optimizer(c[0], c.parameters, {.lr = 1e-2});
  const std::vector<at::Tensor> before = values(c);
  const std::map<std::string, at::Tensor> state = optimizer.state_dict();
  {
    // Finite where it enters, infinite at the middle owner.
    DistAutogradContext context(c[0]);
    const at::Tensor big = torch::full({3}, std::numeric_limits<double>::max(), torch::kFloat64);
    const at::Tensor fine = c.weights[0].rpc_sync(&Weights::forward, input()).sum();
    const at::Tensor other = c.weights[2].rpc_sync(&Weights::forward, input()).sum();
    const at::Tensor bad = (c.weights[1].rpc_sync(&Weights::forward, big) * 4).sum();
    context.backward({fine + other + bad});
    const Status s = error_of([&] { optimizer.step(context, {.require_finite = true}); });
    expect_error(s, ErrorKind::kInvalidArgument,
                 {"step 1 of optimizer Adam", "owner 'worker2'", "not finite",
                  "'worker1' not applied, 'worker2' not applied, 'worker3' not applied"});
    const StepReport report = optimizer.try_step(context, {.require_finite = true});
    EXPECT_FALSE(report.status.ok());
    for (const OwnerReport& one : report.owners) EXPECT_EQ(one.outcome, StepOutcome::kNotApplied);
    EXPECT_TRUE(report.owners[0].error.ok());
    EXPECT_FALSE(report.owners[1].error.ok());
  }
  const std::vector<at::Tensor> after = values(c);
  for (size_t i = 0; i < 3; ++i) expect_equal(after[i], before[i]);
  EXPECT_EQ(optimizer.versions(), (std::vector<int64_t>{0, 0, 0}));
  for (const auto& [key, value] : optimizer.state_dict()) expect_equal(value, state.at(key));
  expect_none(*c.cluster, "optimizer_reservations");
}

TEST_P(DistOptimFailure, DA_55_errors_of_a_step) {
  OptimCluster c = make();
  DistributedOptimizer<optim::Adam> optimizer(c[0], c.parameters);
  {
    DistAutogradContext context(c[0]);
    const at::Tensor ids = torch::tensor({1}, torch::kLong);
    context.backward({c.weights[1].rpc_sync(&Weights::rows, ids, true).sum()});
    expect_error(error_of([&] { optimizer.step(context); }), ErrorKind::kInvalidArgument,
                 {"'worker2'", "Adam cannot take a sparse gradient", "[3, 3]"});
    expect_error(error_of([&] { optimizer.step(context, {.versions = {1}}); }),
                 ErrorKind::kInvalidArgument, {"1 versions", "2 parameters"});
    context.release().wait();
    expect_error(error_of([&] { optimizer.step(context); }), ErrorKind::kState,
                 {"has been released"});
  }
  EXPECT_EQ(optimizer.versions(), (std::vector<int64_t>{0, 0}));
}

// As when a module is converted, or its rows replaced, between backward and step.
TEST_P(DistOptimFailure, AGradientThatFitsItsParameterNoLongerIsRefused) {
  OptimCluster c = make(1);
  at::Tensor leaf = torch::ones({2}, torch::kFloat64).set_requires_grad(true);
  DistributedOptimizer<optim::SGD> optimizer(
      c[0], {RRef<at::Tensor>::local(c[0], leaf), c.parameters[0]}, {.lr = 1});
  const std::vector<at::Tensor> before = values(c);
  for (const at::Tensor& other : {torch::ones({2}), torch::ones({3}, torch::kFloat64)}) {
    const at::Tensor was = leaf.detach().clone();
    DistAutogradContext context(c[0]);
    context.backward({(leaf * 2).sum() + loss(c, input())});
    leaf.set_data(other);
    expect_error(error_of([&] { optimizer.step(context); }), ErrorKind::kInvalidArgument,
                 {"owner 'worker0'", "parameter 0 of this owner is", "its gradient is", "[2]"});
    expect_equal(leaf.detach(), other);
    leaf.set_data(was);
  }
  expect_equal(values(c)[0], before[0]);
}

TEST_P(DistOptimFailure, DA_56_errors_of_the_constructor_leave_nothing) {
  OptimCluster c = make();
  const at::Tensor leaf = torch::ones({2}).set_requires_grad(true);
  const auto local = [&](const at::Tensor& t) { return RRef<at::Tensor>::local(c[0], t); };
  const auto make_with = [&](std::vector<RRef<at::Tensor>> more) {
    more.insert(more.begin(), c.parameters.begin(), c.parameters.end());
    return error_of([&] { DistributedOptimizer<optim::SGD> optimizer(c[0], more); });
  };
  expect_error(make_with({local(leaf * 2)}), ErrorKind::kInvalidArgument,
               {"optimizer SGD over 3 parameters", "owner 'worker0'", "not a leaf", "MulBackward"});
  expect_error(make_with({local(torch::ones({2}, torch::kLong))}), ErrorKind::kInvalidArgument,
               {"floating"});
  expect_error(make_with({local(at::Tensor())}), ErrorKind::kInvalidArgument, {"undefined"});
  expect_error(make_with({c.parameters[0]}), ErrorKind::kInvalidArgument,
               {"owner 'worker1'", "in the optimizer already"});
  expect_error(make_with({RRef<at::Tensor>()}), ErrorKind::kInvalidArgument, {"refers to nothing"});
  expect_error(
      error_of([&] { DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = -1}); }),
      ErrorKind::kInvalidArgument, {"SGD", "lr is -1"});
  expect_none(*c.cluster, "optimizers");
  expect_none(*c.cluster, "optimizer_parameters");
}

TEST_P(DistOptimFailure, AGroupIsAddedEverywhereOrNowhere) {
  OptimCluster c = make();
  DistributedOptimizer<optim::SGD> optimizer(c[0], {c.parameters[0]}, {.lr = 1});
  const at::Tensor more = torch::ones({2}, torch::kFloat64).set_requires_grad(true);
  const auto good = RRef<at::Tensor>::local(c[0], more);
  const auto bad = RRef<at::Tensor>::local(c[0], torch::ones({2}, torch::kLong));
  optimizer.add_param_group({good}, {.lr = 2});
  expect_error(error_of([&] {
                 optimizer.add_param_group({c.parameters[1], bad}, {.lr = 3});
               }),
               ErrorKind::kInvalidArgument, {"owner 'worker0'", "floating"});
  EXPECT_EQ(optimizer.num_param_groups(), 2U);
  // worker2's part is gone; once more, now without the bad one.
  expect_none(*c.cluster, "optimizer_reservations");
  EXPECT_EQ(optimizer.versions().size(), 2U);
  optimizer.add_param_group({c.parameters[1]}, {.lr = 3});
  EXPECT_EQ(optimizer.versions().size(), 3U);
  expect_error(error_of([&] { optimizer.set_lr(-1, 0); }), ErrorKind::kInvalidArgument, {"-1"});
  expect_error(error_of([&] { optimizer.set_lr(1, 7); }), ErrorKind::kInvalidArgument,
               {"group 7 of 3"});
}

// The owner has other parameters as well: the group alone is taken back, and its state.
TEST_P(DistOptimFailure, AGroupThatIsTakenBackLeavesNothing) {
  OptimCluster c = make();
  DistributedOptimizer<optim::Adam> optimizer(c[0], c.parameters, {.lr = 0.125});
  const auto bad = RRef<at::Tensor>::local(c[0], torch::ones({2}, torch::kLong));
  const auto square = remote<Weights>(c[0], 2, torch::zeros({3, 3}, torch::kFloat64));
  const auto flat = remote<Weights>(c[0], 2, torch::zeros({2, 3}, torch::kFloat64));
  const RRef<at::Tensor> refused = square.rpc_sync(&Weights::parameter);
  const Status error = error_of([&] { optimizer.add_param_group({refused, bad}); });
  expect_error(error, ErrorKind::kInvalidArgument, {"owner 'worker0'", "floating"});
  optimizer.add_param_group({flat.rpc_sync(&Weights::parameter)}, {.lr = 0.25});
  {
    DistAutogradContext context(c[0]);
    context.backward({flat.rpc_sync(&Weights::forward, input()).sum()});
    EXPECT_EQ(optimizer.step(context).updated, 1);
  }
  // The first step of Adam is as long as its rate.
  const at::Tensor sign = input().sign().unsqueeze(0).expand({2, 3});
  EXPECT_TRUE(torch::allclose(flat.rpc_sync(&Weights::value), -0.25 * sign, 1e-6));
  optimizer.add_param_group({refused});
  EXPECT_EQ(optimizer.versions(), (std::vector<int64_t>{0, 0, 1, 0}));
}

// The trainer's word to apply never arrives at one owner.
TEST_P(DistOptimFailure, X13_cut_between_the_phases) {
  auto plan = std::make_shared<FaultPlan>(1);
  OptimCluster c = make(2, plan);
  DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 1});
  const std::vector<at::Tensor> before = values(c);
  StepReport report;
  {
    DistAutogradContext context(c[0]);
    context.backward({loss(c, input())});
    // The next request to worker2 is its prepare; the one after that, apply, is swallowed.
    plan->add({.fault = Fault::kDrop,
               .kind = FrameKind::kRequest,
               .from = "worker0",
               .to = "worker2",
               .skip = 1});
    report = optimizer.try_step(context, {.deadline = absl::Milliseconds(500)});
    plan->clear();
  }
  EXPECT_FALSE(report.status.ok());
  EXPECT_EQ(report.owners[0].outcome, StepOutcome::kApplied);
  EXPECT_EQ(report.owners[1].outcome, StepOutcome::kUnknown);
  expect_error(report.status, error_kind(report.status), {"'worker1' applied, 'worker2' unknown"});
  // The list matches the versions.
  EXPECT_EQ(optimizer.versions(), (std::vector<int64_t>{1, 0}));
  const std::vector<at::Tensor> after = values(c);
  EXPECT_FALSE(torch::equal(after[0], before[0]));
  expect_equal(after[1], before[1]);
  // What was reserved is let go of with the next step.
  {
    DistAutogradContext context(c[0]);
    context.backward({loss(c, input())});
    optimizer.step(context);
  }
  expect_none(*c.cluster, "optimizer_reservations");
  EXPECT_EQ(optimizer.versions(), (std::vector<int64_t>{2, 1}));
}

// The answer to the first phase is lost: nothing is applied, and nothing stays reserved.
TEST_P(DistOptimFailure, X13_cut_in_the_first_phase) {
  auto plan = std::make_shared<FaultPlan>(1);
  OptimCluster c = make(2, plan);
  DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 1});
  const std::vector<at::Tensor> before = values(c);
  {
    DistAutogradContext context(c[0]);
    context.backward({loss(c, input())});
    // The backward may have ended before the last answers to its messages are here.
    eventually([&] { return counter(c[0], "calls_pending") == 0; }, "answers to the backward");
    plan->add({.fault = Fault::kDrop,
               .kind = FrameKind::kResponse,
               .from = "worker2",
               .to = "worker0",
               .times = 1});
    const StepReport report = optimizer.try_step(context, {.deadline = absl::Milliseconds(500)});
    EXPECT_FALSE(report.status.ok());
    for (const OwnerReport& one : report.owners) EXPECT_EQ(one.outcome, StepOutcome::kNotApplied);
    plan->clear();
  }
  const std::vector<at::Tensor> after = values(c);
  for (size_t i = 0; i < 2; ++i) expect_equal(after[i], before[i]);
  EXPECT_EQ(optimizer.versions(), (std::vector<int64_t>{0, 0}));
}

// set_lr() and schedules refuse such rates before they are sent; a trainer of another make may send them.
TEST_P(DistOptimFailure, BadInput_a_plan_whose_options_no_optimizer_of_ours_sends) {
  OptimCluster c = make(1);
  const internal::PackedOptions good = internal::pack_options<optim::SGD>({.lr = 1});
  const auto link = internal::functional_link_factory("SGD")(c[0], c[0].get_worker_info("worker1"));
  const CallOptions options;
  link->add_parameters(options, {.parameters = {c.parameters[0]}, .options = good}).wait();
  const std::vector<at::Tensor> before = values(c);
  DistAutogradContext context(c[0]);
  context.backward({loss(c, input())});
  const internal::EndedPasses ended = internal::ended_passes(context);
  internal::StepPlan plan{.creator = context.id().creator.id.value(),
                          .incarnation = context.id().creator.incarnation.value(),
                          .context = context.id().counter,
                          .ended_below = ended.below,
                          .last_pass = ended.last,
                          .running = ended.running,
                          .aborted = ended.aborted};
  const auto with = [&](internal::PackedOptions packed) {
    ++plan.step;
    plan.options = {std::move(packed)};
    return plan;
  };
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  for (const double lr : {kNan, -1.0}) {
    const internal::PackedOptions bad = internal::pack_options<optim::SGD>({.lr = lr});
    expect_error(error_of([&] { link->prepare(options, with(bad)).wait(); }),
                 ErrorKind::kInvalidArgument, {"lr"});
    expect_error(error_of([&] { link->step(options, with(bad)).wait(); }),
                 ErrorKind::kInvalidArgument, {"lr"});
  }
  for (const internal::PackedOptions& bad : {internal::PackedOptions{}, {1.0}}) {
    expect_error(error_of([&] { link->prepare(options, with(bad)).wait(); }),
                 ErrorKind::kInvalidArgument, {"options"});
  }
  ++plan.step;
  plan.options.clear();
  expect_error(error_of([&] { link->step(options, plan).wait(); }), ErrorKind::kInvalidArgument,
               {"options of 0 groups"});
  expect_equal(values(c)[0], before[0]);
  EXPECT_TRUE(link->step(options, with(good)).wait().applied);
  EXPECT_FALSE(at::equal(values(c)[0], before[0]));
  expect_none(*c.cluster, "optimizer_reservations");
}

TEST_P(DistOptimFailure, AWorkerWithoutTheServiceSaysSo) {
  ClusterOptions o;
  o.size = 1;
  o.net = GetParam();
  Cluster c(o);
  expect_error(error_of([&] { DistributedOptimizer<optim::SGD> optimizer(c[0], {}); }),
               ErrorKind::kState, {"worker0", "dist_optim_service()"});
}

INSTANTIATE_TEST_SUITE_P(Nets, DistOptimFailure, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
