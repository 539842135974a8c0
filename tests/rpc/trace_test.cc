// The timelines of two workers: each call begins and ends in both, and an arrow leads from the one
// to the other.

#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/ones.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/common/trace_context.h"
#include "weft/rpc/internal/agent/call_trace.h"
#include "weft/rpc/spi/trace_scope.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/timeline.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;

// The traceparent here, and of the call that this one makes to the next of `path`, and so on.
std::vector<std::string> traces(CallContext& context, std::vector<std::string> path) {
  EXPECT_EQ(current_trace(context.worker()), context.trace());
  std::vector<std::string> out = {context.trace().traceparent()};
  if (path.empty()) return out;
  const std::string next = path.front();
  path.erase(path.begin());
  for (const std::string& text : rpc_sync(context.worker(), next, &traces, path)) {
    out.push_back(text);
  }
  return out;
}

int64_t fails(int64_t) { throw std::runtime_error("on purpose"); }

// A clock that advances by what is listed, at each reading, and then by a microsecond.
class Readings : public Clock {
 public:
  explicit Readings(std::vector<absl::Duration> steps) : steps_(std::move(steps)) {}
  absl::Time now() const override {
    at_ += next_ < steps_.size() ? steps_[next_++] : absl::Microseconds(1);
    return absl::FromUnixSeconds(1000) + at_;
  }
  absl::Duration at() const { return at_; }

 private:
  const std::vector<absl::Duration> steps_;
  mutable size_t next_ = 0;
  mutable absl::Duration at_;
};

TEST(CalendarOffset, AReadingThatWasInterruptedDoesNotCount) {
  // The first two readings lose the processor: for 4 ms between the clocks, then for 7.
  const Readings clock(
      {absl::Microseconds(1), absl::Milliseconds(4), absl::Microseconds(1), absl::Milliseconds(7)});
  const absl::Time date = absl::FromUnixSeconds(1'800'000'000);
  const absl::Duration offset = internal::calendar_offset(clock, [&] { return date + clock.at(); });
  const absl::Duration error = offset - (date - absl::FromUnixSeconds(1000));
  EXPECT_LE(absl::AbsDuration(error), absl::Microseconds(1)) << error;
}

class CallTraceTest : public ::testing::TestWithParam<Net> {
 protected:
  const Timelines lines_;
};

TEST_P(CallTraceTest, EachCallBeginsAndEndsAndLeadsToItsHandler) {
  Library lib("trace");
  lib.def("add", &add, {.inline_ok = true});
  lib.def("numel", &numel);
  lib.def("fails", &fails);
  ClusterOptions o{.net = GetParam(), .library = lib};
  o.adjust = [this](int i, JoinOptions* j) {
    // One by its option, the other by its environment.
    if (i == 0) {
      j->trace_file = lines_.path("trace.%r.json");
    } else {
      j->environment = Environment{{"WEFT_TRACE_FILE", lines_.path("trace.%r.json")}};
    }
  };
  constexpr int kCalls = 5;
  {
    Cluster c(o);
    for (int i = 0; i < kCalls; ++i) ASSERT_EQ(rpc_sync(c[0], 1, &add, i, 1), i + 1);
    ASSERT_EQ(rpc_sync(c[0], 1, &numel, at::ones({1 << 20})), 1 << 20);
    EXPECT_FALSE(try_rpc_sync(c[0], 1, &fails, 1).ok());
    c.shutdown();
  }
  const std::string caller = "trace.0.json";
  const std::string callee = "trace.1.json";
  const auto count = [this](const std::string& name, const std::vector<std::string>& words) {
    return lines_.events(name, words).size();
  };
  for (const char* phase : {"\"ph\":\"b\"", "\"ph\":\"e\""}) {
    EXPECT_EQ(count(caller, {phase, "\"cat\":\"rpc\"", "trace.add"}), kCalls) << phase;
    EXPECT_EQ(count(callee, {phase, "\"cat\":\"serve\"", "trace.add"}), kCalls) << phase;
    EXPECT_EQ(count(caller, {phase, "\"cat\":\"bulk\"", "\"message\""}), 1) << phase;
  }
  EXPECT_EQ(count(caller, {"\"ph\":\"b\"", "trace.add", "worker1"}), kCalls);
  EXPECT_EQ(count(callee, {"\"ph\":\"X\"", "\"cat\":\"run\"", "trace.add"}), kCalls);
  const std::vector<std::string> failed =
      lines_.events(caller, {"\"ph\":\"e\"", "\"cat\":\"rpc\"", "trace.fails"});
  ASSERT_EQ(failed.size(), 1u);
  EXPECT_THAT(failed[0], HasSubstr("on purpose"));
  const std::vector<std::string> out = lines_.events(caller, {"\"ph\":\"s\"", "trace.add"});
  const std::vector<std::string> in = lines_.events(callee, {"\"ph\":\"f\"", "trace.add"});
  ASSERT_EQ(out.size(), kCalls);
  ASSERT_EQ(in.size(), kCalls);
  for (int i = 0; i < kCalls; ++i) EXPECT_EQ(id_of(out[i]), id_of(in[i]));
}

TEST_P(CallTraceTest, ATraceGoesWithCallsAndTheirCalls) {
  Library lib("trace");
  lib.def("traces", &traces);
  ClusterOptions o{.size = 3, .net = GetParam(), .library = lib};
  o.adjust = [this](int, JoinOptions* j) { j->trace_file = lines_.path("trace.%r.json"); };
  const std::string given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
  std::vector<std::string> seen;
  {
    Cluster c(o);
    const std::vector<std::string> none(3);
    const std::vector<std::string> path = {"worker2", "worker0"};
    EXPECT_EQ(rpc_sync(c[0], "worker1", &traces, path), none);
    {
      const TraceScope scope(c[0], *parse_traceparent(given));
      EXPECT_EQ(current_trace(c[0]).traceparent(), given);
      EXPECT_TRUE(current_trace(c[1]).empty()) << "a scope is its worker's alone";
      seen = rpc_sync(c[0], "worker1", &traces, path);
      const TraceScope off(c[0], {});
      EXPECT_EQ(rpc_sync(c[0], "worker1", &traces, path), none);
    }
    EXPECT_TRUE(current_trace(c[0]).empty());
    const TraceContext fresh = new_trace(c[0]);
    EXPECT_TRUE(fresh.sampled());
    EXPECT_EQ(parse_traceparent(fresh.traceparent()).value(), fresh);
    EXPECT_FALSE(fresh == new_trace(c[0]));
    c.shutdown();
  }
  ASSERT_EQ(seen.size(), 3u);
  // From span to span: what begins a call, the call, its handler, which begins the next.
  std::string above = span_text(parse_traceparent(given)->span_id);
  for (int i = 0; i < 3; ++i) {
    const TraceContext here = *parse_traceparent(seen[static_cast<size_t>(i)]);
    EXPECT_EQ(here.trace_id(), "0af7651916cd43dd8448eb211c80319c");
    EXPECT_TRUE(here.sampled());
    const std::string file = absl::StrCat("trace.", i, ".json");
    const std::string next = absl::StrCat("trace.", (i + 1) % 3, ".json");
    const std::string parent = absl::StrCat("\"parent\":\"", above, "\"");
    const std::vector<std::string> call =
        lines_.events(file, {"\"cat\":\"rpc\"", "\"ph\":\"b\"", parent});
    ASSERT_EQ(call.size(), 1u) << parent;
    const std::string key = "\"span\":\"";
    const std::string span = call[0].substr(call[0].find(key) + key.size(), 16);
    EXPECT_EQ(lines_
                  .events(next, {"\"cat\":\"serve\"", "\"parent\":\"" + span,
                                 "\"span\":\"" + span_text(here.span_id)})
                  .size(),
              1u);
    above = span_text(here.span_id);
  }
}

TEST_P(CallTraceTest, BadInput_a_file_that_cannot_be_written_is_only_a_warning) {
  ClusterOptions o{.size = 1, .net = GetParam()};
  o.adjust = [](int, JoinOptions* j) { j->trace_file = "/nonexistent/folder/trace.%r.json"; };
  Cluster c(o);
  EXPECT_TRUE(c[0].shutdown().status.ok());
}

INSTANTIATE_TEST_SUITE_P(Nets, CallTraceTest, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
