// What the grpc transport counts: writes, wake-ups, lanes, threads.
#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <future>
#include <thread>

#include "gtest/gtest.h"
#include "weft/tests/contract/grpc_transport_harness.h"
#include "weft/transport/internal/crowd.h"

namespace weft::testing {
namespace {

int threads_named(const std::string& prefix) {
  int n = 0;
  DIR* const tasks = opendir("/proc/self/task");
  while (const dirent* entry = readdir(tasks)) {
    std::ifstream file(std::string("/proc/self/task/") + entry->d_name + "/comm");
    std::string name;
    if (std::getline(file, name) && name.rfind(prefix, 0) == 0) ++n;
  }
  closedir(tasks);
  return n;
}

TEST_F(GrpcTransportTest, OneWritePerFrameInPingPongAndManyFramesPerWriteInABurst) {
  std::unique_ptr<Peer> a = world().make_peer("a");
  std::unique_ptr<Peer> b = world().make_peer("b");
  ASSERT_TRUE(world().listen(*b).ok());
  StatusOr<End> end = world().dial(*a, b->address);
  ASSERT_TRUE(end.ok()) << end.status();
  const End there = b->acceptor->accepted();
  const ConnectionRef back = there.connection;
  there.handler->reply_with([back](const Received& r) {
    EXPECT_TRUE(back->send(make_frame(FrameKind::kResponse, r.header, ""), r.lane).ok());
  });
  constexpr int64_t kCalls = 1000;
  const int64_t writes_before = counter(*a, "lane0_writes");
  const int64_t waits_before =
      counter(*a, "poller_blocking_waits") + counter(*b, "poller_blocking_waits");
  for (int64_t i = 0; i < kCalls; ++i) {
    ASSERT_TRUE(end->connection->send(make_frame(FrameKind::kRequest, "x", ""), 0).ok());
    ASSERT_TRUE(end->handler->wait_frames(static_cast<size_t>(i + 1)));
  }
  EXPECT_EQ(counter(*a, "lane0_writes") - writes_before, kCalls);
  const int64_t received = counter(*a, "lane0_frames_received");
  EXPECT_GE(received, kCalls);
  EXPECT_LE(received, kCalls + 1) << "and one acknowledgement, if it has arrived";
  // transport.md, 9.1: at most two wake-ups per call; besides, the completion of a write may wake
  // the poller of its own side. A few belong to the opening and to the first acknowledgement.
  EXPECT_LE(
      counter(*a, "poller_blocking_waits") + counter(*b, "poller_blocking_waits") - waits_before,
      4 * kCalls + 8);
  EXPECT_EQ(counter(*a, "lane1_frames_sent"), 0);

  // While a write is under way the others gather: far fewer writes than frames.
  const int64_t burst_before = counter(*a, "lane0_writes");
  for (int64_t i = 0; i < kCalls; ++i) {
    ASSERT_TRUE(end->connection->send(make_frame(FrameKind::kRequest, "x", ""), 0).ok());
  }
  ASSERT_TRUE(there.handler->wait_frames(2 * kCalls));
  EXPECT_LT(counter(*a, "lane0_writes") - burst_before, kCalls);
  EXPECT_GT(counter(*a, "lane0_batches"), 0);
  ASSERT_TRUE(end->handler->wait_frames(2 * kCalls));
  a->transport->shutdown();
  b->transport->shutdown();
}

TEST_F(GrpcTransportTest, HOLD_1_AnswersToWhatCameOneByOneLeaveTogether) {
  std::unique_ptr<Peer> a = world().make_peer("a");
  std::unique_ptr<Peer> b = world().make_peer("b");
  ASSERT_TRUE(world().listen(*b).ok());
  StatusOr<End> end = world().dial(*a, b->address);
  ASSERT_TRUE(end.ok()) << end.status();
  const End there = b->acceptor->accepted();
  constexpr int64_t kCalls = 64;
  // The bytes may be in the hands of a's poller, which waits for a core: the best of a few rounds.
  int64_t fewest = kCalls;
  for (int64_t round = 0; round < 5 && fewest >= kCalls / 2; ++round) {
    std::promise<void> all_sent;
    const std::string first = std::to_string(round * kCalls);
    there.handler->reply_with([back = there.connection, &all_sent, first](const Received& r) {
      // b's poller stays in the first frame until the others wait for it, each in its own message.
      if (r.header == first) all_sent.get_future().wait();
      EXPECT_TRUE(back->send(make_frame(FrameKind::kResponse, r.header, ""), r.lane).ok());
    });
    const int64_t before = counter(*a, "lane0_writes");
    for (int64_t i = 0; i < kCalls; ++i) {
      const std::string number = std::to_string(round * kCalls + i);
      ASSERT_TRUE(end->connection->send(make_frame(FrameKind::kRequest, number, ""), 0).ok());
      while (counter(*a, "lane0_writes") - before <= i) std::this_thread::yield();
    }
    const int64_t answers_before = counter(*b, "lane0_writes");
    all_sent.set_value();
    ASSERT_TRUE(end->handler->wait_frames(static_cast<size_t>((round + 1) * kCalls)));
    fewest = std::min(fewest, counter(*b, "lane0_writes") - answers_before);
  }
  // The first few teach the poller that more is there.
  EXPECT_LT(fewest, kCalls / 2);
  const std::vector<Received> frames = end->handler->frames();
  for (size_t i = 0; i < frames.size(); ++i) EXPECT_EQ(frames[i].header, std::to_string(i));
  a->transport->shutdown();
  b->transport->shutdown();
}

TEST_F(GrpcTransportTest, TheWayDecidesHowManyLanesAConnectionHas) {
  open({.same_user = false, .bulk_lanes = 3, .local_bulk_lanes = 2});
  std::unique_ptr<Peer> a = world().make_peer("a");
  std::unique_ptr<Peer> b = world().make_peer("b");
  ASSERT_TRUE(world().listen(*b).ok());
  const auto undecided = [](Hello* hello) { hello->lanes = 0; };
  size_t accepted = 0;
  for (const auto& [address, lanes] : {std::pair<std::string, uint32_t>{b->address, 3},
                                       std::pair<std::string, uint32_t>{tcp_part(b->address), 4}}) {
    StatusOr<End> end = world().dial(*a, address, absl::Seconds(20), undecided);
    ASSERT_TRUE(end.ok()) << end.status();
    const End there = b->acceptor->accepted(accepted++);
    EXPECT_EQ(1 + end->connection->peer().late_lanes, lanes);
    EXPECT_EQ(1 + there.connection->peer().late_lanes, lanes);
    const int last = static_cast<int>(lanes) - 1;
    const std::string name = "lane" + std::to_string(last);
    ASSERT_TRUE(end->connection->send(make_frame(FrameKind::kRequest, "x", ""), last).ok());
    ASSERT_TRUE(there.handler->wait_frames(1));
    EXPECT_EQ(there.handler->frames().front().lane, last);
    EXPECT_EQ(counter(*a, name + "_frames_sent"), 1) << "each lane has counters of its own";
    EXPECT_EQ(error_kind(end->connection->send(make_frame(FrameKind::kRequest, "x", ""), 8)),
              ErrorKind::kInvalidArgument);
  }
  for (const GrpcTransportOptions& bad :
       {GrpcTransportOptions{.bulk_lanes = 0}, GrpcTransportOptions{.local_bulk_lanes = 8}}) {
    TransportContext context;
    context.runtime = make_system_runtime();
    EXPECT_EQ(error_kind(grpc_transport(bad)(context).status()), ErrorKind::kInvalidArgument);
  }
  a->transport->shutdown();
  b->transport->shutdown();
}

TEST(CrowdWatch, IsCrowdedWhenClearlyMoreThreadsRunThanThereAreCores) {
  const std::string path = ::testing::TempDir() + "loadavg" + std::to_string(getpid());
  const auto say = [&path](int running) {
    std::ofstream(path) << "0.20 0.18 0.12 " << running << "/480 11206\n";
  };
  say(4);
  internal::CrowdWatch watch(path, 4);
  absl::Time now = absl::UnixEpoch();
  const auto look = [&](int times) {
    bool crowded = false;
    for (int i = 0; i < times; ++i) crowded = watch.crowded(now += absl::Milliseconds(3));
    return crowded;
  };
  EXPECT_FALSE(look(50));
  say(9);
  EXPECT_FALSE(look(50)) << "two per core: who spins still wins";
  say(14);
  EXPECT_FALSE(look(1)) << "one look is none";
  EXPECT_TRUE(look(50));
  say(9);
  EXPECT_TRUE(look(50)) << "those that stopped spinning are missing in the number";
  say(6);
  EXPECT_FALSE(look(50)) << "what pairs show that compute, asleep or not";
  say(14);
  ASSERT_TRUE(look(50));
  // Nothing is asked within the interval.
  say(1);
  for (int i = 0; i < 1000; ++i) EXPECT_TRUE(watch.crowded(now));
  std::ofstream(path) << "something else\n";
  EXPECT_FALSE(look(1));
  std::remove(path.c_str());
  internal::CrowdWatch nowhere("/no/such/file", 4);
  EXPECT_FALSE(nowhere.crowded(now));
}

TEST_F(GrpcTransportTest, ASmallFrameWaitsBehindAtMostOneChunk) {
  std::unique_ptr<Peer> a = world().make_peer("a");
  std::unique_ptr<Peer> b = world().make_peer("b");
  ASSERT_TRUE(world().listen(*b).ok());
  StatusOr<End> end = world().dial(*a, b->address);
  ASSERT_TRUE(end.ok()) << end.status();
  const End there = b->acceptor->accepted();
  // 64 MiB in chunks on the bulk lane, and one small frame on the control lane.
  for (int i = 0; i < 64; ++i) {
    ASSERT_TRUE(end->connection
                    ->send(make_frame(FrameKind::kChunk, "", std::string(1 << 20, 'c')), kBulkLane)
                    .ok());
  }
  ASSERT_TRUE(end->connection->send(make_frame(FrameKind::kRequest, "small", ""), 0).ok());
  ASSERT_TRUE(there.handler->wait_frames(65));
  const std::vector<Received> got = there.handler->frames();
  size_t at = 0;
  while (at < got.size() && got[at].kind != FrameKind::kRequest) ++at;
  EXPECT_LT(at, 64u) << "it came last, behind all of the bulk";
  a->transport->shutdown();
  b->transport->shutdown();
}

TEST_F(GrpcTransportTest, ThreadsDoNotGrowWithPeers) {
  constexpr size_t kPeers = 12;
  const int before = threads_named("weft-poller");
  std::vector<std::unique_ptr<Peer>> peers;
  for (size_t i = 0; i < kPeers; ++i) {
    peers.push_back(world().make_peer("p" + std::to_string(i)));
    ASSERT_TRUE(world().listen(*peers.back()).ok());
  }
  std::vector<End> ends;
  for (size_t i = 0; i < kPeers; ++i) {
    for (size_t j = 0; j < kPeers; ++j) {
      if (i == j) continue;
      StatusOr<End> end = world().dial(*peers[i], peers[j]->address);
      ASSERT_TRUE(end.ok()) << end.status();
      ends.push_back(*end);
    }
  }
  EXPECT_EQ(threads_named("weft-poller") - before, static_cast<int>(kPeers));
  for (const End& end : ends) {
    ASSERT_TRUE(end.connection->send(make_frame(FrameKind::kRequest, "x", ""), 0).ok());
  }
  for (const auto& peer : peers) {
    for (size_t i = 0; i + 1 < kPeers; ++i) {
      ASSERT_TRUE(peer->acceptor->accepted(i).handler->wait_frames(1));
    }
  }
  for (const auto& peer : peers) peer->transport->shutdown();
  EXPECT_EQ(threads_named("weft-poller"), before);
}

}  // namespace
}  // namespace weft::testing
