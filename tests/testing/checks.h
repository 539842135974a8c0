#ifndef WEFT_TESTS_TESTING_CHECKS_H_
#define WEFT_TESTS_TESTING_CHECKS_H_

// What tests of several modules ask.

#include <functional>
#include <string>
#include <vector>

#include "weft/common/error.h"
#include "weft/rpc/worker.h"

namespace weft::testing {

// Waits until `what` is so; fails the test after 20 s. On the worker's clock, or the system's.
void eventually(const Worker& worker, const std::function<bool()>& what, const std::string& text);
void eventually(const std::function<bool()>& what, const std::string& text);
// The weft::Error that `fn` throws; the test fails when there is none.
Status error_of(const std::function<void()>& fn);
// `s` is of this kind and names all of `words`.
void expect_error(const Status& s, ErrorKind kind, const std::vector<std::string>& words);

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_CHECKS_H_
