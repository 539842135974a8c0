// Looking at a worker from outside of its job (rpc/inspect.h), and what it shows.

#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/rpc/inspect.h"
#include "weft/rpc/inspection.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"
#include "weft/transport/grpc_transport.h"

namespace weft::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Inspection, IsTextInColumnsAndJson) {
  Inspection seen(2);
  Inspection::Table& calls = seen.table("calls", {"method", "n", "age_s"});
  EXPECT_TRUE(calls.add({std::string("app.Zürich"), int64_t{7}, 1.5}));
  EXPECT_TRUE(calls.add({std::string("f")}));
  EXPECT_FALSE(calls.add({std::string("g"), int64_t{8}, 2.0}));
  calls.leave_out(3);
  seen.table("none", {"a"});
  EXPECT_EQ(seen.text(),
            "calls: 6\n"
            "  method     n age_s\n"
            "  app.Zürich 7 1.500\n"
            "  f          - -\n"
            "  and 4 more\n"
            "none: 0\n");
  EXPECT_EQ(seen.json(),
            "{\n\"calls\": {\"rows\": [\n"
            "{\"method\": \"app.Zürich\", \"n\": 7, \"age_s\": 1.500},\n"
            "{\"method\": \"f\", \"n\": \"\", \"age_s\": \"\"}], \"left_out\": 4},\n"
            "\"none\": {\"rows\": [], \"left_out\": 0}\n}\n");
}

// A name from elsewhere writes nothing on a terminal but itself.
TEST(Inspection, ShowsWhatIsNoTextEscaped) {
  Inspection seen(10);
  seen.table("t", {"name"})
      .add({std::string("a\x1b[2J\n\xff\xc2\x9b"
                        "b",
                        10)});
  EXPECT_EQ(seen.text(), "t: 1\n  name\n  a\\x1b[2J\\x0a\\xff\\xc2\\x9bb\n");
  EXPECT_THAT(seen.json(), AllOf(HasSubstr("a\\u001b[2J\\u000a\\ufffd"), Not(HasSubstr("\x1b"))));
}

class RpcInspect : public ::testing::TestWithParam<Net> {
 protected:
  InspectOptions options(Cluster& c, size_t worker) const {
    InspectOptions out{.address = c[worker].address(), .deadline = absl::Seconds(30)};
    if (GetParam() == Net::kInproc) out.transport = inproc_transport(c.network());
    return out;
  }
  // Waits for the loss of an observer's connection, which the worker hears of by itself.
  static void expect_no_observer(const Worker& worker) {
    const absl::Time limit = worker.now() + absl::Seconds(20);
    const auto parker = worker.runtime().make_pool({})->make_parker();
    while (counter(worker, "observers") > 0) {
      ASSERT_LT(worker.now(), limit);
      parker->park_until(worker.now() + absl::Milliseconds(1));
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Nets, RpcInspect, ::testing::ValuesIn(nets()), net_name);

TEST_P(RpcInspect, ShowsCallsOnBothSidesAndJoinsNothing) {
  const auto runtime = make_system_runtime();
  const auto gate = std::make_shared<Gate>(runtime);
  Library lib("app");
  lib.def("held", [gate] {
    gate->arrive_and_wait();
    return int64_t{1};
  });
  Cluster c({.net = GetParam(), .library = lib});
  const auto held =
      rpc_async(c[0], 1, {.deadline = std::chrono::minutes(5)}, FunctionRef<int64_t()>{"app.held"});
  gate->wait_arrived(1);
  const uint64_t version = c[1].membership_version();
  const int64_t peers = counter(c[1], "peers");
  const int64_t served = counter(c[1], "requests_served");

  const std::string callee = inspect(options(c, 1));
  EXPECT_THAT(callee, ContainsRegex("serving: 1\n[^\n]*\n  app\\.held +worker0 "));
  EXPECT_THAT(callee, AllOf(HasSubstr(c[1].job_id()), HasSubstr("pending: 0\n"),
                            Not(HasSubstr("requests_served"))));
  InspectOptions more = options(c, 0);
  more.json = true;
  more.counters = true;
  more.wanted = c[0].info();
  const std::string caller = inspect(more);
  EXPECT_THAT(caller, HasSubstr("\"pending\": {\"rows\": [\n{\"method\": \"app.held\", \"to\": "
                                "\"worker1\""));
  EXPECT_THAT(caller, HasSubstr("{\"name\": \"calls_pending\", \"value\": 1}"));

  expect_no_observer(c[1]);
  EXPECT_EQ(c[1].membership_version(), version);
  EXPECT_EQ(c[1].worker_infos().size(), 2u);
  EXPECT_EQ(counter(c[1], "peers"), peers);
  EXPECT_EQ(counter(c[1], "requests_served"), served) << "it was a call like any other";
  gate->open();
  EXPECT_EQ(held.wait(), 1);
}

// Threads that wait in something that is not ours: the pool makes no others for them.
TEST_P(RpcInspect, AnswersWhileEveryHandlerIsStuck) {
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  std::promise<void> begun;
  const auto first = std::make_shared<std::once_flag>();
  Library lib("app");
  lib.def("stuck", [released, first, &begun] {
    std::call_once(*first, [&begun] { begun.set_value(); });
    released.wait();
    return int64_t{1};
  });
  Cluster c({.net = GetParam(), .library = lib, .worker_threads = 1});
  std::vector<Future<int64_t>> all;
  for (int i = 0; i < 3; ++i) {
    all.push_back(rpc_async(c[0], 1, {.deadline = std::chrono::minutes(5)},
                            FunctionRef<int64_t()>{"app.stuck"}));
  }
  begun.get_future().wait();  // the only thread is stuck from here on
  const absl::Time limit = c[1].now() + absl::Seconds(20);
  std::string seen;
  do {
    seen = inspect(options(c, 1));
  } while (seen.find("serving: 3\n") == std::string::npos && c[1].now() < limit);
  EXPECT_THAT(seen, HasSubstr("serving: 3\n"));
  release.set_value();
  for (const auto& f : all) EXPECT_EQ(f.wait(), 1);
}

TEST_P(RpcInspect, BadInput_an_observer_that_the_worker_does_not_let_look) {
  Cluster c({.net = GetParam(), .adjust = [](int index, JoinOptions* o) {
               if (index == 1) o->access = {{"@weft.inspect", {"admin*"}}};
             }});
  const StatusOr<std::string> anybody = try_inspect(options(c, 1));
  EXPECT_EQ(error_kind(anybody.status()), ErrorKind::kPermission) << anybody.status();
  EXPECT_THAT(
      std::string(anybody.status().message()),
      AllOf(HasSubstr("'worker1'"), HasSubstr("'weft-inspect'"), HasSubstr("@weft.inspect")));
  InspectOptions admin = options(c, 1);
  admin.name = "admin2";
  EXPECT_TRUE(try_inspect(admin).ok());
  EXPECT_TRUE(try_inspect(options(c, 0)).ok());

  InspectOptions other = options(c, 0);
  other.wanted = c[1].info();
  const Status wrong = try_inspect(other).status();
  EXPECT_EQ(error_kind(wrong), ErrorKind::kPeerLost) << wrong;
  InspectOptions none = options(c, 0);
  none.most_rows = 0;
  EXPECT_EQ(error_kind(try_inspect(none).status()), ErrorKind::kInvalidArgument);
}

TEST_P(RpcInspect, ListsWhoHasARecordInTheStore) {
  Cluster c({.size = 3, .net = GetParam()});
  const auto all = list_workers(*c.store());
  ASSERT_TRUE(all.ok()) << all.status();
  ASSERT_EQ(all->size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ((*all)[i].info, c[i].info());
    EXPECT_EQ((*all)[i].job_id, c[i].job_id());
    EXPECT_EQ((*all)[i].address, c[i].address());
  }
  EXPECT_EQ(list_workers(*c.store(), c[0].job_id())->size(), 3u);
  EXPECT_TRUE(list_workers(*c.store(), "another")->empty());
}

}  // namespace
}  // namespace weft::testing
