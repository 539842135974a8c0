#ifndef WEFT_TRANSPORT_INTERNAL_WIRE_LANE_COUNTERS_H_
#define WEFT_TRANSPORT_INTERNAL_WIRE_LANE_COUNTERS_H_

// What every kind of lane counts. Any thread.

#include <atomic>
#include <cstdint>
#include <string_view>

#include "weft/common/error.h"
#include "weft/transport/connection_stats.h"

namespace weft::internal {

// As LaneStats. Those of the queue are written by the thread that writes to the lane.
struct LaneCounters {
  std::atomic<int64_t> frames_sent{0};
  std::atomic<int64_t> bytes_sent{0};
  std::atomic<int64_t> frames_received{0};
  std::atomic<int64_t> bytes_received{0};
  std::atomic<int64_t> chunks_sent{0};
  std::atomic<int64_t> chunks_received{0};
  std::atomic<int64_t> writes{0};
  std::atomic<int64_t> batches{0};
  std::atomic<int64_t> queued{0};
  std::atomic<int64_t> queued_us{0};
  std::atomic<int64_t> queued_most_us{0};

  LaneStats read() const {
    constexpr auto kOrder = std::memory_order_relaxed;
    LaneStats out;
    out.frames_sent = frames_sent.load(kOrder);
    out.bytes_sent = bytes_sent.load(kOrder);
    out.frames_received = frames_received.load(kOrder);
    out.bytes_received = bytes_received.load(kOrder);
    out.chunks_sent = chunks_sent.load(kOrder);
    out.chunks_received = chunks_received.load(kOrder);
    out.writes = writes.load(kOrder);
    out.batches = batches.load(kOrder);
    out.queued = queued.load(kOrder);
    out.queued_us = queued_us.load(kOrder);
    out.queued_most_us = queued_most_us.load(kOrder);
    return out;
  }
  // Frames waited for so long behind others. REQUIRES: one caller at a time.
  void note_queued(int64_t us) {
    constexpr auto kOrder = std::memory_order_relaxed;
    queued.fetch_add(1, kOrder);
    queued_us.fetch_add(us, kOrder);
    if (us > queued_most_us.load(kOrder)) queued_most_us.store(us, kOrder);
  }
};

inline void add(std::atomic<int64_t>* counter, int64_t n) {
  counter->fetch_add(n, std::memory_order_relaxed);
}

// What send() says of a frame that the lane did not take (CONN-4).
WEFT_COLD inline Status not_delivered(std::string_view message) {
  return make_error(ErrorKind::kNotDelivered, message);
}

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_WIRE_LANE_COUNTERS_H_
