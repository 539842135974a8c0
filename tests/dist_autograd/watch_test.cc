// Passes that stand still say what they wait for; contexts end with a creator that died unheard.

#include <algorithm>
#include <thread>

#include "gmock/gmock.h"
#include "torch/types.h"
#include "weft/rpc/inspect.h"
#include "weft/tests/dist_autograd/fixture.h"
#include "weft/tests/testing/mortal_store.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

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

at::Tensor slow_there(CallContext& context, const std::string& next, const at::Tensor& x) {
  return rpc_sync(context.worker(), next, &slow_way_back, x) * 3;
}

class DistWatch : public DistAutogradTest {
 protected:
  DistWatch() { library_.def("slow_there", &slow_there); }

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
    eventually([&] { return lines[0]->about("it said").find("SlowFunction") != std::string::npos; },
               "the root tells what the others wait for");
    EXPECT_THAT(lines[0]->about("it said"), AllOf(HasSubstr("'worker1' waits for its own node"),
                                                  Not(HasSubstr("'worker2' waits"))));
    EXPECT_GT(counter(c[1], "autograd_progress_reports_sent"), 0);
    EXPECT_EQ(counter(c[2], "autograd_progress_reports_sent"), 0);
    const std::string at_root = lines[0]->about("nothing has happened");
    EXPECT_THAT(at_root, AllOf(HasSubstr("backward 1 of autograd context 0/"), HasSubstr("50ms"),
                               HasSubstr("the gradients of messages 1 from 'worker1'"),
                               HasSubstr("'worker1' to be done")));
    EXPECT_THAT(lines[1]->about("nothing has happened"), HasSubstr("its own node "));
    // Its part is done, so it waits for nothing.
    EXPECT_EQ(lines[2]->about("nothing has happened"), "");
    EXPECT_EQ(counter(c[2], "autograd_stall_reports"), 0);
    stuck.open();
    other.join();
    expect_equal(context.gradient(x), (8 * x).detach());
  }
  expect_nothing_left(c);
}

// The root waits for worker1, which waits for worker2, whose node is slow: all of that is in the
// error.
TEST_P(DistWatch, TheErrorOfADeadlineTellsWhatTheOthersWaitFor) {
  ClusterOptions o = options();
  o.adjust = [](int, JoinOptions* join) {
    join->services.push_back(dist_autograd_service({.report_stall_after = 20ms}));
    join->log_level = Severity::kOff;
  };
  Cluster c(o);
  StuckWayBack stuck;
  {
    DistAutogradContext context(c[0]);
    const at::Tensor loss = rpc_sync(c[0], "worker1", &slow_there, "worker2", leaf({1, 2})).sum();
    const Status failed = error_of([&] { context.backward({loss}, {.deadline = 1s}); });
    EXPECT_EQ(error_kind(failed), ErrorKind::kDeadline);
    EXPECT_THAT(
        std::string(failed.message()),
        AllOf(HasSubstr("'worker1' waits for 1 answers about what the losses need from 'worker2'"),
              HasSubstr("'worker2' waits for its own node "), HasSubstr("SlowFunction"),
              HasSubstr("(it said ")));
    stuck.open();
  }
  expect_nothing_left(c);
}

// The root has said nothing to worker2 itself, and yet knows who that was.
TEST_P(DistWatch, AWorkerThatLeavesInTheMiddleIsNamed) {
  ClusterOptions o = options();
  o.adjust = [](int, JoinOptions* join) { join->services.push_back(dist_autograd_service()); };
  Cluster c(o);
  StuckWayBack stuck;
  std::thread leaver;
  {
    DistAutogradContext context(c[0]);
    const at::Tensor loss = rpc_sync(c[0], "worker1", &slow_there, "worker2", leaf({1, 2})).sum();
    leaver = std::thread([&] {
      stuck.wait_reached();
      (void)c[2].shutdown({.graceful = false});
    });
    const Status failed = error_of([&] { context.backward({loss}); });
    stuck.open();
    expect_error(failed, ErrorKind::kPeerLost, {"worker 'worker2'", "has left"});
    EXPECT_THAT(std::string(failed.message()), Not(HasSubstr("'worker 2 (")));
  }
  leaver.join();
  for (const size_t i : {0, 1}) {
    eventually([&] { return counter(c[i], "num_autograd_contexts") == 0; }, "a context is left");
  }
  c.forget();
}

// From outside of the job: which workers have which contexts, and what a pass waits for at each.
TEST_P(DistWatch, WhoeverLooksSeesContextsAndPasses) {
  ClusterOptions o = options();
  o.adjust = [](int, JoinOptions* join) { join->services.push_back(dist_autograd_service()); };
  Cluster c(o);
  const auto look = [&](size_t worker) {
    InspectOptions at{.address = c[worker].address(), .deadline = absl::Seconds(30)};
    if (GetParam() == Net::kInproc) at.transport = inproc_transport(c.network());
    return inspect(at);
  };
  EXPECT_THAT(look(1),
              AllOf(HasSubstr("autograd_contexts: 0\n"), HasSubstr("backward_passes: 0\n")));
  StuckWayBack stuck;
  {
    DistAutogradContext context(c[0]);
    const at::Tensor x = leaf({1, 2});
    const at::Tensor loss = rpc_sync(c[0], "worker1", &slow_way_back, x).sum();
    std::thread other([&] { context.backward({loss}); });
    stuck.wait_reached();
    // One send each, and so far no leaf has a gradient; only the creator has told another worker.
    const std::string id = "autograd context 0/[0-9a-f]+/1";
    EXPECT_THAT(look(0), ContainsRegex("  " + id + " worker0 1 +0 +1 +1\n"));
    EXPECT_THAT(look(0), ContainsRegex("  backward 1 of " + id + " worker0 running .*'worker1'"));
    const std::string callee = look(1);
    EXPECT_THAT(callee, ContainsRegex("  " + id + " worker0 1 +0 +1 +1\n"));
    EXPECT_THAT(callee, ContainsRegex("  backward 1 of " + id +
                                      " worker0 running +[0-9.]+ +[0-9.]+ +1 +1 +0 +"
                                      "its own node .*SlowFunction"));
    stuck.open();
    other.join();
    expect_equal(context.gradient(x), at::full({2}, 2.0, at::kDouble));
  }
  expect_nothing_left(c);
  eventually([&] { return look(1).find("autograd_contexts: 0\n") != std::string::npos; },
             "a context is shown");
}

INSTANTIATE_TEST_SUITE_P(Nets, DistWatch, ::testing::ValuesIn(nets()), net_name);

// As if its process had died: nothing of it reaches network or store any more. The group's lease
// says so to all, also to those that its context has only reached through others.
class DistOrphans : public DistWatch {
 protected:
  ClusterOptions unheard() {
    ClusterOptions o = options();
    o.names = {"a", "b", "c"};
    o.dynamic = true;
    o.lease = 1s;
    o.adjust = [this](int i, JoinOptions* join) {
      join->services.push_back(dist_autograd_service());
      join->log_level = Severity::kOff;
      join->transport = faulty_transport(join->transport, plan_);
      stores_[static_cast<size_t>(i)] = hear_interrupts(join);
    };
    return o;
  }
  void kill(Cluster& c, size_t i) {
    stores_[i]->interrupt();
    c.network()->kill(c[i].name());
  }

  const std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>(1);
  std::vector<std::shared_ptr<Store>> stores_{3};
};

TEST_P(DistOrphans, ContextsEndWithACreatorThatDiedUnheard) {
  Cluster c(unheard());
  for (size_t i = 0; i < 3; ++i) {
    eventually([&] { return c[i].worker_infos().size() == 3; }, "all are known");
  }
  {
    DistAutogradContext context(c[0]);
    (void)rpc_sync(c[0], "b", &travel, std::vector<std::string>{"c"}, leaf({1, 2}), leaf({3, 4}));
    for (const size_t i : {1, 2}) EXPECT_EQ(counter(c[i], "num_autograd_contexts"), 1);
    kill(c, 0);
    for (const size_t i : {1, 2}) {
      eventually([&] { return counter(c[i], "num_autograd_contexts") == 0; }, "a context is left");
      EXPECT_EQ(counter(c[i], "autograd_sends"), 0);
    }
  }
  (void)c.shutdown_all({.deadline = 2s});
}

// A release rode on a call to b, which answered that and died before it could pass the release on.
TEST_P(DistOrphans, CTX_5_a_release_that_rode_outlives_who_was_to_pass_it_on) {
  Cluster c(unheard());
  for (size_t i = 0; i < 3; ++i) {
    eventually([&] { return c[i].worker_infos().size() == 3; }, "all are known");
  }
  const at::Tensor x = leaf({1, 2});
  {
    auto first = std::make_unique<DistAutogradContext>(c[0]);
    (void)rpc_sync(c[0], "b", &travel, std::vector<std::string>{"c"}, x, x);
    EXPECT_EQ(counter(c[2], "num_autograd_contexts"), 1);
    plan_->add({.fault = Fault::kFailBefore, .from = "b", .to = "c"});
    plan_->add({.fault = Fault::kFailBefore, .kind = FrameKind::kHello, .from = "b"});
    first.reset();
    DistAutogradContext second(c[0]);
    const at::Tensor y = rpc_sync(c[0], "c", &mul, x, x);
    EXPECT_TRUE(rpc_sync(c[0], "b", &in_context));
    eventually([&] { return counter(c[1], "num_autograd_contexts") == 1; }, "b has not heard");
    EXPECT_EQ(counter(c[2], "num_autograd_contexts"), 2);
    kill(c, 1);
    eventually([&] { return counter(c[2], "num_autograd_contexts") == 1; }, "a context is left");
    second.backward({y.sum()});
    expect_equal(second.gradient(x), (2 * x).detach());
  }
  eventually([&] { return counter(c[0], "autograd_releases") == 0; }, "a release goes on");
  EXPECT_EQ(counter(c[2], "num_autograd_contexts"), 0);
  (void)c.shutdown_all({.deadline = 2s});
}

INSTANTIATE_TEST_SUITE_P(Nets, DistOrphans, ::testing::Values(Net::kInproc), net_name);

}  // namespace
}  // namespace weft::testing
