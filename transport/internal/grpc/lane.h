#ifndef WEFT_TRANSPORT_INTERNAL_GRPC_LANE_H_
#define WEFT_TRANSPORT_INTERNAL_GRPC_LANE_H_

// GrpcLane: one bidirectional stream, at either end. It writes frames (from the thread that sends
// them when nothing is being written, else from the poller, many small ones in one message), reads
// messages, and ends exactly once.
//
// Operations of gRPC are started only while the lane's state says that one may be, and the lane
// counts as alive until every one of them has completed; completion queues are shut down only when
// no lane is alive. So no operation can meet a queue that was shut down, which would abort the
// process.
//
//   writing_   a Write or WritesDone is under way, or a thread has reserved the right to start one
//   held_      the poller has reserved that right, so that answers leave together (HOLD-1)
//   reading_   a Read is under way
//   finish     once the peer's side has ended, or ours is drained and we are the server; then the
//              lane has ended when nothing is under way
//
// No lock is held while gRPC is called: it may run owners' destructors and takes locks of its own.
//
// Threads: send(), drain(), abort() from anywhere; the events run on the lane's poller.

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include "weft/common/mutex.h"
#include "weft/transport/channel.h"
#include "weft/transport/frame.h"
#include "weft/transport/grpc_tls.h"
#include "weft/transport/internal/grpc/poller.h"
#include "weft/transport/internal/wire/lane_counters.h"
#include "weft/transport/transport.h"

namespace weft::internal {

class GrpcLane;

// The owner of a lane: first the handshake, then the connection.
class GrpcLaneHost {
 public:
  // A dialler's stream has begun, or could not (then lane_ended follows).
  virtual void lane_started(GrpcLane& lane) = 0;
  // The one handshake frame that the peer sends.
  virtual void lane_handshake(GrpcLane& lane, std::string_view header) = 0;
  // A frame of an open lane that is for the transport itself. An error ends the lane.
  virtual Status lane_own_frame(GrpcLane& lane, const FrameView& frame) = 0;
  // Nothing of the lane follows. On its poller.
  virtual void lane_ended(GrpcLane& lane, LaneEnd end) = 0;

 protected:
  ~GrpcLaneHost() = default;
};

class GrpcLane : public Timed, public GrpcHolder, public std::enable_shared_from_this<GrpcLane> {
 public:
  ~GrpcLane() override = default;

  int number() const { return number_; }
  LaneStats stats() const { return counters_.read(); }
  // The identity of the other end, as its certificate says; null when the stream is gone.
  virtual std::shared_ptr<const grpc::AuthContext> peer_auth() = 0;
  // Its numeric address, as peer_address() gives it; "" when the stream is gone.
  virtual std::string remote() = 0;

  // CONN-3. `rider`, if any, goes before the frame, in the same message where that is possible.
  Status send(Frame frame, Frame* rider = nullptr) ABSL_LOCKS_EXCLUDED(mutex_);
  // Sends a frame of the handshake; the stream ends after it if it is a refusal.
  void send_handshake(Frame frame, bool last) ABSL_LOCKS_EXCLUDED(mutex_);
  // The same, but nothing is written until uncork(): what is sent meanwhile follows it. The lane cannot end before.
  void cork_handshake(Frame frame) ABSL_LOCKS_EXCLUDED(mutex_);
  void uncork() ABSL_LOCKS_EXCLUDED(mutex_);
  // send() may be called from now on.
  void allow_sends() ABSL_LOCKS_EXCLUDED(mutex_);
  // Frames go to `handler`, the end to `host`, from now on. False: the lane has ended already, and
  // `*end` tells how.
  bool open(std::shared_ptr<GrpcLaneHost> host, ConnectionHandler* handler, LaneEnd* end)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The handshake is complete, and give_up_handshake() does nothing any more. False: something has gone wrong with the
  // lane before.
  bool complete_handshake() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    handshake_complete_ = true;
    return !aborted_ && !read_ended_ && !ended_;
  }
  // Sends what is queued, then ends the stream.
  void drain() ABSL_LOCKS_EXCLUDED(mutex_);
  // Drops what is queued and cancels the stream. `why` is told when the lane ends.
  void abort(Status why) ABSL_LOCKS_EXCLUDED(mutex_) { abort_if(true, std::move(why)); }
  // The same, unless complete_handshake() came before.
  void give_up_handshake(Status why) ABSL_LOCKS_EXCLUDED(mutex_) {
    abort_if(false, std::move(why));
  }

 protected:
  enum class Role { kDialler, kAcceptor };

  GrpcLane(Role role, int number, size_t max_frame_bytes, GrpcPoller* poller, GrpcLaneHost* host)
      : role_(role),
        number_(number),
        max_frame_bytes_(max_frame_bytes),
        poller_(poller),
        host_(host),
        phase_(role == Role::kDialler ? WireState::kAwaitAck : WireState::kAwaitHello) {}

  // The stream exists; the first read is posted.
  void begin_reading(grpc::internal::AsyncReaderInterface<grpc::ByteBuffer>* reader,
                     grpc::internal::AsyncWriterInterface<grpc::ByteBuffer>* writer)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The stream could not begin: only its status is to come.
  void begin_failed() ABSL_LOCKS_EXCLUDED(mutex_);

  // Operations of the two kinds of stream.
  virtual void start_finish() = 0;
  virtual void start_half_close() = 0;  // dialler only
  virtual void cancel() = 0;
  virtual void free_stream() = 0;
  // How the stream ended; called once, when the finish is complete.
  virtual void judge_end(bool ok, LaneEnd* end) = 0;
  // The last thing that happens: the lane may be destroyed.
  virtual void release() = 0;

  GrpcEvent* write_event() { return &write_event_; }
  GrpcEvent* finish_event() { return &finish_event_; }
  GrpcLaneHost* host() const { return host_; }

  const Role role_;

 private:
  enum class Next { kNothing, kWrite, kHalfClose, kFinish, kEnd };

  void abort_if(bool handshake_may_be_complete, Status why) ABSL_LOCKS_EXCLUDED(mutex_);
  void on_read(bool ok);
  // HOLD-1. What is sent from now on may wait for let_go().
  void hold_answers_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void let_go() override ABSL_LOCKS_EXCLUDED(mutex_);
  void on_write(bool ok);
  void on_finish(bool ok);

  // What is to be done now; the right to do it is reserved.
  Next next_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Does it. Without the lock.
  void act(Next next) ABSL_LOCKS_EXCLUDED(mutex_);
  void note_queued_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void write_batch() ABSL_LOCKS_EXCLUDED(mutex_);
  void write(absl::Span<Frame> frames);
  void drop_queue_locked(std::deque<Frame>* dropped) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void read_on() ABSL_LOCKS_EXCLUDED(mutex_);
  Status take_message(WireState phase, GrpcLaneHost* host, ConnectionHandler* handler)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void end_lane() ABSL_LOCKS_EXCLUDED(mutex_);

  const int number_;
  const size_t max_frame_bytes_;
  GrpcPoller* const poller_;

  GrpcMemberEvent<GrpcLane, &GrpcLane::on_read> read_event_{this};
  GrpcMemberEvent<GrpcLane, &GrpcLane::on_write> write_event_{this};
  GrpcMemberEvent<GrpcLane, &GrpcLane::on_finish> finish_event_{this};

  // Set before the first operation, then constant.
  grpc::internal::AsyncReaderInterface<grpc::ByteBuffer>* reader_ = nullptr;
  grpc::internal::AsyncWriterInterface<grpc::ByteBuffer>* writer_ = nullptr;

  Mutex mutex_;
  GrpcLaneHost* host_;  // changes once, in open(), under mutex_
  std::shared_ptr<GrpcLaneHost> host_owner_ ABSL_GUARDED_BY(mutex_);
  ConnectionHandler* handler_ ABSL_GUARDED_BY(mutex_) = nullptr;
  WireState phase_ ABSL_GUARDED_BY(mutex_);
  std::deque<Frame> queue_ ABSL_GUARDED_BY(mutex_);  // never handed to gRPC yet
  absl::Time queued_since_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();  // the oldest of them
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  bool handshake_complete_ ABSL_GUARDED_BY(mutex_) = false;
  bool may_send_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool held_ ABSL_GUARDED_BY(mutex_) = false;  // the right to write is reserved by hold_answers
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool read_ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool aborted_ ABSL_GUARDED_BY(mutex_) = false;
  bool finishing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  LaneEnd end_ ABSL_GUARDED_BY(mutex_);

  LaneCounters counters_;

  // The poller's.
  uint64_t seen_idle_ = 0;
  double dense_ = 0;  // moving average: messages that came before the poller had found nothing
  grpc::ByteBuffer incoming_;
  grpc::ByteBuffer message_;
  std::vector<grpc::Slice> slices_;
  std::vector<std::string_view> pieces_;
  FrameReader frames_;
};

// "/weft.v1.Transport/Lane0"
std::string lane_method(int lane);

// The dialler's end.
class GrpcClientLane final : public GrpcLane {
 public:
  // `tls` is null when traffic is plain text.
  GrpcClientLane(int number, size_t max_frame_bytes, GrpcPoller* poller, GrpcLaneHost* host,
                 std::shared_ptr<const GrpcTls> tls, std::function<void(GrpcLane*)> on_release)
      : GrpcLane(Role::kDialler, number, max_frame_bytes, poller, host),
        tls_(std::move(tls)),
        on_release_(std::move(on_release)) {}

  void start(std::shared_ptr<grpc::Channel> channel, grpc::CompletionQueue* queue);
  void on_deadline() override {}
  std::shared_ptr<const grpc::AuthContext> peer_auth() override;
  std::string remote() override;

 private:
  void on_start(bool ok);
  void start_finish() override { stream_->Finish(&status_, finish_event()); }
  void start_half_close() override { stream_->WritesDone(write_event()); }
  void cancel() override;
  void free_stream() override;
  void judge_end(bool ok, LaneEnd* end) override;
  void release() override { on_release_(this); }

  const std::shared_ptr<const GrpcTls> tls_;
  std::function<void(GrpcLane*)> on_release_;
  bool begun_ = false;  // the poller's
  GrpcMemberEvent<GrpcClientLane, &GrpcClientLane::on_start> start_event_{this};
  std::shared_ptr<grpc::Channel> channel_;
  // Keeps abort() and the end of the stream apart; TryCancel may run owners' destructors, which
  // meet an aborted lane then and do not come here again.
  Mutex context_mutex_;
  std::unique_ptr<grpc::ClientContext> context_ = std::make_unique<grpc::ClientContext>();
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  grpc::Status status_;
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_GRPC_LANE_H_
