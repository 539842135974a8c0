// What comes to a worker's port and was not sent by a correct peer: nothing crashes, nothing is
// delivered, and a correct peer is served before, during and after.
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "weft/tests/contract/grpc_raw.h"
#include "weft/tests/contract/transport_harness.h"
#include "weft/transport/frame.h"
#include "weft/transport/grpc_transport.h"
#include "weft/transport/internal/wire/handshake.h"

namespace weft::testing {
namespace {

std::string encoded(FrameKind kind, const std::string& header, const std::string& payload) {
  Frame frame = make_frame(kind, header, payload);
  std::string out(internal::frame_bytes(frame), '\0');
  internal::encode_frame(frame, out.data());
  return out;
}

class GrpcHostile : public ::testing::Test {
 protected:
  // Strangers come by TCP, without a ticket.
  void SetUp() override { open({.same_user = false}); }

  void open(const GrpcTransportOptions& options) {
    if (good_ != nullptr) good_->transport->shutdown();
    if (target_ != nullptr) target_->transport->shutdown();
    Backend backend{"grpc", false, true, [options](World&) { return grpc_transport(options); }};
    good_ = nullptr;
    target_ = nullptr;
    world_ = std::make_unique<World>(backend, 1);
    target_ = world_->make_peer("target", 1u << 20);
    good_ = world_->make_peer("good");
    const Status s = world_->listen(*target_);
    ASSERT_TRUE(s.ok()) << s;
    StatusOr<End> end = world_->dial(*good_, target_->address);
    ASSERT_TRUE(end.ok()) << end.status();
    bystander_ = *end;
    bystander_there_ = target_->acceptor->accepted();
  }

  void TearDown() override {
    EXPECT_TRUE(nobody_was_harmed());
    good_->transport->shutdown();
    target_->transport->shutdown();
    EXPECT_EQ(bystander_.handler->lost_calls(), 1);
  }

  bool nobody_was_harmed() {
    const size_t before = bystander_there_.handler->frame_count();
    if (!bystander_.connection->send(make_frame(FrameKind::kRequest, "still", ""), 0).ok()) {
      return false;
    }
    if (!bystander_there_.handler->wait_frames(before + 1)) return false;
    // Until the target has noticed that strangers left, it may turn a dial away.
    for (int i = 0; i < 200; ++i) {
      StatusOr<End> end = world_->dial(*good_, target_->address);
      if (end.ok()) {
        end->connection->close(absl::OkStatus());
        return end->handler->wait_lost();
      }
      EXPECT_EQ(error_kind(end.status()), ErrorKind::kResource) << end.status();
    }
    return false;
  }

  Hello hello(uint32_t lanes = 2) {
    Hello out = good_->hello;
    out.name = "stranger";
    out.incarnation = 4711;
    out.connection_id = ++connections_;
    out.max_frame_bytes = 1u << 20;
    out.lanes = lanes;
    return out;
  }
  // A hello that the target takes.
  bool say_hello(RawStream* stream, const Hello& mine, int lane) {
    const int before = target_->acceptor->hellos();
    return stream->write(encoded(FrameKind::kHello, internal::encode_hello(mine, lane), "")) &&
           target_->acceptor->wait_hellos(before + 1);
  }
  std::string lane(int number) const { return "/weft.v1.Transport/Lane" + std::to_string(number); }

  std::unique_ptr<World> world_;
  std::unique_ptr<Peer> target_, good_;
  End bystander_, bystander_there_;
  uint64_t connections_ = 0;
};

TEST_F(GrpcHostile, BadFirstMessages) {
  const std::string good = encoded(FrameKind::kHello, internal::encode_hello(hello(), 0), "");
  auto changed = [&](size_t at, char value) {
    std::string out = good;
    out[at] = value;
    return out;
  };
  Hello no_lanes = hello(), many_lanes = hello(), no_name = hello(), long_name = hello();
  Hello no_version = hello(), tiny = hello();
  no_lanes.lanes = 0;
  many_lanes.lanes = 1000;
  no_name.name.clear();
  long_name.name = std::string(60'000, 'n');
  no_version.version_min = 0;
  tiny.max_frame_bytes = 10;
  const std::vector<std::string> messages = {
      "",
      "x",
      good.substr(0, 15),
      good.substr(0, 16),
      good.substr(0, good.size() - 1),
      good + "x",
      good + good,
      changed(0, 0x02),
      changed(1, 0x00),
      changed(2, 0),
      changed(2, 99),
      changed(3, 1),
      changed(7, '\x7f'),
      changed(15, '\xff'),
      encoded(FrameKind::kHello, internal::encode_hello(hello(), 0), "payload"),
      encoded(FrameKind::kHello, std::string(70'000, 'h'), ""),
      encoded(FrameKind::kHello, "not a message of that kind", ""),
      encoded(FrameKind::kHello, "", ""),
      encoded(FrameKind::kHello, internal::encode_hello(hello(), 1), ""),  // of another lane
      encoded(FrameKind::kHello, internal::encode_hello(no_lanes, 0), ""),
      encoded(FrameKind::kHello, internal::encode_hello(many_lanes, 0), ""),
      encoded(FrameKind::kHello, internal::encode_hello(no_name, 0), ""),
      encoded(FrameKind::kHello, internal::encode_hello(long_name, 0), ""),
      encoded(FrameKind::kHello, internal::encode_hello(no_version, 0), ""),
      encoded(FrameKind::kHello, internal::encode_hello(tiny, 0), ""),
      encoded(FrameKind::kHelloAck, internal::encode_ack(hello(), 0), ""),
      encoded(FrameKind::kRequest, "call", "me"),
      encoded(FrameKind::kGoodbye, "", ""),
      std::string(900'000, 'A'),
      std::string(3'000'000, 'A'),  // above what may be sent at all
  };
  const size_t accepted = target_->acceptor->accepted_count();
  for (size_t i = 0; i < messages.size(); ++i) {
    RawStream stream(target_->address, lane(0));
    ASSERT_TRUE(stream.started()) << i;
    (void)stream.write(messages[i]);
    // A refusal at most, then the end.
    int answers = 0;
    while (const std::optional<std::string> answer = stream.read()) {
      ++answers;
      EXPECT_EQ((*answer)[2], static_cast<char>(FrameKind::kHelloAck)) << i;
    }
    EXPECT_LE(answers, 1) << i;
    (void)stream.finish();
  }
  EXPECT_EQ(target_->acceptor->accepted_count(), accepted);
}

TEST_F(GrpcHostile, SecondHelloBeforeTheConnectionIsOpen) {
  RawStream stream(target_->address, lane(0));
  const Hello mine = hello();
  ASSERT_TRUE(say_hello(&stream, mine, 0));
  ASSERT_TRUE(stream.write(encoded(FrameKind::kHello, internal::encode_hello(mine, 0), "")));
  (void)stream.write(encoded(FrameKind::kHello, internal::encode_hello(mine, 0), ""));
  const std::optional<std::string> answer = stream.read();
  ASSERT_TRUE(answer.has_value());
  const Status refused =
      internal::decode_ack(std::string_view(*answer).substr(16), mine, 0).status();
  EXPECT_EQ(error_kind(refused), ErrorKind::kProtocol) << refused;
  EXPECT_FALSE(stream.read().has_value());
  EXPECT_EQ(target_->acceptor->accepted_count(), 1u);
}

TEST_F(GrpcHostile, RequestBeforeAllLanesAreThere) {
  RawStream stream(target_->address, lane(0));
  const Hello mine = hello();
  ASSERT_TRUE(say_hello(&stream, mine, 0));
  (void)stream.write(encoded(FrameKind::kRequest, "early", ""));
  EXPECT_FALSE(stream.read().has_value());
  // The other lane then finds no connection to join.
  RawStream other(target_->address, lane(1));
  ASSERT_TRUE(other.write(encoded(FrameKind::kHello, internal::encode_hello(mine, 1), "")));
  EXPECT_EQ(target_->acceptor->accepted_count(), 1u);
}

// A dialler that reads late would take the answer of the first and that of the second for a connection.
TEST_F(GrpcHostile, DEF_11_LANES_1_LanesThatWereNeverTogetherAreNotAcknowledged) {
  open({.handshake_timeout = absl::Milliseconds(300), .same_user = false});
  const Hello mine = hello();
  for (const int number : {0, 1}) {
    RawStream stream(target_->address, lane(number));
    ASSERT_TRUE(say_hello(&stream, mine, number));
    EXPECT_FALSE(stream.read().has_value()) << number << ": it ends when its time is over";
  }
  EXPECT_EQ(target_->acceptor->accepted_count(), 1u);
}

TEST_F(GrpcHostile, LateLanesBelongToTheConnectionWhoseHelloTheySay) {
  Hello mine = hello(1);
  mine.late_lanes = 1;
  RawStream lane0(target_->address, lane(0));
  ASSERT_TRUE(say_hello(&lane0, mine, 0));
  ASSERT_TRUE(lane0.read().has_value());
  const End end = target_->acceptor->accepted(1);
  ASSERT_NE(end.handler, nullptr);
  Hello unknown = mine, other = mine;
  ++unknown.connection_id;
  other.id = 99;
  for (const Hello& theirs : {unknown, other}) {
    RawStream stream(target_->address, lane(1));
    ASSERT_TRUE(stream.write(encoded(FrameKind::kHello, internal::encode_hello(theirs, 1), "")));
    const std::optional<std::string> answer = stream.read();
    ASSERT_TRUE(answer.has_value());
    const Status refused =
        internal::decode_ack(std::string_view(*answer).substr(16), theirs, 1).status();
    EXPECT_EQ(error_kind(refused), ErrorKind::kUnavailable) << refused;
  }
  RawStream lane1(target_->address, lane(1));
  ASSERT_TRUE(say_hello(&lane1, mine, 1));
  const std::optional<std::string> answer = lane1.read();
  ASSERT_TRUE(answer.has_value());
  EXPECT_TRUE(internal::decode_ack(std::string_view(*answer).substr(16), mine, 1).ok());
  ASSERT_TRUE(end.connection->send(make_frame(FrameKind::kChunk, "", "x"), 1).ok());
  EXPECT_TRUE(lane1.read().has_value());
  // Once more: they are there.
  RawStream again(target_->address, lane(1));
  ASSERT_TRUE(say_hello(&again, mine, 1));
  EXPECT_FALSE(again.read().has_value());
  EXPECT_EQ(end.handler->lost_calls(), 0) << "the connection goes on";
}

TEST_F(GrpcHostile, LanesThatContradictEachOther) {
  RawStream first(target_->address, lane(0));
  Hello mine = hello();
  ASSERT_TRUE(say_hello(&first, mine, 0));
  RawStream second(target_->address, lane(1));
  Hello other = mine;
  other.id = 99;
  ASSERT_TRUE(second.write(encoded(FrameKind::kHello, internal::encode_hello(other, 1), "")));
  const std::optional<std::string> answer = second.read();
  ASSERT_TRUE(answer.has_value());
  const StatusOr<Hello> refused =
      internal::decode_ack(std::string_view(*answer).substr(16), other, 1);
  EXPECT_EQ(error_kind(refused.status()), ErrorKind::kProtocol) << refused.status();
  EXPECT_EQ(target_->acceptor->accepted_count(), 1u);
}

TEST_F(GrpcHostile, BadMessagesOnAnOpenConnectionEndItAndDeliverNothingOfTheMessage) {
  const std::string fine = encoded(FrameKind::kRequest, "fine", "x");
  std::string wrong_flags = fine, wrong_length = fine, wrong_kind = fine, huge = fine;
  wrong_flags[3] = 4;
  wrong_length[8] = 2;
  wrong_kind[2] = 77;
  huge[14] = 1;
  const std::vector<std::string> messages = {
      "",
      fine + wrong_flags,
      fine + fine.substr(0, 10),
      fine + wrong_kind,
      wrong_length,
      huge,
      encoded(FrameKind::kHello, internal::encode_hello(hello(), 0), ""),
      encoded(FrameKind::kHelloAck, "", ""),
      encoded(FrameKind::kDataOffer, "", ""),    // who dialled offers none
      encoded(FrameKind::kLanesWanted, "", ""),  // and makes these itself
      encoded(FrameKind::kChunk, "", std::string(40'000, 'x')) +
          encoded(FrameKind::kChunk, "", std::string(40'000, 'x')),  // a batch above its limit
  };
  for (size_t i = 0; i < messages.size(); ++i) {
    const size_t before = target_->acceptor->accepted_count();
    const Hello mine = hello();
    RawStream lane0(target_->address, lane(0));
    RawStream lane1(target_->address, lane(1));
    ASSERT_TRUE(lane0.write(encoded(FrameKind::kHello, internal::encode_hello(mine, 0), "")));
    ASSERT_TRUE(lane1.write(encoded(FrameKind::kHello, internal::encode_hello(mine, 1), "")));
    ASSERT_TRUE(lane0.read().has_value());
    ASSERT_TRUE(lane1.read().has_value());
    const End end = target_->acceptor->accepted(before);
    ASSERT_NE(end.handler, nullptr);
    // A batch of two arrives as two frames.
    ASSERT_TRUE(lane0.write(fine + fine));
    ASSERT_TRUE(end.handler->wait_frames(2)) << i;
    (void)lane0.write(messages[i]);
    ASSERT_TRUE(end.handler->wait_lost()) << i;
    EXPECT_EQ(error_kind(end.handler->lost().why), ErrorKind::kProtocol)
        << i << " " << end.handler->lost().why;
    EXPECT_EQ(end.handler->frame_count(), 2u) << i;
    EXPECT_FALSE(lane1.read().has_value());
  }
}

TEST_F(GrpcHostile, OneLaneOfAnOpenConnectionVanishes) {
  const Hello mine = hello();
  RawStream lane0(target_->address, lane(0));
  auto lane1 = std::make_unique<RawStream>(target_->address, lane(1));
  ASSERT_TRUE(lane0.write(encoded(FrameKind::kHello, internal::encode_hello(mine, 0), "")));
  ASSERT_TRUE(lane1->write(encoded(FrameKind::kHello, internal::encode_hello(mine, 1), "")));
  ASSERT_TRUE(lane0.read().has_value());
  ASSERT_TRUE(lane1->read().has_value());
  const End end = target_->acceptor->accepted(1);
  ASSERT_NE(end.handler, nullptr);
  EXPECT_TRUE(lane0.read().has_value()) << "the offer of a data connection";
  lane1 = nullptr;
  ASSERT_TRUE(end.handler->wait_lost());
  EXPECT_FALSE(lane0.read().has_value());
}

TEST_F(GrpcHostile, BytesThatAreNotHttp2) {
  std::string noise;
  for (int i = 0; i < 5000; ++i) noise.push_back(static_cast<char>(i * 131 + (i >> 3)));
  const std::vector<std::string> openings = {
      "",
      "G",
      "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
      "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
      "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + noise,
      noise,
      std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11) + noise,  // a TLS hello
      std::string(100'000, '\0'),
  };
  std::vector<std::unique_ptr<RawSocket>> idle;
  for (const std::string& opening : openings) {
    RawSocket closed_at_once(target_->address);
    closed_at_once.send(opening);
    idle.push_back(std::make_unique<RawSocket>(target_->address));
    idle.back()->send(opening);
  }
  EXPECT_TRUE(nobody_was_harmed());
  for (int i = 0; i < 50; ++i) idle.push_back(std::make_unique<RawSocket>(target_->address));
  EXPECT_TRUE(nobody_was_harmed());
}

TEST_F(GrpcHostile, OtherMethodsAreUnimplemented) {
  std::string response;
  for (const char* method : {"/weft.v1.Transport/Lane8", "/weft.v1.Transport/Lane", "/x/y",
                             "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                             "/grpc.health.v1.Health/Watch"}) {
    const grpc::Status status = raw_call(target_->address, method, "x", &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED) << method;
  }
}

TEST_F(GrpcHostile, DiallingAnotherKindOfServerIsAReadableError) {
  // A gRPC server that knows nothing of lanes.
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  const auto queue = builder.AddCompletionQueue();
  const auto server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  std::unique_ptr<Thread> thread = world_->runtime().spawn("stranger", [&] {
    void* tag;
    bool ok;
    while (queue->Next(&tag, &ok)) {
    }
  });
  StatusOr<End> end = world_->dial(*good_, "127.0.0.1:" + std::to_string(port));
  ASSERT_FALSE(end.ok());
  EXPECT_EQ(error_kind(end.status()), ErrorKind::kProtocol) << end.status();
  server->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
  queue->Shutdown();
  thread->join();
}

TEST_F(GrpcHostile, HalfOpenStreamsAreBoundedInNumberAndTime) {
  open(
      {.max_half_open_lanes = 4, .handshake_timeout = absl::Milliseconds(300), .same_user = false});
  std::vector<std::unique_ptr<RawStream>> streams;
  for (int i = 0; i < 4; ++i) {
    streams.push_back(std::make_unique<RawStream>(target_->address, lane(0)));
    ASSERT_TRUE(streams.back()->started());
    // Some say hello, and never for their second lane.
    if (i % 2 == 0) {
      ASSERT_TRUE(streams.back()->write(
          encoded(FrameKind::kHello, internal::encode_hello(hello(), 0), "")));
    }
  }
  // Each is ended by the target when its time is over.
  for (size_t i = 0; i < streams.size(); ++i) {
    while (streams[i]->read().has_value()) {
    }
  }
  EXPECT_EQ(target_->acceptor->accepted_count(), 1u);
  EXPECT_TRUE(nobody_was_harmed());
}

TEST_F(GrpcHostile, MoreHalfOpenStreamsThanTheBoundAreTurnedAway) {
  open({.max_half_open_lanes = 4, .handshake_timeout = absl::Seconds(60), .same_user = false});
  std::vector<std::unique_ptr<RawStream>> streams;
  int turned_away = 0;
  for (int i = 0; i < 8; ++i) {
    streams.push_back(std::make_unique<RawStream>(target_->address, lane(0)));
    ASSERT_TRUE(streams.back()->started());
    if (i < 4) {
      // So that it counts before the next begins: a lane that waits for its second.
      ASSERT_TRUE(say_hello(streams.back().get(), hello(), 0));
      continue;
    }
    const std::optional<std::string> answer = streams.back()->read();
    ASSERT_TRUE(answer.has_value());
    const StatusOr<Hello> refused =
        internal::decode_ack(std::string_view(*answer).substr(16), hello(), 0);
    EXPECT_EQ(error_kind(refused.status()), ErrorKind::kResource) << refused.status();
    EXPECT_FALSE(streams.back()->read().has_value());
    ++turned_away;
  }
  EXPECT_EQ(turned_away, 4);
  // They leave, and there is room again.
  streams.clear();
  EXPECT_TRUE(nobody_was_harmed());
}

}  // namespace
}  // namespace weft::testing
