#ifndef WEFT_TRANSPORT_INTERNAL_INPROC_CORE_H_
#define WEFT_TRANSPORT_INTERNAL_INPROC_CORE_H_

// The state of an inproc network: endpoints (one per transport), links (one per connection, with
// two sides) and the rules that tests set. One mutex guards all of it; callbacks run without it, on
// the loop of the endpoint that they concern.
//
// Order: a packet is due at a time that never lies before that of the packet sent before it on the
// same lane and direction, and events of one endpoint run in order of (due, sequence). Hence
// CONN-2. A side that has ended ignores what still arrives, and its on_lost is posted to the loop
// on which its frames are delivered. Hence CONN-1.

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/transport/inproc_transport.h"
#include "weft/transport/internal/wire/handshake.h"
#include "weft/transport/transport.h"

namespace weft::internal {

struct InprocEndpoint {
  uint64_t number = 0;
  std::string worker;
  std::string address;  // empty: does not listen
  size_t max_frame_bytes = 0;
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<Executor> loop;
  std::shared_ptr<Acceptor> acceptor;
  bool killed = false;
  bool closed = false;
  // Events to come, in order; `timer` is set for the first.
  std::map<std::pair<absl::Time, uint64_t>, Task> pending;
  std::unique_ptr<Timer> timer;
};

struct InprocPacket {
  enum class Type : uint8_t { kFrame, kEnd, kEndAck };
  Type type = Type::kFrame;
  FrameKind kind = FrameKind::kHeartbeat;
  int lane = 0;
  std::string header;
  std::string payload;
  uint64_t cookie = 0;
  uint64_t sequence = 0;
};

class InprocConnection;

struct InprocSide {
  std::shared_ptr<InprocEndpoint> endpoint;
  std::shared_ptr<ConnectionHandler> handler;  // null before open and after the end
  std::shared_ptr<InprocConnection> connection;
  Hello own;
  Hello peer;
  Transport::DialDone done;   // dialler, until it was called
  std::set<int> lanes_ready;  // hellos (acceptor) or answers (dialler) that are there
  bool open = false;
  bool closing = false;  // close() was called here
  bool ended = false;
  bool sealed = false;               // the other side sends nothing more and wants nothing more
  Status reason;                     // of close()
  std::vector<absl::Time> last_due;  // per lane, of packets to this side
  std::deque<InprocPacket> held;     // to this side, kept back by a rule
  std::deque<InprocPacket> early;    // dialler: arrived before it was open
};

using KindCounts = std::array<FrameCount, 16>;  // by FrameKind

struct InprocLink {
  uint64_t id = 0;
  InprocSide side[2];  // 0 dialled, 1 accepted
  bool broken = false;
  KindCounts* counts[2] = {};  // of packets to that side
};

using LinkRef = std::shared_ptr<InprocLink>;

class InprocCore : public std::enable_shared_from_this<InprocCore> {
 public:
  explicit InprocCore(const InprocOptions& options);

  // ---- for transports ----------------------------------------------------------------------
  std::shared_ptr<InprocEndpoint> add_endpoint(const TransportContext& context);
  StatusOr<std::string> listen(const std::shared_ptr<InprocEndpoint>& endpoint,
                               const ListenOptions& options, std::shared_ptr<Acceptor> acceptor);
  void connect(const std::shared_ptr<InprocEndpoint>& from, std::string_view address,
               const Hello& hello, absl::Time deadline, std::shared_ptr<ConnectionHandler> handler,
               Transport::DialDone done);
  void shutdown(const std::shared_ptr<InprocEndpoint>& endpoint);
  std::vector<std::pair<std::string, int64_t>> counters(const InprocEndpoint& endpoint) const;

  // ---- for connections ---------------------------------------------------------------------
  Status send(const LinkRef& link, int from, Frame frame, int lane);
  void close(const LinkRef& link, int from, Status reason);

  // ---- for InprocNetwork -------------------------------------------------------------------
  FrameCount count(FrameKind kind, std::string_view from, std::string_view to) const;
  int connections(std::string_view a, std::string_view b) const;
  std::string dump() const;
  void set_delay(absl::Duration min, absl::Duration max);
  void block(std::string_view from, std::string_view to, bool partition);
  void unblock(std::string_view from, std::string_view to, bool partition);
  int cut(std::string_view a, std::string_view b);
  void refuse_connects(std::string_view worker, bool refuse);
  void kill(std::string_view worker);

 private:
  struct Rule {
    std::string from, to;
    bool partition = false;
    bool operator==(const Rule& o) const {
      return from == o.from && to == o.to && partition == o.partition;
    }
  };

  // What dump() tells: one event, or `text`.
  struct Note {
    absl::Time at;
    uint64_t link = 0;
    std::string from, to;
    InprocPacket packet;
    size_t header_bytes = 0, payload_bytes = 0;
    const char* what = "";
    std::string text;
  };

  // network.cc
  const Rule* blocked_locked(const InprocEndpoint& from, const InprocEndpoint& to) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void release_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Duration draw_delay_locked(const InprocEndpoint& to) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t draw_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void note_locked(Note note) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void note_locked(std::string text) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  enum class Fate { kSent, kDelivered, kLost };
  void count_locked(const InprocLink& link, int to, const InprocPacket& packet, Fate fate)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // transport.cc
  void schedule_locked(const std::shared_ptr<InprocEndpoint>& at, absl::Time due, Task task)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void fire(const std::weak_ptr<InprocEndpoint>& endpoint);
  // Puts the packet on its way to side `to`, or keeps it back.
  void transmit_locked(const LinkRef& link, int to, InprocPacket packet)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void depart_locked(const LinkRef& link, int to, InprocPacket packet)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void arrive(const LinkRef& link, int to, const InprocPacket& packet);
  void on_hello(const LinkRef& link, const InprocPacket& packet);
  void on_ack(const LinkRef& link, const InprocPacket& packet);
  void on_end(const LinkRef& link, int to);
  void deliver(ConnectionHandler& handler, const InprocPacket& packet);
  // Ends one side: its on_lost, or the failure of its dial, is posted.
  void finish_locked(const LinkRef& link, int side, Status why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Loses the connection for both; each side learns it after a delay of its own.
  void break_locked(const LinkRef& link, const Status& why0, const Status& why1)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void finish_later_locked(const LinkRef& link, int side, Status why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  InprocOptions options_ ABSL_GUARDED_BY(mutex_);
  uint64_t random_state_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t next_port_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, std::shared_ptr<InprocEndpoint>> endpoints_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, LinkRef> links_ ABSL_GUARDED_BY(mutex_);
  std::vector<Rule> rules_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> refusing_ ABSL_GUARDED_BY(mutex_);
  // By (from, to); links point into it.
  std::map<std::pair<std::string, std::string>, KindCounts> counts_ ABSL_GUARDED_BY(mutex_);
  std::deque<Note> notes_ ABSL_GUARDED_BY(mutex_);
};

// Whether `who`, a name, an address or "", means this endpoint.
bool means(std::string_view who, const InprocEndpoint& endpoint);
std::string endpoint_name(const InprocEndpoint& endpoint);

class InprocConnection : public Connection {
 public:
  InprocConnection(std::shared_ptr<InprocCore> core, LinkRef link, int side, Hello peer,
                   std::string address)
      : core_(std::move(core)),
        link_(std::move(link)),
        side_(side),
        peer_(std::move(peer)),
        address_(std::move(address)) {}

  const Hello& peer() const override { return peer_; }
  bool dialled() const override { return side_ == 0; }
  Status send(Frame frame, int lane) override {
    return core_->send(link_, side_, std::move(frame), lane);
  }
  void close(Status reason) override { core_->close(link_, side_, std::move(reason)); }
  std::string describe() const override { return describe_peer(peer_, address_); }

 private:
  const std::shared_ptr<InprocCore> core_;
  const LinkRef link_;
  const int side_;
  const Hello peer_;
  const std::string address_;
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_INPROC_CORE_H_
