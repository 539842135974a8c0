// What rides on calls: INT-1 to INT-4 of rpc/spi/interceptor.h, and references inside values.

#include "weft/rpc/spi/interceptor.h"

#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/ops/zeros.h"
#include "gtest/gtest.h"
#include "weft/rpc/group.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/rpc/probe.h"
#include "weft/tests/testing/cluster.h"
#include "weft/transport/faulty_transport.h"
#include "weft/transport/grpc_transport.h"

namespace weft::testing {

struct Bag {
  std::vector<TokenValue> tokens{};
  std::optional<TokenValue> one{};
};
WEFT_STRUCT(Bag, tokens, one);

namespace {

using namespace std::chrono_literals;  // NOLINT
using Ends = std::vector<std::string>;

int64_t sum(const Bag& bag) {
  int64_t n = bag.one.has_value() ? bag.one->number : 0;
  for (const TokenValue& t : bag.tokens) n += t.number;
  return n;
}
Bag make_bag(TokenValue a, TokenValue b) { return Bag{{a, b}, TokenValue{a.number * b.number}}; }

class RpcInterceptor : public ::testing::TestWithParam<Net> {
 protected:
  RpcInterceptor() {
    Library own("own");
    own.def("sum", &sum).def("make_bag", &make_bag);
    own.class_<Counter>("Counter")
        .constructor<int64_t>()
        .def("add", &Counter::add)
        .def("value", &Counter::value);
    library_.merge(own);
    Library waits("waits");
    waits.def("gate", [gate = gate_] {
      gate->arrive_and_wait();
      return int64_t{1};
    });
    waits.def("add", &add);
    waits.def("throw_error", &throw_error);
    library_.merge(waits);
    for (int i = 0; i < 3; ++i) probes_.push_back(std::make_shared<Probe>());
  }
  // Joins with a probe on each worker, but for those that `without` names.
  Cluster make(int size, int without = -1) {
    ClusterOptions o{.size = size, .net = GetParam(), .library = library_};
    o.adjust = [this, without](int index, JoinOptions* j) {
      j->transport = faulty_transport(j->transport, plan_);
      j->services = {group_service()};
      if (!most_.empty()) j->environment = Environment{{"WEFT_MAX_MESSAGE_BYTES", most_}};
      if (index == without) return;
      j->services.push_back(
          [probe = probes_[static_cast<size_t>(index)]](const ServiceContext&) { return probe; });
    };
    return Cluster(std::move(o));
  }
  // A call by hand; `rider` may be null.
  template <class F, class... Args>
  StatusOr<Payload> call(const Worker& from, const Destination& to, std::string rider, const F& f,
                         const Args&... args) {
    StatusOr<UntypedCall> c = internal::make_call<F>(from, CallOptions(), f, args...);
    if (!c.ok()) return c.status();
    c->rider = std::make_shared<ProbeRider>(std::move(rider));
    return send(from, to, *std::move(c));
  }
  static StatusOr<Payload> send(const Worker& from, const Destination& to, UntypedCall c) {
    Promise<Payload> promise(executor_of(from));
    Future<Payload> future = promise.future();
    start_call(from, to, std::move(c),
               [p = std::make_shared<Promise<Payload>>(std::move(promise))](StatusOr<Payload> r) {
                 p->try_set(std::move(r));
               });
    return future.try_wait();
  }
  Probe& probe(int i) { return *probes_[static_cast<size_t>(i)]; }

  std::shared_ptr<Gate> gate_ = std::make_shared<Gate>(make_system_runtime());
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>(7);
  Library library_;
  std::string most_;  // bytes of a message
  std::vector<std::shared_ptr<Probe>> probes_;
};

TEST_P(RpcInterceptor, RidesOnRequestAndAnswer) {
  probe(1).on_arrive = [this](IncomingRequest& request, const std::string& metadata,
                              Proceed proceed) {
    EXPECT_EQ(metadata, "hello");
    EXPECT_EQ(request.method().name, "waits.add");
    EXPECT_EQ(request.context().caller().name, "worker0");
    probe(1).note("seen");
    proceed(absl::OkStatus());
  };
  probe(0).attached = "hello";
  Cluster c = make(2);
  EXPECT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3);
  EXPECT_EQ(probe(1).count("seen"), 1);
  EXPECT_EQ(probe(1).count("ended"), 1);
  EXPECT_EQ(probe(0).count("arrived_answer"), 1);
  EXPECT_EQ(probe(0).ends(), Ends({"waits.add>worker1 delivered"}));
  c.shutdown();
  EXPECT_EQ(probe(1).ends(), Ends({"<waits.add unknown"}));
}

// INT-2, and no thread waits meanwhile: there are more such calls than threads.
TEST_P(RpcInterceptor, DelaysTheHandlerWithoutAThread) {
  std::vector<Proceed> held;
  Mutex mutex;
  probe(1).on_arrive = [&](IncomingRequest&, const std::string&, Proceed proceed) {
    MutexLock lock(&mutex);
    held.push_back(std::move(proceed));
    if (held.size() == 50) gate_->open();
  };
  Cluster c = make(2);
  std::vector<Future<int64_t>> futures;
  for (int i = 0; i < 50; ++i) futures.push_back(rpc_async(c[0], 1, &add, i, 1));
  gate_->arrive_and_wait();
  EXPECT_EQ(counter(c[1], "requests_pooled"), 0);
  for (const auto& f : futures) EXPECT_FALSE(f.done());
  std::vector<Proceed> all;
  {
    MutexLock lock(&mutex);
    all.swap(held);
  }
  for (Proceed& proceed : all) proceed(absl::OkStatus());
  for (int i = 0; i < 50; ++i) EXPECT_EQ(futures[static_cast<size_t>(i)].wait(), i + 1);
}

TEST_P(RpcInterceptor, MayRefuseOrForget) {
  probe(1).on_arrive = [](IncomingRequest&, const std::string& metadata, Proceed proceed) {
    if (metadata == "forget") return;
    proceed(make_error(ErrorKind::kState, "not this one"));
  };
  Cluster c = make(2);
  const Status refused = call(c[0], 1, "no", &add, 1, 2).status();
  EXPECT_EQ(error_kind(refused), ErrorKind::kState);
  EXPECT_NE(refused.message().find("not this one"), absl::string_view::npos) << refused;
  const Status forgotten = call(c[0], 1, "forget", &add, 1, 2).status();
  EXPECT_EQ(error_kind(forgotten), ErrorKind::kInternal) << forgotten;
  EXPECT_EQ(probe(1).count("ended"), 2);
  EXPECT_EQ(probe(0).ends(), Ends({"waits.add>worker1 unknown", "waits.add>worker1 unknown"}));
}

// INT-1.
TEST_P(RpcInterceptor, IsToldHowEachCallEnded) {
  Cluster c = make(3, /*without=*/2);
  EXPECT_FALSE(try_rpc_sync(c[0], 1, &throw_error, "runtime").ok());
  EXPECT_FALSE(
      try_rpc_sync(c[0], 1, FunctionRef<int64_t(int64_t)>{"own.not_there"}, int64_t{1}).ok());
  EXPECT_FALSE(try_rpc_sync(c[0], 1, {.deadline = 0s}, &add, 1, 2).ok());
  {
    const auto late = rpc_async(c[0], 1, {.deadline = 100ms}, FunctionRef<int64_t()>{"waits.gate"});
    EXPECT_EQ(error_kind(late.try_wait().status()), ErrorKind::kDeadline);
    gate_->open();
  }
  const Status unlisted = try_rpc_sync(c[0], 2, &add, 1, 2).status();  // INT-3
  EXPECT_EQ(error_kind(unlisted), ErrorKind::kUnimplemented) << unlisted;
  EXPECT_NE(unlisted.message().find("'@probe'"), absl::string_view::npos) << unlisted;
  EXPECT_EQ(probe(0).ends(),
            Ends({"waits.throw_error>worker1 delivered", "own.not_there>worker1 not_delivered",
                  "waits.add>worker1 not_delivered", "waits.gate>worker1 unknown",
                  "waits.add>worker2 not_delivered"}));
  EXPECT_EQ(probe(0).count("told"), probe(0).count("attached"));
  EXPECT_EQ(probe(1).count("arrived"), 2);
  EXPECT_EQ(rpc_sync(c[2], 1, &add, 1, 2), 3) << "without interceptors";
}

// INT-1: its answer found no room here, so it is asked for again, and again until the deadline: the call
// has run all the same.
TEST_P(RpcInterceptor, ACallWhoseAnswerFoundNoRoomWasNotUndelivered) {
  constexpr int64_t kBytes = 20 << 20;
  Library own("large");
  own.def("make", [] { return at::zeros({kBytes}, at::kByte); });
  own.def("take", [](const at::Tensor& t) { return t.numel(); });
  library_.merge(own);
  // A large request that waits here keeps its room.
  Mutex mutex;
  std::optional<Proceed> held;
  probe(0).on_arrive = [&](IncomingRequest&, const std::string&, Proceed proceed) {
    MutexLock lock(&mutex);
    held.emplace(std::move(proceed));
  };
  ClusterOptions o{.size = 2, .net = GetParam(), .library = library_};
  o.adjust = [this](int index, JoinOptions* j) {
    if (GetParam() == Net::kGrpc) j->transport = grpc_transport({.arena_bytes = 0});
    j->environment = Environment{{"WEFT_PEER_RECEIVE_BUDGET", "32MiB"}};
    j->services = {group_service(), [probe = probes_[static_cast<size_t>(index)]](
                                        const ServiceContext&) { return probe; }};
  };
  Cluster c(std::move(o));
  auto waits = rpc_async(c[1], 0, FunctionRef<int64_t(at::Tensor)>{"large.take"},
                         at::zeros({kBytes}, at::kByte));
  const auto is_held = [&] {
    MutexLock lock(&mutex);
    return held.has_value();
  };
  const absl::Time limit = c[0].now() + absl::Seconds(30);
  while (!is_held()) {
    ASSERT_LT(c[0].now(), limit) << "large.take has not arrived";
    std::this_thread::yield();
  }
  const Status late =
      try_rpc_sync(
          c[0], 1,
          {.deadline = 500ms, .retry = Retry::kAtMostOnce, .backpressure = Backpressure::kWait},
          FunctionRef<at::Tensor()>{"large.make"})
          .status();
  EXPECT_EQ(error_kind(late), ErrorKind::kDeadline) << late;
  EXPECT_GT(counter(c[0], "calls_resent"), 0);
  EXPECT_EQ(probe(0).ends(), Ends({"large.make>worker1 unknown"}));
  (*held)(absl::OkStatus());
  EXPECT_EQ(waits.wait(), kBytes);
}

// INT-2: sent again after the connection broke, it is handed in once.
TEST_P(RpcInterceptor, ARepeatedRequestArrivesOnce) {
  Cluster c = make(2);
  rpc_sync(c[0], 1, &add, 1, 1);
  plan_->add(
      {.fault = Fault::kFailAfter, .kind = FrameKind::kRequest, .from = "worker0", .times = 1});
  EXPECT_EQ(rpc_sync(c[0], 1, {.retry = Retry::kAtMostOnce}, &add, 2, 3), 5);
  EXPECT_EQ(plan_->hits(), 1);
  EXPECT_EQ(probe(1).count("arrived"), 2);
  EXPECT_EQ(probe(1).most_arrivals(), 1);
  EXPECT_EQ(probe(0).ends().back(), "waits.add>worker1 delivered");
}

TEST_P(RpcInterceptor, AnswersThatCannotBeSentAreToldSo) {
  Library own("odd");
  own.def("text", [] { return std::string(1000, 'x'); });
  library_.merge(own);
  ClusterOptions o{.size = 2, .net = GetParam(), .library = library_};
  o.adjust = [this](int index, JoinOptions* j) {
    j->environment = Environment{{"WEFT_SEND_BUDGET", "1200"}, {"WEFT_PEER_SEND_BUDGET", "1200"}};
    j->services = {
        [probe = probes_[static_cast<size_t>(index)]](const ServiceContext&) { return probe; }};
  };
  Cluster c(std::move(o));
  const Status full = try_rpc_sync(c[0], 1, FunctionRef<std::string()>{"odd.text"}).status();
  EXPECT_EQ(error_kind(full), ErrorKind::kResource) << full;
  EXPECT_EQ(probe(1).ends(), Ends({"<odd.text not_delivered"}));
  EXPECT_EQ(probe(0).ends(), Ends({"odd.text>worker1 delivered"}));
}

// The result stays, and later calls find it without a name.
TEST_P(RpcInterceptor, KeepsResultsAndNamesObjects) {
  std::map<std::string, KeptObject> kept;
  std::vector<Status> failed;
  const auto turns = make_object_turns();
  probe(1).on_arrive = [&](IncomingRequest& request, const std::string& metadata, Proceed proceed) {
    const std::string name = metadata.substr(1);
    if (metadata[0] == 'k') {
      request.keep_result([&kept, &failed, name](StatusOr<KeptObject> object) {
        if (object.ok()) kept[name] = *std::move(object);
        if (!object.ok()) failed.push_back(object.status());
      });
    } else if (metadata[0] == 't') {
      request.set_target({kept[name].object, "own.Counter", turns});
    } else if (metadata[0] == 'w') {
      request.set_target({kept[name].object, "own.Other", nullptr});
    }
    proceed(absl::OkStatus());
  };
  Cluster c = make(2);
  UntypedCall construct;
  construct.method = "own.Counter";
  construct.signature = "(int)->own.Counter";
  Encoder(&construct.arguments).put(std::make_tuple(int64_t{40}));
  construct.rider = std::make_shared<ProbeRider>("ka");
  ASSERT_TRUE(send(c[0], 1, construct).ok());
  ASSERT_EQ(*kept.at("a").type, typeid(Counter));
  EXPECT_EQ(kept.at("a").encode, nullptr) << "a Counter cannot be sent";

  const auto on_a = [&](std::string rider, int64_t n) {
    UntypedCall add_call;
    add_call.method = "own.Counter.add";
    add_call.signature = "(int)->int";
    Encoder(&add_call.arguments).put(std::make_tuple(n));
    add_call.rider = std::make_shared<ProbeRider>(std::move(rider));
    return internal::take_result<int64_t>(send(c[0], 1, std::move(add_call)));
  };
  EXPECT_EQ(*on_a("ta", 2), 42);
  EXPECT_EQ(error_kind(on_a("wa", 2).status()), ErrorKind::kSignature);
  EXPECT_EQ(error_kind(on_a("-", 2).status()), ErrorKind::kSignature) << "no object was named";

  // A value that can be sent may be encoded later.
  ASSERT_TRUE(call(c[0], 1, "kb", &add, 20, 22).ok());
  Payload value;
  Encoder out(&value);
  kept.at("b").encode(out, kept.at("b").object.get());
  EXPECT_EQ(*Decoder(std::move(value)).take<int64_t>(), 42);

  // The function's error is the object's, as its caller would have been told it.
  EXPECT_TRUE(call(c[0], 1, "kc", &throw_error, "runtime").ok());
  ASSERT_EQ(failed.size(), 1U);
  EXPECT_EQ(error_details(failed[0]).origin, "worker1");
  EXPECT_NE(failed[0].message().find("it broke"), absl::string_view::npos) << failed[0];
  kept.clear();
}

TEST_P(RpcInterceptor, SlotsReachTheHandlersScope) {
  probe(1).on_arrive = [](IncomingRequest& request, const std::string& metadata, Proceed proceed) {
    request.set_slot("probe", std::make_shared<std::string>(metadata));
    proceed(absl::OkStatus());
  };
  Library own("scope");
  own.def("slot", [](CallContext& context) {
    const auto it = context.scope()->slots.find("probe");
    return it == context.scope()->slots.end() ? std::string("none")
                                              : *static_cast<std::string*>(it->second.get());
  });
  library_.merge(own);
  probe(0).attached = "seven";
  Cluster c = make(2);
  EXPECT_EQ(rpc_sync(c[0], 1, FunctionRef<std::string()>{"scope.slot"}), "seven");
}

// Around 16 KiB, which version 1 allows, around what a frame's header may have, and a lot.
TEST_P(RpcInterceptor, DEF_22_metadata_of_any_size) {
  Cluster c = make(2);
  int calls = 0;
  for (const int size : {(16 << 10) - 6, (16 << 10) - 5, (64 << 10) - 100, 64 << 10, 3 << 20}) {
    const auto sum = internal::take_result<int64_t>(
        call(c[0], 1, std::string(static_cast<size_t>(size), 'x'), &add, 1, 2));
    ASSERT_TRUE(sum.ok()) << size << ": " << sum.status();
    EXPECT_EQ(*sum, 3);
    EXPECT_EQ(probe(1).count("arrived"), ++calls);
    EXPECT_EQ(probe(0).ends().back(), "waits.add>worker1 delivered");
  }
}

TEST_P(RpcInterceptor, BadInput_metadata_beyond_the_messages_bound) {
  most_ = "1MiB";
  Cluster c = make(2);
  const Status more = call(c[0], 1, std::string(1 << 20, 'x'), &add, 1, 2).status();
  EXPECT_EQ(error_kind(more), ErrorKind::kResource) << more;
  for (const char* part : {"with a header of 10486", "1048576", "WEFT_MAX_MESSAGE_BYTES"}) {
    EXPECT_NE(more.message().find(part), absl::string_view::npos) << part << ": " << more;
  }
  EXPECT_EQ(probe(0).ends().back(), "waits.add>worker1 not_delivered");
  EXPECT_EQ(probe(1).count("arrived"), 0);
}

// Two of one key: what a correct worker never sends.
TEST_P(RpcInterceptor, RefusesAKeyThatComesTwice) {
  const auto twin = std::make_shared<Probe>();
  ClusterOptions o{.size = 2, .net = GetParam(), .library = library_};
  o.adjust = [&](int index, JoinOptions* j) {
    j->services = {[p = probes_[static_cast<size_t>(index)]](const ServiceContext&) { return p; }};
    if (index == 0) j->services.push_back([twin](const ServiceContext&) { return twin; });
  };
  Cluster c(std::move(o));
  const Status twice = try_rpc_sync(c[0], 1, &add, 1, 2).status();
  EXPECT_EQ(error_kind(twice), ErrorKind::kProtocol) << twice;
  EXPECT_EQ(probe(1).count("arrived"), 0);
  EXPECT_EQ(twin->ends(), Ends({"waits.add>worker1 not_delivered"}));
  // And in an answer: the call has run.
  const Status back = try_rpc_sync(c[1], 0, &add, 1, 2).status();
  EXPECT_EQ(error_kind(back), ErrorKind::kProtocol) << back;
  EXPECT_EQ(probe(1).ends().back(), "waits.add>worker0 delivered");
}

TEST_P(RpcInterceptor, ReferencesTravelInValues) {
  Cluster c = make(2);
  EXPECT_EQ(rpc_sync(c[0], 1, &sum, Bag{{{1}, {2}}, TokenValue{3}}), 6);
  EXPECT_EQ(rpc_sync(c[0], 1, &sum, Bag{}), 0);
  const Bag bag = rpc_sync(c[0], 1, &make_bag, TokenValue{6}, TokenValue{7});
  EXPECT_EQ(sum(bag), 6 + 7 + 42);
  // To several, each with its own.
  const auto all = rpc_async(c[0], std::vector<Destination>{0, 1}, &sum, Bag{{{4}}, {}});
  for (const auto& f : all) EXPECT_EQ(f.wait(), 4);
  EXPECT_EQ(signature_of<decltype(&make_bag)>(), "(token,token)->Bag");
}

TEST_P(RpcInterceptor, BadInput_references_outside_of_calls) {
  Cluster c = make(2, /*without=*/0);
  const Status unsent = try_rpc_sync(c[0], 1, &sum, Bag{{{1}}, {}}).status();
  EXPECT_EQ(error_kind(unsent), ErrorKind::kUnimplemented) << unsent;
  EXPECT_NE(unsent.message().find("rref_service()"), absl::string_view::npos) << unsent;

  Payload gathered;
  Encoder(&gathered).put(TokenValue{1});
  const Status refused = all_gather_payloads(c[0], gathered, {"worker0"}, 1s).status();
  EXPECT_EQ(error_kind(refused), ErrorKind::kInvalidArgument) << refused;

  Decoder bytes(Payload{gathered.body, {}});
  const Status alone = bytes.take<TokenValue>().status();
  EXPECT_EQ(error_kind(alone), ErrorKind::kProtocol);
  EXPECT_NE(alone.message().find("travels with calls only"), absl::string_view::npos) << alone;
  Payload more{std::string("\0", 1), {}};
  more.references.push_back(std::make_shared<Token>(1));
  Decoder left(std::move(more));
  ASSERT_TRUE(left.take<std::monostate>().ok());
  EXPECT_NE(left.finish().message().find("found 1"), absl::string_view::npos);
  Decoder skipped(Payload{gathered.body, {}});
  EXPECT_FALSE(skipped.skip().ok());
}

INSTANTIATE_TEST_SUITE_P(Nets, RpcInterceptor, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
