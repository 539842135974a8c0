// Schedules by themselves: a small machine runs those of all ranks on vectors of integers, and
// counts.
#include "weft/collectives/internal/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <deque>
#include <map>
#include <numeric>
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
            std::copy_n(input[r].begin() + from, s.count, mine.begin() + begin);
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

// The formulas of docs/collectives.md.
Counts all_reduce_formula(Algorithm algorithm, uint64_t p, uint64_t n) {
  uint64_t q = 1;
  while (q * 2 <= p) q *= 2;
  const uint64_t r = p - q;
  const uint64_t lg = log2_ceil(q);
  uint64_t x = 1;
  for (uint64_t d = 2; d * d <= p; ++d) {
    if (p % d == 0) x = d;
  }
  const uint64_t least = 2 * (p - 1) * n;
  switch (algorithm) {
    case Algorithm::kNaive: return {p * (p - 1), p * (p - 1) * n};
    case Algorithm::kStar:
    case Algorithm::kReduceBroadcast: return {2 * (p - 1), least};
    case Algorithm::kRecursiveDoubling: return {q * lg + 2 * r, n * (q * lg + 2 * r)};
    case Algorithm::kHalvingDoubling: return {2 * q * lg + 2 * r, least};
    case Algorithm::kSegmentedRing: return {2 * p * (p - 1) * 4, least};
    case Algorithm::kTorus:
      if (x > 1) return {2 * p * (x - 1) + 2 * p * (p / x - 1), least};
      return {2 * p * (p - 1), least};
    default: return {2 * p * (p - 1), least};
  }
}

constexpr Algorithm kReducing[] = {Algorithm::kNaive,           Algorithm::kStar,
                                   Algorithm::kReduceBroadcast, Algorithm::kRecursiveDoubling,
                                   Algorithm::kHalvingDoubling, Algorithm::kRing,
                                   Algorithm::kSegmentedRing,   Algorithm::kTorus};

TEST(Schedules, CL_2_messages_and_bytes) {
  for (const Algorithm algorithm : kReducing) {
    for (int p = 1; p <= 13; ++p) {
      for (const uint64_t n : {0u, 1u, 7u, 64u, 101u}) {
        SCOPED_TRACE(std::string(algorithm_name(static_cast<uint8_t>(algorithm))) + ", " +
                     std::to_string(p) + " ranks, " + std::to_string(n) + " elements");
        std::vector<Schedule> schedules;
        std::vector<Memory> work;
        Memory sum(n, 0);
        for (int r = 0; r < p; ++r) {
          schedules.push_back(all_reduce_schedule(algorithm, r, p, n));
          work.emplace_back(n);
          for (uint64_t i = 0; i < n; ++i) {
            work.back()[i] = static_cast<int64_t>(i * 7 + 1) << r;
            sum[i] += work.back()[i];
          }
        }
        const Counts counts = run(schedules, &work);
        for (const Memory& one : work) EXPECT_EQ(one, sum);
        const Counts wanted = all_reduce_formula(algorithm, static_cast<uint64_t>(p), n);
        EXPECT_EQ(counts.messages, p == 1 ? 0 : wanted.messages);
        EXPECT_EQ(counts.elements, p == 1 ? 0 : wanted.elements);
      }
    }
  }
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

}  // namespace
}  // namespace weft::internal
