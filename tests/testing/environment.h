#ifndef WEFT_TESTS_TESTING_ENVIRONMENT_H_
#define WEFT_TESTS_TESTING_ENVIRONMENT_H_

#include <gtest/gtest.h>

#include <cstdlib>

#include "absl/strings/numbers.h"

namespace weft::testing {

// environment_number("WEFT_PS_ROUNDS", 5): the number in that variable, or 5 where it is not set. Other text fails the
// test that asks: a soak of "1e6" schedules would otherwise be one of a single schedule.
template <class Number>
Number environment_number(const char* name, Number otherwise) {
  const char* const text = std::getenv(name);
  if (text == nullptr) return otherwise;
  Number value{};
  if (absl::SimpleAtoi(text, &value)) return value;
  ADD_FAILURE() << name << " is not a number: " << text;
  return otherwise;
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_ENVIRONMENT_H_
