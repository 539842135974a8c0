// DEF_25 under the seeded scheduler. An owner has applied a step and its send budget is full, so the
// trainer hears nothing of it before others have answered the owner. An owner stands still for
// longer than a step may take, at any of its looks at the clock.

#include <torch/optim.h>
#include <torch/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/common/sim.h"
#include "weft/dist_autograd/context.h"
#include "weft/dist_autograd/service.h"
#include "weft/dist_optim/optimizer.h"
#include "weft/dist_optim/service.h"
#include "weft/dist_optim/user_optimizer.h"
#include "weft/rpc/call.h"
#include "weft/rref/rref.h"
#include "weft/store/hash_store.h"
#include "weft/tests/testing/forwarding_runtime.h"
#include "weft/transport/faulty_transport.h"
#include "weft/transport/inproc_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

const FunctionRef<at::Tensor(at::Tensor)> kScaled{"sim.scaled"};
const FunctionRef<RRef<at::Tensor>()> kParameter{"sim.parameter"};
const FunctionRef<int64_t(at::Tensor)> kHold{"sim.hold"};

// By memory of a parameter: what is done when it has been updated, once. The simulation runs one thing at a time.
std::map<const void*, std::function<void()>>* after_update = nullptr;

class Told : public torch::optim::SGD {
 public:
  Told(std::vector<at::Tensor> parameters, double rate) : SGD(std::move(parameters), rate) {}
  at::Tensor step(LossClosure closure) override {
    at::Tensor result = SGD::step(std::move(closure));
    for (const at::Tensor& one : param_groups()[0].params()) {
      if (auto node = after_update->extract(one.data_ptr())) node.mapped()();
    }
    return result;
  }
};

// A process that stands still at one look at the clock: the time of that one is `by` later, and that
// of all that follow.
class StandsStill : public ForwardingRuntime, public Clock {
 public:
  explicit StandsStill(std::shared_ptr<Runtime> inner) : ForwardingRuntime(std::move(inner)) {}
  const Clock& clock() const override { return *this; }
  absl::Time now() const override {
    if (looks_ > 0 && --looks_ == 0) ahead_ += by_;
    return ForwardingRuntime::clock().now() + ahead_;
  }
  // At the look of this number from now.
  void at_look(int64_t number, absl::Duration by) {
    looks_ = number;
    by_ = by;
  }
  // Whether that look is still to come, and no more.
  bool forget() { return std::exchange(looks_, 0) > 0; }

 private:
  mutable int64_t looks_ = 0;
  mutable absl::Duration ahead_;
  absl::Duration by_;
};

class StepSim : public ::testing::Test {
 protected:
  StepSim() : plan_(std::make_shared<FaultPlan>(1)) {
    after_update = &after_;
    for (int i = 0; i < 3; ++i) {
      parameters_.push_back(torch::full({2}, 2.0 + i, torch::kFloat64).set_requires_grad(true));
    }
    optimizer_<Told, double>(library_, "Told");
    library_.merge(dist_optim_library());
    library_.def("scaled", [this](CallContext& context, const at::Tensor& x) {
      return x * parameters_[static_cast<size_t>(context.worker().rank())];
    });
    library_.def("parameter", [this](CallContext& context) {
      return RRef<at::Tensor>::local(context.worker(),
                                     parameters_[static_cast<size_t>(context.worker().rank())]);
    });
    library_.def("hold", [this](const at::Tensor&) {
      held_.emplace_back();
      return held_.back().future();
    });
  }
  ~StepSim() override { after_update = nullptr; }

  // `body` where w0 trains, w1 and w2 own a parameter each, and w2 sends 1 MiB at once.
  void simulate(uint64_t seed, const std::function<void()>& body) {
    auto sim = std::make_shared<SimRuntime>(SimOptions{.seed = seed});
    sim_ = sim.get();
    w2_ = std::make_shared<StandsStill>(sim);
    const Status ended = sim->run([&] {
      try {
        join(sim);
        body();
      } catch (const Error& error) {
        ADD_FAILURE() << error.status();
      }
      for (Worker& w : workers_) (void)w.shutdown({.graceful = false});
      workers_.clear();
    });
    w2_.reset();
    EXPECT_TRUE(ended.ok()) << ended;
  }
  void join(const std::shared_ptr<Runtime>& runtime) {
    const auto network = std::make_shared<InprocNetwork>();
    const auto store = std::make_shared<HashStore>(runtime);
    workers_ = std::vector<Worker>(3);
    std::vector<std::unique_ptr<Thread>> threads;
    for (int i = 0; i < 3; ++i) {
      threads.push_back(runtime->spawn("join", [&, i] {
        JoinOptions o;
        o.name = absl::StrCat("w", i);
        o.rank = i;
        o.world_size = 3;
        o.library = library_;
        o.store = store->new_client();
        o.transport = faulty_transport(inproc_transport(network), plan_);
        o.services = {rref_service(), dist_autograd_service(), dist_optim_service()};
        o.worker_threads = 2;
        o.runtime = i == 2 ? w2_ : runtime;
        o.log_level = Severity::kOff;
        o.environment = i == 2 ? Environment{{"WEFT_SEND_BUDGET", "1MiB"}} : Environment{};
        StatusOr<Worker> w = Worker::try_join(std::move(o));
        if (w.ok()) {
          workers_[static_cast<size_t>(i)] = *std::move(w);
        } else {
          ADD_FAILURE() << w.status();
        }
      }));
    }
    for (auto& one : threads) one->join();
  }

  // Fills the send budget of w2 by calls to w1 that are held.
  void fill() {
    for (int64_t bytes = 1 << 19; bytes >= 1; bytes /= 2) {
      while (true) {
        auto call = try_rpc_async(workers_[2], 1, CallOptions{.deadline = 5min}, kHold,
                                  torch::zeros({bytes}, torch::kByte));
        if (!call.ok() || call->has_error()) break;
        calls_.push_back(*std::move(call));
      }
    }
  }
  void answer_all() {
    for (auto& one : std::exchange(held_, {})) one.set_value(1);
  }

  // A step of so many owners, w2 among them, which has no room for an answer for `full` from the
  // moment at which it has applied.
  StepReport step(int owners, absl::Duration full, int64_t* errors) {
    std::vector<RRef<at::Tensor>> references;
    for (int i = 3 - owners; i < 3; ++i) references.push_back(rpc_sync(workers_[0], i, kParameter));
    DistributedOptimizer<Told> optimizer(workers_[0], references, {}, 1.0);
    DistAutogradContext context(workers_[0]);
    at::Tensor x = torch::ones({2}, torch::kFloat64);
    for (int i = 3 - owners; i < 3; ++i) x = rpc_sync(workers_[0], i, kScaled, x);
    context.backward({x.sum()});
    sim_->sleep(absl::Seconds(3));  // w2 has had the answers to all that it asked
    // Changes nothing, counts.
    const int id = plan_->add({.fault = Fault::kDelay,
                               .kind = FrameKind::kError,
                               .from = "w2",
                               .to = "w0",
                               .delay = absl::ZeroDuration()});
    std::unique_ptr<Thread> release;
    after_[parameters_[2].data_ptr()] = [&] {
      // Not in the scope of the call: these would end with it.
      sim_->spawn("fill", [&] { fill(); })->join();
      release = sim_->spawn("release", [&] {
        sim_->sleep(full);
        answer_all();
      });
    };
    const StepReport report = optimizer.try_step(context, {.deadline = 10s});
    *errors = plan_->hits(id);
    if (release != nullptr) release->join();
    for (const Future<int64_t>& one : calls_) EXPECT_EQ(one.wait(), 1);
    EXPECT_GE(calls_.size(), 1U);
    EXPECT_EQ(optimizer.versions(), std::vector<int64_t>(static_cast<size_t>(owners), 1));
    return report;
  }

  const std::shared_ptr<FaultPlan> plan_;
  Library library_{"sim"};
  std::vector<at::Tensor> parameters_;
  std::map<const void*, std::function<void()>> after_;
  SimRuntime* sim_ = nullptr;
  std::shared_ptr<StandsStill> w2_;  // what w2 runs on
  std::vector<Worker> workers_;
  std::vector<Promise<int64_t>> held_;
  std::vector<Future<int64_t>> calls_;
};

// Steps of one owner and of two. 1 s: it is told to apply again. 9 s: so late in a step of 10 s it
// is told to cancel, and says that it has applied.
class StepSimFull : public StepSim, public ::testing::WithParamInterface<std::tuple<int, int>> {};

TEST_P(StepSimFull, DEF_25_applied_is_reported_when_the_answer_found_no_room) {
  const auto [owners, seconds] = GetParam();
  simulate(1, [&, owners = owners, seconds = seconds] {
    int64_t errors = 0;
    const StepReport report = step(owners, absl::Seconds(seconds), &errors);
    EXPECT_GE(errors, 2) << "the answer, and one at least to a question, find no room";
    EXPECT_TRUE(report.status.ok()) << report.status;
    EXPECT_EQ(report.updated, owners);
    for (const OwnerReport& one : report.owners) {
      EXPECT_EQ(one.outcome, StepOutcome::kApplied) << one.owner.name << ": " << one.error;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Owners, StepSimFull,
                         ::testing::Combine(::testing::Values(1, 2), ::testing::Values(1, 9)),
                         [](const auto& info) {
                           return absl::StrCat("owners_", std::get<0>(info.param), "_seconds_",
                                               std::get<1>(info.param));
                         });

// No owner answers in time: what is reported is that this is not known, and never "not applied".
TEST_F(StepSim, DEF_25_what_nobody_tells_is_not_known) {
  simulate(1, [&] {
    int64_t errors = 0;
    const StepReport report = step(2, absl::Seconds(20), &errors);
    EXPECT_GE(errors, 2);
    EXPECT_FALSE(report.status.ok());
    EXPECT_EQ(report.owners[0].outcome, StepOutcome::kApplied) << report.status;
    EXPECT_EQ(report.owners[1].outcome, StepOutcome::kUnknown) << report.status;
  });
}

// The time of a step ends at any look of w2 at its clock. What is reported has happened. One look is that at which the step
// holds what it has reserved, when the log of steps has let it through; a step of one owner asks how long it has, too.
class StepSimStill : public StepSim, public ::testing::WithParamInterface<int> {};

TEST_P(StepSimStill,
       DEF_25_a_step_whose_time_ends_before_it_holds_what_it_reserved_changes_nothing) {
  const int owners = GetParam();
  int64_t given_up = 0;
  bool looked = true;
  int64_t looks = 0;
  while (looked) {
    SCOPED_TRACE(absl::StrCat("at look ", ++looks));
    for (at::Tensor& one : parameters_) {
      one = torch::full({2}, 2.0, torch::kFloat64).set_requires_grad(true);
    }
    simulate(1, [&] {
      std::vector<RRef<at::Tensor>> references;
      for (int i = 3 - owners; i < 3; ++i) {
        references.push_back(rpc_sync(workers_[0], i, kParameter));
      }
      DistributedOptimizer<optim::SGD> optimizer(workers_[0], references, {.lr = 1.0},
                                                 {.isolation = Isolation::kVersioned});
      DistAutogradContext context(workers_[0]);
      at::Tensor x = torch::ones({2}, torch::kFloat64);
      for (int i = 3 - owners; i < 3; ++i) x = rpc_sync(workers_[0], i, kScaled, x);
      context.backward({x.sum()});
      sim_->sleep(absl::Seconds(3));
      w2_->at_look(looks, absl::Milliseconds(1500));
      const StepReport report = optimizer.try_step(
          context, {.deadline = 1s, .versions = std::vector<int64_t>(static_cast<size_t>(owners))});
      looked = !w2_->forget();
      sim_->sleep(absl::Seconds(3));
      const std::vector<int64_t> versions = optimizer.versions();
      for (size_t i = 0; i < report.owners.size(); ++i) {
        const OwnerReport& one = report.owners[i];
        if (one.outcome == StepOutcome::kUnknown) continue;
        EXPECT_EQ(versions[i], one.outcome == StepOutcome::kApplied ? 1 : 0) << report.status;
      }
      const at::Tensor& value = parameters_[2];
      const bool changed = !torch::equal(value, torch::full({2}, 2.0, torch::kFloat64));
      EXPECT_EQ(changed, versions.back() == 1);
      if (absl::StrContains(report.owners.back().error.message(), "is not reserved any more")) {
        ++given_up;
        EXPECT_EQ(report.owners.back().outcome, StepOutcome::kNotApplied);
      }
    });
    ASSERT_LT(looks, 1000);
  }
  EXPECT_EQ(given_up, owners == 1 ? 2 : 1) << "of " << looks << " looks";
}

INSTANTIATE_TEST_SUITE_P(Owners, StepSimStill, ::testing::Values(1, 2),
                         [](const auto& info) { return absl::StrCat("owners_", info.param); });

}  // namespace
}  // namespace weft::testing
