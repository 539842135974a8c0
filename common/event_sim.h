#ifndef WEFT_COMMON_EVENT_SIM_H_
#define WEFT_COMMON_EVENT_SIM_H_

// EventSim: a discrete event simulation on whole ticks, for predicting how long something takes.
// It computes; it runs nothing (common/sim.h does). What a tick is, the caller says.
//
//   EventSim sim;
//   SimLink wire(&sim, /*latency=*/200, /*bytes_per_kilotick=*/1000);
//   sim.at(5, [&] { wire.send(4096, [&] { arrived = sim.now(); }); });
//   sim.run();
//
// EVENT-1: events of one tick run in the order in which they were set, so that equal inputs give
//          equal runs.
// EVENT-2: time never goes back: an event set for the past runs now.
// One thread.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace weft {

class EventSim {
 public:
  using Ticks = int64_t;  // virtual time, in any unit

  Ticks now() const { return now_; }
  uint64_t events() const { return run_; }
  void at(Ticks when, std::function<void()> what) {  // absolute; after(): relative to now()
    queue_.push({std::max(when, now_), next_++, std::move(what)});
  }
  void after(Ticks delay, std::function<void()> what) { at(now_ + delay, std::move(what)); }
  // Until no event is left.
  void run() {
    while (!queue_.empty()) {
      Event next = queue_.top();
      queue_.pop();
      now_ = next.when;
      ++run_;
      next.what();
    }
  }

 private:
  struct Event {
    Ticks when;
    uint64_t number;
    std::function<void()> what;
    bool operator<(const Event& other) const {  // the queue has the greatest on top
      return when != other.when ? when > other.when : number > other.number;
    }
  };
  std::priority_queue<Event> queue_;
  Ticks now_ = 0;
  uint64_t next_ = 0;
  uint64_t run_ = 0;
};

// One direction of a wire: messages follow each other at the given rate, and each arrives `latency`
// after its last byte has left.
class SimLink {
 public:
  // `bytes_per_kilotick` 0: any number of bytes takes no time.
  SimLink(EventSim* sim, EventSim::Ticks latency, int64_t bytes_per_kilotick)
      : sim_(sim), latency_(latency), rate_(bytes_per_kilotick) {}

  void send(int64_t bytes, std::function<void()> arrived) {
    const EventSim::Ticks begin = std::max(sim_->now(), free_at_);
    free_at_ = begin + (rate_ > 0 ? (bytes * 1000 + rate_ - 1) / rate_ : 0);
    sim_->at(free_at_ + latency_, std::move(arrived));
  }

 private:
  EventSim* const sim_;
  const EventSim::Ticks latency_;
  const int64_t rate_;
  EventSim::Ticks free_at_ = 0;
};

}  // namespace weft

#endif  // WEFT_COMMON_EVENT_SIM_H_
