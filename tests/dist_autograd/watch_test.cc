// Passes that stand still say what they wait for; contexts end with a creator that died unheard.

#include <algorithm>
#include <thread>

#include "gmock/gmock.h"
#include "torch/torch.h"
#include "weft/tests/dist_autograd/fixture.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT
using ::testing::AllOf;
using ::testing::HasSubstr;

class Lines : public LogSink {
 public:
  void write(Severity, std::string_view line) override {
    MutexLock lock(&mutex_);
    lines_.emplace_back(line);
  }
  std::string about(const std::string& word) const {
    MutexLock lock(&mutex_);
    std::string all;
    for (const std::string& line : lines_) {
      if (line.find(word) != std::string::npos) all += line;
    }
    return all;
  }

 private:
  mutable Mutex mutex_;
  std::vector<std::string> lines_ ABSL_GUARDED_BY(mutex_);
};

class DistWatch : public DistAutogradTest {
 protected:
  ClusterOptions options() {
    ClusterOptions o;
    o.size = 3;
    o.net = GetParam();
    o.library = library_;
    return o;
  }
};

TEST_P(DistWatch, APassThatStandsStillNamesTheWorkerAndTheMessage) {
  const std::shared_ptr<Lines> lines[] = {std::make_shared<Lines>(), std::make_shared<Lines>(),
                                          std::make_shared<Lines>()};
  ClusterOptions o = options();
  o.adjust = [&lines](int i, JoinOptions* join) {
    join->services.push_back(dist_autograd_service({.report_stall_after = 50ms}));
    join->log_sink = lines[i];
  };
  Cluster c(o);
  const at::Tensor x = leaf({1, 2});
  StuckWayBack stuck;
  {
    DistAutogradContext context(c[0]);
    const at::Tensor slow = rpc_sync(c[0], "worker1", &slow_way_back, x);
    const at::Tensor loss = rpc_sync(c[0], "worker2", &mul, slow, slow).sum();
    EXPECT_EQ(counter(c[0], "autograd_stall_reports"), 0);
    std::thread other([&] { context.backward({loss}); });
    stuck.wait_reached();
    for (const size_t i : {0, 1}) {
      eventually([&] { return counter(c[i], "autograd_stall_reports") > 1; },
                 "a report, and again");
    }
    const std::string at_root = lines[0]->about("nothing has happened");
    EXPECT_THAT(at_root, AllOf(HasSubstr("backward 1 of autograd context 0/"), HasSubstr("50ms"),
                               HasSubstr("the gradients of messages 1 from 'worker1'"),
                               HasSubstr("'worker1' to be done")));
    EXPECT_THAT(lines[1]->about("nothing has happened"), HasSubstr("its own nodes"));
    // Its part is done, so it waits for nothing.
    EXPECT_EQ(lines[2]->about("nothing has happened"), "");
    EXPECT_EQ(counter(c[2], "autograd_stall_reports"), 0);
    stuck.open();
    other.join();
    expect_equal(context.gradient(x), (8 * x).detach());
  }
  expect_nothing_left(c);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistWatch, ::testing::ValuesIn(nets()), net_name);

// As if its process had died: nothing of it reaches network or store any more. The group's lease
// says so to all, also to those that its context has only reached through others.
class DistOrphans : public DistWatch {};

TEST_P(DistOrphans, ContextsEndWithACreatorThatDiedUnheard) {
  ClusterOptions o = options();
  o.names = {"a", "b", "c"};
  o.dynamic = true;
  o.lease = 1s;
  std::vector<std::shared_ptr<Store>> stores(3);
  o.adjust = [&stores](int i, JoinOptions* join) {
    join->services.push_back(dist_autograd_service());
    join->log_level = Severity::kOff;
    stores[static_cast<size_t>(i)] = join->store;
  };
  Cluster c(o);
  for (size_t i = 0; i < 3; ++i) {
    eventually([&] { return c[i].worker_infos().size() == 3; }, "all are known");
  }
  {
    DistAutogradContext context(c[0]);
    (void)rpc_sync(c[0], "b", &travel, std::vector<std::string>{"c"}, leaf({1, 2}), leaf({3, 4}));
    for (const size_t i : {1, 2}) EXPECT_EQ(counter(c[i], "num_autograd_contexts"), 1);
    stores[0]->interrupt();
    c.network()->kill("a");
    for (const size_t i : {1, 2}) {
      eventually([&] { return counter(c[i], "num_autograd_contexts") == 0; }, "a context is left");
      EXPECT_EQ(counter(c[i], "autograd_sends"), 0);
    }
  }
  (void)c.shutdown_all({.deadline = 2s});
}

INSTANTIATE_TEST_SUITE_P(Nets, DistOrphans, ::testing::Values(Net::kInproc), net_name);

}  // namespace
}  // namespace weft::testing
