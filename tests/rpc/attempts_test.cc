// CALL-5: the answer of a call that is sent again goes over the connection of its latest attempt,
// in whatever order the attempts come. DEF-9: a request counts only while its connection is one of
// its caller. The caller is made by hand; its connections deliver what the test says, also after
// they were closed, as a transport's poller may. DEF-17: it is also a callee whose answer is odd.

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/ones.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/proto/rpc.pb.h"
#include "weft/rpc/call.h"
#include "weft/rpc/internal/agent/tensor_meta.h"
#include "weft/rpc/spi/device_code.h"
#include "weft/rpc/spi/signature.h"
#include "weft/tests/testing/checks.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/forwarding_transport.h"
#include "weft/tests/testing/gate.h"

namespace weft::testing {
namespace {

constexpr uint64_t kCallId = 7;
constexpr uint64_t kIncarnation = 4711;

class ByHand final : public Connection {
 public:
  explicit ByHand(std::string name, uint64_t incarnation = kIncarnation) {
    peer_.name = std::move(name);
    peer_.id = incarnation == kIncarnation ? 99 : static_cast<uint32_t>(incarnation);
    peer_.incarnation = incarnation;
    peer_.max_frame_bytes = 1 << 20;
  }
  const Hello& peer() const override { return peer_; }
  bool dialled() const override { return false; }
  Status send(Frame frame, int) override {
    v1::CallHeader request;
    v1::ResponseHeader header;
    if (frame.kind == FrameKind::kRequest && on_request != nullptr &&
        request.ParseFromString(frame.header)) {
      on_request(request.call_id());
    }
    const MutexLock lock(&mutex_);
    if (frame.kind == FrameKind::kRequest && request.ParseFromString(frame.header)) {
      called_.push_back(request.call_id());
    }
    if (frame.kind == FrameKind::kResponse && header.ParseFromString(frame.header)) {
      answered_.push_back(header.call_id());
    }
    v1::GoodbyeHeader goodbye;
    if (frame.kind == FrameKind::kGoodbye && goodbye.ParseFromString(frame.header)) {
      leaves_ = leaves_ || goodbye.reason() == v1::GoodbyeHeader::LEAVING;
    }
    return absl::OkStatus();
  }
  void close(Status) override { ++closed; }
  std::string describe() const override { return "caller (by hand)"; }

  std::vector<uint64_t> answered() const {
    const MutexLock lock(&mutex_);
    return answered_;
  }
  std::vector<uint64_t> called() const {
    const MutexLock lock(&mutex_);
    return called_;
  }
  // Has said so.
  bool leaves() const {
    const MutexLock lock(&mutex_);
    return leaves_;
  }

  std::function<void(uint64_t call_id)> on_request{};  // while it is sent
  std::atomic<int> closed{0};

 private:
  Hello peer_;
  mutable Mutex mutex_;
  std::vector<uint64_t> answered_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint64_t> called_ ABSL_GUARDED_BY(mutex_);
  bool leaves_ ABSL_GUARDED_BY(mutex_) = false;
};

// Lets the test accept connections in the place of a transport.
class Tapped final : public ForwardingTransport {
 public:
  Tapped(std::unique_ptr<Transport> inner, std::shared_ptr<Acceptor>* acceptor)
      : ForwardingTransport(std::move(inner)), acceptor_(acceptor) {}
  StatusOr<std::string> listen(const ListenOptions& options,
                               std::shared_ptr<Acceptor> acceptor) override {
    *acceptor_ = acceptor;
    return ForwardingTransport::listen(options, std::move(acceptor));
  }

 private:
  std::shared_ptr<Acceptor>* const acceptor_;
};

class Attempts : public ::testing::Test {
 protected:
  struct Way {
    std::shared_ptr<ByHand> connection;
    std::shared_ptr<ConnectionHandler> handler{};
  };

  Attempts() {
    Library lib("attempts");
    lib.def("wait", [this](CallContext& context) {
      gate_.arrive_and_wait();
      cancelled_ = context.cancelled();
      return int64_t{1};
    });
    ClusterOptions options{.size = 1, .library = std::move(lib), .dynamic = true};
    options.adjust = [this](int, JoinOptions* join) {
      join->transport =
          [this, inner = join->transport](
              const TransportContext& context) -> StatusOr<std::unique_ptr<Transport>> {
        auto made = inner(context);
        if (!made.ok()) return made.status();
        return std::make_unique<Tapped>(*std::move(made), &acceptor_);
      };
    };
    cluster_ = std::make_unique<Cluster>(std::move(options));
  }
  // Loses its connections, as a transport would, before the worker leaves.
  ~Attempts() override {
    for (const Way& way : ways_) way.handler->on_lost({absl::CancelledError("the test ends"), {}});
    acceptor_ = nullptr;
  }

  Way accept(const std::string& name = "caller", uint64_t incarnation = kIncarnation) {
    Way way{std::make_shared<ByHand>(name, incarnation)};
    way.handler = acceptor_->on_connection(way.connection);
    ways_.push_back(way);
    return way;
  }
  void deliver(const Way& way, uint32_t attempt) {
    const StatusOr<UntypedCall> call =
        internal::make_call((*cluster_)[0], CallOptions(), FunctionRef<int64_t()>{"attempts.wait"});
    ASSERT_TRUE(call.ok()) << call.status();
    const std::string& body = call->arguments.body;
    v1::CallHeader header;
    header.set_call_id(kCallId);
    header.set_attempt(attempt);
    header.set_at_most_once(true);
    header.set_acked_below(1);
    header.set_remaining_us(absl::ToInt64Microseconds(absl::Hours(1)));
    header.set_method(call->method);
    header.set_signature_hash(signature_hash(call->signature));
    header.mutable_layout()->add_segments()->set_length(body.size());
    const std::string bytes = header.SerializeAsString();
    const std::vector<std::string_view> payload = {body};
    way.handler->on_frame({FrameKind::kRequest, bytes, payload, body.size()}, kControlLane);
  }
  // The members' list names the caller from now on.
  void become_member() {
    v1::MemberRecord record;
    record.set_name("caller");
    record.set_id(99);
    record.set_incarnation(kIncarnation);
    record.set_address("inproc:none");
    const std::string prefix = "weft/" + (*cluster_)[0].job_id() + "/";
    HashStore& store = *cluster_->store();
    ASSERT_TRUE(store.set(prefix + "member/99.0000000000001267", record.SerializeAsString()).ok());
    ASSERT_TRUE(store.add(prefix + "version", 1).ok());
    eventually([&] { return counter((*cluster_)[0], "members") == 2; }, "it is a member");
  }
  static void say_leaving(const Way& way) { say_goodbye(way, v1::GoodbyeHeader::LEAVING); }
  static void say_goodbye(const Way& way, v1::GoodbyeHeader::Reason reason) {
    v1::GoodbyeHeader goodbye;
    goodbye.set_reason(reason);
    const std::string bytes = goodbye.SerializeAsString();
    way.handler->on_frame({FrameKind::kGoodbye, bytes, {}, 0}, kControlLane);
  }
  static void cancel(const Way& way, uint64_t call_id) {
    v1::CancelHeader header;
    header.set_call_id(call_id);
    const std::string bytes = header.SerializeAsString();
    way.handler->on_frame({FrameKind::kCancel, bytes, {}, 0}, kControlLane);
  }
  // So many requests have become calls here; `running` of them have not ended.
  void expect_calls(int64_t all, int64_t running) {
    const Worker& worker = (*cluster_)[0];
    EXPECT_EQ(counter(worker, "requests_pooled"), all);
    EXPECT_EQ(counter(worker, "handlers_running"), running);
    EXPECT_EQ(counter(worker, "deadlines"), running);
  }
  // Over that one alone.
  void expect_answer_over(const Way& way) {
    const std::vector<uint64_t> one = {kCallId};
    EXPECT_EQ(counter((*cluster_)[0], "requests_served"), 0);
    gate_.open();
    eventually([&] { return counter((*cluster_)[0], "requests_served") == 1; }, "it has run");
    eventually([&] { return counter((*cluster_)[0], "handlers_running") == 0; }, "it has ended");
    eventually(
        [&] {
          return !ways_[0].connection->answered().empty() ||
                 !ways_[1].connection->answered().empty();
        },
        "an answer");
    for (const Way& each : ways_) {
      EXPECT_EQ(each.connection->answered(),
                each.connection == way.connection ? one : std::vector<uint64_t>());
    }
    EXPECT_EQ(counter((*cluster_)[0], "requests_repeated"), 1);
  }

  Gate gate_{make_system_runtime()};
  std::atomic<bool> cancelled_{false};  // a call of "attempts.wait", at its end
  std::shared_ptr<Acceptor> acceptor_;
  std::unique_ptr<Cluster> cluster_;
  std::vector<Way> ways_;
};

TEST_F(Attempts, CALL_5_an_earlier_attempt_that_comes_later_does_not_take_the_answer) {
  const Way first = accept();
  const Way second = accept();
  deliver(second, 1);
  gate_.wait_arrived(1);
  deliver(first, 0);
  expect_answer_over(second);
}

TEST_F(Attempts, CALL_5_a_later_attempt_takes_the_answer) {
  const Way first = accept();
  deliver(first, 0);
  gate_.wait_arrived(1);
  const Way second = accept();
  deliver(second, 1);
  expect_answer_over(second);
}

// What is there once is sent to every caller that asks.
TEST_F(Attempts, CALL_5_what_has_been_answered_is_answered_again) {
  const Way first = accept();
  deliver(first, 0);
  gate_.open();
  eventually([&] { return first.connection->answered().size() == 1; }, "the answer");
  const Way second = accept();
  deliver(second, 1);
  EXPECT_EQ(second.connection->answered(), std::vector<uint64_t>{kCallId});
  EXPECT_EQ(counter((*cluster_)[0], "requests_served"), 1);
}

TEST_F(Attempts, DEF_9_an_attempt_of_a_worker_that_is_gone_does_not_run) {
  const Way first = accept();
  const Way second = accept();
  deliver(first, 0);
  gate_.open();
  eventually([&] { return first.connection->answered().size() == 1; }, "the answer");
  say_leaving(first);
  // What its connections had read already, and what one brings that came too late.
  deliver(second, 1);
  deliver(accept(), 2);
  expect_calls(1, 0);
}

TEST_F(Attempts, DEF_9_no_deadline_is_left_when_the_first_attempt_still_runs) {
  const Way first = accept();
  const Way second = accept();
  deliver(first, 0);
  gate_.wait_arrived(1);
  say_leaving(first);
  deliver(second, 1);
  expect_calls(1, 1);
  gate_.open();
  eventually([&] { return counter((*cluster_)[0], "handlers_running") == 0; }, "it has ended");
  expect_calls(1, 0);
}

// A cancel that comes before its request is remembered, and no longer than its caller is there.
TEST_F(Attempts, CancelsOfAWorkerThatIsGoneAreForgotten) {
  const Way way = accept();
  for (const uint64_t id : {kCallId, kCallId + 1}) cancel(way, id);
  EXPECT_EQ(counter((*cluster_)[0], "cancels_remembered"), 2);
  deliver(way, 0);
  expect_calls(0, 0);
  say_leaving(way);
  EXPECT_EQ(counter((*cluster_)[0], "cancels_remembered"), 0);
  cancel(way, kCallId + 2);  // of its connections had read already
  EXPECT_EQ(counter((*cluster_)[0], "cancels_remembered"), 0);
}

// One that took the incarnation of a worker that was not known yet has no part in its calls.
TEST_F(Attempts, DEF_9_the_connection_of_an_impostor_counts_for_nothing) {
  const Way false_one = accept("impostor");
  become_member();
  const Way true_one = accept();
  deliver(false_one, 0);
  say_leaving(false_one);
  expect_calls(0, 0);
  deliver(true_one, 0);
  gate_.wait_arrived(1);
  expect_calls(1, 1);
  gate_.open();
  eventually([&] { return true_one.connection->answered().size() == 1; }, "the answer");
}

TEST_F(Attempts, TheCallsOfOthersGoOnWhenAWorkerLeaves) {
  const Way stays = accept();
  const Way leaves = accept("other", 12);
  deliver(stays, 0);
  gate_.wait_arrived(1);
  say_leaving(leaves);
  gate_.open();
  eventually([&] { return stays.connection->answered().size() == 1; }, "the answer");
  EXPECT_FALSE(cancelled_.load());
}

// More workers that left than are remembered have connections that nothing has closed yet.
TEST_F(Attempts, MoreWorkersThanAreRememberedLeaveWithOpenConnections) {
  for (uint64_t i = 1; i <= 1100; ++i) {
    say_leaving(accept(absl::StrCat("w", i), 100'000 + i));
  }
  EXPECT_EQ(counter((*cluster_)[0], "peers"), 1100);
  EXPECT_EQ(counter((*cluster_)[0], "connections"), 1100);
}

// The other side has seen another connection win: no call takes this one any more.
TEST_F(Attempts, AConnectionOfWhichThePeerTakesLeaveIsNotUsed) {
  const Way first = accept();
  become_member();
  say_goodbye(first, v1::GoodbyeHeader::DUPLICATE);
  UntypedCall call;
  call.method = "of.caller";
  call.signature = "()->none";
  start_call((*cluster_)[0], "caller", std::move(call), [](const StatusOr<Payload>&) {});
  EXPECT_EQ(counter((*cluster_)[0], "calls_waiting_for_connection"), 1);
  const Way second = accept();
  eventually([&] { return second.connection->called().size() == 1; }, "the request");
  EXPECT_TRUE(first.connection->called().empty());
}

// The peer takes leave, and answers, while a request is being sent: nothing else comes that would close the connection.
TEST_F(Attempts, AGoodbyeAfterThatOfThePeerClosesTheConnection) {
  const Way way = accept();
  become_member();
  way.connection->on_request = [&](uint64_t call_id) {
    say_goodbye(way, v1::GoodbyeHeader::DUPLICATE);
    v1::ResponseHeader header;
    header.set_call_id(call_id);
    header.mutable_layout()->add_segments()->set_length(0);
    const std::string bytes = header.SerializeAsString();
    way.handler->on_frame({FrameKind::kResponse, bytes, {}, 0}, kControlLane);
  };
  UntypedCall call;
  call.method = "of.caller";
  call.signature = "()->none";
  std::atomic<int> ended{0};
  start_call((*cluster_)[0], "caller", std::move(call),
             [&](const StatusOr<Payload>& result) { ended += result.ok() ? 1 : 0; });
  EXPECT_EQ(ended, 1);
  EXPECT_EQ(way.connection->closed, 1);
}

// Its peers need no store to know.
TEST_F(Attempts, WhoLeavesSaysSoOnItsConnections) {
  const Way way = accept();
  EXPECT_FALSE(way.connection->leaves());
  (void)(*cluster_)[0].shutdown({.graceful = false, .deadline = absl::Seconds(5)});
  EXPECT_TRUE(way.connection->leaves());
}

// Its gradients may go to devices of others, as a message of theirs has said.
TEST_F(Attempts, DEF_17_an_answer_for_a_device_to_a_worker_without_devices) {
  const Way callee = accept();
  become_member();
  UntypedCall call;
  call.method = "of.caller";
  call.signature = "(tensor)->tensor";
  call.arguments.tensors = {at::ones({2})};
  call.arguments.devices = std::make_shared<PayloadDevices>();
  call.arguments.devices->targets = {kCudaCode};
  auto told = std::make_shared<Promise<Status>>();
  const Future<Status> ended = told->future();
  start_call((*cluster_)[0], "caller", std::move(call),
             [told](const StatusOr<Payload>& result) { told->set_value(result.status()); });
  eventually([&] { return callee.connection->called().size() == 1; }, "the request");

  internal::TensorMeta meta;
  meta.sizes = {2};
  meta.nbytes = 8;
  meta.device = kCudaCode + 3;
  v1::ResponseHeader header;
  header.set_call_id(callee.connection->called()[0]);
  internal::append_meta(meta, header.mutable_layout()->mutable_tensor_metas());
  header.mutable_layout()->add_segments()->set_length(0);
  header.mutable_layout()->add_segments()->set_length(8);
  const std::string bytes = header.SerializeAsString();
  const std::vector<std::string_view> payload = {"12345678"};
  callee.handler->on_frame({FrameKind::kResponse, bytes, payload, 8}, kControlLane);
  expect_error(ended.wait(), ErrorKind::kInvalidArgument, {"cuda:3", "no device map"});
}

}  // namespace
}  // namespace weft::testing
