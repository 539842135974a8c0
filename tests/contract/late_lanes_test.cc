// Bulk lanes that are made when one of the two ends first sends over them (transport/internal/grpc/late_lanes.h).
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/tests/contract/grpc_pair.h"
#include "weft/tests/testing/relay.h"
#include "weft/transport/grpc_transport.h"

namespace weft::testing {
namespace {

constexpr int kFirst = kBulkLane;
constexpr int kSecond = kBulkLane + 1;

enum class Senders { kDialler, kAcceptor, kBoth };

class LateLanes : public GrpcPair {
 protected:
  void SetUp() override { open(); }
  void TearDown() override {
    GrpcPair::TearDown();
    relay_ = nullptr;
  }
  // The connection goes through a relay, which breaks it where a test says.
  void open() {
    const GrpcTransportOptions options{
        .local_sockets = false, .same_user = false, .data_connections = false};
    ASSERT_NO_FATAL_FAILURE(make_peers(options, options));
    relay_ = Relay::start(b_->address.substr(0, b_->address.find('/')));
    ASSERT_NE(relay_, nullptr);
    const StatusOr<End> end = world_->dial(*a_, relay_->address(), absl::Seconds(20),
                                           [](Hello* hello) { hello->lanes = 0; });
    ASSERT_TRUE(end.ok()) << end.status();
    here_ = *end;
    there_ = b_->acceptor->accepted(b_->acceptor->accepted_count() - 1);
    ASSERT_NE(there_.handler, nullptr);
  }
  bool up(const End& end) const override { return end.connection->lane_begun(kFirst); }
  std::vector<End> receivers(Senders senders) const {
    std::vector<End> out;
    if (senders != Senders::kAcceptor) out.push_back(there_);
    if (senders != Senders::kDialler) out.push_back(here_);
    return out;
  }
  static void send(const End& from, int lane, int number, uint64_t cookie = 0) {
    EXPECT_TRUE(
        from.connection
            ->send(make_frame(FrameKind::kChunk, absl::StrCat(number), pattern(2000), cookie), lane)
            .ok());
  }
  // Expects that the lane brought these frames, in this order.
  static void expect_came(const End& at, int lane, int from, int to) {
    const auto came = [&] {
      std::vector<std::string> out;
      for (const Received& got : at.handler->frames()) {
        if (got.lane == lane && got.kind == FrameKind::kChunk) out.push_back(got.header);
      }
      return out;
    };
    std::vector<std::string> wanted;
    for (int i = from; i < to; ++i) wanted.push_back(absl::StrCat(i));
    EXPECT_EQ(came(), wanted);
  }

  std::unique_ptr<Relay> relay_;
};

TEST_P(LateLanes, LATE_3_AConnectionHasOneSocketUntilALargeMessageIsSent) {
  for (const End& end : {here_, there_}) {
    EXPECT_EQ(end.connection->bulk_lanes().first, kFirst);
    EXPECT_EQ(end.connection->bulk_lanes().count, 2);
    EXPECT_FALSE(up(end));
    EXPECT_EQ(end.connection->stats().lanes.size(), 3u);
  }
  for (int i = 0; i < 10; ++i) ASSERT_NO_FATAL_FAILURE(ping());
  EXPECT_EQ(relay_->accepted(), 1);
  send(here_, kSecond, 0);
  ASSERT_TRUE(there_.handler->wait_frames(11));
  expect_came(there_, kSecond, 0, 1);
  EXPECT_TRUE(up(here_) && up(there_));
  EXPECT_EQ(relay_->accepted(), 3);
  EXPECT_EQ(counter(*a_, "lane2_frames_sent"), 1);
  here_.connection->close(absl::OkStatus());
  EXPECT_TRUE(here_.handler->wait_lost());
  EXPECT_TRUE(there_.handler->wait_lost());
}

TEST_P(LateLanes, LATE_1_WhatIsSentBeforeTheyAreUpComesInOrder) {
  constexpr int kFrames = 50;
  for (const Senders senders : {Senders::kDialler, Senders::kAcceptor, Senders::kBoth}) {
    ASSERT_NO_FATAL_FAILURE(open());
    for (int i = 0; i < kFrames; ++i) {
      for (const int lane : {kFirst, kSecond}) {
        if (senders != Senders::kAcceptor) send(here_, lane, i);
        if (senders != Senders::kDialler) send(there_, lane, i);
      }
    }
    for (const End& end : receivers(senders)) {
      ASSERT_TRUE(end.handler->wait_frames(2 * kFrames));
      for (const int lane : {kFirst, kSecond}) expect_came(end, lane, 0, kFrames);
    }
    EXPECT_EQ(relay_->accepted(), 3) << "made once";
  }
}

TEST_P(LateLanes, AnOrderlyCloseLetsWhatWaitsLeave) {
  send(here_, kFirst, 0);
  here_.connection->close(absl::OkStatus());
  ASSERT_TRUE(here_.handler->wait_lost());
  ASSERT_TRUE(there_.handler->wait_lost());
  expect_came(there_, kFirst, 0, 1);
  EXPECT_TRUE(here_.handler->lost().unsent.empty());
}

// The relay takes no more connections: what waited, and all that comes later, goes by the control lane.
TEST_P(LateLanes, LATE_2_WithoutThemTheControlLaneCarriesEverything) {
  constexpr int kFrames = 20;
  for (const Senders senders : {Senders::kDialler, Senders::kAcceptor, Senders::kBoth}) {
    ASSERT_NO_FATAL_FAILURE(open());
    relay_->refuse(true);
    for (int i = 0; i < 2 * kFrames; ++i) {
      if (senders != Senders::kAcceptor) send(here_, kFirst, i, 17);
      if (senders != Senders::kDialler) send(there_, kFirst, i, 17);
      if (i != kFrames) continue;
      for (const End& end : receivers(senders)) ASSERT_TRUE(end.handler->wait_frames(kFrames));
    }
    for (const End& end : receivers(senders)) {
      ASSERT_TRUE(end.handler->wait_frames(2 * kFrames));
      expect_came(end, kControlLane, 0, 2 * kFrames);
    }
    here_.connection->close(absl::OkStatus());
    for (const End& end : {here_, there_}) {
      ASSERT_TRUE(end.handler->wait_lost());
      EXPECT_EQ(end.handler->lost_calls(), 1);
      EXPECT_TRUE(end.handler->lost().unsent.empty());
      EXPECT_FALSE(end.connection->send(make_frame(FrameKind::kChunk, "", "x"), kFirst).ok());
    }
  }
}

// An orderly close sends what waits by the control lane when there are no bulk lanes.
TEST_P(LateLanes, LATE_2_AnOrderlyCloseWithoutThemLetsWhatWaitsLeave) {
  for (const bool dialler : {true, false}) {
    ASSERT_NO_FATAL_FAILURE(open());
    relay_->refuse(true);
    const End& from = dialler ? here_ : there_;
    const End& to = dialler ? there_ : here_;
    send(from, kSecond, 0, 17);
    from.connection->close(absl::OkStatus());
    ASSERT_TRUE(from.handler->wait_lost());
    ASSERT_TRUE(to.handler->wait_lost());
    expect_came(to, kControlLane, 0, 1);
    EXPECT_TRUE(from.handler->lost().unsent.empty());
  }
}

TEST_P(LateLanes, ACloseWithAReasonDropsWhatWaits) {
  send(here_, kFirst, 0, 17);
  here_.connection->close(make_error(ErrorKind::kState, "enough"));
  ASSERT_TRUE(here_.handler->wait_lost());
  ASSERT_TRUE(there_.handler->wait_lost());
  EXPECT_LE(here_.handler->lost().unsent.size(), 1u);
  EXPECT_EQ(error_kind(here_.handler->lost().why), ErrorKind::kState);
}

TEST_P(LateLanes, OneOfThemBreaksTheConnection) {
  send(here_, kFirst, 0);
  ASSERT_TRUE(there_.handler->wait_frames(1));
  relay_->add({.action = RelayAction::kReset, .connection = 2});
  ASSERT_TRUE(here_.handler->wait_lost());
  ASSERT_TRUE(there_.handler->wait_lost());
}

// A lane breaks at some byte of its handshake: each end receives what the other has sent, or the end of the connection.
TEST_P(LateLanes, BrokenWhileTheyComeUp) {
  for (uint64_t byte : {0, 10, 60, 120, 200, 350, 600}) {
    for (const bool to_target : {true, false}) {
      ASSERT_NO_FATAL_FAILURE(open());
      relay_->add({.action = RelayAction::kReset,
                   .to_target = to_target,
                   .connection = 2,
                   .at_byte = byte});
      for (const End& end : {here_, there_}) {
        (void)end.connection->send(make_frame(FrameKind::kChunk, "0", "x", 17), kSecond);
      }
      for (const End& end : {here_, there_}) {
        EXPECT_TRUE(end.handler->wait_frames_or_lost(1)) << byte << " " << to_target;
      }
    }
  }
}

TEST_P(LateLanes, ThePeersShutDownWhileTheyComeUp) {
  for (int round = 0; round < 10; ++round) {
    ASSERT_NO_FATAL_FAILURE(open());
    for (const End& end : {here_, there_}) {
      (void)end.connection->send(make_frame(FrameKind::kChunk, "0", "x", 17), kFirst);
    }
    (round % 2 == 0 ? a_ : b_)->transport->shutdown();
    EXPECT_TRUE(here_.handler->wait_lost());
    EXPECT_TRUE(there_.handler->wait_lost());
  }
}

INSTANTIATE_TEST_SUITE_P(, LateLanes, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "tls" : "plain"; });

}  // namespace
}  // namespace weft::testing
