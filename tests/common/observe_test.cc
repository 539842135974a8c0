// Logs, metrics and traces.
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/common/error.h"
#include "weft/common/files.h"
#include "weft/common/id.h"
#include "weft/common/log.h"
#include "weft/common/metrics.h"
#include "weft/common/trace.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class KeepingSink : public LogSink {
 public:
  void write(Severity severity, std::string_view line) override {
    MutexLock lock(&mutex_);
    lines_.push_back(std::string(line));
    last_ = severity;
  }
  std::vector<std::string> take() {
    MutexLock lock(&mutex_);
    return std::exchange(lines_, {});
  }
  Severity last() {
    MutexLock lock(&mutex_);
    return last_;
  }

 private:
  Mutex mutex_;
  std::vector<std::string> lines_ ABSL_GUARDED_BY(mutex_);
  Severity last_ ABSL_GUARDED_BY(mutex_) = Severity::kOff;
};

struct LogFixture {
  std::shared_ptr<KeepingSink> sink = std::make_shared<KeepingSink>();
  Logger log{LoggerOptions{.name = "trainer0", .rank = 1, .sink = sink}};
};

TEST(Log, LinesAreShapedAndNameTheWorkerAndTheObject) {
  LogFixture f;
  WEFT_LOG(f.log, kInfo) << "joined job " << JobId(0, 15) << " of " << 3 << ", ok=" << true;
  WEFT_LOG(f.log.with("peer ps0").with("call 7"), kError)
      << make_error(ErrorKind::kPeerLost, "gone") << " after " << absl::Milliseconds(1500);
  EXPECT_EQ(f.sink->last(), Severity::kError);
  const auto lines = f.sink->take();
  ASSERT_EQ(lines.size(), 2u);
  const std::string start = "[0-9]{4} [0-9:.]{15} [0-9]+ [^ ]*common/observe_test.cc:[0-9]+. ";
  EXPECT_THAT(lines[0], ::testing::ContainsRegex("^I" + start + ".trainer0/1. joined job 0000"));
  EXPECT_THAT(lines[0], ::testing::EndsWith("0f of 3, ok=true\n"));
  EXPECT_THAT(lines[1], ::testing::ContainsRegex("^E" + start));
  EXPECT_THAT(lines[1], ::testing::EndsWith("[trainer0/1] [peer ps0] [call 7] UNAVAILABLE "
                                            "(peer_lost): gone after 1.5s\n"));
}

TEST(Log, LevelDecidesAndWhatIsOffIsNotEvaluated) {
  LogFixture f;
  int evaluated = 0;
  const auto count = [&] { return ++evaluated; };
  WEFT_LOG(f.log, kDebug) << count();
  f.log.set_level(Severity::kError);
  WEFT_LOG(f.log.with("x"), kWarning) << count();
  EXPECT_EQ(evaluated, 0);
  WEFT_LOG(f.log, kError) << count();
  f.log.set_level(Severity::kOff);
  WEFT_LOG(f.log, kError) << count();
  EXPECT_EQ(evaluated, 1);
  EXPECT_EQ(f.sink->take().size(), 1u);
  Logger none;
  WEFT_LOG(none, kError) << count();
  none.set_level(Severity::kDebug);
  none.set_identity("x", 1);
  EXPECT_FALSE(none.enabled(Severity::kError));
  EXPECT_EQ(evaluated, 1);
  // One statement, whatever stands around it.
  if (evaluated == 1)
    WEFT_LOG(f.log, kInfo) << count();
  else
    FAIL();
}

TEST(Log, WhatComesFromElsewhereCannotForgeALine) {
  LogFixture f;
  WEFT_LOG(f.log.with("peer a\nb"), kInfo) << std::string("x\nE1121 forged\r\x1b[2J\0y", 21);
  const auto lines = f.sink->take();
  ASSERT_EQ(lines.size(), 1u);
  const std::vector<std::string> parts = absl::StrSplit(lines[0], '\n');
  ASSERT_EQ(parts.size(), 4u);
  EXPECT_THAT(parts[1], ::testing::StartsWith("    b]"));
  EXPECT_EQ(parts[2], "    E1121 forged\\x0d\\x1b[2J\\x00y");
  EXPECT_EQ(parts[3], "");
}

TEST(Log, IdentityMayComeLater) {
  LogFixture f;
  Logger other = f.log.with("o");
  f.log.set_identity("ps7", -1);
  WEFT_LOG(other, kInfo) << "x";
  f.log.set_identity("", -1);
  WEFT_LOG(other, kInfo) << "y";
  const auto lines = f.sink->take();
  EXPECT_THAT(lines[0], HasSubstr("] [ps7] [o] x"));
  EXPECT_THAT(lines[1], Not(HasSubstr("[ps7]")));
}

TEST(Log, SeverityNames) {
  for (const Severity s :
       {Severity::kDebug, Severity::kInfo, Severity::kWarning, Severity::kError, Severity::kOff}) {
    EXPECT_EQ(parse_severity(severity_name(s)), s);
  }
  EXPECT_FALSE(parse_severity("loud").has_value());
}

TEST(Log, ThreadsWriteWholeLines) {
  LogFixture f;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 100; ++i) WEFT_LOG(f.log, kInfo) << "thread " << t << " line " << i;
      f.log.set_identity("renamed", t);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto lines = f.sink->take();
  EXPECT_EQ(lines.size(), 400u);
  for (const std::string& line : lines) EXPECT_EQ(line.find('\n'), line.size() - 1);
}

TEST(Log, StderrSinkWritesTheLine) {
  ::testing::internal::CaptureStderr();
  stderr_sink()->write(Severity::kInfo, "a line\n");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "a line\n");
}

TEST(Log, ThrottleLetsOnePerIntervalThrough) {
  LogThrottle throttle(absl::Seconds(10));
  const absl::Time start = absl::UnixEpoch() + absl::Hours(1);
  EXPECT_TRUE(throttle.pass(start).has_value());
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(throttle.pass(start + absl::Seconds(9)).has_value());
  const auto pass = throttle.pass(start + absl::Seconds(10));
  ASSERT_TRUE(pass.has_value());
  EXPECT_EQ(pass->suppressed, 5u);
  LogFixture f;
  WEFT_LOG(f.log, kWarning) << "slow" << *pass;
  WEFT_LOG(f.log, kWarning) << "slow" << LogThrottle::Pass{};
  const auto lines = f.sink->take();
  EXPECT_THAT(lines[0], ::testing::EndsWith("slow (5 more like this)\n"));
  EXPECT_THAT(lines[1], ::testing::EndsWith("slow\n"));
}

TEST(CheckDeathTest, SaysWhatAndWhere) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const int left = -1;
  WEFT_CHECK(left < 0) << "not evaluated";
  EXPECT_DEATH(WEFT_CHECK(left >= 0) << "left=" << left,
               "observe_test.cc:[0-9]+. check failed: left >= 0 left=-1");
}

TEST(Metrics, CountersAndGauges) {
  Metrics metrics;
  Counter* calls = metrics.counter("weft_rpc_calls_total", "Calls begun", {{"peer", "ps0"}});
  calls->add();
  calls->add(4);
  EXPECT_EQ(metrics.counter("weft_rpc_calls_total", "Calls begun", {{"peer", "ps0"}}), calls);
  metrics.counter("weft_rpc_calls_total", "Calls begun", {{"peer", "ps1"}})->add(2);
  Gauge* open = metrics.gauge("weft_rpc_open_calls", "Calls not yet answered");
  open->set(7);
  open->add(-10);
  EXPECT_EQ(metrics.text(),
            "# HELP weft_rpc_calls_total Calls begun\n"
            "# TYPE weft_rpc_calls_total counter\n"
            "weft_rpc_calls_total{peer=\"ps0\"} 5\n"
            "weft_rpc_calls_total{peer=\"ps1\"} 2\n"
            "# HELP weft_rpc_open_calls Calls not yet answered\n"
            "# TYPE weft_rpc_open_calls gauge\n"
            "weft_rpc_open_calls -3\n");
  EXPECT_EQ(metrics.snapshot().at("weft_rpc_calls_total{peer=\"ps0\"}"), 5);
  EXPECT_EQ(metrics.snapshot().at("weft_rpc_open_calls"), -3);
}

// Base units: what is counted in microseconds is shown in seconds, everywhere.
TEST(Metrics, CountersOfSeconds) {
  Metrics metrics;
  Counter* waited = metrics.counter("weft_rpc_waited_seconds_total", "Time waited");
  waited->add(1'500'000);
  waited->add(1);
  EXPECT_EQ(metrics.text(),
            "# HELP weft_rpc_waited_seconds_total Time waited\n"
            "# TYPE weft_rpc_waited_seconds_total counter\n"
            "weft_rpc_waited_seconds_total 1.500001\n");
  EXPECT_DOUBLE_EQ(metrics.snapshot().at("weft_rpc_waited_seconds_total"), 1.500001);
  ASSERT_EQ(metrics.families().size(), 1u);
  EXPECT_DOUBLE_EQ(metrics.families()[0].samples[0].value, 1.500001);
  EXPECT_EQ(waited->value(), 1'500'001u);
}

TEST(Metrics, Histograms) {
  Metrics metrics;
  const HistogramOptions options{.first = 1.0, .factor = 2.0, .buckets = 3};
  Histogram* sizes = metrics.histogram("weft_rpc_frame_bytes", "Sizes", options, {{"lane", "0"}});
  for (const double v : {0.5, 1.0, 1.5, 4.0, 5.0, -1.0}) sizes->observe(v);
  sizes->observe(std::numeric_limits<double>::quiet_NaN());
  EXPECT_THAT(sizes->bucket_counts(), ElementsAre(3, 1, 1, 1));
  EXPECT_EQ(sizes->count(), 6u);
  EXPECT_DOUBLE_EQ(sizes->sum(), 11.0);
  EXPECT_EQ(metrics.text(),
            "# HELP weft_rpc_frame_bytes Sizes\n"
            "# TYPE weft_rpc_frame_bytes histogram\n"
            "weft_rpc_frame_bytes_bucket{lane=\"0\",le=\"1\"} 3\n"
            "weft_rpc_frame_bytes_bucket{lane=\"0\",le=\"2\"} 4\n"
            "weft_rpc_frame_bytes_bucket{lane=\"0\",le=\"4\"} 5\n"
            "weft_rpc_frame_bytes_bucket{lane=\"0\",le=\"+Inf\"} 6\n"
            "weft_rpc_frame_bytes_sum{lane=\"0\"} 11\n"
            "weft_rpc_frame_bytes_count{lane=\"0\"} 6\n");
  EXPECT_EQ(metrics.snapshot().at("weft_rpc_frame_bytes_count{lane=\"0\"}"), 6);
  // The default reaches from a microsecond to more than a minute.
  const Histogram usual{HistogramOptions{}};
  EXPECT_LE(usual.bounds().front(), 1e-6);
  EXPECT_GT(usual.bounds().back(), 60.0);
}

TEST(Metrics, LabelsAreEscapedAndTheirOrderDoesNotMatter) {
  Metrics metrics;
  Counter* a = metrics.counter("weft_x_total", "h\nelp", {{"b", "2"}, {"a", "q\"\\\n\xff"}});
  EXPECT_EQ(metrics.counter("weft_x_total", "", {{"a", "q\"\\\n\xff"}, {"b", "2"}}), a);
  EXPECT_THAT(metrics.text(), HasSubstr("# HELP weft_x_total h\\nelp\n"));
  EXPECT_THAT(metrics.text(), HasSubstr("weft_x_total{a=\"q\\\"\\\\\\n\\\\xff\",b=\"2\"} 0\n"));
}

TEST(Metrics, ManyLabelsShareOneSeries) {
  Metrics metrics;
  for (size_t i = 0; i < Metrics::kMaxSeries + 50; ++i) {
    metrics.counter("weft_x_total", "", {{"peer", std::to_string(i)}})->add();
  }
  const auto snapshot = metrics.snapshot();
  EXPECT_EQ(snapshot.size(), Metrics::kMaxSeries + 1);
  EXPECT_EQ(snapshot.at("weft_x_total{peer=\"other\"}"), 50);
}

TEST(Metrics, ThreadsLoseNothing) {
  Metrics metrics;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      Counter* counter = metrics.counter("weft_x_total", "");
      Histogram* histogram = metrics.histogram("weft_x_seconds", "");
      for (int i = 0; i < 1000; ++i) {
        counter->add();
        histogram->observe(0.25);
      }
      EXPECT_FALSE(metrics.text().empty());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(metrics.snapshot().at("weft_x_total"), 4000);
  EXPECT_EQ(metrics.snapshot().at("weft_x_seconds_sum"), 1000);
}

TEST(MetricsDeathTest, ABadNameIsOurBug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(Metrics().counter("Calls", ""), "metric name 'Calls'");
  EXPECT_DEATH(Metrics().counter("weft_x", "", {{"le", ""}}), "label 'le'");
  EXPECT_DEATH(
      {
        Metrics metrics;
        metrics.counter("weft_x", "");
        metrics.gauge("weft_x", "");
      },
      "another kind");
}

const absl::Time kStart = absl::FromUnixNanos(5'000'001'500);

TEST(Trace, EventsAreWhatViewersExpect) {
  TraceWriter trace({.process_name = "trainer0", .rank = 3, .calendar_offset = absl::Seconds(2)});
  trace.name_thread("loop");
  trace.complete("codec", "decode", kStart, absl::Nanoseconds(2500), {{"bytes", int64_t{64}}});
  trace.async_begin("rpc", "add", 0xabc, kStart, {{"to", "ps0"}});
  trace.async_end("rpc", "add", 0xabc, kStart + absl::Microseconds(1));
  trace.flow_out("rpc", "add", 1, kStart);
  trace.flow_in("rpc", "add", 1, kStart);
  EXPECT_EQ(
      trace.json(),
      "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"weft_rank\":\"3\",\"weft_dropped\":\"0\","
      "\"weft_calendar_offset_us\":\"2000000.000\"},\n\"traceEvents\":[\n"
      "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":3,\"args\":{\"name\":\"trainer0\"}},\n"
      "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":3,\"tid\":1,\"args\":{\"name\":\"loop\"}},\n"
      "{\"ph\":\"X\",\"cat\":\"codec\",\"name\":\"decode\",\"ts\":5000001.500,\"pid\":3,\"tid\":1,"
      "\"dur\":2.500,\"args\":{\"bytes\":64}},\n"
      "{\"ph\":\"b\",\"cat\":\"rpc\",\"name\":\"add\",\"ts\":5000001.500,\"pid\":3,\"tid\":1,"
      "\"id\":\"0xabc\",\"args\":{\"to\":\"ps0\"}},\n"
      "{\"ph\":\"e\",\"cat\":\"rpc\",\"name\":\"add\",\"ts\":5000002.500,\"pid\":3,\"tid\":1,"
      "\"id\":\"0xabc\"},\n"
      "{\"ph\":\"s\",\"cat\":\"rpc\",\"name\":\"add\",\"ts\":5000001.500,\"pid\":3,\"tid\":1,"
      "\"id\":\"0x1\"},\n"
      "{\"ph\":\"f\",\"cat\":\"rpc\",\"name\":\"add\",\"ts\":5000001.500,\"pid\":3,\"tid\":1,"
      "\"id\":\"0x1\",\"bp\":\"e\"}\n]}\n");
}

TEST(Trace, OddBytesBecomeJson) {
  EXPECT_EQ(json_quoted("a\"b\\c"), "\"a\\\"b\\\\c\"");
  EXPECT_EQ(json_quoted(std::string_view("\0\n\x1f\x7f", 4)), "\"\\u0000\\u000a\\u001f\\u007f\"");
  EXPECT_EQ(json_quoted("\xc3\xa4 \xe2\x82\xac \xf0\x9f\x98\x80"),
            "\"\xc3\xa4 \xe2\x82\xac \xf0\x9f\x98\x80\"");
  // A lone continuation, an overlong slash, a surrogate, beyond Unicode, cut short.
  for (const char* bad : {"\x80", "\xff"}) EXPECT_EQ(json_quoted(bad), "\"\\ufffd\"");
  EXPECT_EQ(json_quoted("\xc0\xaf"), "\"\\ufffd\\ufffd\"");
  EXPECT_EQ(json_quoted("\xe0\x80\xaf"), "\"\\ufffd\\ufffd\\ufffd\"");
  EXPECT_EQ(json_quoted("\xed\xa0\x80"), "\"\\ufffd\\ufffd\\ufffd\"");
  EXPECT_EQ(json_quoted("\xf4\x90\x80\x80"), "\"\\ufffd\\ufffd\\ufffd\\ufffd\"");
  EXPECT_EQ(json_quoted("\xe2\x82"), "\"\\ufffd\\ufffd\"");
  TraceWriter trace({.process_name = "a\nb"});
  trace.async_begin("c\"", "n\xff", 1, kStart, {{"k\n", "v\\"}});
  EXPECT_THAT(trace.json(), HasSubstr("\"cat\":\"c\\\"\",\"name\":\"n\\ufffd\""));
  EXPECT_THAT(trace.json(), HasSubstr("{\"k\\u000a\":\"v\\\\\"}"));
}

TEST(Trace, MemoryIsBoundedAndDropsAreCounted) {
  TraceWriter trace({.process_name = "p", .max_bytes = 1000});
  for (int i = 0; i < 100; ++i) trace.complete("c", "n", kStart, absl::Seconds(1));
  EXPECT_LE(trace.bytes(), 1000u);
  EXPECT_GT(trace.dropped(), 50u);
  EXPECT_THAT(trace.json(), HasSubstr("\"weft_dropped\":\"" + std::to_string(trace.dropped())));
  EXPECT_THAT(trace.json(), ::testing::EndsWith("}\n]}\n"));
}

TEST(Trace, SpansAndFiles) {
  const auto runtime = make_system_runtime();
  TraceWriter trace({.process_name = "p"});
  { TraceSpan off(nullptr, nullptr, "c", "nothing"); }
  { TraceSpan span(&trace, &runtime->clock(), "c", "work"); }
  const auto files = make_memory_files();
  ASSERT_TRUE(trace.write_file(files.get(), "t.json").ok());
  EXPECT_EQ(*files->read("t.json"), trace.json());
  EXPECT_THAT(trace.json(), HasSubstr("\"ph\":\"X\",\"cat\":\"c\",\"name\":\"work\""));
  EXPECT_THAT(trace.json(), Not(HasSubstr("nothing")));
}

TEST(Trace, ThreadsGetSmallNumbers) {
  TraceWriter trace({.process_name = "p"});
  trace.complete("c", "main", kStart, absl::Seconds(1));
  std::thread other([&] { trace.complete("c", "other", kStart, absl::Seconds(1)); });
  other.join();
  EXPECT_THAT(trace.json(), HasSubstr("\"tid\":1"));
  EXPECT_THAT(trace.json(), HasSubstr("\"tid\":2"));
}

}  // namespace
}  // namespace weft
