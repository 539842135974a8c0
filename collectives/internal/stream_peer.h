#ifndef WEFT_COLLECTIVES_INTERNAL_STREAM_PEER_H_
#define WEFT_COLLECTIVES_INTERNAL_STREAM_PEER_H_

// StreamPeer: one peer of a link over streams: what goes to it and comes from it, as far as it has
// got. Allocates nothing once its queues have grown.
//
// Threads: those of the link's operations, one at a time.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "weft/collectives/internal/control_lane.h"
#include "weft/collectives/internal/link.h"
#include "weft/collectives/internal/point_reader.h"
#include "weft/collectives/internal/stream_link.h"

namespace weft::internal {

// In the order of adding; its memory stays.
template <class T>
class Queue {
 public:
  void clear() {
    items_.clear();
    next_ = 0;
  }
  bool empty() const { return next_ == items_.size(); }
  T front() const { return items_[next_]; }
  void push_back(T item) { items_.push_back(item); }
  void pop_front() { ++next_; }

 private:
  std::vector<T> items_;
  size_t next_ = 0;
};

// Messages on their way out.
struct Outbox {
  Queue<const Outgoing*> messages;
  uint64_t sent = 0;  // of the first, header included

  void clear() {
    messages.clear();
    sent = 0;
  }
};

class StreamPeer {
 public:
  StreamPeer(const Membership& member, int rank_in)
      : rank(rank_in), reader(member.group, member.generation, rank_in), control(rank_in) {}

  // An exchange or a sending begins.
  void begin_exchange() {
    sends.clear();
    receives.clear();
  }

  // What goes out now, up to a bound. *left: messages still to go; *moved is set when one got nearer. False:
  // the connection has ended.
  bool write(Streams& streams, int lane, Outbox* out, size_t* left, bool* moved);
  // As much as has come, into its places. Sets data_ended at the end of the connection.
  Status read_data(Streams& streams, const Membership& member, const Header& mine, size_t* left,
                   bool* moved);
  // So many bytes the next read of read_data() takes; 0: none is due.
  size_t awaited_bytes() const;
  // The same of send(): whole messages go to `parked`, as long as their bytes are below `room`.
  Status read_points(Streams& streams, uint64_t room, std::deque<PointMessage>* parked,
                     uint64_t* parked_bytes, bool* moved);

  const int rank;
  Outbox sends;
  Queue<const Incoming*> receives;
  Header header;  // the next one that this peer has sent, as far as it has come
  size_t header_got = 0;
  bool data_ended = false;
  Header last;

  Outbox points;
  bool points_ended = false;
  PointReader reader;

  ControlLane control;

 private:
  // Asked when nothing was there: nothing more will come.
  bool over(const Streams& streams) const {
    return control.left() && streams.goodbye_comes_last(rank);
  }
  // False: nothing came.
  bool read_body(Streams& streams, const Incoming& in);

  bool header_checked_ = false;
  uint64_t body_got_ = 0;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_STREAM_PEER_H_
