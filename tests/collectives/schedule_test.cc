// Schedules by themselves: a small machine runs those of all ranks on vectors of integers, and
// counts.
#include "weft/collectives/internal/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace weft::internal {
namespace {

struct Counts {
  uint64_t messages = 0;
  uint64_t elements = 0;
};

using Memory = std::vector<int64_t>;

// Runs the schedules of all ranks to the end. Fails where two ranks wait for each other, or what
// is sent and what is received differ in length (SCHED-1).
Counts run(const std::vector<Schedule>& schedules, std::vector<Memory>* work,
           const std::vector<Memory>& input = {}) {
  const size_t size = schedules.size();
  Counts counts;
  std::map<std::pair<size_t, size_t>, std::deque<Memory>> under_way;
  std::vector<size_t> at(size, 0);
  std::vector<bool> sent(size, false);
  bool moved = true;
  while (moved) {
    moved = false;
    for (size_t r = 0; r < size; ++r) {
      if (at[r] == schedules[r].rounds.size()) continue;
      const Round& round = schedules[r].rounds[at[r]];
      Memory& mine = (*work)[r];
      if (!sent[r]) {
        for (const Step& s : round.steps) {
          const auto begin = static_cast<ptrdiff_t>(s.begin);
          const auto end = static_cast<ptrdiff_t>(s.begin + s.count);
          if (s.kind == Step::Kind::kCopy) {
            const auto from = static_cast<ptrdiff_t>(s.input_begin);
            const Memory& source = s.from == Buffer::kWork ? mine : input[r];
            std::copy_n(source.begin() + from, s.count, mine.begin() + begin);
          }
          if (s.kind != Step::Kind::kSend) continue;
          const Memory& from = s.from == Buffer::kWork ? mine : input[r];
          under_way[{r, static_cast<size_t>(s.peer)}].emplace_back(from.begin() + begin,
                                                                   from.begin() + end);
          ++counts.messages;
          counts.elements += s.count;
        }
        sent[r] = true;
        moved = true;
      }
      bool ready = true;
      for (const Step& s : round.steps) {
        if (s.kind != Step::Kind::kStore && s.kind != Step::Kind::kReduce) continue;
        ready = ready && !under_way[{static_cast<size_t>(s.peer), r}].empty();
      }
      if (!ready) continue;
      for (const Step& s : round.steps) {
        if (s.kind != Step::Kind::kStore && s.kind != Step::Kind::kReduce) continue;
        auto& queue = under_way[{static_cast<size_t>(s.peer), r}];
        const Memory message = queue.front();
        queue.pop_front();
        EXPECT_EQ(message.size(), s.count) << "from " << s.peer << " to " << r;
        if (message.size() != s.count) return counts;
        for (size_t i = 0; i < message.size(); ++i) {
          int64_t& to = mine[s.begin + i];
          to = s.kind == Step::Kind::kStore ? message[i] : to + message[i];
        }
      }
      ++at[r];
      sent[r] = false;
      moved = true;
    }
  }
  for (size_t r = 0; r < size; ++r) {
    EXPECT_EQ(at[r], schedules[r].rounds.size()) << "rank " << r << " waits for ever";
  }
  for (const auto& [pair, queue] : under_way) {
    EXPECT_TRUE(queue.empty()) << "from " << pair.first << " to " << pair.second;
  }
  return counts;
}

uint64_t log2_ceil(uint64_t n) {
  uint64_t steps = 0;
  while ((uint64_t{1} << steps) < n) ++steps;
  return steps;
}

// Factors of p with the fewest steps, by trying all.
std::vector<uint64_t> factors_of(uint64_t p, int count) {
  if (count == 1) return {p};
  std::vector<uint64_t> best;
  for (uint64_t d = 1; d <= p; ++d) {
    if (p % d != 0) continue;
    std::vector<uint64_t> next = factors_of(p / d, count - 1);
    next.push_back(d);
    const auto sum = [](const std::vector<uint64_t>& all) {
      return std::accumulate(all.begin(), all.end(), uint64_t{0});
    };
    if (best.empty() || sum(next) < sum(best)) best = next;
  }
  return best;
}

// The formulas of docs/collectives.md.
Counts all_reduce_formula(Algorithm algorithm, uint64_t p, uint64_t n, uint64_t hosts) {
  uint64_t q = 1;
  while (q * 2 <= p) q *= 2;
  const uint64_t r = p - q;
  const uint64_t lg = log2_ceil(q);
  const auto steps = [p](int dimensions) {
    uint64_t out = 0;
    for (const uint64_t x : factors_of(p, dimensions)) out += x - 1;
    return out;
  };
  const bool prime = steps(2) == p - 1;
  const uint64_t least = 2 * (p - 1) * n;
  switch (algorithm) {
    case Algorithm::kNaive: return {p * (p - 1), p * (p - 1) * n};
    case Algorithm::kStar:
    case Algorithm::kReduceBroadcast: return {2 * (p - 1), least};
    case Algorithm::kRecursiveDoubling: return {q * lg + 2 * r, n * (q * lg + 2 * r)};
    case Algorithm::kHalvingDoubling: return {2 * q * lg + 2 * r, least};
    case Algorithm::kSegmentedRing: return {2 * p * (p - 1) * 4, least};
    case Algorithm::kTorus: return {2 * p * steps(2), least};
    case Algorithm::kTorus3D: return {2 * p * steps(3), least};
    case Algorithm::kMesh: return {(prime ? 2 : 4) * p * steps(2), least};
    case Algorithm::kHierarchicalRing: return {2 * (p - hosts) + 2 * hosts * (hosts - 1), least};
    case Algorithm::kDoubleTree: return {4 * (p - 1) * 4, least};
    default: return {2 * p * (p - 1), least};
  }
}

constexpr Algorithm kReducing[] = {Algorithm::kNaive,           Algorithm::kStar,
                                   Algorithm::kReduceBroadcast, Algorithm::kRecursiveDoubling,
                                   Algorithm::kHalvingDoubling, Algorithm::kRing,
                                   Algorithm::kSegmentedRing,   Algorithm::kTorus,
                                   Algorithm::kTorus3D,         Algorithm::kMesh,
                                   Algorithm::kDoubleTree,      Algorithm::kHierarchicalRing};

// Every rank has the sum; messages and elements are those of the formula.
void expect_counts(Algorithm algorithm, int p, uint64_t n, const Topology& topology = {}) {
  SCOPED_TRACE(std::string(algorithm_name(static_cast<uint8_t>(algorithm))) + ", " +
               std::to_string(p) + " ranks on " + std::to_string(topology.hosts()) + " hosts, " +
               std::to_string(n) + " elements");
  std::vector<Schedule> schedules;
  std::vector<Memory> work;
  Memory sum(n, 0);
  for (int r = 0; r < p; ++r) {
    schedules.push_back(all_reduce_schedule(algorithm, r, p, n, topology));
    work.emplace_back(n);
    for (uint64_t i = 0; i < n; ++i) {
      work.back()[i] = static_cast<int64_t>(i * 7 + 1) << (r % 40);
      sum[i] += work.back()[i];
    }
  }
  const Counts counts = run(schedules, &work);
  for (const Memory& one : work) EXPECT_EQ(one, sum);
  const Counts wanted = all_reduce_formula(algorithm, static_cast<uint64_t>(p), n,
                                           static_cast<uint64_t>(topology.hosts()));
  EXPECT_EQ(counts.messages, p == 1 ? 0 : wanted.messages);
  EXPECT_EQ(counts.elements, p == 1 ? 0 : wanted.elements);
}

TEST(Schedules, CL_2_messages_and_bytes) {
  for (const Algorithm algorithm : kReducing) {
    for (int p = 1; p <= 13; ++p) {
      for (const uint64_t n : {0u, 1u, 7u, 64u, 101u}) expect_counts(algorithm, p, n);
    }
  }
  for (const int p : {16, 18, 24, 27, 30, 32, 48, 49, 64}) {
    for (const Algorithm algorithm :
         {Algorithm::kTorus, Algorithm::kTorus3D, Algorithm::kMesh, Algorithm::kDoubleTree}) {
      for (const uint64_t n : {5u, 101u}) expect_counts(algorithm, p, n);
    }
  }
}

TEST(Schedules, CL_2_a_hierarchical_ring_over_hosts_of_any_sizes) {
  for (int p = 1; p <= 10; ++p) {
    for (int hosts = 1; hosts <= p; ++hosts) {
      std::vector<std::string> in_turn;  // neighbouring ranks on different hosts
      std::vector<std::string> uneven;   // the last host has all that are left
      for (int r = 0; r < p; ++r) {
        in_turn.push_back("host " + std::to_string(r % hosts));
        uneven.push_back("host " + std::to_string(std::min(r, hosts - 1)));
      }
      for (const uint64_t n : {0u, 3u, 101u}) {
        expect_counts(Algorithm::kHierarchicalRing, p, n, Topology::of(in_turn));
        expect_counts(Algorithm::kHierarchicalRing, p, n, Topology::of(uneven));
      }
    }
  }
  EXPECT_EQ(Topology::of({"a", "", "a", ""}).host, (std::vector<int>{0, 1, 0, 2}));
}

// Ranks that have children in one of the two trees have none in the other one: no rank sends and
// receives more than the elements of a buffer in each direction, and one message.
TEST(Schedules, TheTwoTreesShareTheWork) {
  for (int p = 2; p <= 40; ++p) {
    const uint64_t n = 800;
    for (int r = 0; r < p; ++r) {
      uint64_t sent = 0;
      size_t last = 0;
      for (const Round& round : all_reduce_schedule(Algorithm::kDoubleTree, r, p, n).rounds) {
        for (const Step& s : round.steps) sent += s.kind == Step::Kind::kSend ? s.count : 0;
        ++last;
      }
      EXPECT_LE(sent, 2 * n) << "rank " << r << " of " << p;
      EXPECT_LE(last, 2 * (log2_ceil(static_cast<uint64_t>(p)) + 1) + 2 * 4)
          << "rank " << r << " of " << p;
    }
  }
}

TEST(Schedules, EveryAlgorithmSaysByWhichScheduleItRuns) {
  const Topology one;
  const Topology two{{0, 0, 1, 1}};
  EXPECT_EQ(effective_all_reduce(Algorithm::kTorus, 7, one), Algorithm::kRing);
  EXPECT_EQ(effective_all_reduce(Algorithm::kMesh, 7, one), Algorithm::kRing);
  EXPECT_EQ(effective_all_reduce(Algorithm::kMesh, 6, one), Algorithm::kMesh);
  EXPECT_EQ(effective_all_reduce(Algorithm::kTorus3D, 6, one), Algorithm::kTorus);
  EXPECT_EQ(effective_all_reduce(Algorithm::kTorus3D, 5, one), Algorithm::kRing);
  EXPECT_EQ(effective_all_reduce(Algorithm::kTorus3D, 12, one), Algorithm::kTorus3D);
  EXPECT_EQ(effective_all_reduce(Algorithm::kHierarchicalRing, 4, one),
            Algorithm::kReduceBroadcast);
  EXPECT_EQ(effective_all_reduce(Algorithm::kHierarchicalRing, 4, two),
            Algorithm::kHierarchicalRing);
  EXPECT_EQ(effective_all_reduce(Algorithm::kHierarchicalRing, 4, Topology{{0, 1, 2, 3}}),
            Algorithm::kRing);
}

TEST(Schedules, CL_2_and_G5_of_the_other_operations) {
  for (int p = 1; p <= 9; ++p) {
    const auto ranks = static_cast<uint64_t>(p);
    std::vector<uint64_t> lengths;
    for (int r = 0; r < p; ++r) lengths.push_back(static_cast<uint64_t>((r * 5) % 7));
    const Blocks blocks = Blocks::of(lengths);
    const uint64_t n = blocks.total();
    const auto each = [&](auto make) {
      std::vector<Schedule> out;
      for (int r = 0; r < p; ++r) out.push_back(make(r));
      return out;
    };
    const Memory zeros(n, 0);
    Memory ramp(n);
    std::iota(ramp.begin(), ramp.end(), 1);
    {
      std::vector<Memory> work(ranks, zeros);
      for (int r = 0; r < p; ++r) {
        for (uint64_t i = 0; i < blocks.length(r); ++i) {
          work[static_cast<size_t>(r)][blocks.begin(r) + i] = ramp[blocks.begin(r) + i];
        }
      }
      const Counts c = run(each([&](int r) { return all_gather_schedule(r, p, blocks); }), &work);
      for (const Memory& one : work) EXPECT_EQ(one, ramp);
      EXPECT_EQ(c.messages, ranks * (ranks - 1));
      EXPECT_EQ(c.elements, (ranks - 1) * n);
    }
    {
      std::vector<Memory> work(ranks, ramp);
      const Counts c =
          run(each([&](int r) { return reduce_scatter_schedule(r, p, blocks); }), &work);
      for (int r = 0; r < p; ++r) {
        for (uint64_t i = blocks.begin(r); i < blocks.begin(r) + blocks.length(r); ++i) {
          EXPECT_EQ(work[static_cast<size_t>(r)][i], ramp[i] * p);
        }
      }
      EXPECT_EQ(c.messages, ranks * (ranks - 1));
      EXPECT_EQ(c.elements, (ranks - 1) * n);
    }
    for (int root = 0; root < p; ++root) {
      std::vector<Memory> work(ranks, zeros);
      work[static_cast<size_t>(root)] = ramp;
      Counts c = run(each([&](int r) { return broadcast_schedule(r, p, n, root); }), &work);
      for (const Memory& one : work) EXPECT_EQ(one, ramp);
      EXPECT_EQ(c.messages, ranks - 1);
      EXPECT_EQ(c.elements, (ranks - 1) * n);
      c = run(each([&](int r) { return reduce_schedule(r, p, n, root); }), &work);
      for (uint64_t i = 0; i < n; ++i) {
        EXPECT_EQ(work[static_cast<size_t>(root)][i], ramp[i] * p);
      }
      EXPECT_EQ(c.messages, ranks - 1);
    }
    {
      std::vector<Memory> none(ranks);
      const Counts c = run(each([&](int r) { return barrier_schedule(r, p); }), &none);
      EXPECT_EQ(c.messages, ranks * log2_ceil(ranks));
      EXPECT_EQ(c.elements, 0u);
    }
  }
}

template <class F>
std::vector<Schedule> of_all_ranks(int p, F make) {
  std::vector<Schedule> out;
  for (int r = 0; r < p; ++r) out.push_back(make(r));
  return out;
}

// Lengths that differ, some of them 0.
Blocks uneven_blocks(int p) {
  std::vector<uint64_t> lengths;
  for (int r = 0; r < p; ++r) lengths.push_back(static_cast<uint64_t>((r * 5) % 7));
  return Blocks::of(lengths);
}

Memory ramp_of(uint64_t n) {
  Memory out(n);
  std::iota(out.begin(), out.end(), 1);
  return out;
}

TEST(Schedules, CL_2_all_gather_and_reduce_scatter_in_few_messages) {
  for (int p = 1; p <= 17; ++p) {
    SCOPED_TRACE(std::to_string(p) + " ranks");
    const auto ranks = static_cast<uint64_t>(p);
    const bool power = (p & (p - 1)) == 0;
    EXPECT_EQ(effective_all_gather(Algorithm::kRecursiveDoubling, p),
              power ? Algorithm::kRecursiveDoubling : Algorithm::kBruck);
    EXPECT_EQ(effective_reduce_scatter(Algorithm::kRecursiveHalving, p),
              power ? Algorithm::kRecursiveHalving : Algorithm::kRing);
    const Blocks blocks = uneven_blocks(p);
    const Memory ramp = ramp_of(blocks.total());
    for (const Algorithm algorithm : {Algorithm::kBruck, Algorithm::kRecursiveDoubling}) {
      const bool rotates = effective_all_gather(algorithm, p) == Algorithm::kBruck;
      std::vector<Memory> work(ranks, Memory(blocks.total(), 0));
      for (int r = 0; r < p; ++r) {
        const uint64_t at = rotates ? 0 : blocks.begin(r);
        std::copy_n(ramp.begin() + static_cast<ptrdiff_t>(blocks.begin(r)), blocks.length(r),
                    work[static_cast<size_t>(r)].begin() + static_cast<ptrdiff_t>(at));
      }
      const Counts c =
          run(of_all_ranks(p, [&](int r) { return all_gather_schedule(r, p, blocks, algorithm); }),
              &work);
      for (int r = 0; r < p; ++r) {
        Memory wanted;
        for (int i = 0; i < p; ++i) {
          const int from = rotates ? (r + i) % p : i;
          for (uint64_t k = 0; k < blocks.length(from); ++k) {
            wanted.push_back(ramp[blocks.begin(from) + k]);
          }
        }
        EXPECT_EQ(work[static_cast<size_t>(r)], wanted) << "rank " << r;
      }
      EXPECT_EQ(c.messages, ranks * log2_ceil(ranks));
      EXPECT_EQ(c.elements, (ranks - 1) * blocks.total());
    }
    std::vector<Memory> work(ranks, ramp);
    const Counts c = run(of_all_ranks(p,
                                      [&](int r) {
                                        return reduce_scatter_schedule(
                                            r, p, blocks, Algorithm::kRecursiveHalving);
                                      }),
                         &work);
    for (int r = 0; r < p; ++r) {
      for (uint64_t i = blocks.begin(r); i < blocks.begin(r) + blocks.length(r); ++i) {
        EXPECT_EQ(work[static_cast<size_t>(r)][i], ramp[i] * p);
      }
    }
    EXPECT_EQ(c.messages, power ? ranks * log2_ceil(ranks) : ranks * (ranks - 1));
    EXPECT_EQ(c.elements, (ranks - 1) * blocks.total());
  }
}

// Element k of what rank a has for rank b.
int64_t from_to(int a, int b, uint64_t k) { return a * 10'000 + b * 100 + static_cast<int64_t>(k); }

TEST(Schedules, CL_2_all_to_all_by_bruck) {
  for (int p = 1; p <= 17; ++p) {
    for (const uint64_t block : {0u, 1u, 3u}) {
      SCOPED_TRACE(std::to_string(p) + " ranks, " + std::to_string(block) + " elements each");
      const auto ranks = static_cast<uint64_t>(p);
      std::vector<Memory> input(ranks);
      for (int a = 0; a < p; ++a) {
        for (int b = 0; b < p; ++b) {
          for (uint64_t k = 0; k < block; ++k) {
            input[static_cast<size_t>(a)].push_back(from_to(a, b, k));
          }
        }
      }
      std::vector<Memory> work(ranks, Memory(bruck_all_to_all_elements(p, block), -1));
      const Counts c =
          run(of_all_ranks(p, [&](int r) { return bruck_all_to_all_schedule(r, p, block); }), &work,
              input);
      uint64_t bits = 0;  // of all distances: each block travels once for each of them
      for (uint64_t d = 1; d < ranks; ++d) {
        for (uint64_t rest = d; rest != 0; rest /= 2) bits += rest % 2;
      }
      EXPECT_EQ(c.messages, ranks * log2_ceil(ranks));
      EXPECT_EQ(c.elements, ranks * bits * block);
      if ((p & (p - 1)) == 0) {
        EXPECT_EQ(c.elements, ranks * log2_ceil(ranks) * ranks * block / 2);
      }
      for (int b = 0; b < p; ++b) {
        for (int a = 0; a < p; ++a) {
          for (uint64_t k = 0; k < block; ++k) {
            ASSERT_EQ(work[static_cast<size_t>(b)][static_cast<uint64_t>(a) * block + k],
                      from_to(a, b, k))
                << "from " << a << " to " << b;
          }
        }
      }
    }
  }
}

TEST(Schedules, CL_2_trees_that_gather_scatter_and_begin_a_broadcast) {
  for (int p = 1; p <= 13; ++p) {
    const auto ranks = static_cast<uint64_t>(p);
    for (int root = 0; root < p; ++root) {
      for (const uint64_t own : {0u, 2u}) {
        SCOPED_TRACE(std::to_string(p) + " ranks, root " + std::to_string(root));
        std::vector<Memory> input(ranks);
        std::vector<Memory> work(ranks);
        Memory by_place;
        for (int i = 0; i < p; ++i) {
          for (uint64_t k = 0; k < own; ++k) by_place.push_back(from_to((root + i) % p, 0, k));
        }
        for (int r = 0; r < p; ++r) {
          for (uint64_t k = 0; k < own; ++k) {
            input[static_cast<size_t>(r)].push_back(from_to(r, 0, k));
          }
          work[static_cast<size_t>(r)].assign(
              static_cast<uint64_t>(gathered_blocks(r, p, root)) * own, -1);
        }
        Counts c =
            run(of_all_ranks(p, [&](int r) { return tree_gather_schedule(r, p, own, root); }),
                &work, input);
        EXPECT_EQ(work[static_cast<size_t>(root)], by_place);
        EXPECT_EQ(c.messages, ranks - 1);
        const uint64_t moved = c.elements;
        for (Memory& one : work) std::fill(one.begin(), one.end(), -1);
        work[static_cast<size_t>(root)] = by_place;
        c = run(of_all_ranks(p, [&](int r) { return tree_scatter_schedule(r, p, own, root); }),
                &work);
        for (int r = 0; r < p; ++r) {
          for (uint64_t k = 0; k < own; ++k) {
            EXPECT_EQ(work[static_cast<size_t>(r)][k], from_to(r, 0, k));
          }
        }
        EXPECT_EQ(c.messages, ranks - 1);
        EXPECT_EQ(c.elements, moved);
      }
      for (const uint64_t n : {0u, 1u, 7u, 64u}) {
        const Memory ramp = ramp_of(n);
        std::vector<Memory> work(ranks, Memory(n, 0));
        work[static_cast<size_t>(root)] = ramp;
        const Counts c = run(of_all_ranks(p,
                                          [&](int r) {
                                            return broadcast_schedule(r, p, n, root,
                                                                      Algorithm::kScatterAllGather);
                                          }),
                             &work);
        for (const Memory& one : work) EXPECT_EQ(one, ramp);
        EXPECT_EQ(c.messages, ranks * ranks - 1);
        EXPECT_GE(c.elements, (ranks - 1) * n);
      }
    }
  }
}

}  // namespace
}  // namespace weft::internal
