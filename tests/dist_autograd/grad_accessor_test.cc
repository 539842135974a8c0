// What a reducer does in the middle of a backward: collectives/grad_accessor.h.

#include "weft/collectives/grad_accessor.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>

#include "torch/autograd.h"
#include "torch/csrc/autograd/variable.h"
#include "torch/types.h"
#include "weft/tests/dist_autograd/fixture.h"

namespace weft::testing {
namespace {

using Ready = std::function<void(const std::shared_ptr<GradAccessor>&)>;
using BackwardId = GradAccessor::BackwardId;

class Hook final : public GradReadyHook {
 public:
  explicit Hook(Ready ready, std::optional<absl::Duration> deadline = std::nullopt)
      : ready_(std::move(ready)), deadline_(deadline) {}
  void on_grad_ready(const std::shared_ptr<GradAccessor>& accessor) override { ready_(accessor); }
  std::optional<absl::Duration> default_deadline() const override { return deadline_; }

 private:
  const Ready ready_;
  const std::optional<absl::Duration> deadline_;
};

class DistGradAccessor : public DistAutogradTest {
 protected:
  void on_ready(const at::Tensor& parameter, Ready ready,
                std::optional<absl::Duration> deadline = std::nullopt) {
    accumulators_.push_back(torch::autograd::impl::grad_accumulator(parameter));
    accumulators_.back()->add_post_hook(std::make_unique<Hook>(std::move(ready), deadline));
  }

 private:
  std::vector<decltype(torch::autograd::Edge::function)> accumulators_;
};

// One of several replicas, which exchange their gradients when all of theirs are there.
class TestReducer {
 public:
  using Gradients = std::vector<at::Tensor>;
  explicit TestReducer(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {}

  void meet(const std::vector<TestReducer*>& all) { all_ = all; }
  void ready(const std::shared_ptr<GradAccessor>& accessor) {
    if (++seen_ < parameters_.size()) return;
    accessor->at_end([this, accessor] { reduce(*accessor); });
  }
  std::optional<GradAccessor::ContextId> context() const { return context_; }

 private:
  void reduce(GradAccessor& accessor) {
    context_ = accessor.context_id();
    Gradients mine;
    for (const at::Tensor& one : parameters_) {
      accessor.with_grad(one, [&mine](at::Tensor& grad) {
        mine.push_back(grad.clone());
        return false;
      });
    }
    published_.set_value(mine);
    std::vector<Gradients> theirs;
    for (TestReducer* one : all_) theirs.push_back(one->published_.future().wait());
    for (size_t i = 0; i < parameters_.size(); ++i) {
      accessor.with_grad(parameters_[i], [&](at::Tensor& grad) {
        grad = torch::zeros_like(grad);
        for (const Gradients& one : theirs) grad += one[i] / static_cast<double>(theirs.size());
        return true;
      });
    }
  }

  const std::vector<at::Tensor> parameters_;
  std::vector<TestReducer*> all_;
  Promise<Gradients> published_;
  size_t seen_ = 0;
  std::optional<GradAccessor::ContextId> context_;
};

// The hybrid: two trainers, each in a context of its own, with a part of the model at a server.
TEST_P(DistGradAccessor, AReducerAveragesOverTwoContexts) {
  auto c = make();
  std::vector<std::vector<at::Tensor>> parameters;
  std::vector<std::unique_ptr<TestReducer>> reducers;
  std::vector<TestReducer*> all;
  for (size_t i = 0; i < 2; ++i) {
    parameters.push_back({leaf({1, 2}), leaf({3, 4})});
    reducers.push_back(std::make_unique<TestReducer>(parameters[i]));
    all.push_back(reducers[i].get());
    for (const at::Tensor& one : parameters[i]) {
      on_ready(one, [to = all[i]](const auto& accessor) { to->ready(accessor); });
    }
  }
  for (TestReducer* one : all) one->meet(all);
  std::vector<std::thread> trainers;
  for (size_t i = 0; i < 2; ++i) {
    trainers.emplace_back([&, i] {
      const double scale = 1 + 2 * static_cast<double>(i);  // 1 and 3: the mean is 2
      DistAutogradContext context((*c)[i]);
      const auto& [x, y] = std::tie(parameters[i][0], parameters[i][1]);
      context.backward({(rpc_sync((*c)[i], "worker2", &mul, x, y) * scale).sum()});
      EXPECT_EQ(reducers[i]->context(), context.id());
      expect_equal(context.gradient(x), (y * 2).detach());
      expect_equal(context.gradient(y), (x * 2).detach());
      EXPECT_FALSE(x.grad().defined());
    });
  }
  for (std::thread& one : trainers) one.join();
  expect_nothing_left(*c);
}

// The deadline of a pass that was given none: the longest that a reducer names, and 60 s without one.
TEST_P(DistGradAccessor, AReducerNamesTheDeadlineOfAPassThatWasGivenNone) {
  auto c = make({.size = 2});
  const at::Tensor x = leaf({1, 2});
  const at::Tensor y = leaf({3, 4});
  absl::Duration left;
  const auto note = [&left](const std::shared_ptr<GradAccessor>& of) { left = of->time_left(); };
  on_ready(x, note);
  const auto time_of = [&](const at::Tensor& loss, const BackwardOptions& options = {}) {
    DistAutogradContext context((*c)[0]);
    context.backward({(loss * rpc_sync((*c)[0], "worker1", &mul, x, x)).sum()}, options);
    return left;
  };
  EXPECT_LE(time_of(x), absl::Seconds(60));
  on_ready(y, note, absl::Seconds(5));
  EXPECT_LE(time_of(y), absl::Seconds(5));
  on_ready(x, note, absl::Minutes(10));
  EXPECT_GT(time_of(y), absl::Seconds(60));
  EXPECT_LE(time_of(y), absl::Minutes(10));
  EXPECT_LE(time_of(y, {.deadline = absl::Seconds(20)}), absl::Seconds(20));
  expect_nothing_left(*c);
}

TEST_P(DistGradAccessor, TheSameHookServesALocalBackward) {
  const at::Tensor x = leaf({1, 2});
  int ends = 0;
  on_ready(x, [&](const std::shared_ptr<GradAccessor>& accessor) {
    EXPECT_FALSE(accessor->context_id().has_value());
    accessor->at_end([&, accessor] {
      ++ends;
      accessor->with_grad(x, [](at::Tensor& grad) {
        grad = grad * 3;
        return true;
      });
    });
  });
  (x * x).sum().backward();
  EXPECT_EQ(ends, 1);
  expect_equal(x.grad(), (x * 6).detach());
}

// In a pass: only what fn keeps is written, other leaves have nothing, one may be given something.
TEST_P(DistGradAccessor, WithGrad) {
  auto c = make({.size = 2});
  const at::Tensor x = leaf({1, 2});
  const at::Tensor unused = leaf({5, 6});
  on_ready(x, [&](const std::shared_ptr<GradAccessor>& accessor) {
    accessor->with_grad(x, [](at::Tensor& grad) {
      grad = grad * 100;
      return false;
    });
    accessor->with_grad(unused, [](at::Tensor& grad) {
      EXPECT_FALSE(grad.defined());
      grad = torch::ones({2}, torch::kFloat64);
      return true;
    });
  });
  {
    DistAutogradContext context((*c)[0]);
    context.backward({rpc_sync((*c)[0], "worker1", &mul, x, x).sum()});
    expect_equal(context.gradient(x), (x * 2).detach());
    expect_equal(context.gradient(unused), torch::ones({2}, torch::kFloat64));
  }
  expect_nothing_left(*c);
}

TEST_P(DistGradAccessor, WhatAReducerThrowsEndsThePass) {
  auto c = make({.size = 2});
  const at::Tensor x = leaf({1, 2});
  bool fails = true;
  on_ready(x, [&](const std::shared_ptr<GradAccessor>& accessor) {
    accessor->at_end([&] {
      if (fails) throw std::runtime_error("a replica is missing");
    });
  });
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor loss = rpc_sync((*c)[0], "worker1", &mul, x, x).sum();
    const Status failed = context.try_backward({loss}, {.retain_graph = true});
    expect_error(failed, ErrorKind::kUser, {"a replica is missing", "worker0"});
    EXPECT_TRUE(context.gradients().empty());
    fails = false;
    context.backward({loss});
    expect_equal(context.gradient(x), (x * 2).detach());
  }
  expect_nothing_left(*c);
}

// Ends of two replicas' parts, each of which is over when both have begun.
class Meeting {
 public:
  void arrive_and_wait(absl::Duration time_left) {
    if (arrived_.fetch_add(1) == 1) met_.set_value();
    const Status met = met_.future().try_wait(std::min(time_left, absl::Seconds(20)));
    if (!met.ok()) throw std::runtime_error("the other replica did not come");
  }

 private:
  std::atomic<int> arrived_ = 0;
  Promise<void> met_;
};
std::atomic<Meeting*> meeting = nullptr;

// One of two replicas of a factor, each at a worker of its own.
class Replica {
 public:
  Replica()
      : factor_(torch::full({2}, 3.0, torch::kFloat64).set_requires_grad(true)),
        accumulator_(torch::autograd::impl::grad_accumulator(factor_)) {
    accumulator_->add_post_hook(std::make_unique<Hook>([](const auto& accessor) {
      accessor->at_end([accessor] { meeting.load()->arrive_and_wait(accessor->time_left()); });
    }));
  }
  at::Tensor forward(const at::Tensor& x) const { return x * factor_; }

 private:
  const at::Tensor factor_;
  const decltype(torch::autograd::Edge::function) accumulator_;
};

// LIVE-9: one pass through both replicas. The end of the second one's part needs that of the
// first, which needs the gradient that the second has for it.
TEST_P(DistGradAccessor, LIVE_9_WhatOthersWaitForLeavesBeforeTheEnd) {
  Meeting both;
  meeting = &both;
  library_.class_<Replica>("Replica").constructor<>().def("forward", &Replica::forward);
  auto c = make();
  {
    const auto first = remote<Replica>((*c)[0], "worker1");
    const auto second = remote<Replica>((*c)[0], "worker2");
    const at::Tensor x = leaf({1, 2});
    DistAutogradContext context((*c)[0]);
    const at::Tensor there = first.rpc_sync(&Replica::forward, x);
    const at::Tensor loss = second.rpc_sync(&Replica::forward, there).sum();
    context.backward({loss}, {.deadline = std::chrono::seconds(20)});
    expect_equal(context.gradient(x), torch::full({2}, 9.0, torch::kFloat64));
  }
  expect_nothing_left(*c);
}

// A pass has one accessor for all its hooks, a local backward one for each; ids tell them apart.
TEST_P(DistGradAccessor, OneIdForEachBackward) {
  auto c = make({.size = 2});
  const at::Tensor x = leaf({1, 2});
  const at::Tensor y = leaf({3, 4});
  std::vector<std::shared_ptr<GradAccessor>> kept;  // ids are of accessors that live
  std::vector<BackwardId> seen;
  for (const at::Tensor& one : {x, y}) {
    on_ready(one, [&](const std::shared_ptr<GradAccessor>& accessor) {
      kept.push_back(accessor);
      seen.push_back(accessor->backward_id());
    });
  }
  (x * y).sum().backward();
  (x * y).sum().backward();
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor loss = rpc_sync((*c)[0], "worker1", &mul, x, y).sum();
    context.backward({loss}, {.retain_graph = true});
    context.backward({loss});
    ASSERT_EQ(seen.size(), 8U);
    EXPECT_EQ(seen[4].context, context.id());
  }
  for (size_t i = 0; i < 8; i += 2) EXPECT_EQ(seen[i], seen[i + 1]) << i;
  EXPECT_EQ(std::set<BackwardId>(seen.begin(), seen.end()).size(), 4U);
  expect_nothing_left(*c);
}

// The output's node sees a backward in which no parameter is used.
TEST_P(DistGradAccessor, AHookOnAnyNode) {
  auto c = make({.size = 2});
  const at::Tensor x = leaf({1, 2});
  const at::Tensor out = x * 2;
  std::vector<std::optional<GradAccessor::ContextId>> began;
  int ended = 0;
  const auto hook = [&](const std::shared_ptr<GradAccessor>& accessor) {
    began.push_back(accessor->context_id());
    accessor->at_end([&] { ++ended; });
  };
  const auto on_output = [&hook](const at::Tensor& tensor) {
    tensor.grad_fn()->add_post_hook(std::make_unique<Hook>(hook));
  };
  on_output(out);
  out.sum().backward();
  EXPECT_EQ(ended, 1);
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor mine = x * 3;
    on_output(mine);
    context.backward({rpc_sync((*c)[0], "worker1", &mul, mine, mine).sum()});
    EXPECT_EQ(ended, 2);
    ASSERT_EQ(began.size(), 2U);
    EXPECT_FALSE(began[0].has_value());
    EXPECT_EQ(began[1], context.id());
  }
  expect_nothing_left(*c);
}

// An end that waits for another rank knows until when.
TEST_P(DistGradAccessor, TheEndIsBoundedByTheDeadline) {
  auto c = make({.size = 2});
  const at::Tensor x = leaf({1, 2});
  Promise<void> never;
  absl::Duration left;
  on_ready(x, [&](const std::shared_ptr<GradAccessor>& accessor) {
    accessor->at_end([&, accessor] {
      left = accessor->time_left();
      throw_if_error(never.future().try_wait(left));
    });
  });
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor loss = rpc_sync((*c)[0], "worker1", &mul, x, x).sum();
    const Status failed =
        context.try_backward({loss}, {.deadline = std::chrono::milliseconds(300)});
    EXPECT_EQ(error_kind(failed), ErrorKind::kDeadline) << failed;
    EXPECT_GT(left, absl::ZeroDuration());
    EXPECT_LE(left, absl::Milliseconds(300));
  }
  expect_nothing_left(*c);
}

// A backward that fails before its end destroys what was to run at the end, which tells its owner.
TEST_P(DistGradAccessor, AnEndThatIsNotReachedIsDestroyed) {
  auto c = make({.size = 2});
  const at::Tensor x = leaf({1, 2});
  std::weak_ptr<int> held;
  on_ready(x, [&](const std::shared_ptr<GradAccessor>& accessor) {
    const auto token = std::make_shared<int>(0);
    held = token;
    accessor->at_end([accessor, token] { ADD_FAILURE() << "it has failed"; });
    throw std::runtime_error("a hook fails");
  });
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor loss = rpc_sync((*c)[0], "worker1", &mul, x, x).sum();
    expect_error(context.try_backward({loss}), ErrorKind::kUser, {"a hook fails"});
    eventually([&held] { return held.expired(); }, "the end is destroyed");
  }
  held.reset();
  EXPECT_THROW((x * x).sum().backward(), std::runtime_error);
  EXPECT_TRUE(held.expired());
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistGradAccessor, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
