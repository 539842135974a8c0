// Messages of passes and releases that are lost, one of them (X11) or all from some moment on (X6).

#include <thread>

#include "absl/strings/str_cat.h"
#include "torch/types.h"
#include "weft/tests/dist_autograd/fixture.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

class DistLost : public DistAutogradTest {
 protected:
  static constexpr const char* kKinds[] = {"discover", "gradient", "close",
                                           "done",     "abort",    "release"};
  // With one call whose result is not used, so that there is a `close`. A connection that is about
  // to break because of what was lost before is not what is tested here.
  static at::Tensor loss_of(Cluster& c, const at::Tensor& x, bool failing) {
    const CallOptions again{.retry = Retry::kAtMostOnce};
    (void)rpc_sync(c[0], "worker1", again, &add, x, x);
    if (!failing) return rpc_sync(c[0], "worker1", again, &mul, x, x).sum();
    return rpc_sync(c[0], "worker1", again, &via_no_way_back, std::vector<std::string>(), x * x)
        .sum();
  }
  static void expect_clear(const Status& status, bool failing) {
    const std::string text(status.message());
    if (failing && error_kind(status) == ErrorKind::kUser) {
      expect_error(status, ErrorKind::kUser, {"there is no way back"});
    } else if (!status.ok()) {
      expect_error(status, ErrorKind::kDeadline, {"worker"});
    }
    EXPECT_FALSE(failing && status.ok());
  }
  static bool connected(Cluster& c, size_t from, int to) {
    return try_rpc_sync(c[from], to, &in_context).ok();
  }
  static void expect_no_pass_soon(Cluster& c) {
    for (size_t i = 0; i < c.size(); ++i) {
      eventually([&] { return counter(c[i], "num_current_backward_passes") == 0; },
                 "a pass of " + c[i].name());
    }
  }
};

// One after the other each message of a pass, and each answer, is lost: with its connection it is
// sent again, alone the deadline ends the pass.
TEST_P(DistLost, X11_a_lost_message_of_each_kind) {
  auto plan = std::make_shared<FaultPlan>(23);
  auto c = make({.size = 2, .plan = plan});
  const at::Tensor x = leaf({1, 2});
  int hit = 0;
  int failed = 0;
  for (const Fault fault : {Fault::kCut, Fault::kFailAfter, Fault::kDrop}) {
    for (const bool failing : {false, true}) {
      for (const FrameKind kind : {FrameKind::kRequest, FrameKind::kResponse}) {
        for (const bool back : {false, true}) {
          for (int64_t skip = 0;; ++skip) {
            SCOPED_TRACE(absl::StrCat(
                std::string(fault_name(fault)), failing ? ", failing, " : ", ",
                std::string(frame_kind_name(kind)), " ", skip, back ? " back" : " out"));
            eventually([&] { return connected(*c, 0, 1) && connected(*c, 1, 0); }, "connected");
            DistAutogradContext context((*c)[0]);
            const at::Tensor loss = loss_of(*c, x, failing);
            const int rule = plan->add({.fault = fault,
                                        .kind = kind,
                                        .from = back ? "worker1" : "worker0",
                                        .to = back ? "worker0" : "worker1",
                                        .skip = skip,
                                        .times = 1});
            const bool drops = fault == Fault::kDrop;
            const Status status = context.try_backward(
                {loss}, {.retain_graph = true, .deadline = drops ? Timeout(150ms) : Timeout(20s)});
            const bool was_hit = plan->hits(rule) > 0;
            plan->clear();
            hit += was_hit ? 1 : 0;
            failed += status.ok() ? 0 : 1;
            expect_clear(status, failing);
            if (!drops && !failing) {
              EXPECT_TRUE(status.ok()) << status;
            }
            expect_no_pass_soon(*c);
            if (!failing) {
              if (!status.ok()) context.backward({loss}, {.retain_graph = true});
              expect_equal(context.gradient(x), (2 * x).detach());
            } else {
              EXPECT_TRUE(context.gradients().empty());
            }
            const int release = plan->add({.fault = drops ? Fault::kCut : fault,
                                           .kind = kind,
                                           .from = back ? "worker1" : "worker0",
                                           .times = 1});
            EXPECT_TRUE(context.release().try_wait(20s).ok());
            plan->clear();
            hit += plan->hits(release) > 0 ? 1 : 0;
            if (!was_hit || HasFailure()) break;
          }
        }
      }
    }
  }
  EXPECT_GT(hit, 60);
  EXPECT_GT(failed, 3);
  for (const char* kind : kKinds) {
    const std::string name = absl::StrCat("autograd_", kind, "s_sent");
    EXPECT_GT(counter((*c)[0], name) + counter((*c)[1], name), 0) << kind;
  }
  expect_nothing_left(*c);
}

// From its `skip`th on no message goes that way any more. The pass ends by its deadline, also where
// no worker can tell; a release waits. Once the way is free nothing is left; and if it never is, a
// shutdown says so in its time.
class DistForever : public DistLost {
 protected:
  struct Case {
    bool back = false;
    int64_t skip = 0;
    bool failing = false;
    bool heal = false;
  };
  void play(const Case& one) {
    SCOPED_TRACE(absl::StrCat(one.back ? "back " : "out ", one.skip, one.failing ? " failing" : "",
                              one.heal ? " heals" : ""));
    auto plan = std::make_shared<FaultPlan>(5);
    auto c = make({.size = 2, .plan = plan});
    const at::Tensor x = leaf({1, 2});
    DistAutogradContext context((*c)[0]);
    const at::Tensor loss = loss_of(*c, x, one.failing);
    (void)rpc_sync((*c)[1], "worker0", &in_context);
    FaultRule rule{.fault = Fault::kFailBefore,
                   .kind = FrameKind::kRequest,
                   .from = one.back ? "worker1" : "worker0",
                   .to = one.back ? "worker0" : "worker1",
                   .skip = one.skip};
    const int id = plan->add(rule);
    const Status status =
        context.try_backward({loss}, {.retain_graph = true, .deadline = Timeout(200ms)});
    expect_clear(status, one.failing);
    const bool was_hit = plan->hits(id) > 0;
    if (was_hit) {
      EXPECT_FALSE(status.ok());
    }
    EXPECT_EQ(counter((*c)[0], "num_current_backward_passes"), 0);
    expect_no_pass_soon(*c);
    EXPECT_EQ(context.gradients().empty(), !status.ok());
    // No other worker notices.
    EXPECT_EQ(rpc_sync((*c)[1], "worker1", &in_context), false);
    if (one.heal) {
      plan->clear();
      if (!one.failing) {
        const at::Tensor before = status.ok() ? context.gradient(x).clone() : torch::zeros_like(x);
        context.backward({loss}, {.retain_graph = true});
        expect_equal(context.gradient(x), (before + 2 * x).detach());
      }
      EXPECT_TRUE(context.release().try_wait(20s).ok());
      expect_nothing_left(*c);
      return;
    }
    rule.skip = 0;
    plan->add(rule);
    const Future<void> released = context.release();
    const auto results = c->shutdown_all({.deadline = 1s});
    const size_t sender = one.back ? 1 : 0;
    // What worker1 could not say is the end of the pass; the release only wants its answer.
    if (sender == 0 || was_hit) {
      expect_error(results[sender].status, ErrorKind::kDeadline, {(*c)[sender].name()});
    }
    EXPECT_TRUE(released.done() || sender == 1) << "nobody waits for ever";
    plan->clear();
  }
};

TEST_P(DistForever, X6_a_way_that_is_cut_for_ever) {
  std::vector<std::thread> threads;
  for (const bool heal : {true, false}) {
    for (const bool back : {false, true}) {
      for (const int64_t skip : {0, 1, 2}) {
        for (const bool failing : {false, true}) {
          threads.emplace_back(
              [=, this] { play({.back = back, .skip = skip, .failing = failing, .heal = heal}); });
        }
      }
    }
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }
}

INSTANTIATE_TEST_SUITE_P(Nets, DistLost, ::testing::ValuesIn(nets()), net_name);
INSTANTIATE_TEST_SUITE_P(Nets, DistForever, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
