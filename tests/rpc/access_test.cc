// Which workers may call which methods, and whose name counts (rpc/access_rule.h,
// transport/credentials.h).
#include <atomic>

#include "ATen/ops/ones.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/rpc/internal/agent/access.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"

namespace weft::testing {
namespace {

using internal::Access;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::atomic<int> saved{0};
int64_t save(int64_t x) {
  ++saved;
  return x;
}
int64_t load(int64_t x) { return x; }

Library library() {
  Library lib("app");
  lib.def("save", &save).def("load", &load, {.inline_ok = true});
  lib.class_<Counter>("Counter").constructor<int64_t>().def("add", &Counter::add);
  lib.instance("counter", std::make_shared<Counter>(100));
  lib.aten({"aten::neg"});
  return lib;
}

// trainer0, trainer1, ps0; the rules are those of ps0.
ClusterOptions with_rules(Net net, std::vector<AccessRule> rules) {
  return {.size = 3,
          .net = net,
          .library = library(),
          .names = {"trainer0", "trainer1", "ps0"},
          .adjust = [rules](int index, JoinOptions* o) {
            if (index == 2) o->access = rules;
          }};
}

template <class... Call>
std::string refusal(const Worker& from, Call&&... call) {
  try {
    (void)rpc_sync(from, std::forward<Call>(call)...);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kPermission) << error.what();
    EXPECT_EQ(error.origin(), "ps0") << error.what();
    return error.what();
  }
  ADD_FAILURE() << "it ran";
  return "";
}

class RpcAccess : public ::testing::TestWithParam<Net> {};
INSTANTIATE_TEST_SUITE_P(Nets, RpcAccess, ::testing::ValuesIn(nets()), net_name);

TEST_P(RpcAccess, BadInput_a_call_that_the_callee_does_not_allow) {
  Cluster c(with_rules(GetParam(), {{"app.save", {"trainer0", "eval*"}}}));
  saved = 0;
  EXPECT_EQ(rpc_sync(c[0], "ps0", &save, 1), 1);
  const std::string refused = refusal(c[1], "ps0", &save, 2);
  EXPECT_THAT(refused, AllOf(HasSubstr("app.save"), HasSubstr("'trainer1'"), HasSubstr("'ps0'")));
  EXPECT_EQ(saved, 1) << "it ran all the same";
  // Its own worker, other methods, and the same method elsewhere.
  EXPECT_EQ(rpc_sync(c[2], "ps0", &save, 3), 3);
  EXPECT_EQ(rpc_sync(c[1], "ps0", &load, 4), 4);
  EXPECT_EQ(rpc_sync(c[2], "trainer0", &save, 5), 5);
}

TEST_P(RpcAccess, ObjectsConstructorsAndOperatorsAreMethodsToo) {
  Cluster c(with_rules(
      GetParam(), {{"app.Counter*", {"trainer0"}}, {"aten::*", {}}, {"app.load", {"trainer1"}}}));
  EXPECT_EQ(rpc_sync(c[0], "ps0", on("counter", &Counter::add), 5), 105);
  refusal(c[1], "ps0", on("counter", &Counter::add), 5);
  EXPECT_EQ(rpc_sync(c[0], "ps0", on("counter", &Counter::add), 0), 105);
  refusal(c[0], "ps0", &load, 1);  // inline
  const FunctionRef<at::Tensor(at::Tensor)> neg("aten::neg");
  refusal(c[0], "ps0", neg, at::ones({2}));
  EXPECT_EQ(rpc_sync(c[2], "trainer0", neg, at::ones({2})).numel(), 2);
  EXPECT_EQ(rpc_sync(c[1], "ps0", &load, 1), 1);
}

TEST_P(RpcAccess, ARuleThatNamesNothingIsAnErrorOfJoin) {
  JoinOptions options;
  options.library = library();
  options.rank = 0;
  options.world_size = 1;
  options.environment = Environment{};
  options.access = {{"app.svae", {"trainer0"}}};
  const Status status = Worker::try_join(std::move(options)).status();
  EXPECT_EQ(error_kind(status), ErrorKind::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("'app.svae'"));
}

TEST(Access, PatternsAndRules) {
  using internal::fits;
  EXPECT_TRUE(fits("trainer*", "trainer12"));
  EXPECT_TRUE(fits("trainer*", "trainer"));
  EXPECT_FALSE(fits("trainer*", "a.trainer"));
  EXPECT_TRUE(fits("*a*b", "xaabab"));
  EXPECT_FALSE(fits("*a*b", "xaaba"));
  EXPECT_TRUE(fits("*", ""));
  EXPECT_FALSE(fits("", "x"));
  EXPECT_TRUE(fits("", ""));

  const std::vector<std::string> methods = {"app.f", "app.g", "@group.arrive"};
  EXPECT_TRUE(Access().allows("app.f", "anyone"));
  const StatusOr<Access> some = Access::make({{"*", {"a"}}, {"app.g", {"b*"}}}, methods);
  ASSERT_TRUE(some.ok());
  EXPECT_TRUE(some->allows("app.f", "a"));
  EXPECT_FALSE(some->allows("app.f", "b1"));
  EXPECT_TRUE(some->allows("app.g", "b1"));
  // What weft needs for itself is not meant by a '*'.
  EXPECT_TRUE(some->allows("@group.arrive", "b1"));
  const StatusOr<Access> service = Access::make({{"@group.*", {}}}, methods);
  ASSERT_TRUE(service.ok());
  EXPECT_FALSE(service->allows("@group.arrive", "a"));
}

// A member of the job that uses another one's incarnation would get that one's calls.
TEST(RpcIdentity, BadInput_a_peer_with_the_incarnation_of_another) {
  Cluster c(ClusterOptions{.size = 3, .library = library(), .names = {"ps0", "trainer0", "ps1"}});
  TransportContext context;
  context.runtime = make_system_runtime();
  context.worker_name = "stranger";
  std::unique_ptr<Transport> transport = *inproc_transport(c.network())(context);
  class Nobody : public ConnectionHandler {
    void on_frame(const FrameView&, int) override {}
    void on_lost(Lost) override {}
  };
  Hello hello;
  hello.job_id = c[0].job_id();
  hello.name = "stranger";
  hello.id = 7;
  for (size_t known : {1u, 2u}) {
    if (known == 1) (void)rpc_sync(c[0], "trainer0", &load, 1);  // not only in the list
    hello.incarnation = c[known].info().incarnation;
    // Shared: who completes it may not have let go of it when the wait is over.
    const auto refused = std::make_shared<Promise<std::string>>();
    transport->connect(c[0].address(), hello, context.runtime->now() + absl::Seconds(30),
                       std::make_shared<Nobody>(),
                       [refused](StatusOr<std::shared_ptr<Connection>> result) {
                         EXPECT_EQ(error_kind(result.status()), ErrorKind::kPermission);
                         refused->set_value(std::string(result.status().message()));
                       });
    EXPECT_THAT(refused->future().wait(),
                AllOf(HasSubstr("'" + c[known].name() + "'"), HasSubstr("not of 'stranger'")));
  }
  transport->shutdown();
  EXPECT_EQ(rpc_sync(c[0], "trainer0", &load, 2), 2);
}

}  // namespace
}  // namespace weft::testing
