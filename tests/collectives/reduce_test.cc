// What is written around the caches has the same bits, whatever the type, the reduction, the number of
// inputs, whether the output is one of them, and where it begins and ends.
#include "weft/collectives/internal/reduce.h"

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "c10/util/Half.h"
#include "gtest/gtest.h"

namespace weft::internal {
namespace {

struct ReduceCase {
  ElementType type;
  ReduceOp::Kind kind;
  size_t size;  // of an element
};

std::vector<char> random_elements(const ReduceCase& c, size_t elements, std::mt19937_64* random) {
  std::vector<char> out(elements * c.size);
  const auto put = [&out](size_t at, auto value) { std::memcpy(&out[at], &value, sizeof value); };
  for (size_t at = 0; at < out.size(); at += c.size) {
    const auto value = static_cast<double>((*random)() % 1000) / 7;
    switch (c.type) {
      case ElementType::kDouble: put(at, value); break;
      case ElementType::kFloat: put(at, static_cast<float>(value)); break;
      case ElementType::kHalf: put(at, c10::Half(static_cast<float>(value))); break;
      case ElementType::kComplexFloat:
        put(at, static_cast<float>(value));
        put(at + sizeof(float), static_cast<float>(-value));
        break;
      case ElementType::kInt32: put(at, static_cast<int32_t>((*random)())); break;
      default: put(at, static_cast<char>((*random)()));
    }
  }
  return out;
}

TEST(Reduce, StreamedOutputsAreTheSameBits) {
  const std::vector<ReduceCase> cases = {
      {ElementType::kFloat, ReduceOp::kSum, 4},  {ElementType::kFloat, ReduceOp::kAvg, 4},
      {ElementType::kDouble, ReduceOp::kMax, 8}, {ElementType::kUInt8, ReduceOp::kSum, 1},
      {ElementType::kInt32, ReduceOp::kAvg, 4},  {ElementType::kComplexFloat, ReduceOp::kProd, 8},
      {ElementType::kHalf, ReduceOp::kAvg, 2}};
  std::mt19937_64 random(7);
  for (const ReduceCase& c : cases) {
    for (const size_t count : {1, 2, 3, 16, 17}) {
      // Neither whole lines nor whole blocks.
      const size_t elements = (size_t{40} << 10) / c.size + 77;
      const size_t bytes = elements * c.size;
      std::vector<std::vector<char>> inputs;
      std::vector<const void*> from;
      for (size_t k = 0; k < count; ++k) {
        inputs.push_back(random_elements(c, elements, &random));
        from.push_back(inputs.back().data());
      }
      std::vector<char> expected(bytes);
      reduce_many(c.type, c.kind, expected.data(), from.data(), count, elements, count);
      const std::string what =
          std::string(element_name(static_cast<uint8_t>(c.type))) + " of " + std::to_string(count);
      // For a whole element behind the beginning of a line, with a guard on both sides.
      constexpr size_t kLine = 64;
      std::vector<char> room(bytes + 3 * kLine, 'g');
      char* const aligned =
          room.data() + (kLine - reinterpret_cast<uintptr_t>(room.data()) % kLine);
      char* const out = aligned + c.size;
      reduce_many(c.type, c.kind, out, from.data(), count, elements, count, true);
      EXPECT_EQ(std::memcmp(out, expected.data(), bytes), 0) << what;
      EXPECT_EQ(out[-1], 'g') << what;
      EXPECT_EQ(out[bytes], 'g') << what;
      // In place of the last input.
      char* const last = inputs.back().data();
      reduce_many(c.type, c.kind, last, from.data(), count, elements, count, true);
      EXPECT_EQ(std::memcmp(last, expected.data(), bytes), 0) << what << ", in place";
    }
  }
}

}  // namespace
}  // namespace weft::internal
