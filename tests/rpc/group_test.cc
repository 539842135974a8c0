// Gatherings that fail, members that come back: a member that tries again must meet the others.

#include "weft/rpc/group.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/common/sim.h"
#include "weft/tests/testing/cluster.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

class RpcGroup : public ::testing::Test {
 protected:
  ClusterOptions options(int size) { return {.size = size, .runtime = sim_}; }
  // A barrier of all, by each of these; what each was told.
  std::vector<Status> meet(Cluster* c, const std::vector<size_t>& who, Timeout timeout) {
    std::vector<Status> out(who.size());
    std::vector<std::unique_ptr<Thread>> threads;
    for (size_t i = 0; i < who.size(); ++i) {
      threads.push_back(sim_->spawn("meet", [&, i] {
        try {
          barrier((*c)[who[i]], {}, timeout);
        } catch (const Error& e) {
          out[i] = e.status();
        }
      }));
    }
    return out;
  }
  void expect_met(Cluster* c, const std::vector<size_t>& who) {
    for (const Status& s : meet(c, who, 20s)) EXPECT_TRUE(s.ok()) << s;
  }
  void run(const std::function<void()>& body) {
    const Status ended = sim_->run(body);
    EXPECT_TRUE(ended.ok()) << ended;
  }

  std::shared_ptr<SimRuntime> sim_ = std::make_shared<SimRuntime>(SimOptions{.seed = 6});
};

TEST_F(RpcGroup, DEF_6_a_member_that_was_restarted_meets_the_others) {
  run([&] {
    ClusterOptions o = options(0);
    o.size = 3;
    o.names = {"a", "b", "c"};
    o.dynamic = true;
    Cluster c(o);
    const auto wait_for_all = [&](const std::vector<size_t>& who) {
      for (size_t i : who) {
        while (c[i].worker_infos().size() != who.size()) sim_->sleep(absl::Milliseconds(10));
      }
    };
    wait_for_all({0, 1, 2});
    for (int i = 0; i < 3; ++i) expect_met(&c, {0, 1, 2});
    // Not the leader, then the leader.
    EXPECT_TRUE(c[2].shutdown().status.ok());
    wait_for_all({0, 1});
    c.add("c");
    wait_for_all({0, 1, 3});
    for (int i = 0; i < 2; ++i) expect_met(&c, {0, 1, 3});
    EXPECT_TRUE(c[0].shutdown().status.ok());
    wait_for_all({1, 3});
    c.add("a");
    wait_for_all({1, 3, 4});
    for (int i = 0; i < 2; ++i) expect_met(&c, {1, 3, 4});
  });
}

TEST_F(RpcGroup, DEF_6_who_is_late_fails_once_and_meets_those_who_tried_again) {
  for (size_t late = 0; late < 3; ++late) {
    run([&] {
      Cluster c(options(3));
      expect_met(&c, {0, 1, 2});
      std::vector<size_t> punctual;
      for (size_t i = 0; i < 3; ++i) {
        if (i != late) punctual.push_back(i);
      }
      for (int i = 0; i < 5; ++i) {
        for (const Status& s : meet(&c, punctual, 300ms)) {
          EXPECT_EQ(error_kind(s), ErrorKind::kDeadline) << s;
        }
      }
      // It makes the call that the others made first: that gathering is over.
      const absl::Time begin = sim_->now();
      const Status told = meet(&c, {late}, 20s)[0];
      EXPECT_EQ(error_kind(told), ErrorKind::kDeadline) << told;
      EXPECT_NE(std::string(told.message()).find("is over"), std::string::npos) << told;
      EXPECT_LT(sim_->now() - begin, absl::Seconds(1)) << "it is told at once";
      for (int i = 0; i < 3; ++i) expect_met(&c, {0, 1, 2});
    });
  }
}

// However often; what is remembered has a bound.
TEST_F(RpcGroup, DEF_6_a_hundred_failures_are_made_good_by_one_more) {
  run([&] {
    Cluster c(options(2));
    for (int i = 0; i < 100; ++i) {
      EXPECT_EQ(error_kind(meet(&c, {0}, 50ms)[0]), ErrorKind::kDeadline);
    }
    EXPECT_FALSE(meet(&c, {1}, 20s)[0].ok());
    expect_met(&c, {0, 1});
  });
}

TEST_F(RpcGroup, AGatheringWaitsForAMemberThatHasNotJoinedYet) {
  run([&] {
    ClusterOptions o = options(0);
    o.size = 1;
    o.names = {"a"};
    o.dynamic = true;
    Cluster c(o);
    auto early = sim_->spawn("early", [&] { barrier(c[0], {"a", "b"}, 20s); });
    sim_->sleep(absl::Seconds(2));
    JoinOptions j = c.join_options(1, "b");
    Worker b = Worker::join(j);
    barrier(b, {"a", "b"}, 20s);
    early->join();
    try {
      barrier(b, {"b", "never"}, 1s);
      ADD_FAILURE() << "there is no such worker";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kDeadline) << e.what();
      EXPECT_NE(e.message().find("'never'"), std::string::npos) << e.what();
    }
    b.shutdown();
  });
}

}  // namespace
}  // namespace weft::testing
