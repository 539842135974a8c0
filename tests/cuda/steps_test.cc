// Steps of optimizers over parameters on GPUs that are made of host memory (fake_runtime.h): OPT-1
// and STREAM-5, the order of updates, and of what handlers read. Updates are made by the
// place-holders of kernels, in a user-defined class; streams do only what is waited for.

#include <atomic>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "torch/optim/sgd.h"
#include "weft/dist_autograd/context.h"
#include "weft/dist_autograd/ended_passes.h"
#include "weft/dist_autograd/service.h"
#include "weft/dist_optim/service.h"
#include "weft/dist_optim/user_optimizer.h"
#include "weft/rpc/call.h"
#include "weft/rref/rref.h"
#include "weft/tests/cuda/fake_backward.h"
#include "weft/tests/testing/checks.h"
#include "weft/tests/testing/cluster.h"

namespace weft::testing {
namespace {

constexpr int64_t kParameterSize = 100;
OpenFlag new_flag() { return std::make_shared<std::atomic<bool>>(false); }

// Sets its parameters to a number, once the flag of that number is open.
class Setter : public torch::optim::Optimizer {
 public:
  static std::vector<OpenFlag> flags;

  Setter(std::vector<at::Tensor> parameters, double value)
      : Optimizer(std::move(parameters), std::make_unique<torch::optim::SGDOptions>(0.1)),
        value_(static_cast<float>(value)) {}
  at::Tensor step(LossClosure) override {
    for (const at::Tensor& p : param_groups()[0].params()) {
      // As a kernel would, it needs the gradient where it is.
      fake_cuda::queue(native(current(p.device())), [seen = seen_gradient, gradient = p.grad()] {
        seen->store(static_cast<const float*>(gradient.const_data_ptr())[0]);
        return true;
      });
      queue_fill(p, value_, flags.at(static_cast<size_t>(value_)));
      p.unsafeGetTensorImpl()->bump_version();
    }
    return {};
  }

  static std::shared_ptr<std::atomic<float>> seen_gradient;

 private:
  const float value_;
};
std::vector<OpenFlag> Setter::flags;
std::shared_ptr<std::atomic<float>> Setter::seen_gradient;

// Queues a fill of its parameters with 2, and fails.
class Breaking : public internal::OwnerOptimizer {
 protected:
  void added(const std::vector<Slot>&, size_t, const internal::PackedOptions&) override {}
  void removed(size_t) override {}
  void check_options(const internal::PackedOptions&) const override {}
  Status check_gradient(const Slot&, const at::Tensor&,
                        const internal::PackedOptions&) const override {
    return absl::OkStatus();
  }
  Status update(const std::vector<Slot>& slots, const std::vector<Update>&, const Options&,
                Isolation, int64_t*) override {
    for (const Slot& slot : slots) queue_fill(slot.parameter, 2, Setter::flags.at(2));
    throw std::range_error("no more");
  }
  bool one_by_one() const override { return true; }
  internal::OwnerStateDict save(const std::vector<Slot>&) override { return {}; }
  void load(const std::vector<Slot>&, const internal::OwnerStateDict&, bool) override {}
};

class Steps : public ::testing::TestWithParam<Net> {
 protected:
  // A trainer, and an owner whose calls have streams of their own.
  Steps() {
    Setter::flags = {new_flag(), new_flag(), new_flag()};
    Setter::seen_gradient = std::make_shared<std::atomic<float>>(0.0F);
    Library lib("steps");
    optimizer_<Setter, double>(lib, "Setter");
    lib.merge(dist_optim_library());
    auto breaking = lib.class_<Breaking>("Breaking", {.concurrent = true});
    breaking.constructor<>();
    internal::def_owner_methods(breaking);
    lib.def("parameter", [this] { return parameter_; });
    // Whatever comes, as a function of the parameter, whose gradient is 5 and made late.
    lib.def("forward", [this](const at::Tensor&) {
      return with_backward(parameter_, [gate = gradient_made_](const at::Tensor& gradient) {
        at::Tensor out = gpu_full(gradient.numel(), 0, 0);
        queue_fill(out, 5, gate);
        return out;
      });
    });
    lib.def("read", [this](const at::Tensor&) { read_ = queue_read(parameter_); });
    ClusterOptions options{.net = GetParam(), .library = std::move(lib)};
    options.adjust = [](int, JoinOptions* o) {
      o->devices = {gpu(0), gpu(1)};
      o->device_maps = {{"worker1", {{gpu(0), gpu(0)}}}};
      o->services = {rref_service(), dist_autograd_service(), dist_optim_service()};
    };
    cluster_ = std::make_unique<Cluster>(std::move(options));  // opens what knows of devices
    parameter_ = gpu_full(kParameterSize, 9, 0).set_requires_grad(true);
    x_ = gpu_full(4, 1, 0);
  }
  Worker& trainer() { return (*cluster_)[0]; }
  Worker& owner() { return (*cluster_)[1]; }

  RRef<at::Tensor> reference(const Worker& worker) {
    return remote(worker, 1, FunctionRef<at::Tensor()>{"steps.parameter"});
  }
  at::Tensor forward(const Worker& worker) {
    return rpc_sync(worker, 1, FunctionRef<at::Tensor(const at::Tensor&)>{"steps.forward"}, x_);
  }
  static internal::StepPlan plan_of(const DistAutogradContext& context) {
    internal::StepPlan plan;
    plan.creator = context.id().creator.id.value();
    plan.incarnation = context.id().creator.incarnation.value();
    plan.context = context.id().counter;
    const internal::EndedPasses ended = internal::ended_passes(context);
    plan.ended_below = ended.below;
    plan.last_pass = ended.last;
    plan.step = 77;
    plan.options.emplace_back();
    return plan;
  }
  static BackwardOptions ones() { return {.gradients = {gpu_full(kParameterSize, 1, 0)}}; }
  // What a handler of the owner, on streams of its own, reads: nothing, as long as it waits. Both
  // workers share their default streams here, and what is sent from one waits for what is there.
  std::vector<float> read() {
    const c10::StreamGuard elsewhere(fresh());
    rpc_sync(trainer(), 1, FunctionRef<void(const at::Tensor&)>{"steps.read"}, x_);
    fake_cuda::run_all();
    return *read_;
  }
  static std::vector<float> all(float value) { return std::vector<float>(kParameterSize, value); }

  at::Tensor parameter_;
  at::Tensor x_;
  const OpenFlag gradient_made_ = new_flag();
  std::shared_ptr<std::vector<float>> read_;
  std::unique_ptr<Cluster> cluster_;
};

TEST_P(Steps, STREAM_5_a_handler_reads_what_the_step_before_it_makes) {
  gradient_made_->store(true);
  EXPECT_EQ(read(), all(9));
  const size_t blocking = fake_cuda::blocking_calls();
  DistributedOptimizer<Setter> optimizer(trainer(), {reference(trainer())}, {}, 1.0);
  {
    DistAutogradContext context(trainer());
    context.backward({forward(trainer())}, ones());
    EXPECT_EQ(optimizer.step(context).updated, 1);
  }
  EXPECT_EQ(read(), std::vector<float>()) << "the handler's kernel did not wait for the update";
  Setter::flags[1]->store(true);
  fake_cuda::run_all();
  EXPECT_EQ(*read_, all(1));
  EXPECT_EQ(fake_cuda::blocking_calls(), blocking) << "somebody waited for a device";
}

TEST_P(Steps, STREAM_5_also_of_a_step_within_the_backward) {
  gradient_made_->store(true);
  DistributedOptimizer<Setter> optimizer(trainer(), {reference(trainer())}, {}, 1.0);
  {
    DistAutogradContext context(trainer());
    const StepReport report =
        optimizer.backward_and_step(context, {forward(trainer())}, ones(), {});
    EXPECT_EQ(report.updated, 1);
  }
  EXPECT_EQ(read(), std::vector<float>()) << "the handler's kernel did not wait for the update";
  Setter::flags[1]->store(true);
  fake_cuda::run_all();
  EXPECT_EQ(*read_, all(1));
}

// The second one's streams are those of a thread that is none of a handler, and its gradient is
// there before the first one's update is queued.
TEST_P(Steps, OPT_1_updates_come_one_after_the_other) {
  gradient_made_->store(true);
  DistributedOptimizer<Setter> first(trainer(), {reference(trainer())}, {}, 1.0);
  DistributedOptimizer<Setter> second(owner(), {reference(owner())}, {}, 2.0);
  DistAutogradContext of_second(owner());
  of_second.backward({forward(owner())}, ones());
  {
    DistAutogradContext of_first(trainer());
    of_first.backward({forward(trainer())}, ones());
    EXPECT_EQ(first.step(of_first).updated, 1);
  }
  const c10::StreamGuard elsewhere(fresh());
  EXPECT_EQ(second.step(of_second).updated, 1);
  Setter::flags[2]->store(true);
  fake_cuda::run_all();
  EXPECT_EQ(read(), std::vector<float>());
  Setter::flags[1]->store(true);
  fake_cuda::run_all();
  EXPECT_EQ(*read_, all(2)) << "the first update came last";
}

TEST_P(Steps, STREAM_5_also_of_a_step_that_fails_half_way) {
  gradient_made_->store(true);
  auto part = remote<Breaking>(trainer(), 1);
  internal::ParameterPlan parameters;
  parameters.parameters.push_back(reference(trainer()));
  part.rpc_sync(&internal::OwnerOptimizer::add_parameters, parameters);
  DistAutogradContext context(trainer());
  context.backward({forward(trainer())}, ones());
  expect_error(error_of([&] { part.rpc_sync(&internal::OwnerOptimizer::step, plan_of(context)); }),
               ErrorKind::kUser, {"no more"});
  EXPECT_EQ(read(), std::vector<float>()) << "the handler's kernel did not wait for what it queued";
  Setter::flags[2]->store(true);
  fake_cuda::run_all();
  EXPECT_EQ(*read_, all(2));
}

// Phase one reads the gradients on one handler's streams, phase two uses them on another's.
TEST_P(Steps, OPT_5_the_second_phase_waits_for_the_gradients) {
  Setter::flags[1]->store(true);
  // By itself an optimizer with one owner takes both phases in one message.
  auto part = remote<internal::ServedOptimizer<Setter>>(trainer(), 1, 1.0);
  internal::ParameterPlan parameters;
  parameters.parameters.push_back(reference(trainer()));
  part.rpc_sync(&internal::OwnerOptimizer::add_parameters, parameters);
  DistAutogradContext context(trainer());
  context.backward({forward(trainer())}, ones());
  EXPECT_EQ(part.rpc_sync(&internal::OwnerOptimizer::prepare, plan_of(context)).updated, 1);
  EXPECT_EQ(part.rpc_sync(&internal::OwnerOptimizer::apply, uint64_t{77}).updated, 1);
  fake_cuda::run_all();
  EXPECT_EQ(Setter::seen_gradient->load(), 0.0F) << "the update did not wait for its gradient";
  gradient_made_->store(true);
  fake_cuda::run_all();
  EXPECT_EQ(Setter::seen_gradient->load(), 5.0F);
  EXPECT_EQ(read(), all(1));
}

INSTANTIATE_TEST_SUITE_P(Nets, Steps, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
