// What the agent tells about its peers: peer_stats(), and the same numbers as metrics.

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/rpc/internal/agent/agent.h"

namespace weft::internal {

std::vector<PeerStats> Agent::peer_stats() const {
  struct Found {
    PeerStats stats;
    std::vector<std::shared_ptr<Link>> links;
  };
  std::map<uint64_t, Found> found;
  {
    MutexLock lock(&mutex_);
    for (const auto& [incarnation, peer] : peers_) {
      if (!peer->gone.ok() && peer->links.empty()) continue;
      Found& f = found[incarnation];
      f.stats.worker = peer->info;
      f.stats.address = peer->address;
      f.stats.calls_waiting = static_cast<int64_t>(peer->waiting.size());
      if (peer->send_room != nullptr) {
        f.stats.send_bytes = static_cast<int64_t>(peer->send_room->budget().used());
      }
      if (peer->budget != nullptr) {
        f.stats.receive_bytes = static_cast<int64_t>(peer->budget->used());
      }
      f.links = peer->links;
    }
    for (const auto& [id, pending] : pending_) {
      const auto f = found.find(pending.to.incarnation);
      if (f != found.end()) ++f->second.stats.calls_pending;
    }
    for (const auto& [key, serving] : serving_) {
      const auto f = found.find(key.first);
      if (f != found.end()) ++f->second.stats.handlers_running;
    }
  }
  std::vector<PeerStats> out;
  for (auto& [incarnation, f] : found) {
    for (const auto& link : f.links) f.stats.connections.push_back(link->connection()->stats());
    out.push_back(std::move(f.stats));
  }
  std::sort(out.begin(), out.end(), [](const PeerStats& a, const PeerStats& b) {
    return std::pair(a.worker.id, a.worker.incarnation) <
           std::pair(b.worker.id, b.worker.incarnation);
  });
  return out;
}

void Agent::put_peer_numbers(std::map<std::string, int64_t>* out) const {
  for (const PeerStats& peer : peer_stats()) {
    const auto put = [&](const std::string& name, int64_t value) {
      // Most are zero, and a worker may have many peers.
      if (value != 0) (*out)[absl::StrCat("peer/", peer.worker.name, "/", name)] += value;
    };
    put("calls_pending", peer.calls_pending);
    put("handlers_running", peer.handlers_running);
    put("send_bytes", peer.send_bytes);
    put("receive_bytes", peer.receive_bytes);
    put("connections", static_cast<int64_t>(peer.connections.size()));
    for (const ConnectionStats& connection : peer.connections) {
      put("arena_hits", connection.arena_hits);
      put("arena_hit_bytes", connection.arena_hit_bytes);
      put("arena_fallbacks", connection.arena_fallbacks);
      put("arena_fallback_bytes", connection.arena_fallback_bytes);
      for (size_t i = 0; i < connection.lanes.size(); ++i) {
        for (const auto& [name, value] : lane_numbers(connection.lanes[i])) {
          put(absl::StrCat("lane", i, "/", name), value);
        }
      }
    }
  }
}

void Link::publish(Metrics* metrics) {
  const int64_t traffic = std::max(last_sent_.load(std::memory_order_relaxed),
                                   last_received_.load(std::memory_order_relaxed));
  MutexLock lock(&published_mutex_);
  // A worker may have hundreds of peers, most of which are silent. What was under way at the first look is
  // counted at the second.
  if (traffic != published_traffic_) {
    published_traffic_ = traffic;
    looks_without_traffic_ = 0;
  } else if (++looks_without_traffic_ > 1) {
    return;
  }
  const ConnectionStats now = connection_->stats();
  const auto add = [&](std::string_view name, std::string_view help, int lane, int64_t value,
                       int64_t before) {
    // Looked up only when it has changed: most of the time nothing has.
    if (value <= before) return;
    MetricLabels labels;
    if (lane >= 0) labels.emplace_back("lane", std::to_string(lane));
    labels.emplace_back("peer", connection_->peer().name);
    metrics->counter(absl::StrCat("weft_rpc_", std::string(name), "_total"), help, labels)
        ->add(static_cast<uint64_t>(value - before));
  };
  published_.lanes.resize(now.lanes.size());
  for (size_t i = 0; i < now.lanes.size(); ++i) {
    const auto before = lane_numbers(published_.lanes[i]);
    const auto values = lane_numbers(now.lanes[i]);
    for (size_t k = 0; k < values.size(); ++k) {
      const std::string_view name = values[k].first;
      if (name == "queued_most_us") continue;  // not a sum
      // Metrics have base units: a counter of seconds is given microseconds (common/metrics.h).
      const char* const of_metric = name == "queued_us" ? "queued_seconds" : values[k].first;
      if (values[k].second <= before[k].second) continue;
      add(absl::StrCat("lane_", of_metric), "Of one lane to one peer, see docs/sight.md",
          static_cast<int>(i), values[k].second, before[k].second);
    }
  }
  add("arena_hits", "Tensors sent through shared memory", -1, now.arena_hits,
      published_.arena_hits);
  add("arena_hit_bytes", "Their bytes", -1, now.arena_hit_bytes, published_.arena_hit_bytes);
  add("arena_fallbacks", "Large tensors that went by the wire", -1, now.arena_fallbacks,
      published_.arena_fallbacks);
  add("arena_fallback_bytes", "Their bytes", -1, now.arena_fallback_bytes,
      published_.arena_fallback_bytes);
  published_ = now;
}

void Agent::publish_stats(const std::vector<std::shared_ptr<Link>>& links,
                          const Transport& transport) {
  Metrics* const metrics = options_.metrics.get();
  for (const auto& link : links) link->publish(metrics);
  for (const auto& [name, value] : transport.counters()) {
    if (name == "descriptors_open" || name == "descriptors_limit") {
      metrics->gauge(absl::StrCat("weft_rpc_", name), "Of the process, see docs/transport.md")
          ->set(value);
    }
    const bool of_the_poller = name.rfind("poller_", 0) == 0;
    if (!of_the_poller && name.rfind("listener_", 0) != 0) continue;
    int64_t& before = published_[name];
    if (value > before) {
      metrics
          ->counter(absl::StrCat("weft_rpc_", name, "_total"),
                    of_the_poller ? "Of the thread that polls, see docs/threading.md"
                                  : "Of the thread that accepts connections, see docs/sight.md")
          ->add(static_cast<uint64_t>(value - before));
    }
    before = value;
  }
}

}  // namespace weft::internal
