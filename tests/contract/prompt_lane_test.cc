// The prompt lane: a data connection by the local socket of a host, for small frames.
#include <dirent.h>

#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "weft/tests/contract/grpc_pair.h"
#include "weft/transport/channel.h"
#include "weft/transport/grpc_transport.h"

namespace weft::testing {
namespace {

int64_t open_descriptors() {
  int64_t n = 0;
  DIR* const dir = opendir("/proc/self/fd");
  while (readdir(dir) != nullptr) ++n;
  closedir(dir);
  return n;
}

class PromptLane : public GrpcPair {
 protected:
  static constexpr int kPrompt = 2;  // after control and bulk

  void SetUp() override { open({}); }
  void open(const GrpcTransportOptions& here, const GrpcTransportOptions& there = {},
            uint32_t version_here = internal::kPromptLaneVersion,
            uint32_t version_there = internal::kPromptLaneVersion) {
    ASSERT_NO_FATAL_FAILURE(make_peers(here, there, version_here, version_there));
    dial();
  }
  void dial() {
    ASSERT_NO_FATAL_FAILURE(dial_at(b_->address));
    ASSERT_EQ(here_.connection->stats().way, "Unix socket");
    ASSERT_EQ(here_.connection->peer().lanes, 2u);
  }
  void ping() override {
    ASSERT_NO_FATAL_FAILURE(GrpcPair::ping(here_, there_));
    GrpcPair::ping(there_, here_);
  }
  bool up(const End& end) const override { return end.connection->prompt_lane() == kPrompt; }
  static std::vector<Received> on_prompt_lane(RecordingHandler& handler) {
    std::vector<Received> out;
    for (Received& got : handler.frames()) {
      if (got.lane == kPrompt) out.push_back(std::move(got));
    }
    return out;
  }
};

TEST_P(PromptLane, EitherEndMayWantIt) {
  for (const int who : {0, 1, 2}) {  // the dialler, the acceptor, both
    open({});
    for (int i = 0; i < 10; ++i) ASSERT_NO_FATAL_FAILURE(ping());
    EXPECT_FALSE(up(here_) || up(there_)) << "before one of them wants it";
    EXPECT_EQ(here_.connection->stats().data, "the peer is on this host's local socket");
    for (int i = 0; i < 3; ++i) {
      if (who != 1) here_.connection->want_prompt_lane();
      if (who != 0) there_.connection->want_prompt_lane();
    }
    ASSERT_NO_FATAL_FAILURE(wait_up());
    for (const End& end : {here_, there_}) {
      EXPECT_EQ(end.connection->stats().data,
                GetParam() ? "1 connection, TLS 1.3" : "1 connection");
      EXPECT_EQ(end.connection->bulk_lanes().first, kBulkLane) << "not for large messages";
      EXPECT_EQ(end.connection->bulk_lanes().count, 1);
    }
  }
}

TEST_P(PromptLane, SmallFramesTravelOnItInOrderBothWays) {
  here_.connection->want_prompt_lane();
  ASSERT_NO_FATAL_FAILURE(wait_up());
  constexpr int kFrames = 200;
  const int64_t control = counter(*a_, "lane0_frames_sent");
  for (const auto& [from, to] : {std::pair(&here_, &there_), std::pair(&there_, &here_)}) {
    const size_t before = to->handler->frame_count();
    for (int i = 0; i < kFrames; ++i) {
      ASSERT_TRUE(from->connection
                      ->send(make_frame(FrameKind::kRequest, std::to_string(i), pattern(100, 7)),
                             from->connection->prompt_lane())
                      .ok());
    }
    ASSERT_TRUE(to->handler->wait_frames(before + kFrames));
    const std::vector<Received> got = on_prompt_lane(*to->handler);
    ASSERT_EQ(got.size(), static_cast<size_t>(kFrames));
    for (int i = 0; i < kFrames; ++i) {
      EXPECT_EQ(got[static_cast<size_t>(i)].header, std::to_string(i));
      EXPECT_TRUE(got[static_cast<size_t>(i)].payload == pattern(100, 7));
    }
  }
  EXPECT_EQ(counter(*a_, "lane0_frames_sent"), control);
}

// What it costs: a socket at each end, and for all connections of a transport a thread's epoll and its alarm.
TEST_P(PromptLane, ItTakesOneDescriptorOfEachEnd) {
  here_.connection->want_prompt_lane();
  ASSERT_NO_FATAL_FAILURE(wait_up());
  std::vector<End> kept = {here_, there_};
  ASSERT_NO_FATAL_FAILURE(dial());
  // Their arenas, too, are descriptors.
  const absl::Time limit = world_->runtime().now() + absl::Seconds(30);
  for (const End& end : {here_, there_}) {
    while (end.connection->stats().arena != "lends, borrows") {
      ASSERT_LT(world_->runtime().now(), limit) << end.connection->stats().arena;
      ASSERT_NO_FATAL_FAILURE(ping());
    }
  }
  const int64_t before = open_descriptors();
  here_.connection->want_prompt_lane();
  there_.connection->want_prompt_lane();
  ASSERT_NO_FATAL_FAILURE(wait_up());
  EXPECT_EQ(open_descriptors() - before, 2);
  here_.connection->close(absl::OkStatus());
  ASSERT_TRUE(here_.handler->wait_lost());
  ASSERT_TRUE(there_.handler->wait_lost());
  EXPECT_EQ(kept[0].handler->lost_calls() + kept[1].handler->lost_calls(), 0);
}

// A side may have none, or be of a version that knows none.
TEST_P(PromptLane, WhereThereIsNoneFramesGoByTheControlLane) {
  constexpr uint32_t kNew = internal::kPromptLaneVersion;
  struct Refusal {
    bool dialler_has_them, acceptor_has_them;
    uint32_t dialler_version, acceptor_version;
    bool dialler_wants, acceptor_wants;
  };
  for (const Refusal& no :
       {Refusal{false, true, kNew, kNew, true, true}, Refusal{true, false, kNew, kNew, true, true},
        Refusal{true, true, kNew, kNew - 1, true, false},
        Refusal{true, true, kNew - 1, kNew, false, true}}) {
    open({.data_connections = no.dialler_has_them}, {.data_connections = no.acceptor_has_them},
         no.dialler_version, no.acceptor_version);
    if (no.dialler_wants) here_.connection->want_prompt_lane();
    if (no.acceptor_wants) there_.connection->want_prompt_lane();
    for (int i = 0; i < 20; ++i) ASSERT_NO_FATAL_FAILURE(ping());
    EXPECT_FALSE(up(here_) || up(there_));
    for (const auto& [from, to] : {std::pair(&here_, &there_), std::pair(&there_, &here_)}) {
      const size_t before = to->handler->frame_count();
      ASSERT_TRUE(
          from->connection
              ->send(make_frame(FrameKind::kRequest, "x", ""), from->connection->prompt_lane())
              .ok());
      ASSERT_TRUE(to->handler->wait_frames(before + 1));
      EXPECT_EQ(to->handler->frames().back().lane, kControlLane);
      EXPECT_EQ(to->handler->lost_calls(), 0);
    }
  }
}

TEST_P(PromptLane, CloseSendsWhatIsQueuedFirst) {
  there_.connection->want_prompt_lane();
  ASSERT_NO_FATAL_FAILURE(wait_up());
  constexpr uint64_t kFrames = 500;
  for (uint64_t i = 1; i <= kFrames; ++i) {
    ASSERT_TRUE(
        here_.connection->send(make_frame(FrameKind::kRequest, "x", pattern(1000, i), i), kPrompt)
            .ok());
  }
  here_.connection->close(absl::OkStatus());
  ASSERT_TRUE(there_.handler->wait_lost());
  ASSERT_TRUE(here_.handler->wait_lost());
  EXPECT_EQ(on_prompt_lane(*there_.handler).size(), kFrames);
  EXPECT_TRUE(here_.handler->lost().unsent.empty());
  EXPECT_EQ(error_kind(here_.connection->send(make_frame(FrameKind::kRequest, "", ""), kPrompt)),
            ErrorKind::kNotDelivered);
}

INSTANTIATE_TEST_SUITE_P(, PromptLane, ::testing::Bool(),
                         [](const auto& p) { return p.param ? "tls" : "plain"; });

}  // namespace
}  // namespace weft::testing
