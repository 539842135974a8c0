#ifndef WEFT_TESTS_FUZZ_TARGET_H_
#define WEFT_TESTS_FUZZ_TARGET_H_

// A fuzz target: one decoder. libfuzzer.cc calls it with whatever comes; replay.cc with the seeds
// of its corpus, and compares what it says with what is written beside them
// (corpus/<name>.expected).

#include <cstdlib>
#include <string_view>
#include <utility>

#include "weft/common/error.h"

// What the decoder said of `input`: OK, or the first error. Aborts when a promise is broken. Called
// by one thread; nothing is left behind between two calls but what is made once.
weft::Status fuzz_one(std::string_view input);

inline void require(bool condition) {
  if (!condition) std::abort();
}

// Keeps the first error.
inline void note(weft::Status status, weft::Status* verdict) {
  if (verdict->ok() && !status.ok()) *verdict = std::move(status);
}

#endif  // WEFT_TESTS_FUZZ_TARGET_H_
