#include "weft/tests/testing/checks.h"

#include "gtest/gtest.h"
#include "weft/common/runtime.h"

namespace weft::testing {
namespace {

void poll(const Runtime& runtime, Parker* parker, const std::function<bool()>& what,
          const std::string& text) {
  const absl::Time deadline = runtime.now() + absl::Seconds(20);
  while (!what()) {
    ASSERT_LT(runtime.now(), deadline) << text;
    parker->park_until(runtime.now() + absl::Milliseconds(1));
  }
}

}  // namespace

void eventually(const Worker& worker, const std::function<bool()>& what, const std::string& text) {
  poll(worker.runtime(), worker.runtime().make_parker().get(), what, text);
}

void eventually(const std::function<bool()>& what, const std::string& text) {
  const auto runtime = make_system_runtime();
  poll(*runtime, runtime->make_parker().get(), what, text);
}

Status error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& e) {
    return e.status();
  }
  ADD_FAILURE() << "it did not throw";
  return absl::OkStatus();
}

void expect_error(const Status& s, ErrorKind kind, const std::vector<std::string>& words) {
  EXPECT_FALSE(s.ok());
  EXPECT_EQ(kind_name(error_kind(s)), kind_name(kind)) << s;
  for (const std::string& word : words) {
    EXPECT_NE(std::string(s.message()).find(word), std::string::npos)
        << "'" << word << "' is not in: " << s;
  }
}

}  // namespace weft::testing
