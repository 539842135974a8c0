// What TcpStore alone promises: a server that can be missing, taken, killed, restarted or attacked.
#include "weft/store/tcp_store.h"

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "weft/store/internal/tcp_data.h"
#include "weft/tests/contract/tcp_tools.h"

namespace weft::testing {
namespace {

using internal::TcpData;
using ::testing::HasSubstr;

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

class TcpStoreTest : public ::testing::Test {
 protected:
  std::unique_ptr<TcpStoreServer> start(int port = 0) {
    auto server = TcpStoreServer::start({.port = port}, runtime_);
    EXPECT_TRUE(server.ok()) << server.status();
    return server.ok() ? *std::move(server) : nullptr;
  }
  std::shared_ptr<Store> connect(int port) {
    auto store = TcpStore::connect("127.0.0.1", port, {}, runtime_);
    EXPECT_TRUE(store.ok()) << store.status();
    return store.ok() ? *std::move(store) : nullptr;
  }
  Status connect_status(int port, Timeout timeout) {
    return TcpStore::connect("127.0.0.1", port, {.timeout = timeout}, runtime_).status();
  }

  std::shared_ptr<Runtime> runtime_ = make_system_runtime();
};

TEST_F(TcpStoreTest, ATakenPortIsAnErrorThatNamesIt) {
  const auto server = start();
  const Status status = TcpStoreServer::start({.port = server->port()}, runtime_).status();
  EXPECT_EQ(error_kind(status), ErrorKind::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("127.0.0.1:", server->port())));
  EXPECT_THAT(std::string(status.message()), HasSubstr("in use"));
  EXPECT_TRUE(connect(server->port())->set("k", "still there").ok());
}

TEST_F(TcpStoreTest, ListeningBeyondLoopbackMustBeAskedFor) {
  for (const char* host : {"0.0.0.0", "::"}) {
    const Status status = TcpStoreServer::start({.host = host}, runtime_).status();
    EXPECT_EQ(error_kind(status), ErrorKind::kPermission) << status;
  }
  EXPECT_EQ(error_kind(TcpStoreServer::start({.host = "no.such.host.invalid"}, runtime_).status()),
            ErrorKind::kInvalidArgument);
  EXPECT_EQ(error_kind(TcpStoreServer::start({.port = 65536}, runtime_).status()),
            ErrorKind::kInvalidArgument);
  EXPECT_TRUE(TcpStoreServer::start({.host = "0.0.0.0", .allow_insecure = true}, runtime_).ok());
}

TEST_F(TcpStoreTest, NobodyThereIsUnavailableWithinTheDeadline) {
  const int port = RawListener().port();  // closed again
  const Status status = connect_status(port, 300ms);
  EXPECT_EQ(error_kind(status), ErrorKind::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("127.0.0.1:", port)));
}

TEST_F(TcpStoreTest, AListenerThatNeverSpeaksIsUnavailableWithinTheDeadline) {
  const RawListener listener;
  const Status status = connect_status(listener.port(), 300ms);
  EXPECT_EQ(error_kind(status), ErrorKind::kUnavailable) << status;
}

// Its first words are here later than any pause between two attempts.
TEST_F(TcpStoreTest, DEF_13_aServerBehindASlowLineIsReached) {
  const auto server = start();
  Relay relay(server->port());
  relay.delay_answers(1500);
  const Status status = connect_status(relay.port(), 15s);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(relay.connections(), 1) << "no attempt was given up";
}

TEST_F(TcpStoreTest, AnotherGrpcServerIsFoundOutAtOnce) {
  ForeignGrpcServer foreign;
  const Status status = connect_status(foreign.port(), 30s);
  EXPECT_EQ(error_kind(status), ErrorKind::kUnimplemented) << status;
}

TEST_F(TcpStoreTest, AClientThatIsEarlyWaitsForTheServer) {
  const int port = RawListener().port();
  std::thread early([&] { EXPECT_TRUE(connect(port)->set("k", "v").ok()); });
  const auto server = start(port);
  early.join();
  EXPECT_EQ(*connect(port)->get("k"), "v");
}

TEST_F(TcpStoreTest, CL_19_SixtyFourClients) {
  const auto server = start();
  std::vector<std::thread> threads;
  for (int i = 0; i < 64; ++i) {
    threads.emplace_back([&, i] {
      const std::shared_ptr<Store> store = connect(server->port());
      ASSERT_NE(store, nullptr);
      EXPECT_TRUE(store->set(absl::StrCat("rank", i), "here").ok());
      EXPECT_TRUE(store->add("n", 1).ok());
      EXPECT_EQ(*store->get("go"), "now");
    });
  }
  const auto store = connect(server->port());
  std::vector<std::string> keys;
  for (int i = 0; i < 64; ++i) keys.push_back(absl::StrCat("rank", i));
  EXPECT_TRUE(store->wait(keys).ok());
  EXPECT_TRUE(store->set("go", "now").ok());
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(*store->get("n"), "64");
}

TEST_F(TcpStoreTest, AServerThatLeavesEndsWaitsByTheirDeadline) {
  auto server = start();
  const auto store = connect(server->port());
  std::vector<std::thread> waiting;
  for (int i = 0; i < 3; ++i) {
    waiting.emplace_back([&] {
      const Status status = store->get("never", 1s).status();
      EXPECT_EQ(error_kind(status), ErrorKind::kUnavailable) << status;
    });
  }
  EXPECT_TRUE(store->set("k", "v").ok());
  server->stop(0ms);
  for (std::thread& t : waiting) t.join();
  EXPECT_EQ(error_kind(store->set("k", "v", 200ms)), ErrorKind::kUnavailable);
}

TEST_F(TcpStoreTest, AKilledServerIsUnavailableAndAnotherOneIsFound) {
  StoreProcess process(0);
  ASSERT_GT(process.port(), 0);
  const auto store = connect(process.port());
  ASSERT_TRUE(store->set("k", "first").ok());
  std::thread waiter([&] {
    const Status status = store->get("never", 1s).status();
    EXPECT_EQ(error_kind(status), ErrorKind::kUnavailable) << status;
  });
  EXPECT_EQ(*store->get("k"), "first");
  process.kill();
  waiter.join();
  EXPECT_EQ(error_kind(store->try_get("k", 200ms).status()), ErrorKind::kUnavailable);

  // What is asked while there is no server is done when there is one.
  std::thread patient([&] {
    const StatusOr<int64_t> sum = store->add("n", 1);
    ASSERT_TRUE(sum.ok()) << sum.status();
    EXPECT_EQ(*sum, 1);
  });
  StoreProcess again(process.port());
  patient.join();
  EXPECT_EQ(*store->try_get("k"), std::nullopt) << "a new server is empty";
  EXPECT_EQ(*store->get("n"), "1");
}

TEST_F(TcpStoreTest, InterruptUnblocksAtOnceWhenNobodyIsThere) {
  auto server = start();
  const auto store = connect(server->port());
  server->stop(0ms);
  std::thread waiter(
      [&] { EXPECT_EQ(error_kind(store->get("k", kInfinite).status()), ErrorKind::kCancelled); });
  std::thread writer(
      [&] { EXPECT_EQ(error_kind(store->set("k", "v", kInfinite)), ErrorKind::kCancelled); });
  store->interrupt();
  waiter.join();
  writer.join();
}

TEST_F(TcpStoreTest, TheServerOutlivesItsClients) {
  auto server = start();
  auto a = connect(server->port());
  auto b = connect(server->port());
  EXPECT_EQ(server->num_clients(), 2);
  std::atomic<bool> released{false};
  std::thread stopper([&] {
    server->stop(kInfinite);
    EXPECT_TRUE(released);
  });
  a = nullptr;
  EXPECT_TRUE(b->set("k", "v").ok());
  released = true;
  b = nullptr;
  stopper.join();
}

TEST_F(TcpStoreTest, AKilledClientIsNoticedAndItsWaitsAreDropped) {
  auto server = start();
  StoreProcess client(server->port(), "client");
  const auto store = connect(server->port());
  EXPECT_EQ(*store->get("client is here"), "");
  EXPECT_EQ(server->num_clients(), 2);
  client.kill();
  EXPECT_TRUE(store->set("never", "after all").ok());
  server->stop(0ms);
}

TEST_F(TcpStoreTest, StopWaitsNotForAKilledClient) {
  auto server = start();
  {
    StoreProcess client(server->port(), "client");
    EXPECT_EQ(*connect(server->port())->get("client is here"), "");
    client.kill();
  }
  server->stop(kInfinite);  // returns at all
}

TEST_F(TcpStoreTest, StopIsIdempotentAndStoppedServersCanBeStartedAgain) {
  auto server = start();
  const int port = server->port();
  server->stop();
  server->stop();
  server = start(port);
  EXPECT_TRUE(connect(port)->set("k", "v").ok());
}

TEST_F(TcpStoreTest, AFullStoreSaysSo) {
  auto server = TcpStoreServer::start({.max_bytes = 1000}, runtime_);
  ASSERT_TRUE(server.ok());
  const auto store = connect((*server)->port());
  const Status status = store->set("k", std::string(1000, 'v'));
  EXPECT_EQ(error_kind(status), ErrorKind::kResource) << status;
  EXPECT_TRUE(store->set("k", std::string(900, 'v')).ok());
}

TEST_F(TcpStoreTest, HostileBytesHarmNobody) {
  const auto server = start();
  const auto store = connect(server->port());
  std::mt19937 random(1);
  std::string noise(1 << 16, '\0');
  for (char& c : noise) c = static_cast<char>(random());
  const std::string preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), noise, preface + noise,
        preface + std::string("\0\0\0\4\0\0\0\0\0", 9) + noise, std::string(1 << 20, '\xff')}) {
    send_and_close(server->port(), bytes);
  }
  EXPECT_TRUE(store->set("k", "v").ok());
}

TEST_F(TcpStoreTest, HostileMessagesAreRefused) {
  const auto server = start();
  const auto channel = grpc::CreateChannel(absl::StrCat("127.0.0.1:", server->port()),
                                           grpc::InsecureChannelCredentials());
  using grpc::StatusCode;
  std::string reply;
  EXPECT_EQ(raw_call(channel, "/weft.v1.Store/Do", "\xff\xff\xff\xff", &reply),
            StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(raw_call(channel, "/weft.v1.Store/Session", "\xff\xff\xff\xff", &reply),
            StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(raw_call(channel, "/weft.v1.Store/Session", "", &reply),
            StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(raw_call(channel, "/weft.v1.Store/Steal", "x", &reply), StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(raw_call(channel, "/weft.v1.Store/Do", std::string(9 << 20, 'x'), &reply),
            StatusCode::RESOURCE_EXHAUSTED);
  v1::StoreRequest request;  // no session
  request.set_client_id(7);
  request.mutable_set()->set_key("k");
  ASSERT_EQ(raw_call(channel, "/weft.v1.Store/Do", request.SerializeAsString(), &reply),
            StatusCode::OK);
  v1::StoreReply parsed;
  ASSERT_TRUE(parsed.ParseFromString(reply));
  EXPECT_EQ(parsed.outcome(), v1::StoreReply::REFUSED_NO_SESSION);
  EXPECT_EQ(*connect(server->port())->num_keys(), 0);
}

TEST_F(TcpStoreTest, AnAnswerThatIsLostDoesNotApplyTwice) {
  const auto server = start();
  Relay relay(server->port());
  const auto store = connect(relay.port());
  int cuts = 0;
  for (int i = 1; i <= 20; ++i) {
    relay.cut_answer(1 + i % 2);
    const StatusOr<int64_t> sum = store->add("n", 1);
    ASSERT_TRUE(sum.ok()) << sum.status();
    EXPECT_EQ(*sum, i);
    cuts += relay.was_cut();
  }
  EXPECT_GT(cuts, 0);
  relay.cut_answer();
  EXPECT_EQ(*store->compare_set("c", "", "mine"), "mine");
  relay.cut_answer();
  EXPECT_TRUE(*store->delete_key("c"));
  EXPECT_EQ(*connect(server->port())->get("n"), "20");
}

// STORE-1, STORE-2, without a network.
class TcpDataTest : public ::testing::Test {
 protected:
  v1::StoreSessionReply open(uint64_t client, uint64_t last_server = 0) {
    v1::StoreSessionRequest request;
    request.set_magic("weft-store");
    request.set_protocol(1);
    request.set_client_id(client);
    request.set_last_server_id(last_server);
    return *data_.open_session(request, now_);
  }
  v1::StoreReply add(uint64_t client, uint64_t id, uint64_t done_below) {
    v1::StoreRequest request;
    request.set_client_id(client);
    request.set_request_id(id);
    request.set_done_below(done_below);
    request.mutable_add()->set_key("n");
    request.mutable_add()->set_delta(1);
    return data_.handle(request).reply;
  }

  absl::Time now_ = absl::UnixEpoch();
  TcpData data_{99, 1 << 20};
};

TEST_F(TcpDataTest, RepeatedRequestsGetTheSameAnswer) {
  open(1);
  open(2);
  EXPECT_EQ(add(1, 1, 1).number(), 1);
  EXPECT_EQ(add(2, 1, 1).number(), 2) << "ids of different clients are different";
  EXPECT_EQ(add(1, 1, 1).number(), 1);
  EXPECT_EQ(add(1, 2, 1).number(), 3);
  EXPECT_EQ(add(1, 1, 1).number(), 1);
}

TEST_F(TcpDataTest, LateCopiesHaveNoEffect) {
  open(1);
  EXPECT_EQ(add(1, 1, 1).number(), 1);
  EXPECT_EQ(add(1, 2, 2).number(), 2);
  EXPECT_EQ(add(1, 1, 1).outcome(), v1::StoreReply::REFUSED_OLD);
  EXPECT_EQ(add(1, 0, 0).outcome(), v1::StoreReply::REFUSED_OLD);
  EXPECT_EQ(add(1, 3, 3).number(), 3);
}

TEST_F(TcpDataTest, MemoryIsBoundedInTimeAndNumber) {
  EXPECT_TRUE(open(1).known());
  EXPECT_EQ(add(1, 1, 1).number(), 1);
  data_.close_session(1, now_);
  EXPECT_EQ(add(1, 1, 1).outcome(), v1::StoreReply::REFUSED_NO_SESSION);
  now_ += absl::Minutes(4);
  EXPECT_TRUE(open(1, 99).known());
  EXPECT_EQ(add(1, 1, 1).number(), 1);
  data_.close_session(1, now_);
  now_ += absl::Minutes(6);
  EXPECT_FALSE(open(1, 99).known());
  EXPECT_TRUE(open(1, 98).known()) << "it was on another server: nothing to remember";

  v1::StoreReply last;
  for (uint64_t id = 1; id <= 8193; ++id) last = add(1, id, 1);
  EXPECT_EQ(last.outcome(), v1::StoreReply::FAILED);
  EXPECT_EQ(last.error_kind(), static_cast<uint32_t>(ErrorKind::kResource));
}

TEST_F(TcpDataTest, OtherProtocolsAreRefusedNamingBoth) {
  v1::StoreSessionRequest request;
  request.set_magic("weft-store");
  request.set_protocol(7);
  request.set_client_id(1);
  const Status status = data_.open_session(request, now_).status();
  EXPECT_EQ(error_kind(status), ErrorKind::kProtocol);
  EXPECT_THAT(std::string(status.message()), HasSubstr("7"));
}

TEST_F(TcpDataTest, RandomRequestsNeverCrash) {
  open(1);
  std::mt19937 random(3);
  v1::StoreRequest seed;
  seed.set_client_id(1);
  seed.set_request_id(5);
  seed.mutable_wait_keys()->add_keys("k");
  seed.mutable_wait_keys()->set_max_wait_ms(5);
  const std::string good = seed.SerializeAsString();
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes = good;
    for (int i = 0; i < 3; ++i) bytes[random() % bytes.size()] = static_cast<char>(random());
    v1::StoreRequest request;
    if (!request.ParseFromString(bytes)) continue;
    request.set_client_id(1);
    data_.handle(request);
    data_.not_yet(request);
  }
  v1::StoreRequest empty;
  empty.set_client_id(1);
  EXPECT_EQ(data_.handle(empty).reply.error_kind(),
            static_cast<uint32_t>(ErrorKind::kUnimplemented));
}

}  // namespace
}  // namespace weft::testing
