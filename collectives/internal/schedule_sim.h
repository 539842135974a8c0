#ifndef WEFT_COLLECTIVES_INTERNAL_SCHEDULE_SIM_H_
#define WEFT_COLLECTIVES_INTERNAL_SCHEDULE_SIM_H_

// ScheduleSim: how long the schedules of all ranks take together, in the model of cost_model.h. A
// rank's schedule is kept as numbers of its different rounds, because most rounds of a ring are
// equal: a segmented ring of 4,096 ranks has 134 million of them.
//
// SIM-1: what is under way at one tick is begun together: messages that become ready at one tick
//        take the ports in the order in which their senders list them, then in the order of ranks.
// SIM-2: ticks are femtoseconds; nothing is rounded after the parameters are.
//
// Threads: one.

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "weft/collectives/internal/schedule.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/event_sim.h"

namespace weft::internal {

struct SimCost {
  EventSim::Ticks alpha = 0;
  EventSim::Ticks beta = 0;   // per byte
  EventSim::Ticks gamma = 0;  // per byte
  // Neighbouring ranks share a host, whose messages have costs of their own. 1: none do.
  int ranks_per_host = 1;
  EventSim::Ticks local_alpha = 0;
  EventSim::Ticks local_beta = 0;
};

struct SimResult {
  EventSim::Ticks ticks = 0;
  uint64_t messages = 0;
  uint64_t bytes = 0;
};

class WEFT_API ScheduleSim {
 public:
  ScheduleSim(int ranks, uint64_t element_bytes, const SimCost& cost);

  // Rank by rank, in order.
  Status add(const Schedule& schedule);
  // After all ranks. Error, kind internal: ranks wait for each other for ever.
  StatusOr<SimResult> run();

 private:
  // A message of one rank to another one, again and again: the k-th send meets the k-th receive.
  struct Pair {
    int from = 0;
    int to = 0;
    int balance = 0;      // sends that wait for a receive; below 0: receives that wait for a send
    uint32_t number = 0;  // of the last send, in its round
  };
  struct Move {
    uint32_t pair = 0;
    bool sends = false;
    uint64_t bytes = 0;
  };
  struct Shape {
    uint32_t begin = 0;  // in moves
    uint32_t count = 0;
    uint64_t reduced = 0;  // bytes
  };
  struct Rank {
    std::vector<Move> moves;
    std::vector<Shape> shapes;
    std::vector<uint16_t> rounds;  // numbers of shapes
    size_t next = 0;               // round
    uint32_t pending = 0;          // messages of the round that have not begun
    EventSim::Ticks ends = 0;      // the latest end of those that have
    EventSim::Ticks send_free = 0;
    EventSim::Ticks receive_free = 0;
  };
  struct Ready {
    uint32_t number;  // among the sends of its round
    int from;
    int to;
    uint64_t bytes;
  };

  uint32_t pair_of(int from, int to);
  uint16_t shape_of(Rank& rank, const std::vector<Move>& moves, uint64_t reduced,
                    std::unordered_multimap<uint64_t, uint16_t>& known);
  void enter_at(EventSim::Ticks when, int rank);
  void enter(int rank);
  // The messages that became ready at this tick begin.
  void begin_ready();
  void begun(int rank, EventSim::Ticks end);

  const uint64_t element_bytes_;
  const SimCost cost_;
  std::vector<Rank> ranks_;
  std::vector<Pair> pairs_;
  absl::flat_hash_map<uint64_t, uint32_t> pair_numbers_;
  size_t added_ = 0;
  size_t ended_ = 0;

  EventSim sim_;
  // Ranks that enter their next round at one tick: one event for all of them.
  std::unordered_map<EventSim::Ticks, std::vector<int>> entering_;
  std::vector<Ready> ready_;
  SimResult result_;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_SCHEDULE_SIM_H_
