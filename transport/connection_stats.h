#ifndef WEFT_TRANSPORT_CONNECTION_STATS_H_
#define WEFT_TRANSPORT_CONNECTION_STATS_H_

// What connections did so far, for people who ask why something is slow. Worker::peer_stats() gives
// it peer by peer, debug_info() and the metrics give the numbers. Values; no threads.

#include <cstdint>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/worker_info.h"

namespace weft {

// One lane of one connection (or of several, summed up).
struct LaneStats {
  int64_t frames_sent = 0;  // messages, and parts of large ones
  int64_t bytes_sent = 0;   // of messages of the transport, headers included
  int64_t frames_received = 0;
  int64_t bytes_received = 0;
  int64_t chunks_sent = 0;  // of the frames: those that carry a part of a large message
  int64_t chunks_received = 0;
  int64_t writes = 0;   // messages of the transport
  int64_t batches = 0;  // messages of more than one frame
  // Frames that found another one being written waited for it. How often the oldest of them went
  // out after such a wait, and how long it had waited.
  int64_t queued = 0;
  int64_t queued_us = 0;
  int64_t queued_most_us = 0;

  WEFT_API LaneStats& operator+=(const LaneStats& other);
};

// Each number with its name, as debug_info() and the metrics call it.
WEFT_API std::vector<std::pair<const char*, int64_t>> lane_numbers(const LaneStats& lane);

struct ConnectionStats {  // one connection
  std::string way;        // "Unix socket", "TCP", "TCP with TLS", "inproc"; "" unknown
  bool dialled = false;
  std::vector<LaneStats> lanes;  // by number: 0 is control and small messages
  // Tensors above WEFT_INLINE_BYTES through memory that both see, and those that went by the wire.
  int64_t arena_hits = 0;
  int64_t arena_hit_bytes = 0;
  int64_t arena_fallbacks = 0;
  int64_t arena_fallback_bytes = 0;
  // "lends, borrows", or what is in the way; "" where there is no such memory.
  std::string arena;
  // "2 connections, TLS 1.3", or why large messages go by the bulk lanes; "" where there are none.
  std::string data;
};

struct PeerStats {               // one peer: what Worker::peer_stats() lists
  WorkerInfo worker;             // the peer
  std::string address;           // where it listens
  int64_t calls_pending = 0;     // ours to it
  int64_t calls_waiting = 0;     // of those: until there is a connection
  int64_t handlers_running = 0;  // for it
  int64_t send_bytes = 0;        // of its share of the send budget, and of the receive budget
  int64_t receive_bytes = 0;
  std::vector<ConnectionStats> connections;
};

// Several lines for people.
WEFT_API std::ostream& operator<<(std::ostream& out, const PeerStats& peer);

}  // namespace weft

#endif  // WEFT_TRANSPORT_CONNECTION_STATS_H_
