// What goes wrong at a caller's or a callee's hand, case by case, as docs/faults.md lists them: who
// is told, with which code and kind, and that everything else goes on. Those that need processes of
// their own are in tests/integration.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/eye.h"
#include "ATen/ops/ones.h"
#include "c10/util/Exception.h"
#include "gtest/gtest.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"
#include "weft/transport/faulty_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT
using Code = absl::StatusCode;

struct NotStandard {};

// Throws what the caller names.
int64_t raise(const std::string& what) {
  if (what == "torch") TORCH_CHECK_INDEX(false, "row 7 of 3");
  if (what == "standard") throw std::out_of_range("too far");
  if (what == "object") throw NotStandard();
  if (what == "int") throw 42;
  if (what == "odd") throw std::runtime_error("odd \xff\xfe\x01 bytes");
  if (what == "nul") throw Error(Code::kAborted, std::string("a\0b", 3));
  return 0;
}
Future<int64_t> raise_later(std::string what) { co_return raise(what); }

class RpcBadInput : public ::testing::TestWithParam<Net> {
 protected:
  RpcBadInput() {
    library_.merge(test_.library);
    Library own("bad");
    own.def("raise", &raise).def("raise_later", &raise_later);
    own.def("meta", [] { return at::empty({2}, at::TensorOptions().device(at::kMeta)); });
    own.def("hold", [gate = test_.gate](const at::Tensor& x) {
      gate->arrive_and_wait();
      return x.numel();
    });
    library_.merge(own);
  }
  ClusterOptions options(int size) {
    ClusterOptions o{.size = size, .net = GetParam(), .library = library_};
    o.adjust = [plan = plan_](int, JoinOptions* j) {
      j->transport = faulty_transport(j->transport, plan);
    };
    return o;
  }
  // `s` is an error of this code and kind that names all of `words`.
  static void expect_error(const Status& s, Code code, ErrorKind kind,
                           const std::vector<std::string>& words) {
    EXPECT_EQ(s.code(), code) << s;
    EXPECT_EQ(error_kind(s), kind) << s;
    for (const std::string& word : words) {
      EXPECT_NE(std::string(s.message()).find(word), std::string::npos) << word << " in: " << s;
    }
  }
  // The two still call each other, and nothing of what went wrong is left.
  static void expect_healthy(Cluster& c) {
    EXPECT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3);
    EXPECT_EQ(rpc_sync(c[1], 0, &add, 1, 2), 3);
    EXPECT_EQ(c[0].debug_info().at("calls_pending"), 0);
  }

  TestLibrary test_;
  Library library_;
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>(5);
};
class RpcBadInputInproc : public RpcBadInput {};

TEST_P(RpcBadInput, BadInput_unknown_function) {
  Cluster c(options(2));
  const FunctionRef<int64_t(int64_t, int64_t)> wrong{"test.ad"};
  const Status s = try_rpc_sync(c[0], 1, wrong, 1, 2).status();
  expect_error(s, Code::kNotFound, ErrorKind::kNotFound, {"test.ad", "test.add"});
  EXPECT_EQ(error_details(s).origin, "worker1");
  EXPECT_EQ(c[1].debug_info().at("requests_pooled"), 0);
  expect_healthy(c);
}

TEST_P(RpcBadInput, BadInput_unknown_class_or_object) {
  Cluster c(options(2));
  const FunctionRef<int64_t(int64_t)> no_class{"test.Account.add"};
  expect_error(try_rpc_sync(c[0], 1, on("counter", no_class), 1).status(), Code::kNotFound,
               ErrorKind::kNotFound, {"test.Account.add"});
  expect_error(try_rpc_sync(c[0], 1, on("abacus", &Counter::add), 1).status(), Code::kNotFound,
               ErrorKind::kNotFound, {"abacus"});
  EXPECT_EQ(rpc_sync(c[0], 1, on("counter", &Counter::value)), 100);
  expect_healthy(c);
}

TEST_P(RpcBadInput, BadInput_wrong_types) {
  Cluster c(options(2));
  const FunctionRef<int64_t(std::string, int64_t)> wrong{"test.add"};
  const Status s = try_rpc_sync(c[0], 1, wrong, "1", 2).status();
  expect_error(s, Code::kInvalidArgument, ErrorKind::kSignature,
               {"(string,int)->int", "(int,int)->int"});
  EXPECT_EQ(error_details(s).origin, "worker1");
  expect_healthy(c);
}

TEST_P(RpcBadInput, BadInput_wrong_arity) {
  Cluster c(options(2));
  const FunctionRef<int64_t(int64_t)> few{"test.add"};
  const FunctionRef<int64_t(int64_t, int64_t, int64_t)> many{"test.add"};
  expect_error(try_rpc_sync(c[0], 1, few, 1).status(), Code::kInvalidArgument,
               ErrorKind::kSignature, {"(int)->int", "(int,int)->int"});
  expect_error(try_rpc_sync(c[0], 1, many, 1, 2, 3).status(), Code::kInvalidArgument,
               ErrorKind::kSignature, {"(int,int,int)->int", "(int,int)->int"});
  expect_healthy(c);
}

TEST_P(RpcBadInput, BadInput_unserialisable_argument) {
  Cluster c(options(2));
  const int64_t sent = c[1].debug_info().at("requests_served");
  const at::Tensor meta = at::empty({2}, at::TensorOptions().device(at::kMeta));
  expect_error(try_rpc_sync(c[0], 1, &echo, meta).status(), Code::kInvalidArgument,
               ErrorKind::kInvalidArgument, {"test.echo", "meta"});
  expect_error(try_rpc_sync(c[0], 1, &echo, at::eye(3).to_sparse_csr()).status(),
               Code::kInvalidArgument, ErrorKind::kInvalidArgument, {"test.echo", "sparse COO"});
  EXPECT_EQ(c[1].debug_info().at("requests_served"), sent) << "nothing was sent";
  expect_healthy(c);
}

TEST_P(RpcBadInput, BadInput_unserialisable_result) {
  Cluster c(options(2));
  const FunctionRef<at::Tensor()> meta{"bad.meta"};
  const Status s = try_rpc_sync(c[0], 1, meta).status();
  expect_error(s, Code::kInvalidArgument, ErrorKind::kInvalidArgument, {"meta"});
  EXPECT_EQ(error_details(s).origin, "worker1") << s;
  expect_healthy(c);
}

TEST_P(RpcBadInput, BadInput_unknown_peer) {
  Cluster c(options(2));
  expect_error(try_rpc_sync(c[0], "worker7", &add, 1, 2).status(), Code::kNotFound,
               ErrorKind::kNotFound, {"worker7", "nearest", "worker1"});
  expect_error(try_rpc_sync(c[0], 7, &add, 1, 2).status(), Code::kNotFound, ErrorKind::kNotFound,
               {"7"});
  expect_error(try_rpc_sync(c[0], -1, &add, 1, 2).status(), Code::kNotFound, ErrorKind::kNotFound,
               {"-1"});
  expect_healthy(c);
}

TEST_P(RpcBadInput, BadInput_duplicate_name) {
  ClusterOptions o = options(1);
  o.names = {"same"};
  o.dynamic = true;
  Cluster c(o);
  const Status s = Worker::try_join(c.join_options(1, "same")).status();
  expect_error(s, Code::kAlreadyExists, ErrorKind::kInvalidArgument, {"same", "not unique"});
  // The one that is there is not touched.
  EXPECT_EQ(rpc_sync(c[0], "same", &add, 1, 2), 3);
  Worker& other = c.add("other");
  EXPECT_EQ(rpc_sync(other, "same", &add, 1, 2), 3);
}

TEST_P(RpcBadInput, BadInput_a_handler_throws_a_LibTorch_error) {
  Cluster c(options(2));
  for (const Status& s : {try_rpc_sync(c[0], 1, &raise, "torch").status(),
                          try_rpc_sync(c[0], 1, &raise_later, "torch").status()}) {
    expect_error(s, Code::kOutOfRange, ErrorKind::kUser, {"row 7 of 3"});
    EXPECT_EQ(s.message(), "row 7 of 3");
    EXPECT_EQ(error_details(s).origin, "worker1");
    EXPECT_EQ(std::string(s.message()).find("Exception raised"), std::string::npos);
  }
  expect_healthy(c);
}

TEST_P(RpcBadInput, BadInput_a_handler_throws_a_standard_exception) {
  Cluster c(options(2));
  for (const Status& s : {try_rpc_sync(c[0], 1, &raise, "standard").status(),
                          try_rpc_sync(c[0], 1, &raise_later, "standard").status()}) {
    expect_error(s, Code::kOutOfRange, ErrorKind::kUser, {"too far"});
    EXPECT_EQ(error_details(s).origin, "worker1");
  }
  expect_healthy(c);
}

TEST_P(RpcBadInput, BadInput_a_handler_throws_an_object_that_is_no_exception) {
  Cluster c(options(2));
  for (const char* what : {"object", "int"}) {
    for (const Status& s : {try_rpc_sync(c[0], 1, &raise, what).status(),
                            try_rpc_sync(c[0], 1, &raise_later, what).status()}) {
      expect_error(s, Code::kUnknown, ErrorKind::kUser, {"not derived from std::exception"});
    }
  }
  expect_healthy(c);
}

TEST_P(RpcBadInput, BadInput_a_handler_throws_odd_bytes) {
  Cluster c(options(2));
  for (const auto& call :
       {std::function([&](const char* w) { return try_rpc_sync(c[0], 1, &raise, w).status(); }),
        std::function(
            [&](const char* w) { return try_rpc_sync(c[0], 1, &raise_later, w).status(); })}) {
    EXPECT_EQ(call("odd").message(), "odd \xff\xfe\x01 bytes");
    EXPECT_EQ(call("nul").message(), std::string("a\0b", 3));
    EXPECT_EQ(call("nul").code(), Code::kAborted);
  }
  expect_healthy(c);
}

TEST_P(RpcBadInput, BadInput_a_truncated_message) {
  Cluster c(options(2));
  rpc_sync(c[0], 1, &add, 1, 2);
  for (const FrameKind kind : {FrameKind::kRequest, FrameKind::kResponse}) {
    const int rule = plan_->add({.fault = Fault::kTruncate, .kind = kind, .times = 1});
    const Status s = try_rpc_sync(c[0], 1, {.deadline = 20s}, &echo, at::ones({1000})).status();
    EXPECT_FALSE(s.ok()) << fault_name(Fault::kTruncate) << " " << plan_->log();
    EXPECT_NE(error_kind(s), ErrorKind::kDeadline) << s;
    EXPECT_EQ(plan_->hits(rule), 1);
    plan_->remove(rule);
    expect_healthy(c);
  }
}

TEST_P(RpcBadInput, BadInput_more_bytes_than_may_be_under_way) {
  ClusterOptions o = options(2);
  o.adjust = [](int, JoinOptions* j) {
    j->environment = Environment{{"WEFT_SEND_BUDGET", "1000000"}};
  };
  Cluster c(o);
  const FunctionRef<int64_t(at::Tensor)> hold{"bad.hold"};
  const at::Tensor x = at::ones({150'000});  // 600 kB
  Future<int64_t> first = rpc_async(c[0], 1, hold, x);
  test_.gate->wait_arrived(1);
  EXPECT_GE(c[0].debug_info().at("send_bytes"), 600'000);
  expect_error(try_rpc_sync(c[0], 1, hold, x).status(), Code::kResourceExhausted,
               ErrorKind::kResource, {"bad.hold", "1000000", "WEFT_SEND_BUDGET"});
  EXPECT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3) << "what fits may still go";
  test_.gate->open();
  EXPECT_EQ(first.wait(), 150'000);
  EXPECT_EQ(rpc_sync(c[0], 1, hold, x), 150'000) << "the bytes came back with the call";
  // The transport may drop the last frame a moment after the answer.
  const absl::Time limit = c[0].now() + absl::Seconds(30);
  while (c[0].debug_info().at("send_bytes") > 0) ASSERT_LT(c[0].now(), limit);
  expect_healthy(c);
}

// A flipped byte may hit anything: the call gets an error or its right answer, and no worker ends.
TEST_P(RpcBadInput, BadInput_a_message_with_flipped_bytes) {
  Cluster c(options(2));
  rpc_sync(c[0], 1, &add, 1, 2);
  const int rule = plan_->add({.fault = Fault::kFlipByte, .kind = FrameKind::kRequest, .skip = 1});
  int failed = 0;
  for (int i = 0; i < 30; ++i) {
    const Status s = try_rpc_sync(c[0], 1, {.deadline = 300ms}, &echo, at::ones({8})).status();
    failed += s.ok() ? 0 : 1;
  }
  EXPECT_GT(failed, 0);
  EXPECT_GE(plan_->hits(rule), 10);
  plan_->remove(rule);
  expect_healthy(c);
  c.shutdown_all({.deadline = 10s});
}

TEST_P(RpcBadInputInproc, BadInput_a_peer_partitioned) {
  ClusterOptions o = options(2);
  o.heartbeat = 50ms;
  o.lease = 400ms;
  Cluster c(o);
  rpc_sync(c[0], 1, &add, 1, 2);
  c.network()->partition("worker0", "worker1");
  // The store still hears both, so neither counts as dead; the call ends by its own deadline, or
  // earlier when the silence breaks the connection under it.
  const Status s = try_rpc_sync(c[0], 1, {.deadline = 1s}, &add, 1, 2).status();
  EXPECT_TRUE(error_kind(s) == ErrorKind::kDeadline || error_kind(s) == ErrorKind::kMaybeExecuted)
      << s;
  EXPECT_EQ(c[0].worker_infos().size(), 2u);
  EXPECT_EQ(c[0].debug_info().at("calls_pending"), 0);
  c.network()->heal("worker0", "worker1");
  EXPECT_EQ(rpc_sync(c[0], 1, {.deadline = 20s}, &add, 1, 2), 3);
  expect_healthy(c);
}

INSTANTIATE_TEST_SUITE_P(Nets, RpcBadInputInproc, ::testing::Values(Net::kInproc), net_name);
INSTANTIATE_TEST_SUITE_P(Nets, RpcBadInput, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
