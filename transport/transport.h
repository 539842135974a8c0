#ifndef WEFT_TRANSPORT_TRANSPORT_H_
#define WEFT_TRANSPORT_TRANSPORT_H_

// Transport: moves frames between workers. A backend is one public header with a factory
// (transport/inproc_transport.h, transport/grpc_transport.h, transport/faulty_transport.h) and a
// folder behind it.
//
// What a transport promises:
//   CONN-1  on_lost is called exactly once per connection, after its last on_frame, and not inside
//           a call of send() or close() by the same thread.
//   CONN-2  frames of one lane arrive in the order sent, each at most once, whole or not at all;
//           lanes are independent: a frame of one lane may overtake one of another.
//   CONN-3  send() never blocks and never calls back. It may be called from several threads.
//   CONN-4  a frame whose send() returned an error was not and will not be delivered. on_lost tells
//           the cookies of accepted frames that the transport never handed to the network.
//   CONN-5  a connection exists only after the hello of each side was checked by the other.
//   CONN-6  every lane always has a read posted: a receiver never stops reading because of what it
//           has read.
// A frame is bytes to a transport: it knows neither calls nor tensors.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/log.h"
#include "weft/common/runtime.h"
#include "weft/common/time.h"
#include "weft/common/wait_driver.h"
#include "weft/transport/connection_stats.h"
#include "weft/transport/credentials.h"

namespace weft {

// Values are on the wire: never reused.
enum class FrameKind : uint8_t {
  kHello = 1,     // first frame of every lane, dialler to acceptor
  kHelloAck = 2,  // its answer
  kRequest = 3,
  kResponse = 4,
  kError = 5,  // response with an error
  kChunk = 6,  // part of a transfer that a request or response announced
  kTransferAbort = 7,
  kCancel = 8,
  kHeartbeat = 9,
  kGoodbye = 10,
  kArenaProbe = 11,  // this and the next: between transports, never seen by a handler
  kArenaFree = 12,
  kDataOffer = 13,
  kDataEnd = 14,
  kLanesWanted = 15,
};
WEFT_API std::string_view frame_kind_name(FrameKind kind);

// Lane 0 carries control and small messages, lane 1 and above carry bulk; there are as many as the
// hello says. A message that needs chunks travels on one bulk lane as a whole.
inline constexpr int kControlLane = 0;
inline constexpr int kBulkLane = 1;

// Bytes that stay where they are until sent; `owner` keeps them alive and is dropped, on any
// thread, when the transport needs them no more.
struct Slice {
  const char* data = nullptr;  // first byte
  size_t size = 0;             // bytes
  std::shared_ptr<const void> owner;
};

struct Frame {                             // a message to be sent
  FrameKind kind = FrameKind::kHeartbeat;  // what it is
  std::string header;                      // a protobuf message, or a fixed struct for kChunk
  std::vector<Slice> payload;
  uint64_t cookie = 0;  // CONN-4; not on the wire; 0 is not reported

  size_t payload_bytes() const {  // of all slices
    size_t n = 0;
    for (const Slice& s : payload) n += s.size;
    return n;
  }
};

// A frame being delivered: valid during on_frame only.
struct FrameView {
  FrameKind kind;                              // what it is
  std::string_view header;                     // contiguous, private memory
  absl::Span<const std::string_view> payload;  // in pieces as they arrived
  size_t payload_bytes;
};

// What a side says about itself in the first frame of every lane.
struct Hello {
  uint32_t version_min = 1;  // protocol versions that the speaker understands
  uint32_t version_max = 1;
  std::string job_id;  // 128 random bits; a peer of another job is refused
  std::string name;
  uint32_t id = 0;
  uint64_t incarnation = 0;  // 64 random bits; changes each time the worker starts
  // The worker that the dialler wants (0: any): its address may now belong to another worker.
  uint32_t to_id = 0;
  uint64_t to_incarnation = 0;
  std::string to_name{};  // "": any; not on the wire, the dialler compares it with the answer
  uint32_t max_frame_bytes = 0;  // largest frame that the speaker accepts
  uint64_t connection_id = 0;    // random, by the dialler; ties lanes together
  uint32_t lanes = 2;            // of the connection, 1 to 8; 0: the dialling transport decides
  uint32_t late_lanes =
      0;                 // behind them, made when one of the two sends over them; 8 with the others
  std::string ticket{};  // of the private socket, see LocalGate; a transport fills it in
  bool observer = false;  // not a worker: it only inspects its peer (rpc/inspect.h)
};

// A place in memory that both sides of a connection see, as place() returns it.
struct Placement {
  uint64_t offset = 0;  // in the shared memory
  uint64_t lease = 0;   // names this use of the place, to give it back
};
// Bytes of the peer's that this process can read: valid while `owner` lives, on any thread,
// whatever becomes of the connection.
struct Borrowed {
  char* data = nullptr;  // first byte
  std::shared_ptr<void> owner;
};

// Where a transport that reads by itself may put the payload of a chunk: valid while `owner` lives.
struct ChunkTarget {
  char* data = nullptr;  // first byte; null: as a frame
  std::shared_ptr<void> owner;
};

struct LaneRange {  // neighbouring lanes
  int first = 0;    // number of the first
  int count = 0;    // how many
};

class WEFT_API Connection {  // to one peer, in all its lanes
 public:
  virtual ~Connection() = default;
  // The hello of the other side.
  virtual const Hello& peer() const = 0;
  // Returns the lanes on which large messages travel from now on. The result may change once, to
  // lanes with higher numbers; the earlier ones can still be used.
  virtual LaneRange bulk_lanes() const {
    return {kBulkLane, static_cast<int>(peer().lanes + peer().late_lanes) - 1};
  }
  // Whether anything may have been sent over the lane, or may come.
  virtual bool lane_begun(int lane) const {
    (void)lane;
    return true;
  }
  // Returns the lane for small frames for which a thread of the peer waits; the control lane as long as there is
  // no other one.
  virtual int prompt_lane() const { return kControlLane; }
  // Such frames will be sent: a lane for them is made, if there can be one.
  virtual void want_prompt_lane() {}
  virtual bool dialled() const = 0;  // true on the side that dialled
  // Queues a frame on a lane (CONN-3, CONN-4). Errors: not_delivered when the connection is lost or
  // closed; resource when the frame exceeds what the peer accepts.
  virtual Status send(Frame frame, int lane) = 0;
  // Sends what is queued, then ends the connection; on_lost follows on both sides. Does not block.
  // With a `reason` that is not OK, queued frames are dropped.
  virtual void close(Status reason) = 0;
  virtual std::string describe() const = 0;  // "ps0 (127.0.0.1:4711)"
  virtual ConnectionStats stats() const {
    ConnectionStats out;
    out.dialled = dialled();
    return out;
  }

  // Puts bytes where the peer can read them, so that a frame only has to name the place. Bytes that
  // lie there already are not copied: a later write to them changes what the peer sees. Returns
  // nullopt when there is no such memory, or no room in it; never waits.
  virtual std::optional<Placement> place(std::string_view bytes) {
    (void)bytes;
    return std::nullopt;
  }
  // Frees a place of place() whose frame was not sent after all.
  virtual void unplace(const Placement& placement) { (void)placement; }
  // Returns the `length` bytes that the peer has placed there, without a copy. Error, kind
  // protocol: there is no such place.
  virtual StatusOr<Borrowed> borrow(const Placement& placement, uint64_t length);
};

struct Lost {                    // why a connection ended
  Status why;                    // never OK
  std::vector<uint64_t> unsent;  // cookies of frames that never left this process (CONN-4)
};

// Implemented by the agent. Called on the transport's own thread (the poller): short, never blocks.
class ConnectionHandler {
 public:
  virtual ~ConnectionHandler() = default;
  // A frame has arrived; `frame` is valid during the call only.
  virtual void on_frame(const FrameView& frame, int lane) = 0;
  // The connection has ended (CONN-1).
  virtual void on_lost(Lost lost) = 0;
  // Returns where the payload of an arriving chunk belongs, for a transport that can read it there
  // directly; then chunk_filled() with the same arguments follows when the bytes are there, unless
  // the connection is lost before. A null target: the chunk is passed to on_frame().
  virtual ChunkTarget chunk_target(std::string_view header, size_t bytes, int lane) {
    (void)header, (void)bytes, (void)lane;
    return {};
  }
  virtual void chunk_filled(std::string_view header, size_t bytes, int lane) {
    (void)header, (void)bytes, (void)lane;
  }
};

// The accepting side of a transport. Its methods must not block.
class Acceptor {
 public:
  virtual ~Acceptor() = default;
  // Checks the hello of a dialler, once per lane. Returns this side's hello for the
  // acknowledgement, or the refusal that the dialler will see.
  virtual StatusOr<Hello> check_hello(const Hello& theirs) = 0;
  // Called when all lanes are up and the connection is open. Returns its handler (not null).
  virtual std::shared_ptr<ConnectionHandler> on_connection(
      std::shared_ptr<Connection> connection) = 0;
};

struct ListenOptions {  // where a transport listens
  std::string host;     // address to bind; "" = loopback
  int port_first = 0;   // 0: any free port; otherwise the first free one of [first, last]
  int port_last = 0;
  std::string advertise;        // host that peers dial; "" = the bound one
  bool allow_insecure = false;  // permits binding beyond loopback without credentials
};

class Transport {
 public:
  using DialDone = std::function<void(StatusOr<std::shared_ptr<Connection>>)>;  // once

  virtual ~Transport() = default;
  virtual std::string name() const = 0;  // "inproc", "grpc"

  // Starts accepting; returns the address that peers dial ("inproc:3", "127.0.0.1:40123"). Errors
  // name the address: port taken, range exhausted, not loopback without credentials or
  // allow_insecure.
  virtual StatusOr<std::string> listen(const ListenOptions& options,
                                       std::shared_ptr<Acceptor> acceptor) = 0;

  // Dials; `done` runs exactly once, on a thread of the transport. The handler receives frames from
  // then on (never before `done`). Errors: unavailable (no listener there), peer_lost (there was
  // one, and it has ended for certain), permission/state/protocol (refused, with the other side's
  // message), deadline.
  virtual void connect(std::string_view address, const Hello& hello, absl::Time deadline,
                       std::shared_ptr<ConnectionHandler> handler, DialDone done) = 0;

  // Closes all connections (each gets its on_lost) and stops the poller. Takes a few seconds at
  // most, whatever the peers do. No callback runs after it returned. Not allowed in a callback.
  virtual void shutdown() = 0;

  // Counters for debug_info() and metrics: name -> value ("lane0_frames_sent", ...).
  virtual std::vector<std::pair<std::string, int64_t>> counters() const { return {}; }

  // Allocates memory from which place() shares without a copy; null when there is none, or no room.
  virtual std::shared_ptr<char> allocate_shared(size_t bytes) {
    (void)bytes;
    return nullptr;
  }
  // Returns what lets a thread that waits for an answer poll for it itself; null when the transport
  // does not support that.
  virtual std::shared_ptr<WaitDriver> wait_driver() { return nullptr; }
  // Called periodically: gives memory back that was not used since the last call but one.
  virtual void sweep() {}
};

// Made at join, when runtime and settings are known; copyable.
struct TransportContext {
  std::shared_ptr<Runtime> runtime;
  std::string worker_name;              // for errors and threads
  Logger log{};                         // of the worker
  size_t max_frame_bytes = (5u << 20);  // largest frame accepted
  Credentials credentials{};            // of the worker; a transport's own options rule
};
using TransportFactory =
    std::function<StatusOr<std::unique_ptr<Transport>>(const TransportContext& context)>;

}  // namespace weft

#endif  // WEFT_TRANSPORT_TRANSPORT_H_
