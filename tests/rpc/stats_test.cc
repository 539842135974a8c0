// What a worker tells about its connections: peer_stats(), debug_info() and the metrics agree.

#include <atomic>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "ATen/ops/ones.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/common/metrics.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/checks.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/forwarding_transport.h"
#include "weft/tests/testing/gate.h"
#include "weft/transport/grpc_transport.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;

Library stats_library() {
  Library lib("stats");
  lib.def("add", &add, {.inline_ok = true});
  lib.def("numel", &numel, {.inline_ok = true});
  return lib;
}

ClusterOptions stats_options(const GrpcTransportOptions& transport) {
  ClusterOptions o{.net = Net::kGrpc, .library = stats_library()};
  o.adjust = [transport](int, JoinOptions* j) { j->transport = grpc_transport(transport); };
  return o;
}

PeerStats only_peer(const Worker& worker) {
  const std::vector<PeerStats> all = worker.peer_stats();
  EXPECT_EQ(all.size(), 1u);
  return all.empty() ? PeerStats() : all.front();
}

constexpr int64_t kFloats = int64_t{2} << 20;  // 8 MiB

TEST(Stats, EachLaneOfEachPeerIsCounted) {
  Cluster c(stats_options({.local_sockets = false, .data_connections = false}));
  // Before the small calls, which would make its chunks smaller.
  ASSERT_EQ(rpc_sync(c[0], 1, &numel, at::ones({kFloats})), kFloats);
  for (int64_t i = 0; i < 20; ++i) ASSERT_EQ(rpc_sync(c[0], 1, &add, i, 1), i + 1);
  const PeerStats peer = only_peer(c[0]);
  EXPECT_EQ(peer.worker.name, "worker1");
  EXPECT_EQ(peer.calls_pending, 0);
  ASSERT_EQ(peer.connections.size(), 1u);
  const ConnectionStats& connection = peer.connections[0];
  EXPECT_EQ(connection.way, "TCP");
  EXPECT_TRUE(connection.dialled);
  ASSERT_EQ(connection.lanes.size(), 3u);
  EXPECT_GE(connection.lanes[0].frames_sent, 20);
  EXPECT_EQ(connection.lanes[0].chunks_sent, 0);
  EXPECT_GE(connection.lanes[0].writes, 20);
  LaneStats bulk = connection.lanes[1];
  bulk += connection.lanes[2];
  EXPECT_EQ(bulk.chunks_sent, (4 * kFloats + (256 << 10) - 1) / (256 << 10));
  EXPECT_GT(bulk.bytes_sent, 4 * kFloats);
  // 32 chunks were queued at once behind one that was being written.
  EXPECT_GT(bulk.queued, 0);
  EXPECT_GE(bulk.queued_us, bulk.queued_most_us);
  EXPECT_EQ(connection.arena_fallbacks, 1) << "one tensor that went by the wire";
  EXPECT_EQ(connection.arena_fallback_bytes, 4 * kFloats);
  EXPECT_THAT(connection.arena, HasSubstr("not on this host"));

  // The answer leaves while the last chunk is still being handed over, and is counted after it.
  const auto chunks_at_the_callee = [&c] {
    const ConnectionStats there = only_peer(c[1]).connections.at(0);
    return there.lanes[1].chunks_received + there.lanes[2].chunks_received;
  };
  const absl::Time end = c[1].now() + absl::Seconds(20);
  while (chunks_at_the_callee() < bulk.chunks_sent && c[1].now() < end) std::this_thread::yield();
  EXPECT_EQ(chunks_at_the_callee(), bulk.chunks_sent);
  EXPECT_FALSE(only_peer(c[1]).connections.at(0).dialled);

  const std::map<std::string, int64_t> info = c[0].debug_info();
  EXPECT_EQ(
      info.at("peer/worker1/lane1/chunks_sent") + info.count("peer/worker1/lane2/chunks_sent"),
      connection.lanes[1].chunks_sent + (connection.lanes[2].chunks_sent > 0 ? 1 : 0));
  EXPECT_EQ(info.at("lane1_chunks_sent"), connection.lanes[1].chunks_sent);
  std::ostringstream text;
  text << peer;
  EXPECT_THAT(text.str(), HasSubstr("worker1 (id 1)"));
  EXPECT_THAT(text.str(), HasSubstr("TCP, dialled here"));
}

TEST(Stats, TensorsThroughSharedMemoryAreCountedApart) {
  Cluster c(stats_options({}));
  // Which workers share memory is settled beside the first calls.
  int64_t sent = 0;
  for (; sent < 10'000; ++sent) {
    ASSERT_EQ(rpc_sync(c[0], 1, &numel, at::ones({kFloats / 8})), kFloats / 8);
    if (only_peer(c[0]).connections.at(0).arena_hits >= 3) break;
  }
  const ConnectionStats connection = only_peer(c[0]).connections.at(0);
  EXPECT_EQ(connection.way, "Unix socket");
  EXPECT_THAT(connection.arena, HasSubstr("lends"));
  EXPECT_GE(connection.arena_hits, 3);
  EXPECT_EQ(connection.arena_hit_bytes, connection.arena_hits * kFloats / 2);
  EXPECT_EQ(connection.arena_hits + connection.arena_fallbacks, sent + 1);
}

TEST(Stats, WhatALostConnectionDidStaysInTheMetrics) {
  ClusterOptions o = stats_options({.local_sockets = false});
  o.dynamic = true;
  o.names = {"a", "b"};
  Cluster c(o);
  eventually([&] { return c[0].worker_infos().size() == 2; }, "b is known");
  ASSERT_EQ(rpc_sync(c[0], "b", &numel, at::ones({kFloats})), kFloats);
  const int64_t chunks = (4 * kFloats + (256 << 10) - 1) / (256 << 10);
  ASSERT_TRUE(c[1].shutdown().status.ok());
  const auto value = [&](const std::string& name) {
    const std::map<std::string, double> all = c[0].metrics().snapshot();
    const auto it = all.find(name);
    return it == all.end() ? 0.0 : it->second;
  };
  // The connection's end is told by the poller.
  const absl::Time end = c[0].now() + absl::Seconds(20);
  while (counter(c[0], "connections") > 0 && c[0].now() < end) std::this_thread::yield();
  EXPECT_EQ(value("weft_rpc_lane_chunks_sent_total{lane=\"1\",peer=\"b\"}") +
                value("weft_rpc_lane_chunks_sent_total{lane=\"2\",peer=\"b\"}"),
            static_cast<double>(chunks));
  EXPECT_EQ(value("weft_rpc_arena_fallbacks_total{peer=\"b\"}"), 1.0);
}

TEST(Stats, WhatTheListenerAcceptedIsAMetricAtTheNextHeartbeat) {
  Cluster c(stats_options({.local_sockets = false, .bulk_lanes = 2, .data_connections = false}));
  ASSERT_EQ(rpc_sync(c[0], 1, &add, 1, 1), 2);
  const auto accepted = [&c](size_t worker) {
    const std::map<std::string, double> all = c[worker].metrics().snapshot();
    const auto it = all.find("weft_rpc_listener_accepted_total");
    return it == all.end() ? 0.0 : it->second;
  };
  const absl::Time end = c[1].now() + absl::Seconds(20);
  while (accepted(1) < 1 && c[1].now() < end) std::this_thread::yield();
  EXPECT_EQ(accepted(1), 1) << "one for each lane";
  EXPECT_EQ(accepted(0), 0) << "nobody dialled this one";
  EXPECT_EQ(counter(c[1], "listener_accepted"), 1);
  EXPECT_EQ(counter(c[1], "listener_stalls"), 0);
}

// Stops its worker's tick in counters(), once.
class HeldTransport final : public ForwardingTransport {
 public:
  struct Seen {
    Gate gate{make_system_runtime()};
    std::atomic<bool> held{false};
    std::atomic<bool> gone{false};
    std::atomic<int> after_it_went{0};
  };
  HeldTransport(std::unique_ptr<Transport> inner, std::shared_ptr<Seen> seen)
      : ForwardingTransport(std::move(inner)), seen_(std::move(seen)) {}
  ~HeldTransport() override { seen_->gone = true; }
  std::vector<std::pair<std::string, int64_t>> counters() const override {
    const auto seen = seen_;
    if (!seen->held.exchange(true)) seen->gate.arrive_and_wait();
    if (seen->gone) {
      ++seen->after_it_went;
      return {};
    }
    return ForwardingTransport::counters();
  }

 private:
  const std::shared_ptr<Seen> seen_;
};

TEST(Stats, ATickThatRunsWhileItsWorkerGoesKeepsTheTransport) {
  const auto seen = std::make_shared<HeldTransport::Seen>();
  ClusterOptions o{.size = 1, .library = stats_library(), .dynamic = true};
  o.adjust = [seen](int, JoinOptions* j) {
    j->transport = [seen, inner = j->transport](
                       const TransportContext& context) -> StatusOr<std::unique_ptr<Transport>> {
      auto made = inner(context);
      if (!made.ok()) return made.status();
      return std::make_unique<HeldTransport>(*std::move(made), seen);
    };
  };
  {
    Cluster c(std::move(o));
    seen->gate.wait_arrived(1);
  }
  EXPECT_FALSE(seen->gone) << "the tick still uses it";
  seen->gate.open();
  eventually([&] { return seen->gone.load(); }, "the tick to let go of the transport");
  EXPECT_EQ(seen->after_it_went, 0);
}

}  // namespace
}  // namespace weft::testing
