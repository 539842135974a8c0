#ifndef WEFT_TESTS_FUZZ_MEMORY_H_
#define WEFT_TESTS_FUZZ_MEMORY_H_

// What a target's decoder allocates, for replay.cc: malloc and its like are replaced in that
// program alone. The counts are those of the calling thread.

#include <cstddef>

struct DecodingMemory {
  size_t messages = 0;
  size_t input_bytes = 0;  // of them
  size_t charged_bytes = 0;
  size_t allocated_bytes = 0;  // all together, freed or not
};

void reset_decoding_memory();
DecodingMemory decoding_memory();

#endif  // WEFT_TESTS_FUZZ_MEMORY_H_
