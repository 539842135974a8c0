#ifndef WEFT_EXAMPLES_ASYNC_PS_DIGITS_H_
#define WEFT_EXAMPLES_ASYNC_PS_DIGITS_H_

// The handwritten digits: finding and reading the file, and a seeded split by class.
//
//   Images all = read_digits(find_digits(given));    // throws with the file's name and the line
//   Split split = split_by_class(all, 360, /*seed=*/1);
//   std::vector<Images> shards = deal(split.train, 2);
//
// Any thread may call them; they keep nothing.

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

// Returns where the build puts the images: share/weft/digits.csv beside the program's folder.
std::string default_digits();
// Returns `given`, or default_digits() where it is empty. Throws std::invalid_argument, naming
// --data, if there is no such file.
std::string find_digits(const std::string& given);

// Throws std::runtime_error, with the file and the line.
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
