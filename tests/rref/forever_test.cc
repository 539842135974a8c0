// X6: a control item of each kind that never gets through. What needs it waits or fails by its
// deadline; nothing else does, no process ends, and a shutdown says so in its time. Once the way is
// free again nothing is left.

#include <functional>

#include "weft/tests/rref/fixture.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

const FunctionRef<int64_t(IntRef)> kHold{"own.fetch_at_gate"};

class RRefForever : public RRefTest {
 protected:
  // Control items go as calls; calls of the worker that is cut off fail before they are sent.
  // The first `skip` come through.
  int cut_off(const std::string& from, const std::string& to, int64_t skip = 0) {
    return plan_->add({.fault = Fault::kFailBefore,
                       .kind = FrameKind::kRequest,
                       .from = from,
                       .to = to,
                       .skip = skip});
  }
  void wait_hit(const Worker& worker, int rule) {
    eventually(
        worker, [&] { return plan_->hits(rule) > 2; }, "the item was tried, and again");
  }
  // `scene` leaves the way cut off, and one item of the sender on it.
  void both(size_t sender, const std::function<void(Cluster&)>& scene) {
    for (const bool heal : {true, false}) {
      lib_ = RRefLibrary();
      auto c = make({.plan = plan_, .fail_on_leak = false});
      for (size_t i = 0; i < 3; ++i) {
        for (int to = 0; to < 3; ++to) rpc_sync((*c)[i], to, &add, 1, 1);
      }
      scene(*c);
      // Others do not notice.
      EXPECT_EQ(remote((*c)[0], 0, &add, 1, 2).to_here(), 3);
      eventually((*c)[sender], [&] { return counter((*c)[sender], "rref_unacknowledged") > 0; },
                 "the item is still to be sent");
      if (heal) {
        plan_->clear();
        expect_nothing_left(*c);
        c->shutdown();
        continue;
      }
      const auto results = c->shutdown_all({.deadline = 1s});
      expect_error(results[sender].status, ErrorKind::kDeadline, {(*c)[sender].name()});
      plan_->clear();
    }
  }
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>(5);
};

TEST_P(RRefForever, X6_delete) {
  both(0, [this](Cluster& c) {
    auto x = remote<Table>(c[0], 1, 5);
    EXPECT_EQ(x.rpc_sync(&Table::rows), 5);
    const int rule = cut_off("worker0", "worker1");
    x.reset();
    wait_hit(c[0], rule);
    EXPECT_EQ(counter(c[1], "rref_values"), 1);
    EXPECT_EQ(remote(c[2], 1, &add, 1, 2).to_here(), 3);
  });
}

TEST_P(RRefForever, X6_known) {
  both(1, [this](Cluster& c) {
    const int rule = cut_off("worker1", "worker0");
    const auto x = remote(c[0], 1, kOwnWaitAtGate);
    wait_hit(c[1], rule);
    lib_.hold->open();
    EXPECT_EQ(x.to_here(), 7) << "its answer says the same";
    eventually(
        c[0], [&] { return x.confirmed_by_owner(); }, "the answer of the creation");
  });
}

TEST_P(RRefForever, X6_abandon) {
  both(0, [this](Cluster& c) {
    // Only what neither `known` nor an answer has confirmed is abandoned.
    const int unknown = cut_off("worker1", "worker0");
    const int rule = cut_off("worker0", "worker1", 1);  // behind the creation
    const auto x = remote(c[0], 1, {.deadline = 100ms}, kOwnWaitAtGate);
    lib_.hold->wait_arrived(1);
    wait_hit(c[0], rule);  // nothing else is on its way there
    EXPECT_GT(counter(c[0], "rref_unacknowledged"), 0);
    expect_error(x.try_to_here().status(), ErrorKind::kDeadline, {"100ms"});
    plan_->remove(unknown);
    EXPECT_EQ(counter(c[1], "rref_owners"), 1);
    lib_.hold->open();
  });
}

TEST_P(RRefForever, X6_fork) {
  both(2, [this](Cluster& c) {
    const auto x = remote(c[0], 1, &add, 1, 2);
    EXPECT_EQ(x.to_here(), 3);
    const int rule = cut_off("worker2", "worker1");
    const Status s = try_rpc_sync(c[0], 2, {.deadline = 200ms}, &fetch, x).status();
    EXPECT_EQ(error_kind(s), ErrorKind::kDeadline) << s;
    wait_hit(c[2], rule);
    EXPECT_EQ(x.to_here(), 3);
  });
}

TEST_P(RRefForever, X6_accept) {
  both(2, [this](Cluster& c) {
    const auto x = remote(c[0], 1, &add, 1, 2);
    const int rule = cut_off("worker2", "worker0");
    const auto held = rpc_async(c[0], 2, kHold, x);
    wait_hit(c[2], rule);
    lib_.hold->open();
    EXPECT_EQ(held.wait(), 3) << "its answer says the same";
  });
}

TEST_P(RRefForever, X6_audit) {
  both(1, [this](Cluster& c) {
    plan_->add({.fault = Fault::kCut, .kind = FrameKind::kResponse, .from = "worker1", .times = 1});
    const int rule = cut_off("worker1", "worker0");
    const auto lost = try_rpc_sync(c[0], 1, &make_here, 5);
    EXPECT_EQ(error_kind(lost.status()), ErrorKind::kMaybeExecuted) << lost.status();
    rpc_sync(c[0], 1, &add, 1, 1);
    wait_hit(c[1], rule);
    EXPECT_EQ(counter(c[1], "rref_forks"), 1);
  });
}

INSTANTIATE_TEST_SUITE_P(Nets, RRefForever, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
