// Large and small messages side by side: which lane a message takes, and that a small one waits for
// no large one.

#include <atomic>
#include <string>
#include <vector>

#include "ATen/ops/ones.h"
#include "gtest/gtest.h"
#include "weft/rpc/internal/agent/link.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"
#include "weft/transport/grpc_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT
using internal::LaneLoads;

Library lanes_library() {
  Library lib("lanes");
  lib.def("add", &add, {.inline_ok = true});
  lib.def("numel", &numel, {.inline_ok = true});
  return lib;
}

ClusterOptions lanes_options(const GrpcTransportOptions& transport) {
  ClusterOptions o{.net = Net::kGrpc, .library = lanes_library()};
  o.adjust = [transport](int, JoinOptions* j) { j->transport = grpc_transport(transport); };
  return o;
}

TEST(LaneLoads, LargeMessagesTakeTurnsAndAvoidTheLaneWithMoreToDo) {
  LaneLoads loads;
  EXPECT_EQ(loads.choose({1, 0}), kControlLane) << "a connection without bulk lanes";
  EXPECT_EQ(loads.choose({1, 1}), 1);
  EXPECT_EQ(loads.choose({1, 1}), 1);
  std::vector<int> chosen;
  for (int i = 0; i < 6; ++i) chosen.push_back(loads.choose({1, 3}));
  EXPECT_EQ(chosen, (std::vector<int>{2, 3, 1, 2, 3, 1}));
  loads.add(1, 100);
  loads.add(2, 300);
  loads.add(3, 200);
  EXPECT_EQ(loads.choose({1, 3}), 1);
  loads.add(1, 150);
  EXPECT_EQ(loads.choose({1, 3}), 3);
  loads.remove(2, 300);
  EXPECT_EQ(loads.choose({1, 3}), 2);
}

// The invariant "one chunk ahead": a small message waits for what is being written on its own lane,
// and the control lane never has a chunk. So every small call is written by the thread that makes
// it, at once and alone, however much is under way on the others.
TEST(Lanes, OneChunkAhead) {
  constexpr int64_t kBytes = 64 * kMiB;
  Cluster c(lanes_options({.local_sockets = false, .data_connections = false}));
  const at::Tensor x = at::ones({kBytes / 4});
  ASSERT_EQ(rpc_sync(c[0], 1, &numel, x), x.numel());
  const int64_t chunk_bytes = 256 << 10;
  int64_t beside = 0;
  for (int round = 0; round < 20 && beside < 20; ++round) {
    const int64_t frames = counter(c[0], "lane0_frames_sent");
    const int64_t writes = counter(c[0], "lane0_writes");
    const int64_t bytes = counter(c[0], "lane0_bytes_sent");
    Future<int64_t> large = rpc_async(c[0], 1, &numel, x);
    int64_t calls = 0;
    for (; !large.done(); ++calls) {
      ASSERT_EQ(rpc_sync(c[0], 1, &add, calls, 1), calls + 1);
      if (!large.done()) ++beside;
    }
    ASSERT_EQ(large.wait(), x.numel());
    const int64_t sent = counter(c[0], "lane0_frames_sent") - frames;
    EXPECT_GE(sent, calls) << "heartbeats come on top";
    // A heartbeat may be written together with a call.
    EXPECT_GE(counter(c[0], "lane0_writes") - writes, calls - 1);
    EXPECT_LE(counter(c[0], "lane0_bytes_sent") - bytes, sent * 4096) << "no chunk among them";
  }
  EXPECT_GE(beside, 20) << "small calls overtake a large one";
  // On the bulk lanes nothing is ever written that is larger than one chunk and its headers.
  for (const char* lane : {"lane1_", "lane2_"}) {
    const int64_t writes = counter(c[0], std::string(lane) + "writes");
    EXPECT_LE(counter(c[0], std::string(lane) + "bytes_sent"), writes * (chunk_bytes + 65'536));
  }
}

TEST(Lanes, ChunksAreSmallerWhereSmallMessagesWouldWaitForThem) {
  constexpr int64_t kBytes = 8 * kMiB;
  Cluster c(lanes_options({.local_sockets = false, .bulk_lanes = 1, .data_connections = false}));
  const at::Tensor x = at::ones({kBytes / 4});
  const auto chunks = [&] {
    const int64_t before = counter(c[0], "lane1_chunks_sent");
    EXPECT_EQ(rpc_sync(c[0], 1, &numel, x), x.numel());
    return counter(c[0], "lane1_chunks_sent") - before;
  };
  const int64_t small = (kBytes + (160 << 10) - 1) / (160 << 10);
  const int64_t large = kBytes / (256 << 10);
  EXPECT_EQ(chunks(), large);
  EXPECT_EQ(chunks(), large);
  // Only what follows within a tenth of a second is certain.
  int64_t got = 0;
  for (int i = 0; i < 50 && got != small; ++i) {
    ASSERT_EQ(rpc_sync(c[0], 1, &add, 1, 1), 2);
    got = chunks();
  }
  EXPECT_EQ(got, small);
}

TEST(Lanes, TwoLargeMessagesTravelSideBySide) {
  constexpr int64_t kBytes = 16 * kMiB;
  Cluster c(lanes_options({.local_sockets = false, .data_connections = false}));
  const at::Tensor x = at::ones({kBytes / 4});
  std::vector<Future<int64_t>> calls;
  for (int i = 0; i < 8; ++i) calls.push_back(rpc_async(c[0], 1, &numel, x));
  for (auto& call : calls) EXPECT_EQ(call.wait(), x.numel());
  // Each took its half: what a message has beside its bytes is little.
  for (const char* name : {"lane1_bytes_sent", "lane2_bytes_sent"}) {
    EXPECT_NEAR(static_cast<double>(counter(c[0], name)), 4.0 * kBytes, 0.1 * kBytes) << name;
  }
}

// Both sides dial at once, so one connection is retired, by a goodbye on every lane.
TEST(Lanes, AConnectionOfManyLanesIsRetiredWhenBothSidesDialled) {
  for (const int lanes : {1, 3, 7}) {
    for (int round = 0; round < 5; ++round) {
      Cluster c(lanes_options({.local_sockets = false, .bulk_lanes = lanes}));
      const at::Tensor x = at::ones({kMiB / 4});
      std::vector<Future<int64_t>> calls;
      for (int i = 0; i < 10; ++i) {
        calls.push_back(rpc_async(c[0], 1, &numel, x));
        calls.push_back(rpc_async(c[1], 0, &numel, x));
      }
      for (auto& call : calls) EXPECT_EQ(call.wait(), x.numel());
      // Only one is left, at the latest with the next sign of life.
      const absl::Time limit = c[0].now() + absl::Seconds(20);
      while (counter(c[0], "connections") + counter(c[1], "connections") > 2) {
        ASSERT_LT(c[0].now(), limit) << lanes;
        rpc_sync(c[0], 1, &add, 1, 2);
      }
      EXPECT_EQ(counter(c[0], "connections_lost"), counter(c[0], "connections_opened") - 1);
    }
  }
}

// Calls of small messages for which a thread of the callee waits: their requests have a lane, and the callee's
// `weft-prompt` a thread, of their own.
class PromptCalls : public ::testing::Test {
 protected:
  static StatusOr<Payload> call(const Worker& from, int64_t x, int64_t y) {
    return prompt_call(from, 1, &add, x, y);
  }
  // False: it did not come up within so many calls.
  static bool comes_up(const Worker& from) {
    for (int i = 0; i < 2000; ++i) {
      if (!call(from, i, 1).ok()) return false;
      if (counter(from, "lane2_frames_sent") > 0) return true;
    }
    return false;
  }
};

TEST_F(PromptCalls, HaveALaneOfTheirOwn) {
  constexpr int kCalls = 200;
  for (const bool data_connections : {true, false}) {
    Cluster c(lanes_options({.data_connections = data_connections}));
    ASSERT_EQ(rpc_sync(c[0], 1, &add, int64_t{1}, int64_t{2}), 3);
    EXPECT_EQ(comes_up(c[0]), data_connections);
    const int64_t prompt = counter(c[0], "lane2_frames_sent");
    const int64_t answers = counter(c[1], "lane0_frames_sent");
    for (int64_t i = 0; i < kCalls; ++i) {
      ASSERT_TRUE(call(c[0], i, 1).ok());
      ASSERT_EQ(rpc_sync(c[0], 1, &add, i, int64_t{1}), i + 1);
    }
    EXPECT_EQ(counter(c[0], "lane2_frames_sent") - prompt, data_connections ? kCalls : 0);
    EXPECT_EQ(counter(c[1], "lane2_frames_sent"), 0);
    EXPECT_GE(counter(c[1], "lane0_frames_sent") - answers, 2 * kCalls)
        << "answers go by the control lane";
  }
}

// Requests change to the lane while they are under way: each runs once.
TEST_F(PromptCalls, EachRunsOnceWhileTheLaneComesUp) {
  for (int round = 0; round < 20; ++round) {
    Cluster c(lanes_options({}));
    std::vector<Future<int64_t>> beside;
    int64_t calls = 0;
    while (counter(c[0], "lane2_frames_sent") == 0 && calls < 2000) {
      beside.push_back(rpc_async(c[0], 1, &add, calls, int64_t{1}));
      ASSERT_TRUE(call(c[0], calls++, 1).ok());
    }
    for (size_t i = 0; i < beside.size(); ++i) {
      EXPECT_EQ(beside[i].wait(), static_cast<int64_t>(i) + 1);
    }
    EXPECT_GT(counter(c[0], "lane2_frames_sent"), 0);
    EXPECT_EQ(counter(c[0], "connections_lost"), 0);
  }
}

// Both sides dialled, one connection is retired: a goodbye goes by the prompt lane, too.
TEST_F(PromptCalls, AConnectionWithAPromptLaneIsRetired) {
  for (int round = 0; round < 10; ++round) {
    Cluster c(lanes_options({}));
    std::vector<Future<int64_t>> calls;
    for (int64_t i = 0; i < 10; ++i) {
      calls.push_back(rpc_async(c[0], 1, &add, i, int64_t{1}));
      calls.push_back(rpc_async(c[1], 0, &add, i, int64_t{1}));
      ASSERT_TRUE(call(c[0], i, 1).ok());
    }
    for (auto& one : calls) EXPECT_GT(one.wait(), 0);
    const absl::Time limit = c[0].now() + absl::Seconds(20);
    while (counter(c[0], "connections") + counter(c[1], "connections") > 2) {
      ASSERT_LT(c[0].now(), limit);
      ASSERT_TRUE(call(c[0], 1, 2).ok());
    }
    EXPECT_EQ(counter(c[0], "connections_lost"), counter(c[0], "connections_opened") - 1);
  }
}

}  // namespace
}  // namespace weft::testing
