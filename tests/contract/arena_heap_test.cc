// The heap of a shared memory file: which range is taken, and that random use leaves it as it was.

#include "weft/transport/arena_heap.h"

#include <iterator>
#include <map>
#include <optional>
#include <random>

#include "gtest/gtest.h"

namespace weft::internal {
namespace {

constexpr uint64_t kHeapKiB = 1024;

TEST(ArenaHeap, takes_the_lowest_of_the_ranges_that_fit_best) {
  ArenaHeap heap(64 * kHeapKiB);
  ASSERT_EQ(heap.allocate(4096), 0u);
  ASSERT_EQ(heap.allocate(1), 4096u) << "a granule at least";
  ASSERT_EQ(heap.allocate(8192), 8192u);
  heap.free(0, 4096);
  EXPECT_EQ(heap.allocate(8192), 16384u) << "the hole is too small";
  EXPECT_EQ(heap.allocate(100), 0u) << "the hole fits best";
  EXPECT_EQ(heap.allocate(64 * kHeapKiB), std::nullopt);
  EXPECT_EQ(heap.allocate(~uint64_t{0}), std::nullopt) << "and nothing overflows";
}

TEST(ArenaHeap, random_use_never_overlaps_and_ends_as_one_free_range) {
  constexpr uint64_t kCapacity = 4096 * kHeapKiB;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    ArenaHeap heap(kCapacity);
    std::map<uint64_t, uint64_t> taken;  // begin -> end
    uint64_t used = 0;
    for (int step = 0; step < 2000; ++step) {
      if (taken.empty() || random() % 2 == 0) {
        const uint64_t bytes = random() % (128 * kHeapKiB);
        const auto offset = heap.allocate(bytes);
        if (!offset.has_value()) continue;
        const uint64_t end = *offset + ArenaHeap::block_size(bytes);
        ASSERT_LE(end, kCapacity);
        const auto after = taken.lower_bound(*offset);
        ASSERT_TRUE(after == taken.end() || after->first >= end) << "seed " << seed;
        ASSERT_TRUE(after == taken.begin() || std::prev(after)->second <= *offset);
        taken.emplace(*offset, end);
        used += end - *offset;
      } else {
        auto it = std::next(taken.begin(), random() % taken.size());
        heap.free(it->first, it->second - it->first);
        used -= it->second - it->first;
        taken.erase(it);
      }
      ASSERT_EQ(heap.used(), used);
    }
    for (const auto& [begin, end] : taken) heap.free(begin, end - begin);
    ASSERT_EQ(heap.free_ranges(), (std::map<uint64_t, uint64_t>{{0, kCapacity}}));
  }
}

}  // namespace
}  // namespace weft::internal
