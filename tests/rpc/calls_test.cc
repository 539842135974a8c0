// Calls: RPC-24 to RPC-51 of the inventory, error fidelity (X7) and nested calls (X8), on each
// transport.

#include <algorithm>
#include <set>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/sparse_coo_tensor.h"
#include "ATen/ops/zeros.h"
#include "gtest/gtest.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

class RpcCalls : public ::testing::TestWithParam<Net> {
 protected:
  Cluster make(int size, int threads = 4) {
    return Cluster(
        {.size = size, .net = GetParam(), .library = test_.library, .worker_threads = threads});
  }
  // The error of a call that must fail.
  template <class F, class... Args>
  Error error_of(const Worker& from, const Destination& to, const F& f, const Args&... args) {
    try {
      rpc_sync(from, to, f, args...);
    } catch (const Error& e) {
      return e;
    }
    ADD_FAILURE() << "the call did not fail";
    return Error(make_error(ErrorKind::kInternal, "the call did not fail"));
  }
  TestLibrary test_;
};

using AddRef = FunctionRef<int64_t(int64_t, int64_t)>;

TEST_P(RpcCalls, RPC_24_add) {
  Cluster c = make(2);
  EXPECT_EQ(rpc_sync(c[0], "worker1", &add, 2, 40), 42);
  EXPECT_EQ(rpc_sync(c[0], std::string("worker1"), AddRef{"test.add"}, 2, 40), 42);
}

TEST_P(RpcCalls, RPC_25_add_with_id) {
  Cluster c = make(2);
  EXPECT_EQ(rpc_sync(c[0], c[0].get_worker_info("worker1"), &add, 2, 40), 42);
  EXPECT_EQ(rpc_sync(c[0], c[0].get_worker_info("worker1").id, &add, 2, 40), 42);
}

TEST_P(RpcCalls, RPC_26_int_callee) {
  Cluster c = make(2);
  EXPECT_EQ(rpc_sync(c[0], 1, &add, 2, 40), 42);
}

TEST_P(RpcCalls, RPC_27_send_to_rank) {
  Cluster c = make(2);
  for (const Destination& to : {Destination("worker1"), Destination(1), Destination(c[1].info())}) {
    EXPECT_EQ(rpc_sync(c[0], to, &add, 1, 2), 3);
  }
  EXPECT_EQ(error_of(c[0], "worker7", &add, 1, 2).kind(), ErrorKind::kNotFound);
  EXPECT_NE(std::string(error_of(c[0], "wurker1", &add, 1, 2).what()).find("nearest: 'worker1'"),
            std::string::npos);
  EXPECT_EQ(error_of(c[0], 7, &add, 1, 2).kind(), ErrorKind::kNotFound);
  EXPECT_EQ(error_of(c[0], -1, &add, 1, 2).kind(), ErrorKind::kNotFound);
  EXPECT_EQ(error_of(c[0], int64_t{1} << 40, &add, 1, 2).kind(), ErrorKind::kNotFound);
  WorkerInfo old = c[1].info();
  old.incarnation ^= 1;
  EXPECT_EQ(error_of(c[0], old, &add, 1, 2).kind(), ErrorKind::kPeerLost);
}

TEST_P(RpcCalls, RPC_28_self_add) {
  Cluster c = make(2);
  EXPECT_EQ(rpc_sync(c[1], "worker1", &add, 2, 40), 42);
  at::Tensor x = at::ones({4});
  at::Tensor y = rpc_sync(c[1], 1, &echo, x);
  EXPECT_TRUE(at::equal(x, y));
  EXPECT_NE(x.data_ptr(), y.data_ptr()) << "a call to self must not alias the caller's memory";
}

TEST_P(RpcCalls, RPC_29_async_add) {
  Cluster c = make(2);
  Future<int64_t> f = rpc_async(c[0], "worker1", {.deadline = 30s}, &add, 2, 40);
  EXPECT_EQ(f.wait(), 42);
}

TEST_P(RpcCalls, RPC_30_multi_rpc) {
  Cluster c = make(3);
  std::vector<Future<int64_t>> futures;
  for (int64_t i = 0; i < 100; ++i) futures.push_back(rpc_async(c[0], 1 + i % 2, &add, i, i));
  for (int64_t i = 0; i < 100; ++i) EXPECT_EQ(futures[static_cast<size_t>(i)].wait(), 2 * i);
  const std::vector<int64_t> all =
      rpc_sync(c[0], std::vector<Destination>{"worker0", "worker1", 2}, &add, 20, 22);
  EXPECT_EQ(all, (std::vector<int64_t>{42, 42, 42}));
}

TEST_P(RpcCalls, RPC_31_nonzero_and_RPC_45_op_with_invalid_args) {
  Cluster c = make(2);
  const FunctionRef<at::Tensor(at::Tensor)> nonzero{"aten::nonzero"};
  const at::Tensor eye = at::ones({3, 3}).triu().tril();
  EXPECT_EQ(rpc_sync(c[0], 1, nonzero, eye).sizes(), (std::vector<int64_t>{3, 2}));
  // A signature that the operator does not have is told to the caller, with what there is.
  const FunctionRef<at::Tensor(std::string)> wrong{"aten::nonzero"};
  const Error e = error_of(c[0], 1, wrong, "x");
  EXPECT_EQ(e.kind(), ErrorKind::kSignature) << e.what();
  EXPECT_NE(e.message().find("(tensor)->tensor"), std::string::npos) << e.what();
  EXPECT_NE(e.message().find("(string)->tensor"), std::string::npos) << e.what();
}

TEST_P(RpcCalls, RPC_32_scalar_add) {
  Cluster c = make(2);
  EXPECT_EQ(rpc_sync(c[0], 1, &add_double, 1, 2.5), 3.5);
}

TEST_P(RpcCalls, RPC_33_py_tensors) {
  Cluster c = make(2);
  const at::Tensor y = rpc_sync(c[0], 1, &add_tensors, at::ones({2, 3}), at::ones({2, 3}));
  EXPECT_TRUE(at::equal(y, at::full({2, 3}, 2)));
}

TEST_P(RpcCalls, RPC_34_py_tensors_in_container) {
  Cluster c = make(2);
  const std::vector<at::Tensor> sent = {at::ones({2}), at::zeros({0, 3}), at::arange(1000),
                                        at::full({}, 7)};
  const std::vector<at::Tensor> got = rpc_sync(c[0], 1, &echo_list, sent);
  ASSERT_EQ(got.size(), sent.size());
  for (size_t i = 0; i < sent.size(); ++i) EXPECT_TRUE(at::equal(sent[i], got[i])) << i;
}

TEST_P(RpcCalls, RPC_35_py_nested_pickle) {
  Cluster c = make(2);
  Nested nested;
  nested["a"] = {{1, "x"}, {2, std::nullopt}};
  nested[""] = {};
  EXPECT_EQ(rpc_sync(c[0], 1, &echo_nested, nested), nested);
  const Point p = rpc_sync(c[0], 1, &echo_point, Point{3, 0.5, "here"});
  EXPECT_EQ(p.x, 3);
  EXPECT_EQ(p.y, 0.5);
  EXPECT_EQ(p.label, "here");
}

TEST_P(RpcCalls, RPC_36_non_cont_tensors) {
  Cluster c = make(2);
  const at::Tensor x =
      at::arange(2 * 3 * 4 * 5).reshape({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor y = rpc_sync(c[0], 1, &echo, x);
  EXPECT_TRUE(at::equal(x, y));
  EXPECT_TRUE(y.is_contiguous(at::MemoryFormat::ChannelsLast));
  const at::Tensor view = at::arange(1 << 20).as_strided({4}, {1000});
  EXPECT_TRUE(at::equal(rpc_sync(c[0], 1, &echo, view), view));
}

TEST_P(RpcCalls, RPC_37_py_no_return_result) {
  Cluster c = make(2);
  rpc_sync(c[0], 1, &nothing);
  Future<void> f = rpc_async(c[0], 1, &nothing);
  EXPECT_TRUE(f.try_wait().ok());
}

TEST_P(RpcCalls, RPC_38_py_class_methods) {
  Cluster c = make(2);
  EXPECT_EQ(rpc_sync(c[0], 1, on("counter", &Counter::add), 5), 105);
  EXPECT_EQ(rpc_sync(c[0], 1, on("counter", &Counter::value)), 105);
  EXPECT_EQ(rpc_sync(c[0], 1, &Counter::twice, 21), 42);
  EXPECT_EQ(error_of(c[0], 1, on("other", &Counter::value)).kind(), ErrorKind::kNotFound);
}

TEST_P(RpcCalls, RPC_39_nested_rpc) {
  Cluster c = make(2);
  EXPECT_EQ(rpc_sync(c[0], 1, &nested_add, "worker0", 2, 3), 5);
}

TEST_P(RpcCalls, RPC_40_multi_layer_nested_async_rpc) {
  Cluster c = make(3);
  const std::vector<std::string> ring = {"worker0", "worker1", "worker2"};
  EXPECT_EQ(rpc_sync(c[0], 1, &ring_async, ring, 30), 30);
}

TEST_P(RpcCalls, RPC_41_stress_light_rpc) {
  Cluster c = make(2);
  std::vector<Future<int64_t>> futures;
  for (int64_t i = 0; i < 1000; ++i) futures.push_back(rpc_async(c[i % 2], 1 - i % 2, &add, i, 1));
  for (int64_t i = 0; i < 1000; ++i) EXPECT_EQ(futures[static_cast<size_t>(i)].wait(), i + 1);
}

TEST_P(RpcCalls, RPC_42_stress_heavy_rpc) {
  Cluster c = make(2);
  const at::Tensor x = at::arange(1 << 20);  // 8 MiB
  std::vector<Future<at::Tensor>> futures;
  for (int i = 0; i < 12; ++i) futures.push_back(rpc_async(c[i % 2], 1 - i % 2, &echo, x));
  for (auto& f : futures) EXPECT_TRUE(at::equal(f.wait(), x));
}

TEST_P(RpcCalls, RPC_43_expected_src) {
  Cluster c = make(3);
  for (size_t from = 0; from < 3; ++from) {
    for (int to = 0; to < 3; ++to) {
      EXPECT_EQ(rpc_sync(c[from], to, &who_calls), "worker" + std::to_string(from));
      EXPECT_EQ(rpc_sync(c[from], to, &my_name), "worker" + std::to_string(to));
    }
  }
}

TEST_P(RpcCalls, RPC_44_function_not_on_callee) {
  Cluster c = make(2);
  const Error e = error_of(c[0], 1, AddRef{"test.ad"}, 1, 2);
  EXPECT_EQ(e.kind(), ErrorKind::kNotFound);
  EXPECT_NE(e.message().find("test.add"), std::string::npos) << e.what();
  EXPECT_EQ(e.origin(), "worker1");
  // A service that the callee did not list is named.
  EXPECT_EQ(error_of(c[0], 1, AddRef{"@rref.fork"}, 1, 2).kind(), ErrorKind::kUnimplemented);
}

TEST_P(RpcCalls, RPC_46_py_raise_in_user_func) {
  Cluster c = make(2);
  const Error e = error_of(c[0], 1, &throw_error, "invalid_argument");
  EXPECT_EQ(e.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(e.kind(), ErrorKind::kUser);
  EXPECT_EQ(e.message(), "bad value");
  EXPECT_EQ(e.origin(), "worker1");
  EXPECT_NE(e.remote_trace().find("'test.throw_error' on worker 'worker1'"), std::string::npos);
}

TEST_P(RpcCalls, RPC_47_py_raise_in_user_func_escaped_str) {
  Cluster c = make(2);
  EXPECT_EQ(error_of(c[0], 1, &throw_error, "odd").message(), "odd \xff\xfe bytes");
  EXPECT_EQ(error_of(c[0], 1, &throw_error, "nul").message(), std::string("a\0b", 3));
}

TEST_P(RpcCalls, RPC_48_py_function_exception) {
  Cluster c = make(2);
  const Error e = error_of(c[0], 1, FunctionRef<int64_t(int64_t)>{"test.add"}, 1);
  EXPECT_EQ(e.kind(), ErrorKind::kSignature);
  EXPECT_NE(e.message().find("(int)->int"), std::string::npos) << e.what();
  EXPECT_NE(e.message().find("(int,int)->int"), std::string::npos) << e.what();
}

TEST_P(RpcCalls, RPC_72_pickle_future_is_refused_when_compiling) {
  EXPECT_FALSE(Sendable<Future<int64_t>>);
  EXPECT_FALSE(Sendable<int64_t*>);
  EXPECT_TRUE(Sendable<Point>);
}

TEST_P(RpcCalls, X7_error_fidelity) {
  Cluster c = make(3);
  // rpc_sync, a future and then(): all see the same error.
  struct Case {
    const char* what;
    absl::StatusCode code;
    std::string message;
  };
  const std::vector<Case> cases = {
      {"weft", absl::StatusCode::kAlreadyExists, "weft text"},
      {"invalid_argument", absl::StatusCode::kInvalidArgument, "bad value"},
      {"out_of_range", absl::StatusCode::kOutOfRange, "too far"},
      {"runtime", absl::StatusCode::kUnknown, "it broke"},
      {"long", absl::StatusCode::kUnknown, std::string(1 << 20, 'x')},
  };
  for (const Case& k : cases) {
    const Error sync = error_of(c[0], 1, &throw_error, k.what);
    EXPECT_EQ(sync.code(), k.code) << k.what;
    EXPECT_EQ(sync.message(), k.message) << k.what;
    EXPECT_EQ(sync.kind(), ErrorKind::kUser) << k.what;
    Future<int64_t> f = rpc_async(c[0], 1, &throw_error, k.what);
    const Status s = f.try_wait().status();
    EXPECT_EQ(s, sync.status()) << k.what;
    EXPECT_EQ(f.then([](int64_t v) { return v; }).try_wait().status(), s) << k.what;
  }
  EXPECT_EQ(error_of(c[0], 1, &throw_error, "weft").payload(), std::string("pay\0load", 8));
  EXPECT_EQ(error_of(c[0], 1, &throw_error, "int").code(), absl::StatusCode::kUnknown);
  const Error c10 = error_of(c[0], 1, &throw_error, "c10");
  EXPECT_NE(c10.message().find("must match the size"), std::string::npos) << c10.what();
  EXPECT_EQ(c10.message().find("/"), std::string::npos) << "no paths in: " << c10.message();
  // Distinct kinds for distinct causes.
  EXPECT_EQ(error_of(c[0], "nobody", &add, 1, 2).kind(), ErrorKind::kNotFound);
  const Status late = try_rpc_sync(c[0], 1, {.deadline = 0s}, &add, 1, 2).status();
  EXPECT_EQ(error_kind(late), ErrorKind::kDeadline);
}

TEST_P(RpcCalls, X7_errors_through_two_hops_name_both_workers) {
  Cluster c = make(3);
  // worker0 -> worker1 (nested_add) -> worker9, which does not exist: the error arises on worker1.
  const Error e = error_of(c[0], 1, &nested_add, "worker9", 1, 2);
  EXPECT_EQ(e.kind(), ErrorKind::kNotFound);
  EXPECT_EQ(e.origin(), "worker1");
  EXPECT_NE(e.remote_trace().find("worker1"), std::string::npos);
  EXPECT_NE(e.remote_trace().find("called by 'worker0'"), std::string::npos);
}

TEST_P(RpcCalls, X8_nested_synchronous_calls_with_one_thread) {
  Cluster c = make(3, 1);
  EXPECT_EQ(rpc_sync(c[0], 1, &ring_sync, std::vector<std::string>{"worker0", "worker1"}, 100),
            100);
  EXPECT_EQ(
      rpc_sync(c[0], 1, &ring_sync, std::vector<std::string>{"worker0", "worker1", "worker2"}, 100),
      100);
  EXPECT_EQ(rpc_sync(c[0], 0, &ring_sync, std::vector<std::string>{"worker0"}, 100), 100);
}

TEST_P(RpcCalls, X8_64_chains_at_once_as_coroutines_and_8_blocking) {
  Cluster c = make(2, 1);
  const std::vector<std::string> ring = {"worker0", "worker1"};
  constexpr int kHops = fewer(100, 30);
  std::vector<Future<int64_t>> chains;
  for (int i = 0; i < 64; ++i) chains.push_back(rpc_async(c[0], 1, &ring_async, ring, kHops));
  for (auto& f : chains) EXPECT_EQ(f.wait(), kHops);
  chains.clear();
  for (int i = 0; i < 8; ++i) chains.push_back(rpc_async(c[0], 1, &ring_sync, ring, kHops));
  for (auto& f : chains) EXPECT_EQ(f.wait(), kHops);
}

TEST_P(RpcCalls, CallsOnOneObjectRunOneAtATimeAndNestedOnesAreLetIn) {
  Cluster c = make(2);
  std::vector<Future<int64_t>> futures;
  for (int i = 0; i < 50; ++i)
    futures.push_back(rpc_async(c[i % 2], 1, on("counter", &Counter::add), 1));
  for (auto& f : futures) f.wait();
  EXPECT_EQ(rpc_sync(c[0], 1, on("counter", &Counter::most_at_once)), 1);
  // add_around holds the object while worker0 calls it back: OBJ-3.
  EXPECT_EQ(rpc_sync(c[0], 1, on("counter", &Counter::add_around), "worker0", "counter", 10), 170);
}

TEST_P(RpcCalls, NarrowingIsRefusedBeforeAnythingIsSent) {
  Cluster c = make(2);
  const int64_t before = c[0].debug_info().at("calls_issued");
  const FunctionRef<int64_t(int8_t, int64_t)> narrow{"test.add"};
  try {
    rpc_sync(c[0], 1, narrow, 300, 1);
    ADD_FAILURE() << "300 does not fit an int8_t";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), absl::StatusCode::kOutOfRange);
  }
  EXPECT_EQ(c[0].debug_info().at("calls_issued"), before);
}

TEST_P(RpcCalls, InlineHandlersTakeNoHopToThePool) {
  Cluster c = make(2);
  for (int i = 0; i < 1000; ++i) rpc_sync(c[0], 1, &add, i, 1);
  const auto info = c[1].debug_info();
  EXPECT_EQ(info.at("requests_pooled"), 0);
  EXPECT_EQ(info.at("requests_inline"), 1000);
}

// Both ends of the connection of a worker to itself belong to one agent, which must not take them
// for two connections of which one is too many.
TEST_P(RpcCalls, CallsToOneselfTakeOneConnection) {
  Cluster c = make(1);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(rpc_sync(c[0], 0, &add, i, 1), i + 1);
  const auto info = c[0].debug_info();
  EXPECT_EQ(info.at("dials"), 1);
  EXPECT_EQ(info.at("connections_lost"), 0);
  EXPECT_EQ(info.at("reconnects"), 0);
}

INSTANTIATE_TEST_SUITE_P(Nets, RpcCalls, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
