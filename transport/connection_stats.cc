#include "weft/transport/connection_stats.h"

#include <algorithm>

namespace weft {

LaneStats& LaneStats::operator+=(const LaneStats& other) {
  frames_sent += other.frames_sent;
  bytes_sent += other.bytes_sent;
  frames_received += other.frames_received;
  bytes_received += other.bytes_received;
  chunks_sent += other.chunks_sent;
  chunks_received += other.chunks_received;
  writes += other.writes;
  batches += other.batches;
  queued += other.queued;
  queued_us += other.queued_us;
  queued_most_us = std::max(queued_most_us, other.queued_most_us);
  return *this;
}

std::vector<std::pair<const char*, int64_t>> lane_numbers(const LaneStats& lane) {
  return {{"frames_sent", lane.frames_sent},
          {"bytes_sent", lane.bytes_sent},
          {"frames_received", lane.frames_received},
          {"bytes_received", lane.bytes_received},
          {"chunks_sent", lane.chunks_sent},
          {"chunks_received", lane.chunks_received},
          {"writes", lane.writes},
          {"batches", lane.batches},
          {"queued", lane.queued},
          {"queued_us", lane.queued_us},
          {"queued_most_us", lane.queued_most_us}};
}

std::ostream& operator<<(std::ostream& out, const PeerStats& peer) {
  out << peer.worker.name << " (id " << peer.worker.id << ") at " << peer.address << ": "
      << peer.calls_pending << " calls pending, " << peer.calls_waiting
      << " of them wait for a connection, " << peer.handlers_running << " handlers, "
      << peer.send_bytes << " bytes to send, " << peer.receive_bytes << " bytes being received\n";
  for (const ConnectionStats& connection : peer.connections) {
    out << "  " << (connection.way.empty() ? "connection" : connection.way)
        << (connection.dialled ? ", dialled here" : ", dialled there");
    if (!connection.arena.empty()) {
      out << "; shared memory: " << connection.arena << " (" << connection.arena_hits
          << " tensors, " << connection.arena_hit_bytes << " bytes; by the wire "
          << connection.arena_fallbacks << ", " << connection.arena_fallback_bytes << " bytes)";
    }
    if (!connection.data.empty()) out << "; large messages: " << connection.data;
    out << "\n";
    for (size_t i = 0; i < connection.lanes.size(); ++i) {
      const LaneStats& lane = connection.lanes[i];
      out << "    lane " << i << ": sent " << lane.frames_sent << " frames, " << lane.bytes_sent
          << " bytes in " << lane.writes << " writes (" << lane.chunks_sent << " chunks); received "
          << lane.frames_received << ", " << lane.bytes_received << " bytes ("
          << lane.chunks_received << " chunks); waited to be sent " << lane.queued << " times, "
          << (lane.queued == 0 ? 0 : lane.queued_us / lane.queued) << " us on average, "
          << lane.queued_most_us << " us at most\n";
    }
  }
  return out;
}

}  // namespace weft
