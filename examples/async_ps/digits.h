#ifndef WEFT_EXAMPLES_ASYNC_PS_DIGITS_H_
#define WEFT_EXAMPLES_ASYNC_PS_DIGITS_H_

// The handwritten digits: reading the file, and a seeded split by class.
//
//   Images all = read_digits("digits.csv");          // throws std::runtime_error, with file and
//   line Split split = split_by_class(all, 360, /*seed=*/1); std::vector<Images> shards =
//   deal(split.train, 2);
//
// Pure functions; any thread.

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"

namespace async_ps {

struct Images {
  at::Tensor pixels;  // uint8, n x 64, 0 to 16
  at::Tensor labels;  // int64, n

  int64_t size() const { return labels.size(0); }
};

struct Split {
  Images train;
  Images test;
};

Images read_digits(const std::string& path);

// `held_out` images for the test, of each digit as large a part as of all of them; the rest to
// train.
Split split_by_class(const Images& all, int64_t held_out, uint64_t seed);

// Deals the images out like cards, so that every hand has every digit.
std::vector<Images> deal(const Images& images, int hands);

// 0..n-1 in an order drawn from the seed, the same on every system.
std::vector<int64_t> shuffled(int64_t n, uint64_t seed);
// The images of these positions.
Images select(const Images& images, const std::vector<int64_t>& positions);

}  // namespace async_ps

#endif  // WEFT_EXAMPLES_ASYNC_PS_DIGITS_H_
