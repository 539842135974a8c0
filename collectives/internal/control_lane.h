#ifndef WEFT_COLLECTIVES_INTERNAL_CONTROL_LANE_H_
#define WEFT_COLLECTIVES_INTERNAL_CONTROL_LANE_H_

// ControlLane: what one peer says beside the data: faults, a goodbye, rings that wake a thread, and
// at a deadline in which operation it is. Its socket also ends with the peer's process. Messages
// are wire::GroupFault after their length as 4 bytes; a length of 0 is a ring.
//
// Threads: those of the link's operations, one at a time.

#include <optional>
#include <string>

#include "weft/collectives/internal/link.h"
#include "weft/common/error.h"

namespace weft::wire {
class GroupFault;
}

namespace weft::internal {

class Streams;

// A message for the control lane.
std::string control_message(const wire::GroupFault& fault);

class ControlLane {
 public:
  explicit ControlLane(int rank) : rank_(rank) {}

  // Reads what has come, if there is such a peer. Error: the peer's fault, when it concerns what
  // this rank is in (`position`, see link.h), now or at a later call; or the peer is gone without a
  // goodbye. `current` answers a peer that asks where this rank is.
  Status read(Streams& streams, const Header& current, uint64_t position);

  // Nothing more will come.
  bool ended() const { return ended_; }
  // It said goodbye, and had finished this operation then.
  bool left() const { return left_; }
  uint64_t finished() const { return finished_; }
  // The operation that the peer is in, as it said since forget_answer().
  const std::optional<Header>& answer() const { return answer_; }
  void forget_answer() { answer_.reset(); }

 private:
  Status receive(Streams& streams, const Header& current);
  Status decode(Streams& streams, const Header& current);
  Status take(Streams& streams, const wire::GroupFault& message, const Header& current);

  const int rank_;
  std::string bytes_;
  bool reset_ = false;  // the end of a Unix socket with rings unread was told
  bool ended_ = false;
  bool left_ = false;
  uint64_t finished_ = 0;
  Status later_;  // a fault of operations to come
  std::optional<Header> answer_;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_CONTROL_LANE_H_
