#ifndef WEFT_TESTS_FUZZ_TARGET_H_
#define WEFT_TESTS_FUZZ_TARGET_H_

// A fuzz target: one decoder. libfuzzer.cc calls it with whatever comes; replay.cc with the seeds
// of its corpus, and compares what it says with what is written beside them
// (corpus/<name>.expected).

#include <cstddef>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "weft/common/error.h"

// What the decoder said of `input`: OK, or the first error. Aborts when a promise is broken. Called
// by one thread; nothing is left behind between two calls but what is made once.
weft::Status fuzz_one(std::string_view input);

// What a decoder may allocate for a byte of its input, before it knows that the input is right: the
// target says why.
extern const size_t kMostBytesPerByte;

// Around the decoder's part of fuzz_one(): replay.cc counts what is allocated meanwhile, for
// a message of `input_bytes` that it reads (0: the same goes on). Nothing else of the target
// counts.
class Decoding {
 public:
  explicit Decoding(size_t input_bytes) { begin(input_bytes); }
  ~Decoding() { end(); }
  Decoding(const Decoding&) = delete;
  Decoding& operator=(const Decoding&) = delete;

  static void begin(size_t input_bytes);
  static void end();
  // So many bytes were checked, and charged to a budget: they may be allocated besides.
  static void charged(size_t bytes);
};

// Keeps the decoder's result: return decoded(n, [&] { return decode(...); });
template <class F>
auto decoded(size_t input_bytes, const F& decoder) {
  const Decoding counts(input_bytes);
  return decoder();
}

inline void require(bool condition) {
  if (!condition) std::abort();
}

// Keeps the first error.
inline void note(weft::Status status, weft::Status* verdict) {
  if (verdict->ok() && !status.ok()) *verdict = std::move(status);
}

#endif  // WEFT_TESTS_FUZZ_TARGET_H_
