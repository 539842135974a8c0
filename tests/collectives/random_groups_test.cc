// Random operations on random overlapping groups, by seed: threads as ranks, so that the
// sanitizers see all of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "weft/tests/collectives/world.h"
#include "weft/tests/testing/environment.h"

namespace weft::testing {
namespace {

// What all ranks do, in this order; each of them takes part in what it is a member of.
struct Event {
  enum class Kind { kMake, kDrop, kAllReduce, kBroadcast, kAllGather, kReduceScatter, kSend };
  Kind kind = Kind::kAllReduce;
  size_t group = 0;        // 0: the world; kMake: the number of the new one
  std::vector<int> ranks;  // of the group, by rank in the world
  int64_t elements = 0;
  bool is_async = false;
  Algorithm algorithm = Algorithm::kAuto;
};

std::vector<Event> plan(uint64_t seed, int size, int count) {
  std::mt19937_64 random(seed);
  const auto below = [&random](size_t n) { return static_cast<size_t>(random() % n); };
  std::vector<int> everyone;
  for (int r = 0; r < size; ++r) everyone.push_back(r);
  std::vector<std::vector<int>> groups{everyone};  // empty: dropped
  std::vector<Event> out;
  for (int i = 0; i < count; ++i) {
    Event next;
    const size_t what = below(10);
    if (what == 0) {
      next.kind = Event::Kind::kMake;
      next.group = groups.size();
      std::vector<int> shuffled = everyone;
      std::shuffle(shuffled.begin(), shuffled.end(), random);
      shuffled.resize(1 + below(shuffled.size()));
      groups.push_back(shuffled);
    } else {
      next.group = below(groups.size());
      if (groups[next.group].empty()) next.group = 0;
      next.kind = static_cast<Event::Kind>(2 + below(5));
      if (what == 1 && next.group != 0) next.kind = Event::Kind::kDrop;
    }
    next.ranks = groups[next.group];
    if (next.kind == Event::Kind::kDrop) groups[next.group].clear();
    const int64_t sizes[] = {0, 1, 5, 1000, 70'000};
    next.elements = sizes[below(std::size(sizes))];
    next.is_async = below(2) == 0;
    next.algorithm = static_cast<Algorithm>(below(static_cast<size_t>(Algorithm::kDoubleTree) + 1));
    const Algorithm broadcasts[] = {Algorithm::kAuto, Algorithm::kBinomialTree,
                                    Algorithm::kScatterAllGather};
    const Algorithm gathers[] = {Algorithm::kAuto, Algorithm::kRing, Algorithm::kBruck,
                                 Algorithm::kRecursiveDoubling};
    const Algorithm reduces[] = {Algorithm::kAuto, Algorithm::kRing, Algorithm::kRecursiveHalving};
    if (next.kind == Event::Kind::kBroadcast) next.algorithm = broadcasts[below(3)];
    if (next.kind == Event::Kind::kAllGather) next.algorithm = gathers[below(4)];
    if (next.kind == Event::Kind::kReduceScatter) next.algorithm = reduces[below(3)];
    out.push_back(next);
  }
  return out;
}

// One rank's part. What was begun is awaited behind the next event, so that operations of several
// groups are under way at the same time.
class Actor {
 public:
  explicit Actor(ProcessGroup& world) : rank_(world.rank()), groups_{world} {}

  void act(const Event& event) {
    const auto at = std::find(event.ranks.begin(), event.ranks.end(), rank_);
    if (groups_.size() <= event.group) groups_.resize(event.group + 1);
    if (at == event.ranks.end()) return;
    ProcessGroup& group = groups_[event.group];
    if (event.kind == Event::Kind::kMake) {
      group = groups_[0].new_group(event.ranks, {.name = "g" + std::to_string(event.group)});
      return;
    }
    finish();
    if (event.kind == Event::Kind::kDrop) {
      group = ProcessGroup();
      return;
    }
    operate(group, event, static_cast<int>(at - event.ranks.begin()));
  }
  void finish() {
    if (pending_.valid()) pending_.wait();
    pending_ = Work();
    if (result_.defined()) {
      EXPECT_TRUE(at::equal(result_, expected_)) << "rank " << rank_;
    }
    result_ = at::Tensor();
  }

 private:
  void operate(ProcessGroup& group, const Event& event, int place) {
    const int size = group.size();
    const int64_t n = event.elements;
    const double sum = size * (size + 1) / 2.0;
    const at::Tensor mine = at::full({n}, place + 1.0);
    result_ = mine;
    switch (event.kind) {
      case Event::Kind::kAllReduce:
        expected_ = at::full({n}, sum);
        pending_ = group.all_reduce_async(mine, {.algorithm = event.algorithm});
        break;
      case Event::Kind::kBroadcast:
        expected_ = at::full({n}, static_cast<double>(size));
        pending_ = group.broadcast_async(mine, {.root = size - 1, .algorithm = event.algorithm});
        break;
      case Event::Kind::kAllGather: {
        result_ = at::empty({size, n});
        expected_ = at::empty({size, n});
        for (int r = 0; r < size; ++r) expected_[r].fill_(r + 1.0);
        pending_ =
            group.all_gather_into_tensor_async(result_, mine, {.algorithm = event.algorithm});
        break;
      }
      case Event::Kind::kReduceScatter:
        result_ = at::empty({n});
        expected_ = at::full({n}, sum);
        pending_ = group.reduce_scatter_tensor_async(result_, at::full({n * size}, place + 1.0),
                                                     {.algorithm = event.algorithm});
        break;
      default: {  // round in a ring
        const int next = (place + 1) % size;
        const int previous = (place + size - 1) % size;
        result_ = at::empty({n});
        expected_ = at::full({n}, previous + 1.0);
        if (size == 1) {
          result_ = at::Tensor();
          return;
        }
        const Work sent = group.send_async(mine, next);
        pending_ = group.recv_async(result_, previous);
        sent.wait();
      }
    }
    if (!event.is_async) finish();
  }

  const int rank_;
  std::vector<ProcessGroup> groups_;
  Work pending_;
  at::Tensor result_;
  at::Tensor expected_;
};

class CollectiveRandom : public ::testing::TestWithParam<Backend> {};

TEST_P(CollectiveRandom, CL_3_operations_on_overlapping_groups) {
  const auto plans =
      weft::testing::environment_number<uint64_t>("WEFT_COLLECTIVES_RANDOM_PLANS", 2);
  for (uint64_t seed = 1; seed <= plans && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const int size = 2 + static_cast<int>(seed % 3);
    const std::vector<Event> events = plan(seed, size, 60);
    const World world(GetParam(), size);
    world.run([&](ProcessGroup& group) {
      Actor actor(group);
      for (const Event& event : events) actor.act(event);
      actor.finish();
    });
    EXPECT_EQ(*world.store->num_keys(), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, CollectiveRandom,
                         ::testing::Values(Backend::kInproc, Backend::kShm, Backend::kTcp),
                         [](const auto& info) { return setting_text(info.param); });

}  // namespace
}  // namespace weft::testing
