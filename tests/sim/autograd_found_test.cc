// What autograd_sim_test.cc has found, each alone: two or three workers in simulation, and just the
// one fault.

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "torch/autograd.h"
#include "torch/types.h"
#include "weft/common/sim.h"
#include "weft/dist_autograd/context.h"
#include "weft/rpc/call.h"
#include "weft/rpc/containers.h"
#include "weft/rref/rref.h"
#include "weft/tests/sim/autograd_world.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

// x times the parameter of each worker of the path, one calling the next.
const FunctionRef<at::Tensor(std::vector<int64_t>, at::Tensor)> kThrough{"found.through"};

// An object of the callee's beside so many zeros.
const FunctionRef<std::tuple<RRef<at::Tensor>, at::Tensor>(int64_t)> kLarge{"found.large"};

class AutogradFound : public ::testing::Test {
 protected:
  AutogradFound() : plan_(std::make_shared<FaultPlan>(1)) {
    for (int i = 0; i < 3; ++i) {
      parameters_.push_back(torch::full({2}, 2.0 + i, torch::kFloat64).set_requires_grad(true));
    }
  }

  // `body` in a simulation, in which three workers have joined.
  void simulate(const std::function<void()>& body) {
    auto sim = std::make_shared<SimRuntime>(SimOptions{.seed = 1});
    sim_ = sim.get();
    const Status ended = sim->run([&] {
      Library library("found");
      library.def("through", [this](CallContext& context, std::vector<int64_t> path, at::Tensor x) {
        const at::Tensor y = x * parameters_[static_cast<size_t>(context.worker().rank())];
        path.erase(path.begin());
        if (path.empty()) return y;
        const int next = static_cast<int>(path.front());
        return rpc_sync(context.worker(), next, kThrough, path, y);
      });
      library.def("large", [](CallContext& context, int64_t n) {
        return std::tuple(RRef<at::Tensor>::local(context.worker(), torch::ones({7})),
                          torch::zeros({n}, torch::kFloat64));
      });
      auto joined = join_in_simulation(sim, 3, library, plan_, &audit_);
      ASSERT_TRUE(joined.ok()) << joined.status();
      workers_ = *std::move(joined);
      try {
        body();
      } catch (const Error& error) {
        ADD_FAILURE() << error.status();
      }
      for (Worker& w : workers_) (void)w.shutdown({.graceful = false});
    });
    EXPECT_TRUE(ended.ok()) << ended;
  }

  // A call of w0.
  at::Tensor through(const std::vector<int64_t>& path, const at::Tensor& x) const {
    return rpc_sync(workers_[0], static_cast<int>(path[0]), kThrough, path, x);
  }
  at::Tensor gradient_at(size_t worker, const AutogradContextId& context) const {
    for (const auto& one : autograd_gradients(workers_[worker], context)) {
      if (one.leaf.is_same(parameters_[worker])) return one.gradient;
    }
    return {};
  }
  // The pass does not get on from w1, and w2 is not told.
  void cut_off_w2(bool its_questions) {
    plan_->add({.fault = Fault::kDrop, .kind = FrameKind::kRequest, .from = "w1", .to = "w0"});
    plan_->add({.fault = Fault::kDrop, .kind = FrameKind::kRequest, .to = "w2"});
    if (!its_questions) return;
    plan_->add({.fault = Fault::kDrop, .kind = FrameKind::kRequest, .from = "w2", .to = "w0"});
  }
  int64_t contexts_at(size_t worker) const {
    return workers_[worker].debug_info().at("num_autograd_contexts");
  }

  const std::shared_ptr<FaultPlan> plan_;
  std::vector<at::Tensor> parameters_;
  Audit audit_;
  SimRuntime* sim_ = nullptr;
  std::vector<Worker> workers_;
};

// An answer with an RRef is longer on its way than RRefs in answers are left alone: by then their
// owner asked about it, and took what the answer brought back.
TEST_F(AutogradFound, DEF_23_an_answer_with_an_rref_that_travels_for_long) {
  simulate([&] {
    // 16 chunks, 5 s each.
    for (int i = 1; i <= 16; ++i) {
      plan_->add({.fault = Fault::kDelay,
                  .kind = FrameKind::kChunk,
                  .from = "w1",
                  .to = "w0",
                  .times = 1,
                  .delay = absl::Seconds(5 * i)});
    }
    const absl::Time begun = sim_->now();
    const std::tuple<RRef<at::Tensor>, at::Tensor> answer =
        rpc_sync(workers_[0], 1, CallOptions{.deadline = 5min}, kLarge, int64_t{500'000});
    EXPECT_GE(sim_->now() - begun, absl::Seconds(70)) << "the answer was faster than planned";
    const at::Tensor here = std::get<0>(answer).to_here();
    EXPECT_EQ(here.numel(), 7);
    EXPECT_EQ(std::get<1>(answer).numel(), 500'000);
  });
}

// The answer to what says that its part is done is lost. When its time was over, w1 took its
// gradients away, and the backward had succeeded.
TEST_F(AutogradFound, LIVE_1_gradients_stay_when_the_answer_to_a_done_is_lost) {
  simulate([&] {
    DistAutogradContext context(workers_[0]);
    const at::Tensor x = torch::ones({2}, torch::kFloat64).set_requires_grad(true);
    const at::Tensor loss = through({1}, x).sum();
    // All that w0 answers to w1 in this pass.
    plan_->add({.fault = Fault::kDrop, .kind = FrameKind::kResponse, .from = "w0", .to = "w1"});
    context.backward({loss}, {.deadline = 2s});
    sim_->sleep(absl::Seconds(10));
    EXPECT_GT(plan_->hits(), 0);
    plan_->clear();
    const at::Tensor gradient = gradient_at(1, context.id());
    ASSERT_TRUE(gradient.defined());
    EXPECT_TRUE(torch::equal(gradient, x.detach()));
  });
}

// w2 knows the context from w1 alone, which leaves: the release of w0 did not reach w2.
TEST_F(AutogradFound, LIVE_5_a_release_reaches_whom_a_worker_that_left_had_told) {
  simulate([&] {
    DistAutogradContext context(workers_[0]);
    (void)through({1, 2}, torch::ones({2}, torch::kFloat64));
    EXPECT_EQ(contexts_at(2), 1);
    (void)workers_[1].shutdown({.graceful = false});
    sim_->sleep(absl::Seconds(40));
    EXPECT_EQ(contexts_at(2), 1);
    context.release().wait();
    EXPECT_EQ(contexts_at(2), 0);
  });
}

// w2, which w1 engages and the root never speaks to, is done when the root gives up, and what tells
// it of that is lost, and so is its own question: it learns of it with the next pass.
TEST_F(AutogradFound, LIVE_1_what_an_abort_did_not_undo_the_next_pass_does) {
  simulate([&] {
    DistAutogradContext context(workers_[0]);
    const at::Tensor x = torch::ones({2}, torch::kFloat64).set_requires_grad(true);
    const at::Tensor loss = through({1, 2}, x).sum();
    // To w1, to w2, and back to w1: there it ends.
    audit_.on_arrival(3, [&] { cut_off_w2(/*its_questions=*/true); });
    const BackwardOptions again{.retain_graph = true, .deadline = 2s};
    EXPECT_EQ(error_kind(context.try_backward({loss}, again)), ErrorKind::kDeadline);
    sim_->sleep(absl::Seconds(10));
    plan_->clear();
    EXPECT_TRUE(gradient_at(2, context.id()).defined());  // it knows no better
    context.backward({loss}, again);
    const at::Tensor gradient = gradient_at(2, context.id());
    ASSERT_TRUE(gradient.defined());
    EXPECT_TRUE(torch::equal(gradient, parameters_[1])) << gradient;
  });
}

// The same, but it can ask, and does when the time of the pass is over.
TEST_F(AutogradFound, LIVE_5_who_was_not_told_of_a_failure_asks) {
  simulate([&] {
    DistAutogradContext context(workers_[0]);
    const at::Tensor x = torch::ones({2}, torch::kFloat64).set_requires_grad(true);
    const at::Tensor loss = through({1, 2}, x).sum();
    audit_.on_arrival(3, [&] { cut_off_w2(/*its_questions=*/false); });
    EXPECT_EQ(error_kind(context.try_backward({loss}, {.deadline = 2s})), ErrorKind::kDeadline);
    EXPECT_TRUE(gradient_at(2, context.id()).defined());
    sim_->sleep(absl::Seconds(3));
    EXPECT_FALSE(gradient_at(2, context.id()).defined());
    plan_->clear();
  });
}

// w1 has had all of w2, which it has engaged and which is done; then it leaves, and no worker can
// ask it to pass on that the pass has failed. Whether w2 says that it is done before the root gives
// up or after, it hears that it was for nothing.
TEST_F(AutogradFound, LIVE_1_whom_a_worker_that_has_left_had_engaged_is_told) {
  for (const absl::Duration late : {absl::ZeroDuration(), absl::Milliseconds(200)}) {
    SCOPED_TRACE(absl::FormatDuration(late));
    simulate([&] {
      DistAutogradContext context(workers_[0]);
      const at::Tensor x = torch::ones({2}, torch::kFloat64).set_requires_grad(true);
      const at::Tensor loss = through({1, 2}, x).sum();
      const auto w2 = [&] { return gradient_at(2, context.id()); };
      plan_->add({.fault = Fault::kDelay, .from = "w2", .to = "w0", .delay = late});
      plan_->add({.fault = Fault::kDelay, .from = "w1", .to = "w0", .delay = absl::Seconds(1)});
      Status status;
      const auto backward =
          sim_->spawn("backward", [&] { status = context.try_backward({loss}, {.deadline = 3s}); });
      sim_->sleep(absl::Milliseconds(100));
      EXPECT_TRUE(w2().defined());
      (void)workers_[1].shutdown({.graceful = false});
      sim_->sleep(absl::Seconds(10));
      EXPECT_EQ(error_kind(status), ErrorKind::kPeerLost) << status;
      EXPECT_FALSE(w2().defined());
      plan_->clear();
    });
  }
}

// w2 leaves before the root has heard that it takes part: the pass waited for it until its
// deadline.
TEST_F(AutogradFound, LIVE_5_a_worker_that_left_before_it_was_known_to_take_part) {
  simulate([&] {
    DistAutogradContext context(workers_[0]);
    const at::Tensor x = torch::ones({2}, torch::kFloat64).set_requires_grad(true);
    const at::Tensor loss = through({1, 2}, x).sum();
    plan_->add({.fault = Fault::kDelay, .from = "w1", .to = "w0", .delay = absl::Seconds(1)});
    plan_->add({.fault = Fault::kDelay, .from = "w2", .to = "w0", .delay = absl::Seconds(5)});
    Status status;
    const auto backward =
        sim_->spawn("backward", [&] { status = context.try_backward({loss}, {.deadline = 4s}); });
    sim_->sleep(absl::Milliseconds(100));
    (void)workers_[2].shutdown({.graceful = false});
    sim_->sleep(absl::Seconds(10));
    EXPECT_EQ(error_kind(status), ErrorKind::kPeerLost) << status;
    plan_->clear();
  });
}

// The time of the pass is over while a node runs: those behind it are left alone, at the latest
// then, or they would run beside those of the next pass, and parameters be stepped that late.
TEST_F(AutogradFound, LIVE_5_a_pass_that_has_failed_runs_no_further_node) {
  simulate([&] {
    DistAutogradContext context(workers_[0]);
    const at::Tensor x = torch::ones({2}, torch::kFloat64).set_requires_grad(true);
    const at::Tensor y = x * 2;
    const at::Tensor z = y * 3;
    const at::Tensor loss = through({1}, z).sum();
    bool slow = true;
    int behind = 0;
    z.register_hook([&](const at::Tensor&) {
      if (slow) sim_->sleep(absl::Seconds(3));
    });
    y.register_hook([&](const at::Tensor&) { ++behind; });
    const BackwardOptions again{.retain_graph = true, .deadline = 2s};
    EXPECT_EQ(error_kind(context.try_backward({loss}, again)), ErrorKind::kDeadline);
    sim_->sleep(absl::Seconds(10));
    EXPECT_EQ(behind, 0);
    slow = false;
    context.backward({loss}, again);
    EXPECT_EQ(behind, 1);
    EXPECT_TRUE(torch::equal(context.gradient(x), torch::full({2}, 18.0, torch::kFloat64)));
  });
}

TEST_F(AutogradFound, InnerTensorsKeepTheirGradientsWhereThatIsAskedFor) {
  simulate([&] {
    DistAutogradContext context(workers_[0]);
    const at::Tensor x = torch::ones({2}, torch::kFloat64).set_requires_grad(true);
    const at::Tensor y = x * 2;
    y.retain_grad();
    context.backward({through({1}, y).sum()});
    EXPECT_TRUE(torch::equal(y.grad(), torch::full({2}, 3.0, torch::kFloat64)));
    EXPECT_TRUE(torch::equal(context.gradient(x), torch::full({2}, 6.0, torch::kFloat64)));
  });
}

// Gradients of 512 KiB ride with the question, and as many go in each message after it.
TEST_F(AutogradFound, GradientsForOneWorkerShareMessages) {
  simulate([&] {
    DistAutogradContext context(workers_[0]);
    const at::Tensor x = torch::ones({1 << 14, 2}, torch::kFloat64).set_requires_grad(true);
    at::Tensor loss = through({1}, x).sum();
    for (int i = 1; i < 6; ++i) loss = loss + through({1}, x).sum();
    const int messages = plan_->add({.fault = Fault::kDelay,
                                     .kind = FrameKind::kRequest,
                                     .from = "w0",
                                     .to = "w1",
                                     .delay = absl::ZeroDuration()});
    context.backward({loss});
    EXPECT_EQ(plan_->hits(messages), 3) << "two gradients in each";
    plan_->clear();
  });
}

// Several messages of one worker fail at once when the time is over: the root hears of it once.
TEST_F(AutogradFound, AFailureIsToldOnceByEachWorker) {
  simulate([&] {
    DistAutogradContext context(workers_[0]);
    const at::Tensor x = torch::ones({1 << 14, 2}, torch::kFloat64).set_requires_grad(true);
    at::Tensor loss = through({1, 2}, x).sum();
    for (int i = 1; i < 12; ++i) loss = loss + through({1, 2}, x).sum();
    plan_->add({.fault = Fault::kDrop, .kind = FrameKind::kRequest, .from = "w1", .to = "w2"});
    const int messages = plan_->add({.fault = Fault::kDelay,
                                     .kind = FrameKind::kRequest,
                                     .from = "w1",
                                     .to = "w0",
                                     .delay = absl::ZeroDuration()});
    const BackwardOptions fast{.deadline = 2s, .mode = BackwardMode::kFast};
    EXPECT_EQ(error_kind(context.try_backward({loss}, fast)), ErrorKind::kDeadline);
    sim_->sleep(absl::Seconds(10));
    EXPECT_LE(plan_->hits(messages), 2);
    plan_->clear();
  });
}

// Looked at every 5 s; a report comes after 10 s without an event, and not before.
TEST_F(AutogradFound, APassIsReportedWhenTwoLooksHaveSeenNothingHappen) {
  simulate([&] {
    DistAutogradContext context(workers_[0]);
    const at::Tensor x = torch::ones({2}, torch::kFloat64).set_requires_grad(true);
    const at::Tensor y = x * 2;
    const auto reports = [&] { return workers_[0].debug_info().at("autograd_stall_reports"); };
    std::vector<int64_t> seen;
    y.register_hook([&](const at::Tensor&) {
      for (const int seconds : {12, 5, 5, 5}) {
        sim_->sleep(absl::Seconds(seconds));
        seen.push_back(reports());
      }
    });
    context.backward({through({1}, y).sum()}, {.deadline = 60s});
    EXPECT_EQ(seen, (std::vector<int64_t>{0, 1, 1, 2}));
  });
}

}  // namespace
}  // namespace weft::testing
