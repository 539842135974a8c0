// The timelines of two workers: each call begins and ends in both, and an arrow leads from the one
// to the other.

#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "ATen/ops/ones.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;

int64_t numel(const at::Tensor& x) { return x.numel(); }
int64_t fails(int64_t) { throw std::runtime_error("on purpose"); }

// The lines of a timeline that hold all of `words`; each event is one line.
std::vector<std::string> events(const std::string& path, const std::vector<std::string>& words) {
  std::ifstream in(path);
  const std::string text((std::istreambuf_iterator<char>(in)), {});
  EXPECT_FALSE(text.empty()) << path;
  std::vector<std::string> out;
  for (const auto& line : absl::StrSplit(text, '\n')) {
    const std::string event(line);
    if (std::all_of(words.begin(), words.end(),
                    [&](const std::string& w) { return absl::StrContains(event, w); })) {
      out.push_back(event);
    }
  }
  return out;
}

std::string id_of(const std::string& event) {
  const size_t at = event.find("\"id\":");
  return at == std::string::npos ? "" : event.substr(at, event.find_first_of(",}", at) - at);
}

class CallTraceTest : public ::testing::TestWithParam<Net> {
 protected:
  CallTraceTest() {
    std::string name = ::testing::TempDir() + "/weft-trace-XXXXXX";
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    dir_ = name;
  }
  ~CallTraceTest() override { std::filesystem::remove_all(dir_); }
  std::string path(const char* name) const { return dir_ / name; }

 private:
  std::filesystem::path dir_;
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
      j->trace_file = path("trace.%r.json");
    } else {
      j->environment = Environment{{"WEFT_TRACE_FILE", path("trace.%r.json")}};
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
  const std::string caller = path("trace.0.json");
  const std::string callee = path("trace.1.json");
  const auto count = [](const std::string& path, const std::vector<std::string>& words) {
    return events(path, words).size();
  };
  for (const char* phase : {"\"ph\":\"b\"", "\"ph\":\"e\""}) {
    EXPECT_EQ(count(caller, {phase, "\"cat\":\"rpc\"", "trace.add"}), kCalls) << phase;
    EXPECT_EQ(count(callee, {phase, "\"cat\":\"serve\"", "trace.add"}), kCalls) << phase;
    EXPECT_EQ(count(caller, {phase, "\"cat\":\"bulk\"", "\"message\""}), 1) << phase;
  }
  EXPECT_EQ(count(caller, {"\"ph\":\"b\"", "trace.add", "worker1"}), kCalls);
  EXPECT_EQ(count(callee, {"\"ph\":\"X\"", "\"cat\":\"run\"", "trace.add"}), kCalls);
  const std::vector<std::string> failed =
      events(caller, {"\"ph\":\"e\"", "\"cat\":\"rpc\"", "trace.fails"});
  ASSERT_EQ(failed.size(), 1u);
  EXPECT_THAT(failed[0], HasSubstr("on purpose"));
  const std::vector<std::string> out = events(caller, {"\"ph\":\"s\"", "trace.add"});
  const std::vector<std::string> in = events(callee, {"\"ph\":\"f\"", "trace.add"});
  ASSERT_EQ(out.size(), kCalls);
  ASSERT_EQ(in.size(), kCalls);
  for (int i = 0; i < kCalls; ++i) EXPECT_EQ(id_of(out[i]), id_of(in[i]));
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
