// Where what lies: PLACE-1 to PLACE-4 against plain models.

#include <algorithm>
#include <optional>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/ps/placement.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::ps {
namespace {

TEST(PsPlacement, PLACE_1_RangesCoverATableOnceWithoutDivisibility) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 2000; ++round) {
    const int64_t elements =
        round < 50 ? round : static_cast<int64_t>(random() >> (random() % 60 + 4));
    const size_t servers = 1 + random() % 40;
    int64_t at = 0;
    for (size_t s = 0; s < servers; ++s) {
      const ElementRange range = element_range(elements, servers, s);
      ASSERT_EQ(range.begin, at) << elements << " over " << servers;
      ASSERT_GE(range.size(), elements / static_cast<int64_t>(servers));
      ASSERT_LE(range.size(), elements / static_cast<int64_t>(servers) + 1);
      at = range.end;
    }
    ASSERT_EQ(at, elements) << servers;
  }
}

std::vector<std::string> random_names(std::mt19937_64& random, size_t count) {
  std::set<std::string> names;
  while (names.size() < count) names.insert(absl::StrCat("ps-", random() % 100'000));
  return {names.begin(), names.end()};
}

// 100 sets of names, because a fixed one shows nothing.
TEST(PsPlacement, PS_1_TheFullestServerIsNearTheMean) {
  std::mt19937_64 random(2);
  for (int round = 0; round < testing::fewer(100, 10); ++round) {
    const HashRing ring(random_names(random, 3));
    std::vector<int> load(3, 0);
    const int keys = round < testing::fewer(3, 0) ? 1'000'000 : 50'000;
    for (int k = 0; k < keys; ++k) ++load[ring.owner(static_cast<uint64_t>(k))];
    EXPECT_LE(*std::max_element(load.begin(), load.end()), 1.1 * keys / 3) << round;
  }
}

TEST(PsPlacement, PLACE_4_LargeTablesHaveEquallyManyPartsAtEachServer) {
  constexpr int64_t kPart = 1 << 20;
  for (const size_t servers : {1, 2, 3, 7, 4096}) {
    for (const int64_t elements :
         {int64_t{4}, kPart - 1, kPart, kPart + 1, 64 * kPart, 65 * kPart + 3, int64_t{1} << 43}) {
      const size_t parts = dense_parts(elements, servers, kPart);
      ASSERT_EQ(parts % servers, 0U);
      EXPECT_LE(parts, std::max(servers, kMostParts));
      const bool capped = parts + servers > kMostParts;
      const auto of_each = static_cast<double>(elements) / static_cast<double>(parts);
      if (!capped) {
        EXPECT_LE(of_each, kPart) << elements << " elements at " << servers;
      }
      if (parts > servers) {
        EXPECT_GT(static_cast<double>(elements) / static_cast<double>(parts - servers), kPart)
            << "fewer parts would do";
      }
      std::vector<size_t> at(servers);
      for (size_t p = 0; p < parts; ++p) {
        const size_t home = home_of(p, parts, servers);
        ASSERT_LT(home, servers);
        ++at[home];
        if (p > 0) {
          ASSERT_GE(home, home_of(p - 1, parts, servers)) << "neighbours lie together";
        }
      }
      EXPECT_EQ(std::set<size_t>(at.begin(), at.end()).size(), 1U) << "equally many";
    }
  }
}

TEST(PsPlacement, PS_1_and_PLACE_2_AnotherServerTakesKeysFromTheOthersAndMovesNoneBetweenThem) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::string> names = random_names(random, 4);
    const HashRing before({names.begin(), names.begin() + 3});
    const HashRing after(names);
    int moved = 0;
    constexpr int kKeys = 20'000;
    for (int k = 0; k < kKeys; ++k) {
      const uint64_t key = random();
      const size_t was = before.owner(key);
      const size_t is = after.owner(key);
      if (was == is) continue;
      ASSERT_EQ(is, 3U);
      ++moved;
    }
    EXPECT_NEAR(moved, kKeys / 4, kKeys / 25);
    EXPECT_LE(moved, 1.15 * kKeys / 4);
  }
}

TEST(PsPlacement, PS_1_and_PLACE_3_SlicesLoseNothingAndRepeatNothing) {
  std::mt19937_64 random(4);
  constexpr int kSets = testing::fewer(100'000, 2'000);
  constexpr int kOfOneRing = 500;
  std::optional<HashRing> ring;
  size_t servers = 0;
  for (int round = 0; round < kSets; ++round) {
    if (round % kOfOneRing == 0) {
      servers = 1 + random() % 7;
      ring.emplace(random_names(random, servers));
    }
    std::vector<uint64_t> keys(random() % (round % kOfOneRing == 0 ? 500 : 40));
    for (uint64_t& key : keys) key = random() % 3 == 0 ? random() % 10 : random();
    if (round % 2 == 0) std::sort(keys.begin(), keys.end());
    const auto slices = slice_keys(*ring, keys.data(), keys.size());
    ASSERT_EQ(slices.size(), servers);
    std::vector<int> seen(keys.size(), 0);
    for (size_t s = 0; s < servers; ++s) {
      ASSERT_TRUE(std::is_sorted(slices[s].begin(), slices[s].end()));
      for (const int64_t place : slices[s]) {
        ++seen[static_cast<size_t>(place)];
        if (ring->owner(keys[static_cast<size_t>(place)]) != s) FAIL() << "round " << round;
      }
    }
    ASSERT_EQ(std::count(seen.begin(), seen.end(), 1), static_cast<int64_t>(keys.size()));
  }
}

}  // namespace
}  // namespace weft::ps
