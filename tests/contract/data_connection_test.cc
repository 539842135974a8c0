// Data connections of the grpc transport: real sockets, a relay that breaks them, and strangers.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "weft/common/posix.h"
#include "weft/tests/contract/grpc_pair.h"
#include "weft/tests/contract/grpc_transport_harness.h"
#include "weft/tests/testing/loopback.h"
#include "weft/tests/testing/sanitizers.h"
#include "weft/transport/channel.h"
#include "weft/transport/grpc_transport.h"

namespace weft::testing {
namespace {

class DataConnection : public GrpcPair {
 protected:
  static constexpr int kLanes = 2;  // control and bulk
  static constexpr int kDataLane = kLanes;

  void SetUp() override { open({}); }
  void open(GrpcTransportOptions here, GrpcTransportOptions there = {}) {
    here.local_sockets = there.local_sockets = false;
    ASSERT_NO_FATAL_FAILURE(make_peers(here, there));
    relay_ = nullptr;
  }
  void dial(bool by_relay = false) {
    if (by_relay && relay_ == nullptr) relay_ = Relay::start(tcp_part(b_->address));
    dial_at(by_relay ? relay_->address() : b_->address);
  }
  bool up(const End& end) const override { return end.connection->bulk_lanes().first == kDataLane; }

  std::unique_ptr<Relay> relay_;
};

std::vector<Received> chunks_of(RecordingHandler& handler) {
  std::vector<Received> out;
  for (Received& got : handler.frames()) {
    if (got.kind == FrameKind::kChunk) out.push_back(std::move(got));
  }
  return out;
}

TEST_P(DataConnection, LargeFramesTravelOnThemBothWays) {
  dial();
  ASSERT_NO_FATAL_FAILURE(wait_up());
  EXPECT_EQ(here_.connection->bulk_lanes().count, 1);
  EXPECT_EQ(here_.connection->stats().data, GetParam() ? "1 connection, TLS 1.3" : "1 connection");
  const End ends[] = {here_, there_};
  for (int from = 0; from < 2; ++from) {
    const End& to = ends[1 - from];
    for (uint64_t i = 1; i <= 8; ++i) {
      ASSERT_TRUE(
          ends[from]
              .connection
              ->send(make_frame(FrameKind::kChunk, std::to_string(i), pattern(1'000'000 + i, i)),
                     kDataLane)
              .ok());
    }
    const absl::Time limit = world_->runtime().now() + absl::Seconds(30);
    while (chunks_of(*to.handler).size() < 8) {
      ASSERT_LT(world_->runtime().now(), limit);
      ASSERT_NO_FATAL_FAILURE(ping());
    }
    const std::vector<Received> got = chunks_of(*to.handler);
    for (uint64_t i = 1; i <= 8; ++i) {
      EXPECT_EQ(got[i - 1].header, std::to_string(i)) << "the order of a lane (CONN-2)";
      EXPECT_EQ(got[i - 1].lane, kDataLane);
      EXPECT_TRUE(got[i - 1].payload == pattern(1'000'000 + i, i));
    }
  }
  EXPECT_EQ(counter(*a_, "lane1_frames_sent"), 0);
  EXPECT_EQ(counter(*a_, "lane2_chunks_sent"), 8);
  EXPECT_EQ(counter(*b_, "lane2_chunks_received"), 8);
  here_.connection->close(absl::OkStatus());
  ASSERT_TRUE(here_.handler->wait_lost());
  ASSERT_TRUE(there_.handler->wait_lost());
  EXPECT_EQ(counter(*a_, "lane2_chunks_sent"), 8) << "what is over is counted still";
}

TEST_P(DataConnection, EitherSideMaySayNo) {
  for (const bool dialler : {true, false}) {
    open({.data_connections = !dialler}, {.data_connections = dialler});
    dial();
    for (int i = 0; i < 20; ++i) ASSERT_NO_FATAL_FAILURE(ping());
    for (const End& end : {here_, there_}) {
      EXPECT_EQ(end.connection->bulk_lanes().first, kBulkLane);
      EXPECT_EQ(end.connection->bulk_lanes().count, 1);
    }
    const End& says_no = dialler ? here_ : there_;
    EXPECT_EQ(says_no.connection->stats().data,
              "it is switched off here (data_connections is false)");
    ASSERT_TRUE(
        here_.connection->send(make_frame(FrameKind::kChunk, "x", "bytes"), kBulkLane).ok());
    const Status none = here_.connection->send(make_frame(FrameKind::kChunk, "x", ""), kDataLane);
    EXPECT_EQ(error_kind(none), ErrorKind::kInvalidArgument) << none;
    EXPECT_TRUE(there_.handler->wait_frames(21));
  }
}

TEST_P(DataConnection, CloseSendsWhatIsQueuedFirst) {
  dial();
  ASSERT_NO_FATAL_FAILURE(wait_up());
  constexpr uint64_t kFrames = 32;
  for (uint64_t i = 1; i <= kFrames; ++i) {
    ASSERT_TRUE(here_.connection
                    ->send(make_frame(FrameKind::kChunk, "x", pattern(1'000'000, i), i), kDataLane)
                    .ok());
  }
  here_.connection->close(absl::OkStatus());
  ASSERT_TRUE(there_.handler->wait_lost());
  ASSERT_TRUE(here_.handler->wait_lost());
  EXPECT_EQ(chunks_of(*there_.handler).size(), kFrames);
  EXPECT_TRUE(here_.handler->lost().unsent.empty());
  EXPECT_EQ(error_kind(here_.connection->send(make_frame(FrameKind::kChunk, "", ""), kDataLane)),
            ErrorKind::kNotDelivered);
}

TEST_P(DataConnection, WhatWasNotSentIsTold) {
  dial(/*by_relay=*/true);
  ASSERT_NO_FATAL_FAILURE(wait_up());
  relay_->add({.action = RelayAction::kStall, .connection = kDataLane});
  constexpr uint64_t kFrames = 64;
  for (uint64_t i = 1; i <= kFrames; ++i) {
    ASSERT_TRUE(here_.connection
                    ->send(make_frame(FrameKind::kChunk, "x", pattern(1'000'000, i), i), kDataLane)
                    .ok());
  }
  relay_->cut_all(/*reset=*/true);
  ASSERT_TRUE(here_.handler->wait_lost());
  ASSERT_TRUE(there_.handler->wait_lost());
  const std::vector<uint64_t> unsent = here_.handler->lost().unsent;
  ASSERT_FALSE(unsent.empty());
  // CONN-4: none of them was delivered, and nothing behind the first of them left.
  for (size_t i = 0; i < unsent.size(); ++i) EXPECT_EQ(unsent[i], unsent[0] + i);
  EXPECT_EQ(unsent.back(), kFrames);
  EXPECT_LT(chunks_of(*there_.handler).size(), unsent[0]);
}

TEST_P(DataConnection, ACutGreetingLeavesTheBulkLanes) {
  for (const uint64_t at : {0, 1, 8, 23}) {
    relay_ = Relay::start(tcp_part(b_->address));
    // Lanes come first, and the data connection when both are open.
    relay_->add({.action = RelayAction::kCut, .connection = kLanes, .at_byte = at});
    dial(/*by_relay=*/true);
    const absl::Time limit = world_->runtime().now() + absl::Seconds(30);
    while (here_.connection->stats().data == "not there yet") {
      ASSERT_LT(world_->runtime().now(), limit);
      ASSERT_NO_FATAL_FAILURE(ping());
    }
    EXPECT_FALSE(up(here_)) << at;
    const size_t before = there_.handler->frame_count();
    ASSERT_TRUE(
        here_.connection->send(make_frame(FrameKind::kChunk, "x", "bytes"), kBulkLane).ok());
    EXPECT_TRUE(there_.handler->wait_frames(before + 1));
    EXPECT_EQ(here_.handler->lost_calls(), 0);
    here_.connection->close(absl::OkStatus());
    ASSERT_TRUE(here_.handler->wait_lost());
    ASSERT_TRUE(there_.handler->wait_lost());
  }
}

class DataConnectionOverTls : public DataConnection {};

TEST_P(DataConnectionOverTls, AHandshakeThatIsCutOrStallsLeavesTheBulkLanes) {
  // A stall is ended by the acceptor's patience.
  open({}, {.handshake_timeout = absl::Seconds(1)});
  // Behind the greeting, within the dialler's first message.
  for (const auto& [action, at] : std::vector<std::pair<RelayAction, uint64_t>>{
           {RelayAction::kCut, 24}, {RelayAction::kCut, 90}, {RelayAction::kStall, 24}}) {
    relay_ = Relay::start(tcp_part(b_->address));
    relay_->add({.action = action, .connection = kLanes, .at_byte = at});
    dial(/*by_relay=*/true);
    const absl::Time limit = world_->runtime().now() + absl::Seconds(30);
    for (const End& end : {here_, there_}) {
      while (end.connection->stats().data == "not there yet") {
        ASSERT_LT(world_->runtime().now(), limit);
        ASSERT_NO_FATAL_FAILURE(ping());
      }
      EXPECT_FALSE(up(end)) << at;
    }
    if (action == RelayAction::kStall) {
      EXPECT_EQ(there_.connection->stats().data, "no end of the greetings in time");
    }
    const size_t before = there_.handler->frame_count();
    ASSERT_TRUE(
        here_.connection->send(make_frame(FrameKind::kChunk, "x", "bytes"), kBulkLane).ok());
    EXPECT_TRUE(there_.handler->wait_frames(before + 1));
    EXPECT_EQ(here_.handler->lost_calls(), 0);
    here_.connection->close(absl::OkStatus());
    ASSERT_TRUE(here_.handler->wait_lost());
    ASSERT_TRUE(there_.handler->wait_lost());
  }
}

TEST_P(DataConnection, CutInStepsThroughChunks) {
  constexpr uint64_t kChunk = 200 << 10;
  for (const RelayAction action :
       {RelayAction::kCut, RelayAction::kReset, RelayAction::kHalfClose}) {
    for (const bool to_target : {true, false}) {
      for (uint64_t at = 0; at < 3 * kChunk; at += fewer(60'013, 180'039)) {
        relay_ = nullptr;
        dial(/*by_relay=*/true);
        ASSERT_NO_FATAL_FAILURE(wait_up());
        relay_->add({.action = action,
                     .to_target = to_target,
                     .connection = kLanes,
                     .at_byte = relay_->passed(kLanes, to_target) + at});
        const End& from = to_target ? here_ : there_;
        const End& to = to_target ? there_ : here_;
        for (uint64_t i = 1; i <= 4; ++i) {
          (void)from.connection->send(
              make_frame(FrameKind::kChunk, std::to_string(i), pattern(kChunk, i), i), kDataLane);
        }
        ASSERT_TRUE(here_.handler->wait_lost());
        ASSERT_TRUE(there_.handler->wait_lost());
        EXPECT_EQ(here_.handler->lost_calls(), 1);
        EXPECT_EQ(there_.handler->lost_calls(), 1);
        const std::vector<Received> got = chunks_of(*to.handler);
        ASSERT_LE(got.size(), at / kChunk + 1);
        for (size_t i = 0; i < got.size(); ++i) {
          EXPECT_EQ(got[i].header, std::to_string(i + 1));
          EXPECT_TRUE(got[i].payload == pattern(kChunk, i + 1));
        }
      }
    }
  }
}

TEST_P(DataConnection, ChangedBytesEndTheConnection) {
  dial(/*by_relay=*/true);
  ASSERT_NO_FATAL_FAILURE(wait_up());
  // In plain text the first bytes are a frame's prefix; in TLS every byte counts.
  const uint64_t at = relay_->passed(kLanes, true) + (GetParam() ? 50'000 : 1);
  relay_->add({.action = RelayAction::kFlip, .connection = kLanes, .at_byte = at, .count = 1});
  ASSERT_TRUE(
      here_.connection->send(make_frame(FrameKind::kChunk, "x", pattern(300'000, 1)), kDataLane)
          .ok());
  ASSERT_TRUE(there_.handler->wait_lost());
  ASSERT_TRUE(here_.handler->wait_lost());
  // OpenSSL tells the other end of a bad record before it tells this one: that end may have ended
  // the stream already when this one comes to say why.
  const ErrorKind kind = error_kind(there_.handler->lost().why);
  EXPECT_TRUE(kind == ErrorKind::kProtocol || (GetParam() && kind == ErrorKind::kUnavailable))
      << there_.handler->lost().why;
  EXPECT_TRUE(chunks_of(*there_.handler).empty());
}

// Keeps what a transport puts into place.
class PlacingHandler : public RecordingHandler {
 public:
  explicit PlacingHandler(Signal* signal) : RecordingHandler(signal) {}
  ChunkTarget chunk_target(std::string_view header, size_t bytes, int lane) override {
    EXPECT_EQ(lane, 2);
    place_ = std::make_shared<std::string>(bytes, '\0');
    return header == "place" ? ChunkTarget{place_->data(), place_} : ChunkTarget{};
  }
  void chunk_filled(std::string_view header, size_t bytes, int lane) override {
    EXPECT_EQ(header, "place");
    EXPECT_EQ(bytes, place_->size());
    EXPECT_EQ(lane, 2);
    signal().with([&] { placed_.push_back(*place_); });
  }
  bool wait_placed(size_t n) {
    return signal().wait([&] { return placed_.size() >= n; });
  }
  std::vector<std::string> placed() {
    return signal().with([&] { return placed_; });
  }

 private:
  std::shared_ptr<std::string> place_;
  std::vector<std::string> placed_;
};

TEST_P(DataConnection, PayloadsAreReadToWhereTheyBelong) {
  // The dialler's handler says where.
  auto handler = std::make_shared<PlacingHandler>(&world_->signal());
  Hello hello = a_->hello;
  hello.lanes = kLanes;
  std::shared_ptr<Connection> connection;
  Status failed;
  bool done = false;
  a_->transport->connect(b_->address, hello, world_->runtime().now() + absl::Seconds(30), handler,
                         [&](StatusOr<std::shared_ptr<Connection>> result) {
                           world_->signal().with([&] {
                             done = true;
                             failed = result.status();
                             if (result.ok()) connection = *result;
                           });
                         });
  ASSERT_TRUE(world_->signal().wait([&] { return done; }));
  ASSERT_TRUE(failed.ok()) << failed;
  here_ = {connection, handler};
  there_ = b_->acceptor->accepted();
  ASSERT_NO_FATAL_FAILURE(wait_up());
  for (const size_t bytes : {size_t{1}, size_t{4096}, size_t{3'000'001}}) {
    ASSERT_TRUE(there_.connection
                    ->send(make_frame(FrameKind::kChunk, "place", pattern(bytes, bytes)), kDataLane)
                    .ok());
  }
  ASSERT_TRUE(
      there_.connection->send(make_frame(FrameKind::kChunk, "elsewhere", "bytes"), kDataLane).ok());
  ASSERT_TRUE(handler->wait_placed(3));
  ASSERT_TRUE(handler->wait_frames(1));
  EXPECT_TRUE(handler->placed()[1] == pattern(4096, 4096));
  EXPECT_TRUE(handler->placed()[2] == pattern(3'000'001, 3'000'001));
  EXPECT_EQ(handler->frames().back().payload, "bytes");
}

// ---- strangers ---------------------------------------------------------------------------------

internal::UniqueFd knock(const std::string& address) {
  internal::UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const std::string tcp = tcp_part(address);
  const sockaddr_in at = loopback(std::stoi(tcp.substr(tcp.rfind(':') + 1)));
  EXPECT_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&at), sizeof at), 0);
  return fd;
}

void say(const internal::UniqueFd& fd, std::string_view text) {
  EXPECT_EQ(send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(text.size()));
}

// Waits for the end; nothing was said before it.
bool cut_off(const internal::UniqueFd& fd) {
  char byte;
  return recv(fd.get(), &byte, 1, 0) <= 0;
}

TEST_P(DataConnection, AStrangersTicketIsCutOffWithoutAWord) {
  dial();
  ASSERT_NO_FATAL_FAILURE(wait_up());
  const std::string magic(internal::kSocketMagic);
  for (const std::string& greeting :
       {magic + std::string(16, '\0'), magic + std::string(16, 'x') + "and more",
        std::string("weftdatx") + std::string(16, 'x')}) {
    const internal::UniqueFd fd = knock(b_->address);
    say(fd, greeting);
    EXPECT_TRUE(cut_off(fd)) << greeting;
  }
  // In pieces, and with an end in the middle.
  const internal::UniqueFd slow = knock(b_->address);
  say(slow, "w");
  say(slow, "eftdata");
  say(slow, std::string(16, 'x'));
  EXPECT_TRUE(cut_off(slow));
  const internal::UniqueFd half = knock(b_->address);
  say(half, "weftda");
  shutdown(half.get(), SHUT_WR);
  EXPECT_TRUE(cut_off(half));
  ASSERT_NO_FATAL_FAILURE(ping());
  EXPECT_EQ(here_.handler->lost_calls(), 0);
}

TEST_P(DataConnection, WhoSaysNothingOrNotAllHasTheTimeOfAHandshake) {
  open({}, {.handshake_timeout = absl::Milliseconds(200)});
  const internal::UniqueFd mute = knock(b_->address);
  const internal::UniqueFd slow = knock(b_->address);
  say(slow, "weftdata");
  EXPECT_TRUE(cut_off(mute));
  EXPECT_TRUE(cut_off(slow));
}

TEST_P(DataConnection, ManyWhoSayNothingKeepNobodyOut) {
  std::vector<internal::UniqueFd> mute;
  for (int i = 0; i < 300; ++i) mute.push_back(knock(b_->address));
  dial();
  ASSERT_NO_FATAL_FAILURE(wait_up());
}

INSTANTIATE_TEST_SUITE_P(, DataConnectionOverTls, ::testing::Values(true));
INSTANTIATE_TEST_SUITE_P(, DataConnection, ::testing::Bool(),
                         [](const auto& p) { return p.param ? "tls" : "plain"; });

}  // namespace
}  // namespace weft::testing
