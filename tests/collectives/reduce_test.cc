// Sums of two large inputs into memory that is none of them go around the caches: the same bits as
// in place, whatever the type, the reduction, and where the output begins and ends.
#include "weft/collectives/internal/reduce.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "weft/transport/stream_copy.h"

namespace weft::internal {
namespace {

struct ReduceCase {
  ElementType type;
  ReduceOp::Kind kind;
  size_t size;  // of an element
};

TEST(Reduce, LargeOutputsApartFromTheInputsAreTheSameBits) {
  const std::vector<ReduceCase> cases = {
      {ElementType::kFloat, ReduceOp::kSum, 4},  {ElementType::kFloat, ReduceOp::kAvg, 4},
      {ElementType::kDouble, ReduceOp::kMax, 8}, {ElementType::kUInt8, ReduceOp::kSum, 1},
      {ElementType::kInt32, ReduceOp::kAvg, 4},  {ElementType::kComplexFloat, ReduceOp::kProd, 8}};
  std::mt19937_64 random(7);
  constexpr uint64_t kDivisor = 2;
  for (const ReduceCase& c : cases) {
    // Neither whole lines nor whole blocks; and one element less than what streams.
    for (const size_t bytes : {kStreamAbove + 77 * c.size, kStreamAbove - c.size}) {
      const size_t elements = bytes / c.size;
      std::vector<char> a(bytes);
      std::vector<char> b(bytes);
      // Repeated at a distance that no block of the reduction has.
      constexpr size_t kPattern = 61 * 1024;
      const auto fill = [&](std::vector<char>* to) {
        std::vector<char> pattern(kPattern);
        for (size_t at = 0; at < kPattern; at += c.size) {
          const auto value = static_cast<double>(random() % 1000) / 7;
          const auto single = static_cast<float>(value);
          const auto whole = static_cast<int32_t>(random());
          if (c.type == ElementType::kDouble) {
            std::memcpy(&pattern[at], &value, sizeof value);
          } else if (c.type == ElementType::kFloat || c.type == ElementType::kComplexFloat) {
            for (size_t i = 0; i < c.size; i += sizeof single) {
              std::memcpy(&pattern[at + i], &single, sizeof single);
            }
          } else {
            std::memcpy(&pattern[at], &whole, c.size);
          }
        }
        for (size_t at = 0; at < to->size(); at += kPattern) {
          std::memcpy(to->data() + at, pattern.data(), std::min(kPattern, to->size() - at));
        }
      };
      fill(&a);
      fill(&b);
      std::vector<char> in_place = a;
      const void* const both[] = {in_place.data(), b.data()};
      reduce_many(c.type, c.kind, in_place.data(), both, 2, elements, kDivisor);
      // For a whole element behind the beginning of a line, with a guard on both sides.
      constexpr size_t kLine = 64;
      std::vector<char> room(bytes + 3 * kLine, 'g');
      char* const aligned =
          room.data() + (kLine - reinterpret_cast<uintptr_t>(room.data()) % kLine);
      char* const out = aligned + c.size;
      const void* const inputs[] = {a.data(), b.data()};
      reduce_many(c.type, c.kind, out, inputs, 2, elements, kDivisor);
      EXPECT_EQ(std::memcmp(out, in_place.data(), bytes), 0)
          << element_name(static_cast<uint8_t>(c.type)) << " " << bytes;
      EXPECT_EQ(out[-1], 'g');
      EXPECT_EQ(out[bytes], 'g');
    }
  }
}

}  // namespace
}  // namespace weft::internal
