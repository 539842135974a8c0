// Metrics over HTTP: what Prometheus gets from a worker, through a socket.

#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/tests/rpc/http_client.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"

namespace weft::testing {
namespace {

// "name{labels}" -> value, of the lines that are ours.
std::map<std::string, double> values(const std::string& page) {
  std::map<std::string, double> out;
  std::istringstream lines(page);
  std::string line;
  while (std::getline(lines, line)) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    const size_t space = line.rfind(' ');
    if (line.rfind("weft_", 0) != 0 || space == std::string::npos) continue;
    EXPECT_TRUE(absl::SimpleAtod(line.substr(space + 1), &out[line.substr(0, space)])) << line;
  }
  return out;
}

constexpr char kIssued[] = "weft_rpc_calls_issued_total";

class MetricsHttpTest : public ::testing::Test {
 protected:
  ClusterOptions options(int size, const std::string& address = "127.0.0.1:0") {
    ClusterOptions o{.size = size, .library = test_.library};
    o.adjust = [address](int, JoinOptions* j) { j->metrics_address = address; };
    return o;
  }
  JoinOptions alone(const std::string& address) {
    JoinOptions o;
    o.name = "alone";
    o.rank = 0;
    o.world_size = 1;
    o.transport = inproc_transport(std::make_shared<InprocNetwork>());
    o.log_level = Severity::kWarning;
    o.environment = Environment{};
    o.metrics_address = address;
    return o;
  }
  TestLibrary test_;
};

TEST_F(MetricsHttpTest, CountersOfEachWorkerGrowByTheCallsMade) {
  Cluster c(options(2));
  const std::string first = c[0].metrics_address();
  const std::string second = c[1].metrics_address();
  EXPECT_NE(first, second);
  EXPECT_EQ(first, absl::StrCat("127.0.0.1:", c[0].debug_info().at("metrics_port")));

  const std::string page = http_get(first);
  EXPECT_EQ(page.rfind("HTTP/1.1 200 OK\r\n", 0), 0u) << page;
  EXPECT_NE(page.find("Content-Type: text/plain"), std::string::npos) << page;
  EXPECT_NE(page.find("# TYPE weft_rpc_calls_issued_total counter\n"), std::string::npos) << page;
  EXPECT_NE(page.find("# TYPE weft_rpc_call_seconds histogram\n"), std::string::npos) << page;

  auto before0 = values(page);
  auto before1 = values(http_get(second));
  ASSERT_EQ(before0.count(kIssued), 1u) << page;
  for (int64_t i = 0; i < 5; ++i) rpc_sync(c[0], 1, &add, i, i);
  for (int64_t i = 0; i < 3; ++i) rpc_sync(c[1], 0, &add, i, i);
  EXPECT_EQ(values(http_get(first))[kIssued], before0[kIssued] + 5);
  EXPECT_EQ(values(http_get(second))[kIssued], before1[kIssued] + 3);
  c.shutdown();
}

TEST_F(MetricsHttpTest, ThePageHasTheSameSeriesAsTheText) {
  Cluster c(options(1));
  Metrics& metrics = c[0].metrics();
  metrics.counter("weft_test_odd_total", "odd \\ help", {{"peer", "a\"b\nc\\\x01\xff"}})->add(7);
  metrics.gauge("weft_test_depth", "a gauge")->set(-3);
  Histogram* const seconds =
      metrics.histogram("weft_test_seconds", "t", {.first = 1, .factor = 2, .buckets = 3});
  for (const double v : {0.5, 2.0, 3.0, 100.0}) seconds->observe(v);
  const std::map<std::string, double> served = values(http_get(c[0].metrics_address()));
  const std::map<std::string, double> text = values(metrics.text());
  std::vector<std::string> served_names;
  std::vector<std::string> text_names;
  // The spelling of a bound is the format's affair: 1e-06 or 1e-06000.
  for (const auto& [name, value] : served)
    if (name.find("_call_seconds_bucket") == std::string::npos) served_names.push_back(name);
  for (const auto& [name, value] : text)
    if (name.find("_call_seconds_bucket") == std::string::npos) text_names.push_back(name);
  EXPECT_EQ(served_names, text_names);
  for (const std::string& name : text_names) {
    if (name.rfind("weft_test_", 0) == 0) {
      EXPECT_EQ(served.at(name), text.at(name)) << name;
    }
  }
  EXPECT_EQ(served.at("weft_test_seconds_bucket{le=\"2\"}"), 2);
  EXPECT_EQ(served.at("weft_test_seconds_bucket{le=\"4\"}"), 3);
  EXPECT_EQ(served.at("weft_test_seconds_bucket{le=\"+Inf\"}"), 4);
  EXPECT_EQ(served.at("weft_test_depth"), -3);
  c.shutdown();
}

TEST_F(MetricsHttpTest, OnlyMetricsAreServed) {
  Cluster c(options(1));
  for (const char* path : {"/", "/etc/passwd", "/../../../../etc/passwd"}) {
    const std::string answer = http_get(c[0].metrics_address(), path);
    EXPECT_EQ(answer.find(" 200 "), std::string::npos) << path << "\n" << answer;
    EXPECT_EQ(answer.find("root:"), std::string::npos) << path;
    EXPECT_EQ(answer.rfind("HTTP/1.1 4", 0), 0u) << path << "\n" << answer;
  }
  const std::string odd =
      HttpClient(c[0].metrics_address()).ask(std::string("\xff\x00odd\r\n\r\n", 9));
  EXPECT_EQ(odd.find(" 200 "), std::string::npos);
  EXPECT_NE(http_get(c[0].metrics_address()).find(kIssued), std::string::npos);
  c.shutdown();
}

// What `promtool check metrics` asks for, and base units in names besides; tests/docs runs promtool.
TEST_F(MetricsHttpTest, NamesFollowTheConventionsOfPrometheus) {
  Cluster c(options(2));
  EXPECT_EQ(rpc_sync(c[0], "worker1", &add, 1, 2), 3);
  for (const MetricFamily& family : c[0].metrics().families()) {
    const bool total = absl::EndsWith(family.name, "_total");
    EXPECT_EQ(total, family.kind == MetricFamily::Kind::kCounter) << family.name;
    EXPECT_FALSE(family.help.empty()) << family.name;
    for (const char* unit : {"_us", "_ms", "_ns", "_kib", "_mib", "_count", "_bucket"}) {
      const std::string odd = absl::StrCat(unit, "_");
      EXPECT_FALSE(absl::StrContains(family.name + "_", odd)) << family.name;
    }
  }
  c.shutdown();
}

TEST_F(MetricsHttpTest, ATakenPortIsAnErrorOfJoin) {
  Worker first = Worker::join(alone("127.0.0.1:0"));
  const std::string address = first.metrics_address();
  const Status second = Worker::try_join(alone(address)).status();
  EXPECT_EQ(error_kind(second), ErrorKind::kResource) << second;
  EXPECT_NE(second.message().find(address), std::string::npos) << second;
  EXPECT_NE(second.message().find("the port is taken"), std::string::npos) << second;
  // The first still serves; when it has gone, the port is free.
  EXPECT_NE(http_get(address).find(kIssued), std::string::npos);
  EXPECT_TRUE(first.shutdown().status.ok());
  EXPECT_FALSE(HttpClient(address).connected());
  Worker third = Worker::join(alone(address));
  EXPECT_EQ(third.metrics_address(), address);
  EXPECT_NE(http_get(address).find(kIssued), std::string::npos);
  EXPECT_TRUE(third.shutdown().status.ok());
}

TEST_F(MetricsHttpTest, OddAddressesAreErrorsOfJoin) {
  const std::vector<std::pair<std::string, ErrorKind>> rows = {
      {"127.0.0.1", ErrorKind::kInvalidArgument},
      {":0", ErrorKind::kInvalidArgument},
      {"127.0.0.1:65536", ErrorKind::kInvalidArgument},
      {"127.0.0.1:-1", ErrorKind::kInvalidArgument},
      {"127.0.0.1:0,127.0.0.1:1", ErrorKind::kInvalidArgument},
      // No credentials: every process that reaches the machine could read it.
      {"0.0.0.0:0", ErrorKind::kPermission},
      {"[::]:0", ErrorKind::kPermission},
  };
  for (const auto& [address, kind] : rows) {
    const Status status = Worker::try_join(alone(address)).status();
    EXPECT_EQ(error_kind(status), kind) << address << ": " << status;
    EXPECT_NE(status.message().find(address), std::string::npos) << status;
  }
}

TEST_F(MetricsHttpTest, OffUnlessAskedForByOptionOrEnvironment) {
  Worker off = Worker::join(alone(""));
  EXPECT_EQ(off.metrics_address(), "");
  EXPECT_EQ(off.debug_info().count("metrics_port"), 0u);
  EXPECT_TRUE(off.shutdown().status.ok());

  JoinOptions o = alone("");
  o.environment = Environment{{"WEFT_METRICS", "localhost:0"}};
  Worker on = Worker::join(std::move(o));
  EXPECT_EQ(on.metrics_address().rfind("127.0.0.1:", 0), 0u) << on.metrics_address();
  EXPECT_NE(http_get(on.metrics_address()).find(kIssued), std::string::npos);
  EXPECT_TRUE(on.shutdown().status.ok());
}

TEST_F(MetricsHttpTest, ClientsThatSayNothingDoNotHoldTheEnd) {
  Worker worker = Worker::join(alone("127.0.0.1:0"));
  // More than the server has threads.
  std::vector<std::unique_ptr<HttpClient>> silent;
  for (int i = 0; i < 5; ++i) {
    silent.push_back(std::make_unique<HttpClient>(worker.metrics_address()));
    EXPECT_TRUE(silent.back()->connected());
  }
  EXPECT_TRUE(worker.shutdown().status.ok());
}

}  // namespace
}  // namespace weft::testing
