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

class LateLanes : public GrpcPair {
 protected:
  void SetUp() override { open(); }
  void TearDown() override {
    GrpcPair::TearDown();
    relay_ = nullptr;
  }
  // Through a relay, which breaks what it is told to.
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
  static void send(const End& from, int lane, int number, uint64_t cookie = 0) {
    EXPECT_TRUE(
        from.connection
            ->send(make_frame(FrameKind::kChunk, absl::StrCat(number), pattern(2000), cookie), lane)
            .ok());
  }
  // That these came on the lane, in this order.
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
  for (const int who : {0, 1, 2}) {  // the dialler, the acceptor, both
    ASSERT_NO_FATAL_FAILURE(open());
    for (int i = 0; i < kFrames; ++i) {
      for (const int lane : {kFirst, kSecond}) {
        if (who != 1) send(here_, lane, i);
        if (who != 0) send(there_, lane, i);
      }
    }
    for (const auto& [wanted, end] : {std::pair(who != 1, there_), std::pair(who != 0, here_)}) {
      if (!wanted) continue;
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

// Of the relay there are no more connections: what waited, and all that comes later, goes by the control lane.
TEST_P(LateLanes, LATE_2_WithoutThemTheControlLaneCarriesEverything) {
  constexpr int kFrames = 20;
  for (const int who : {0, 1, 2}) {  // the dialler, the acceptor, both
    ASSERT_NO_FATAL_FAILURE(open());
    relay_->refuse(true);
    for (int i = 0; i < 2 * kFrames; ++i) {
      if (who != 1) send(here_, kFirst, i, 17);
      if (who != 0) send(there_, kFirst, i, 17);
      if (i != kFrames) continue;
      for (const auto& [wanted, end] : {std::pair(who != 1, there_), std::pair(who != 0, here_)}) {
        if (wanted) ASSERT_TRUE(end.handler->wait_frames(kFrames));
      }
    }
    for (const auto& [wanted, end] : {std::pair(who != 1, there_), std::pair(who != 0, here_)}) {
      if (!wanted) continue;
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

// The close is orderly, and what waits has no lanes to leave by.
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

// At whichever byte of theirs: it is over for both, once, and the next connection works.
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
