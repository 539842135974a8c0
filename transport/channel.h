#ifndef WEFT_TRANSPORT_CHANNEL_H_
#define WEFT_TRANSPORT_CHANNEL_H_

// Channel: moves the bulk bytes of a connection beside its control lane, out of band. A backend
// makes one end per connection; the two ends negotiate by frames of their own kinds on the control
// lane. There are two backends: "arena" places bytes in memory that both sides see, "data" sends
// frames on sockets of its own. A channel that cannot serve says why, and the connection goes on
// without it.
//
//   std::shared_ptr<Channel> end = backend->make(site);   // both sides
//   end->start(host);                                     // the connection is open
//   end->on_own_frame(kind, header);                      // what the other end sent by send_own()
//   end->place(bytes);          or  end->send(frame, 0);  // once it serves
//   end->drain(); end->abort(why);  end->close();         // as the connection does
//
// Invariants (tests/contract/channel_contract_test.cc, both backends):
//   CHAN-1  channel_settled() is called at most once per end, and not after close(); before it the
//           end places nothing and has no lanes.
//   CHAN-2  a lane_begun() that returned true is followed by exactly one lane_ended(), whatever
//           happens to sockets, frames and the peer.
//   CHAN-3  loss of any negotiation frame leaves both ends without service, and neither waits: a
//           drain ends all lanes.
//   CHAN-4  an error of on_own_frame() is of kind protocol and means that no correct peer sends
//           that.
//
// Threads: any, unless said otherwise. A host is called without locks of the channel.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/posix.h"
#include "weft/common/time.h"
#include "weft/transport/connection_stats.h"
#include "weft/transport/transport.h"

namespace weft::internal {

class LocalSession;

// Workers from this protocol version on (Hello) may have a data connection by their host's local socket.
inline constexpr uint32_t kPromptLaneVersion = 3;

// A socket that belongs to a channel begins with this and a ticket, which no client of gRPC or TLS
// begins with.
inline constexpr std::string_view kSocketMagic = "weftdata";
inline constexpr size_t kSocketTicketBytes = 16;
inline constexpr size_t kSocketGreetingBytes = 8 + kSocketTicketBytes;

struct ChannelCapabilities {
  bool places = false;  // place() and borrow(): memory that both sides see
  bool lanes = false;   // send(): frames on lanes of its own
};

// How a lane ended.
struct LaneEnd {
  bool orderly = false;      // it ended as lanes do, nothing broke
  bool turned_away = false;  // a dialler's: its credentials may be the reason
  Status why;
  std::vector<uint64_t> unsent;  // cookies, CONN-4
};

// Something with a time limit.
class Timed {
 public:
  virtual ~Timed() = default;
  // On the runtime's timer thread: short, no callbacks of users.
  virtual void on_deadline() = 0;
};

class Channel;

// The connection, as a channel sees it.
class ChannelHost {
 public:
  virtual ~ChannelHost() = default;
  virtual bool dialled() const = 0;
  // The highest protocol version of the peer's hello.
  virtual uint32_t peer_version() const = 0;
  virtual std::string describe() const = 0;
  // To the other end of this channel, by the control lane. A lost connection drops it.
  virtual void send_own(Frame frame) = 0;
  virtual void set_deadline(absl::Time when, std::weak_ptr<Timed> what) = 0;
  // The dialler's: another socket to where the connection was dialled, which may be connecting
  // still.
  virtual StatusOr<UniqueFd> dial_socket() = 0;
  // Known for good: it serves, or what is in the way. CHAN-1.
  virtual void channel_settled(Channel& channel, bool serves, std::string_view why_not) = 0;

  // A lane counts from here on: the connection is lost only when it has ended. False: the
  // connection ends already, there must be none.
  virtual bool lane_begun() = 0;
  // Frames may flow, to the handler that is given back; null: the lane is not wanted, and ends.
  virtual ConnectionHandler* lane_up() = 0;
  // Nothing of the lane follows. `was_up`: frames may have gone over it, so its end is the
  // connection's.
  virtual void lane_ended(LaneEnd end, bool was_up) = 0;
};

class Channel : public Timed {
 public:
  virtual std::string_view name() const = 0;
  virtual ChannelCapabilities capabilities() const = 0;
  // Whether frames of this kind are for the other end to send, and for this one to take.
  virtual bool owns(FrameKind kind) const = 0;

  // The connection is open, and no frame has come. Once.
  virtual void start(std::shared_ptr<ChannelHost> host) = 0;
  // Frames flow. Once, after start().
  virtual void opened() {}
  // CHAN-4.
  virtual Status on_own_frame(FrameKind kind, std::string_view header) = 0;
  // Something wants to go with the next frame of the control lane: take_rider(), whose header is
  // empty when it was nothing after all. Called for every small call.
  virtual bool rider_waits() const { return false; }
  virtual Frame take_rider() { return {}; }
  // A small call goes over the control lane. Called for every one.
  virtual void note_small() {}

  // As the functions of Connection.
  virtual std::optional<Placement> place(std::string_view bytes) {
    (void)bytes;
    return std::nullopt;
  }
  virtual void unplace(const Placement& placement) { (void)placement; }
  WEFT_API virtual StatusOr<Borrowed> borrow(const Placement& placement, uint64_t length);

  // Its lanes that can be used, none or all; counted from 0.
  virtual size_t lanes() const { return 0; }
  // Whether they are for prompt frames alone (Connection::prompt_lane()), and not for large messages. Such
  // lanes are made when one of the two ends wants them.
  virtual bool only_prompt() const { return false; }
  virtual void want_lanes() {}
  virtual LaneStats lane_stats(size_t index) const {
    (void)index;
    return {};
  }
  // CONN-3, CONN-4. REQUIRES: index < lanes().
  virtual Status send(Frame frame, size_t index);

  // Lanes send what is queued and end; or end at once.
  virtual void drain() {}
  virtual void abort(const Status& why) { (void)why; }
  // The connection is lost: after the last lane_ended(). The host is let go of.
  virtual void close() = 0;
  // What it counts, and whether it serves or why not.
  virtual void add_to(ConnectionStats* stats) const = 0;

  void on_deadline() override {}
};

// What a backend is told of a connection whose end it makes.
struct ChannelSite {
  bool dialled = false;
  // Over the local socket of this host; `session`: with its peer, if that is of the same user.
  bool local = false;
  std::shared_ptr<LocalSession> session;
  // The number of the channel's first lane, and how many it may have.
  size_t first_lane = 0;
  size_t max_lanes = 0;
};

class ChannelBackend {
 public:
  virtual ~ChannelBackend() = default;
  virtual std::string_view name() const = 0;
  virtual ChannelCapabilities capabilities() const = 0;
  // Not null: an end that cannot serve there says so.
  virtual std::shared_ptr<Channel> make(const ChannelSite& site) = 0;

  // A socket showed this ticket. False: it is none of this backend's.
  virtual bool take_socket(const std::string& ticket, UniqueFd* fd) {
    (void)ticket, (void)fd;
    return false;
  }
  // Memory from which place() does not copy; null: none, or no room.
  virtual std::shared_ptr<char> allocate_shared(size_t bytes) {
    (void)bytes;
    return nullptr;
  }
  virtual void add_counters(std::vector<std::pair<std::string, int64_t>>* out) const { (void)out; }
  // As Transport::sweep().
  virtual void sweep() {}
  // No end is called after it, and none calls.
  virtual void stop() {}
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_CHANNEL_H_
