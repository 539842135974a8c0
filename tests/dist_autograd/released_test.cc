// DEF_30: what is remembered of contexts that were released, and of workers that are gone.

#include "weft/dist_autograd/internal/released.h"

#include <algorithm>
#include <random>
#include <thread>

#include "weft/common/gone_workers.h"
#include "weft/tests/dist_autograd/fixture.h"

namespace weft::testing {
namespace {

using internal::GoneWorkers;
using internal::Released;

struct Message {
  uint64_t counter = 0;
  uint64_t below = 0;
  std::vector<uint64_t> alive{};
};

// A creator that makes and releases contexts, and messages that arrive in any order, some twice.
TEST(AutogradReleased, DEF_30_any_order_says_the_same_and_no_living_context_is_released) {
  for (uint32_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&random](size_t n) { return static_cast<size_t>(random() % n); };
    const size_t cap = 1 + below(6);
    std::vector<uint64_t> alive;
    std::vector<Message> under_way;
    Released released;
    uint64_t last = 0;
    const auto deliver = [&](size_t at) {
      const Message m = under_way[at];
      if (below(4) > 0) under_way.erase(under_way.begin() + static_cast<std::ptrdiff_t>(at));
      released.add_below(m.below, m.alive);
      released.add(m.counter);
      EXPECT_TRUE(released.contains(m.counter));
      for (const uint64_t one : alive) EXPECT_FALSE(released.contains(one)) << one;
      EXPECT_FALSE(released.contains(last + 1));
    };
    for (int step = 0; step < 200; ++step) {
      if (alive.empty() || below(2) == 0) alive.push_back(++last);
      if (below(2) == 0) {
        const size_t which = below(alive.size());
        Message m{alive[which], last + 1, {}};
        alive.erase(alive.begin() + static_cast<std::ptrdiff_t>(which));
        for (const uint64_t one : alive) {
          if (m.alive.size() == cap) {
            m.below = one;
            break;
          }
          m.alive.push_back(one);
        }
        under_way.push_back(m);
      }
      if (!under_way.empty() && below(2) == 0) deliver(below(under_way.size()));
    }
    while (!under_way.empty()) deliver(below(under_way.size()));
    for (uint64_t one = 1; one <= last; ++one) {
      EXPECT_EQ(released.contains(one), std::count(alive.begin(), alive.end(), one) == 0) << one;
    }
    EXPECT_LE(released.alive().size(), cap);
  }
}

TEST(AutogradReleased, DEF_30_the_last_workers_that_are_gone_are_remembered) {
  GoneWorkers gone;
  constexpr uint64_t kWorkers = 3 * GoneWorkers::kMost;
  for (uint64_t i = 1; i <= kWorkers; ++i) {
    EXPECT_TRUE(gone.add(Incarnation(i * 77), "it died"));
    EXPECT_FALSE(gone.add(Incarnation(i * 77), "again"));
    EXPECT_EQ(gone.why(Incarnation(i * 77)), "it died");
  }
  EXPECT_EQ(gone.size(), GoneWorkers::kMost);
  EXPECT_EQ(gone.all().size(), GoneWorkers::kMost);
  EXPECT_TRUE(gone.contains(Incarnation(kWorkers * 77)));
  EXPECT_FALSE(gone.contains(Incarnation(77)));
  EXPECT_EQ(gone.why(Incarnation(77)), "");
}

class DistReleased : public DistAutogradTest {};

// One context lives as long as its trainer; each step has one of its own, and not all of them reach
// worker1.
TEST_P(DistReleased, DEF_30_a_long_lived_context_leaves_no_tombstones) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  {
    const DistAutogradContext lasting((*c)[0]);
    rpc_sync((*c)[0], "worker1", &identity, x);
    // A thread is in one context at a time.
    std::thread([&] {
      EXPECT_NO_THROW({
        for (int i = 0; i < 1000; ++i) {
          const DistAutogradContext context((*c)[0]);
          if (i % 3 > 0) rpc_sync((*c)[0], "worker1", &identity, x);
        }
      });
    }).join();
    // The lasting one itself.
    eventually([&] { return counter((*c)[1], "num_autograd_contexts") == 1; }, "releases");
    EXPECT_EQ(counter((*c)[1], "autograd_tombstones"), 1);
    EXPECT_EQ(counter((*c)[0], "autograd_tombstones"), 0);
  }
  expect_nothing_left(*c);
  EXPECT_LE(counter((*c)[1], "autograd_tombstones"), 1);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistReleased, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
