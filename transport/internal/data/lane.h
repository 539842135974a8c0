#ifndef WEFT_TRANSPORT_INTERNAL_DATA_LANE_H_
#define WEFT_TRANSPORT_INTERNAL_DATA_LANE_H_

// DataLane: one end of a data connection, a TCP connection of its own for large messages, on which
// payloads go from the sender's tensor into the receiver's with no copy in between but the
// kernel's. The dialler says who it is by a ticket that it got over the control lane:
//
//   dialler   "weftdata" ticket            acceptor   "weftdata"      then frames, both ways
//
// With a key there is a handshake of TLS between the greetings and the frames (tls_stream.h).
//
// A sending thread writes to the socket itself as long as the socket takes more; the loop writes
// the rest. A lane ends exactly once, on the loop, when no thread writes any more.
//
// Threads: send(), drain(), abort(), give_up() from anywhere; the rest on the loop.

#include <deque>
#include <memory>
#include <string>
#include <string_view>

#include "weft/common/api.h"
#include "weft/common/mutex.h"
#include "weft/common/posix.h"
#include "weft/common/runtime.h"
#include "weft/transport/channel.h"
#include "weft/transport/internal/data/loop.h"
#include "weft/transport/internal/data/pipe.h"
#include "weft/transport/internal/data/stream_reader.h"
#include "weft/transport/internal/wire/lane_counters.h"
#include "weft/transport/transport.h"

namespace weft::internal {

class DataLane;

class DataLaneHost {
 public:
  virtual ~DataLaneHost() = default;
  // Frames may flow, to the handler that is given back; null: it is not wanted any more, and ends.
  virtual ConnectionHandler* data_lane_up(DataLane& lane) = 0;
  // Nothing of the lane follows. `was_up`: data_lane_up() had taken it.
  virtual void data_lane_ended(DataLane& lane, bool was_up, LaneEnd end) = 0;
};

class WEFT_API DataLane final : public DataLoop::Client,
                                public StreamSink,
                                public std::enable_shared_from_this<DataLane> {
 public:
  struct Setup {
    int number = 0;
    std::string ticket;
    std::string key;             // of TLS; empty: plain text
    size_t max_frame_bytes = 0;  // that we take
    std::shared_ptr<Runtime> runtime;
    std::shared_ptr<DataLoop> loop;
    bool prompt = false;  // for small frames, of which the next is not due
  };

  // `fd`: a socket that does not block; `dials`: its connect() may be under way still. An error
  // means that there is no lane, and the host is told nothing.
  static StatusOr<std::shared_ptr<DataLane>> make(Setup setup, UniqueFd fd, bool dials,
                                                  std::shared_ptr<DataLaneHost> host);
  // Begins. An error: it has ended, and the host was told nothing.
  Status start();
  ~DataLane() override = default;

  int number() const { return setup_.number; }
  LaneStats stats() const { return counters_.read(); }

  // CONN-3, CONN-4.
  Status send(Frame frame) ABSL_LOCKS_EXCLUDED(mutex_);
  // Sends what is queued, then says that nothing follows.
  void drain() ABSL_LOCKS_EXCLUDED(mutex_);
  void abort(Status why) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends it unless it is up.
  void give_up(Status why) ABSL_LOCKS_EXCLUDED(mutex_);

  bool on_ready(bool readable, bool writable) override ABSL_LOCKS_EXCLUDED(mutex_);
  void on_called() override ABSL_LOCKS_EXCLUDED(mutex_);
  void on_stopped() override ABSL_LOCKS_EXCLUDED(mutex_);

  ChunkTarget stream_target(std::string_view header, size_t bytes) override;
  Status stream_filled(std::string_view header, size_t bytes) override;
  Status stream_frame(const FrameView& frame) override;

 private:
  enum class Phase { kConnecting, kGreeting, kSecuring, kUp };

  DataLane(Setup setup, UniqueFd fd, bool dials, std::shared_ptr<DataLaneHost> host)
      : setup_(std::move(setup)),
        fd_(std::move(fd)),
        dials_(dials),
        host_(std::move(host)),
        reader_(setup_.max_frame_bytes, this) {}

  // The next step of the way up; it may be called too early.
  Status step(bool readable, bool writable) ABSL_LOCKS_EXCLUDED(mutex_);
  Status show_ticket();
  Status read_answer();
  Status answer();
  // The greetings are over.
  Status secure() ABSL_LOCKS_EXCLUDED(mutex_);
  Status go_up() ABSL_LOCKS_EXCLUDED(mutex_);
  // REQUIRES: writing_ was reserved by the caller; it is given back.
  void write_on(size_t turns) ABSL_LOCKS_EXCLUDED(mutex_);
  void stop_writing_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The caller is the one who ends it, now: nothing is under way.
  bool may_end_locked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !writing_ && (aborted_ || read_ended_);
  }
  Status go_on() ABSL_LOCKS_EXCLUDED(mutex_);
  void break_off(Status why) ABSL_LOCKS_EXCLUDED(mutex_);
  void end_if_due() ABSL_LOCKS_EXCLUDED(mutex_);

  const Setup setup_;
  const UniqueFd fd_;
  const bool dials_;
  uint64_t client_ = 0;             // number at the loop
  std::shared_ptr<TlsStream> tls_;  // null: plain text
  std::unique_ptr<PipeWriter> out_;
  std::unique_ptr<PipeReader> in_;
  std::deque<OutFrame> leaving_;  // belongs to the thread that has the right to write

  // The loop's.
  std::shared_ptr<DataLaneHost> host_;
  Phase phase_ = Phase::kConnecting;
  std::string greeting_;
  ConnectionHandler* handler_ = nullptr;
  StreamReader reader_;

  Mutex mutex_;
  std::deque<OutFrame> queue_ ABSL_GUARDED_BY(mutex_);
  absl::Time queued_since_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  bool may_send_ ABSL_GUARDED_BY(mutex_) = false;
  bool up_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;  // a thread has the right to write
  bool blocked_ ABSL_GUARDED_BY(mutex_) = false;  // the loop waits until the socket takes more
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;  // all was sent, data_end included
  bool aborted_ ABSL_GUARDED_BY(mutex_) = false;
  bool read_ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  Status why_ ABSL_GUARDED_BY(mutex_);

  LaneCounters counters_;
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_DATA_LANE_H_
