// traceparent, as W3C Trace Context (level 1) has it.
#include "weft/common/trace_context.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace weft {
namespace {

constexpr char kExample[] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

TEST(TraceContext, ReadsAndWrites) {
  const StatusOr<TraceContext> got = parse_traceparent(kExample);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->trace_high, 0x0af7651916cd43ddu);
  EXPECT_EQ(got->trace_low, 0x8448eb211c80319cu);
  EXPECT_EQ(got->span_id, 0xb7ad6b7169203331u);
  EXPECT_TRUE(got->sampled());
  EXPECT_EQ(got->traceparent(), kExample);
  EXPECT_EQ(got->trace_id(), "0af7651916cd43dd8448eb211c80319c");
  EXPECT_TRUE(TraceContext().empty());
  EXPECT_EQ(TraceContext().traceparent(), "");
  // Zeros in front stay, and half a trace of zeros is a trace.
  const std::string small = "00-00000000000000000000000000000001-0000000000000002-00";
  ASSERT_TRUE(parse_traceparent(small).ok());
  EXPECT_EQ(parse_traceparent(small)->traceparent(), small);
  EXPECT_FALSE(parse_traceparent(small)->sampled());
}

TEST(TraceContext, ALaterVersionIsReadAsThisOne) {
  const std::string later = "cc" + std::string(kExample).substr(2);
  EXPECT_EQ(*parse_traceparent(later), *parse_traceparent(kExample));
  EXPECT_EQ(*parse_traceparent(later + "-what-comes"), *parse_traceparent(kExample));
  EXPECT_FALSE(parse_traceparent(later + "x").ok());
}

TEST(TraceContext, BadInput_a_traceparent) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "0 characters"},
      {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331", "52 characters"},
      {std::string(kExample) + "-extra", "61 characters"},
      {"00_0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "'-' between"},
      {"00-0AF7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "a to f"},
      {"00-0af7651916cd43dd8448eb211c80319g-b7ad6b7169203331-01", "a to f"},
      {"ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "version ff"},
      {"00-00000000000000000000000000000000-b7ad6b7169203331-01", "the trace is 0"},
      {"00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", "the span is 0"},
      {std::string(60, '\n'), "'-' between"},
  };
  for (const auto& [text, words] : cases) {
    const Status status = parse_traceparent(text).status();
    EXPECT_EQ(error_kind(status), ErrorKind::kInvalidArgument) << text;
    EXPECT_NE(status.message().find(words), absl::string_view::npos) << status;
    EXPECT_EQ(status.message().find('\n'), absl::string_view::npos) << status;
  }
}

}  // namespace
}  // namespace weft
