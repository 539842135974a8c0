// Whether a worker lives and is ready, over HTTP, as Kubernetes asks.

#include "weft/rpc/internal/observe/health_http.h"

#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/tests/rpc/http_client.h"
#include "weft/tests/testing/cluster.h"

namespace weft::testing {
namespace {

using internal::health_answer;
using internal::HealthState;
using internal::kMostHealthClients;
using internal::kMostHealthRequest;

// The number in "HTTP/1.1 200 OK"; 0 when nothing answers.
int status_of(const std::string& answer) {
  int status = 0;
  if (answer.size() > 12) static_cast<void>(absl::SimpleAtoi(answer.substr(9, 3), &status));
  return status;
}

// Asks again until the answer is `wanted`, 20 seconds at most: each question is a round trip.
int status_in_time(const std::string& address, const std::string& path, int wanted) {
  const auto runtime = make_system_runtime();
  const absl::Time until = runtime->now() + absl::Seconds(20);
  int status = 0;
  do {
    status = status_of(http_get(address, path));
  } while (status != wanted && runtime->now() < until);
  return status;
}

// Gives the address that the log line of the server names, as soon as it is written.
class AddressSink : public LogSink {
 public:
  void write(Severity, std::string_view line) override {
    const size_t at = line.find("health at http://");
    const size_t end = line.find("/healthz");
    if (at == std::string_view::npos || end == std::string_view::npos) return;
    address_.set_value(std::string(line.substr(at + 17, end - at - 17)));
  }
  std::string address() { return address_.get_future().get(); }

 private:
  std::promise<std::string> address_;
};

Environment health_at(const std::string& address) { return {{"WEFT_HEALTH", address}}; }

std::string health_address(const Worker& worker) {
  return absl::StrCat("127.0.0.1:", worker.debug_info()["health_port"]);
}

TEST(HealthHttp, AnswersHaveAStatusAndNoContent) {
  HealthState state;
  const auto ask = [&](const std::string& line) {
    const std::string answer = health_answer(line + "\r\nHost: a\r\n\r\n", state);
    EXPECT_NE(answer.find("\r\nContent-Length: 0\r\n"), std::string::npos) << answer;
    EXPECT_EQ(answer.substr(answer.size() - 4), "\r\n\r\n") << answer;
    return status_of(answer);
  };
  EXPECT_EQ(ask("GET /healthz HTTP/1.1"), 200);
  EXPECT_EQ(ask("GET /readyz HTTP/1.1"), 503);
  state.ready = true;
  EXPECT_EQ(ask("GET /readyz?verbose HTTP/1.0"), 200);
  EXPECT_EQ(ask("HEAD /readyz HTTP/1.1"), 200);
  state.live = false;
  EXPECT_EQ(ask("GET /healthz HTTP/1.1"), 503);
  EXPECT_EQ(ask("GET /readyz HTTP/1.1"), 503);
  EXPECT_EQ(ask("POST /healthz HTTP/1.1"), 405);
  for (const char* path : {"/", "/metrics", "/healthz/", "/../healthz", "*", "http://a/healthz"}) {
    EXPECT_EQ(ask(absl::StrCat("GET ", path, " HTTP/1.1")), 404) << path;
  }
  for (const char* line : {"", "GET", "GET /healthz", "GET  /healthz", "GET /healthz SSH-2.0"}) {
    EXPECT_EQ(ask(line), 400) << line;
  }
  EXPECT_EQ(health_answer("GET /healthz HTTP/1.1\r\nHost: a\r\n", state), "");
  EXPECT_EQ(status_of(health_answer(std::string(kMostHealthRequest, 'a'), state)), 431);
  EXPECT_EQ(status_of(health_answer(std::string("\xff\x00\n\n", 4), state)), 400);
}

TEST(HealthHttp, AWorkerIsReadyWhenAllHaveJoinedAndNotWhenItLeaves) {
  auto sink = std::make_shared<AddressSink>();
  ClusterOptions o{.size = 2};
  o.adjust = [&sink](int index, JoinOptions* j) {
    if (index != 0) return;
    j->environment = health_at("127.0.0.1:0");
    j->log_sink = sink;
    j->log_level = Severity::kInfo;
  };
  // Only for its store, network and options: the workers join one after the other.
  ClusterOptions none = o;
  none.size = 0;
  Cluster c(none);
  JoinOptions first = c.join_options(0, "worker0");
  JoinOptions second = c.join_options(1, "worker1");
  for (JoinOptions* j : {&first, &second}) j->world_size = 2;
  first.rank = 0;
  second.rank = 1;
  StatusOr<Worker> a = make_error(ErrorKind::kState, "not joined");
  std::thread joining([&] { a = Worker::try_join(std::move(first)); });
  const std::string address = sink->address();
  EXPECT_EQ(status_of(http_get(address, "/healthz")), 200);
  EXPECT_EQ(status_of(http_get(address, "/readyz")), 503);
  Worker b = Worker::join(std::move(second));
  joining.join();
  ASSERT_TRUE(a.ok()) << a.status();
  EXPECT_EQ(address, health_address(*a));
  EXPECT_EQ(status_of(http_get(address, "/readyz")), 200);
  EXPECT_EQ(b.debug_info().count("health_port"), 0u);

  std::thread leaving([&] { EXPECT_TRUE(a->shutdown().status.ok()); });
  // It waits for the other one.
  EXPECT_EQ(status_in_time(address, "/readyz", 503), 503);
  EXPECT_EQ(status_of(http_get(address, "/healthz")), 200);
  EXPECT_TRUE(b.shutdown().status.ok());
  leaving.join();
  EXPECT_FALSE(HttpClient(address).connected());
}

TEST(HealthHttp, AWorkerThatWasDeclaredDeadIsNotHealthy) {
  ClusterOptions o{.size = 2, .names = {"anchor", "b"}, .dynamic = true};
  o.adjust = [](int index, JoinOptions* j) {
    if (index == 1) j->environment = health_at("127.0.0.1:0");
  };
  Cluster c(o);
  const std::string address = health_address(c[1]);
  EXPECT_EQ(status_of(http_get(address, "/healthz")), 200);
  const std::string prefix = absl::StrCat("weft/", c[0].job_id(), "/");
  const auto records = c.store()->list_keys(absl::StrCat(prefix, "member/", c[1].id(), "."));
  ASSERT_TRUE(records.ok()) << records.status();
  ASSERT_EQ(records->size(), 1u);
  ASSERT_TRUE(*c.store()->delete_key(records->front()));
  ASSERT_TRUE(c.store()->add(absl::StrCat(prefix, "version"), 1).ok());
  EXPECT_EQ(status_in_time(address, "/healthz", 503), 503);
  EXPECT_EQ(status_of(http_get(address, "/readyz")), 503);
  c.shutdown_all();
}

TEST(HealthHttp, SilentClientsHoldNeitherOthersNorTheEnd) {
  ClusterOptions o{.size = 1};
  o.adjust = [](int, JoinOptions* j) { j->environment = health_at("127.0.0.1:0"); };
  Cluster c(o);
  const std::string address = health_address(c[0]);
  std::vector<std::unique_ptr<HttpClient>> silent;
  for (size_t i = 0; i < kMostHealthClients - 1; ++i) {
    silent.push_back(std::make_unique<HttpClient>(address));
    ASSERT_TRUE(silent.back()->connected());
  }
  EXPECT_EQ(status_of(http_get(address, "/readyz")), 200);
  // The bound is reached; those that are beyond it wait until one goes.
  silent.push_back(std::make_unique<HttpClient>(address));
  silent.front() = nullptr;
  EXPECT_EQ(status_of(http_get(address, "/readyz")), 200);
  // More than is read, in one piece: the answer comes all the same.
  const std::string big = HttpClient(address).ask(std::string(3 * kMostHealthRequest, 'a'));
  EXPECT_EQ(status_of(big), 431) << big;
  c.shutdown();
}

TEST(HealthHttp, BadInput_a_health_address_that_is_none_or_taken) {
  ClusterOptions o{.size = 1};
  o.adjust = [](int, JoinOptions* j) { j->environment = health_at("127.0.0.1:0"); };
  Cluster c(o);
  const std::string taken = health_address(c[0]);
  const std::vector<std::pair<std::string, ErrorKind>> rows = {
      {"127.0.0.1", ErrorKind::kInvalidArgument},
      {":0", ErrorKind::kInvalidArgument},
      {"127.0.0.1:65536", ErrorKind::kInvalidArgument},
      {taken, ErrorKind::kResource},
  };
  for (const auto& [address, kind] : rows) {
    JoinOptions j;
    j.name = "alone";
    j.rank = 0;
    j.world_size = 1;
    j.transport = inproc_transport(std::make_shared<InprocNetwork>());
    j.log_level = Severity::kWarning;
    j.environment = health_at(address);
    const Status status = Worker::try_join(std::move(j)).status();
    EXPECT_EQ(error_kind(status), kind) << address << ": " << status;
    EXPECT_NE(status.message().find("WEFT_HEALTH"), std::string::npos) << status;
    EXPECT_NE(status.message().find(address), std::string::npos) << status;
  }
  c.shutdown();
}

}  // namespace
}  // namespace weft::testing
