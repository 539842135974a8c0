// libFuzzer's entry of every fuzz target.
#include <cstddef>
#include <cstdint>

#include "weft/tests/fuzz/target.h"

void Decoding::begin(size_t) {}
void Decoding::end() {}
void Decoding::charged(size_t) {}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  (void)fuzz_one(std::string_view(reinterpret_cast<const char*>(data), size));
  return 0;
}
