// Contexts that are released while their calls are under way, and very many of them: X9, CTX-3.

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "torch/types.h"
#include "weft/tests/dist_autograd/fixture.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::testing {
namespace {

using HeldFunction = FunctionRef<at::Tensor(std::vector<std::string>, at::Tensor)>;
const HeldFunction kHeld{"app.held"};

// One per graph that a handler has made.
struct Token {
  Token() { ++alive(); }
  ~Token() { --alive(); }
  Token(const Token&) = delete;
  Token& operator=(const Token&) = delete;
  static std::atomic<int64_t>& alive() {
    static std::atomic<int64_t> count{0};
    return count;
  }
};
at::Tensor counted(const at::Tensor& x) {
  const at::Tensor y = x * 2;
  y.register_hook([token = std::make_shared<Token>()](const at::Tensor& g) { return g; });
  return y;
}

int64_t resident_kib() {
  std::ifstream in("/proc/self/statm");
  int64_t size = 0;
  int64_t resident = 0;
  in >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE) / 1024;
}

class DistRelease : public DistAutogradTest {
 protected:
  DistRelease() {
    library_.def("counted", &counted);
    // Along the path; at its end it waits at the gate.
    library_.def("held",
                 [this](CallContext& context, std::vector<std::string> path,
                        const at::Tensor& x) -> at::Tensor {
                   if (path.empty()) {
                     gate()->arrive_and_wait();
                     return x * weight_;
                   }
                   const std::string next = path.front();
                   path.erase(path.begin());
                   return rpc_sync(context.worker(), next, kHeld, path, x * 2) * 2;
                 });
  }

  std::shared_ptr<Gate> gate() {
    MutexLock lock(&mutex_);
    return gate_;
  }
  std::shared_ptr<Gate> new_gate() {
    MutexLock lock(&mutex_);
    return gate_ = std::make_shared<Gate>(runtime_);
  }

 private:
  // So that the answer requires grad also when what came was detached.
  const at::Tensor weight_ = torch::full({1}, 2.0, torch::kFloat64).set_requires_grad(true);
  const std::shared_ptr<Runtime> runtime_ = make_system_runtime();
  Mutex mutex_;
  std::shared_ptr<Gate> gate_ ABSL_GUARDED_BY(mutex_);
};

enum Point { kQueued, kOnTheWire, kInTheHandler, kAnswered, kPoints };

TEST_P(DistRelease, X9_release_at_each_point_of_a_call) {
  auto plan = std::make_shared<FaultPlan>(17);
  auto c = make({.plan = plan});
  for (int i = 0; i < 3; ++i) {
    for (size_t k = 0; k < 3; ++k) (void)rpc_sync((*c)[k], i, &in_context);
  }
  const absl::Duration late = absl::Milliseconds(1);
  const std::vector<std::string> paths[] = {{}, {"worker2"}, {"worker2", "worker0"}};
  std::array<int, kPoints> caught{};
  constexpr int kReleases = fewer(1000, 250);
  int in_the_handler = 0;
  for (int i = 0; i < kReleases; ++i) {
    SCOPED_TRACE("release " + std::to_string(i));
    // Only a call that fails to leave is queued for sure; the link's repair takes its time.
    const Point point = i % 25 == 0 ? kQueued : static_cast<Point>(1 + i % 3);
    in_the_handler += point == kInTheHandler ? 1 : 0;
    const std::vector<std::string>& path = paths[i / 3 % 3];
    const auto gate = new_gate();
    const at::Tensor x = leaf({1, 2});
    DistAutogradContext context((*c)[0]);
    FaultRule rule{.fault = Fault::kDelay,
                   .kind = FrameKind::kRequest,
                   .from = "worker0",
                   .to = "worker1",
                   .times = 1,
                   .delay = 2 * late};
    if (point == kQueued) {
      rule.fault = Fault::kFailBefore;
      rule.times = 1000;
    }
    if (point == kAnswered) {
      rule.kind = FrameKind::kResponse;
      std::swap(rule.from, rule.to);
    }
    plan->clear();  // the oldest rule that hits decides
    const int id = point == kInTheHandler ? -1 : plan->add(rule);
    plan->add({.fault = Fault::kReorder, .probability = 0.1, .delay = late});
    plan->add({.fault = Fault::kDuplicate, .probability = 0.1});
    // A connection that breaks late, because of a call before, is none of what is asked here.
    auto call = rpc_async((*c)[0], "worker1", {.retry = Retry::kAtMostOnce}, kHeld, path, x);
    if (point == kQueued) {
      eventually([&] { return plan->hits(id) > 0; }, "it failed to leave");
    } else if (point == kInTheHandler) {
      gate->wait_arrived(1);
    } else if (point == kAnswered) {
      gate->open();
      eventually([&] { return call.done() || plan->hits(id) > 0; }, "it was answered");
    }
    caught[point] += call.done() ? 0 : 1;
    const Future<void> released = context.release();
    EXPECT_EQ(counter((*c)[0], "num_autograd_contexts"), 0);
    if (point == kQueued) plan->remove(id);
    // It does not wait for calls.
    if (point == kInTheHandler) released.wait();
    gate->open();
    const at::Tensor y = call.wait();
    const double factor = std::pow(4, path.size()) * 2;
    expect_equal(y.detach(), (x * factor).detach());
    // CTX-3
    if (point == kInTheHandler || point == kQueued) {
      EXPECT_FALSE(y.requires_grad());
    }
    EXPECT_TRUE(released.try_wait().ok());
    if (HasFailure()) break;
  }
  for (int point = 0; point < kPoints; ++point) EXPECT_GT(caught[point], fewer(20, 2)) << point;
  EXPECT_EQ(caught[kInTheHandler], in_the_handler);
  plan->clear();
  expect_nothing_left(*c);
}

// A large answer is on the wire for long; what comes of it is the tensor, and no context.
TEST_P(DistRelease, X9_release_while_a_large_answer_is_on_its_way) {
  auto c = make();
  constexpr int64_t kNumbers = int64_t{8} << 20;  // 64 MiB
  const at::Tensor x = torch::ones({kNumbers}, torch::kFloat64).set_requires_grad(true);
  for (int i = 0; i < fewer(6, 2); ++i) {
    const auto gate = new_gate();
    DistAutogradContext context((*c)[0]);
    auto call = rpc_async((*c)[0], "worker1", kHeld, std::vector<std::string>(), x);
    gate->wait_arrived(1);
    gate->open();
    const Future<void> released = context.release();
    EXPECT_EQ(call.wait().sum().item<double>(), 2.0 * kNumbers);
    released.wait();
  }
  expect_nothing_left(*c);
}

// No thread waits for a release that goes with a context's end: the next call takes it along.
TEST_P(DistRelease, ReleasesRideOnTheNextCall) {
  auto c = make({.size = 2});
  const auto live = [&](int count) {
    for (int i = 0; i < count; ++i) {
      DistAutogradContext context((*c)[0]);
      EXPECT_TRUE(rpc_sync((*c)[0], "worker1", &in_context));
    }
  };
  live(100);
  EXPECT_LT(counter((*c)[0], "autograd_releases_sent"), 100);
  expect_nothing_left(*c);
  // More at once than one call takes along.
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) threads.emplace_back([&] { live(100); });
  for (std::thread& one : threads) one.join();
  expect_nothing_left(*c);
}

// Made, passed backward through and released: nothing stays, graph or byte.
TEST_P(DistRelease, ManyContexts) {
  const char* const wanted = std::getenv("WEFT_AUTOGRAD_CONTEXTS");
  const int64_t contexts = wanted == nullptr ? fewer(1000, 150) : std::atoll(wanted);
  auto c = make();
  const auto live = [&](int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const at::Tensor x = leaf({1, 2});
      DistAutogradContext context((*c)[0]);
      const at::Tensor a = rpc_sync((*c)[0], "worker1", &counted, x);
      const at::Tensor b = rpc_sync((*c)[0], "worker2", &counted, a);
      (void)rpc_sync((*c)[0], "worker2", &counted, x);  // not used
      context.backward({b.sum()});
      expect_equal(context.gradient(x), torch::full({2}, 4.0, torch::kFloat64));
      if (i % 3 == 0) context.release().wait();
      if (HasFailure()) return;
    }
    expect_nothing_left(*c);
    eventually([] { return Token::alive() == 0; }, "graphs are left");
  };
  // What is there once and for all: connections, pool threads, windows.
  live(contexts / 10 + fewer(200, 20));
  const int64_t before = resident_kib();
  live(contexts);
  const int64_t grown = resident_kib() - before;
  RecordProperty("grown_kib", std::to_string(grown));
  if (wanted != nullptr) {
    EXPECT_LT(grown, 8 * 1024) << "KiB";
  }
}

INSTANTIATE_TEST_SUITE_P(Nets, DistRelease, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
