#ifndef WEFT_TRANSPORT_INTERNAL_GRPC_SERVER_H_
#define WEFT_TRANSPORT_INTERNAL_GRPC_SERVER_H_

// GrpcServer: the accepting half of a grpc transport. Takes streams of the lane methods, checks
// their hellos, gathers the lanes of a connection, and answers gRPC's health check.
//
// An unauthenticated peer gets nothing beyond the hello: its stream may say one frame, has a time
// limit, and only so many streams may be in that state.
//
// Threads: listen() and shut_down() from the core; the rest on the poller.

#include <memory>
#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/service_type.h>

#include "absl/time/time.h"
#include "weft/common/mutex.h"
#include "weft/transport/address.h"
#include "weft/transport/internal/grpc/core.h"
#include "weft/transport/internal/grpc/listener.h"
#include "weft/transport/internal/wire/handshake.h"

namespace weft::internal {

// As gRPC's options take a time.
inline int millis(absl::Duration d) { return static_cast<int>(absl::ToInt64Milliseconds(d)); }

// The methods, without generated code: raw bytes in and out, each on the queue of its lane.
class GrpcRawService final : public grpc::Service {
 public:
  using Stream = grpc::ServerAsyncReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;

  GrpcRawService();
  void request_lane(int lane, grpc::ServerContext* context, Stream* stream,
                    grpc::ServerCompletionQueue* queue, void* tag);
  void request_health(grpc::ServerContext* context, grpc::ByteBuffer* request,
                      grpc::ServerAsyncResponseWriter<grpc::ByteBuffer>* writer,
                      grpc::ServerCompletionQueue* queue, void* tag);
};

class GrpcServerLane;

class GrpcServer final : public GrpcLaneHost, public std::enable_shared_from_this<GrpcServer> {
 public:
  GrpcServer(std::shared_ptr<GrpcTransportCore> core, std::shared_ptr<Acceptor> acceptor);

  // Binds the port, and the Unix socket `local` if that is not empty. The queue is for the core's
  // poller; nothing is accepted until start(). Errors name what could not be bound.
  StatusOr<int> bind(const BindHost& host, int port, std::string_view local,
                     std::unique_ptr<grpc::CompletionQueue>* queue);
  void start();
  // No stream begins any more; those that are there are cancelled when `grace` is over.
  void shut_down(absl::Duration grace);
  // REQUIRES: shut_down(), and no lane of it is alive. Breaks the cycle with the core.
  void release();

  void lane_started(GrpcLane& lane) override { (void)lane; }
  void lane_handshake(GrpcLane& lane, std::string_view header) override ABSL_LOCKS_EXCLUDED(mutex_);
  Status lane_own_frame(GrpcLane& lane, const FrameView& frame) override;
  void lane_ended(GrpcLane& lane, LaneEnd end) override ABSL_LOCKS_EXCLUDED(mutex_);

  void accepted(const std::shared_ptr<GrpcServerLane>& lane);
  void post_accept(int lane);
  void post_health();

 private:
  class HealthCall;
  using LaneRef = std::shared_ptr<GrpcServerLane>;

  void refuse(GrpcLane& lane, const Status& why);
  // By the certificate of its connection and by its token.
  Status check_credentials(GrpcLane& lane, const Hello& theirs, std::string_view token) const;
  // All lanes are there: those of a connection that opens, or the late ones of an open connection.
  void open(std::unique_ptr<HalfOpenTable<LaneRef>::Entry> entry, const Hello& own, bool late);
  int half_open() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return half_open_; }

  const std::shared_ptr<GrpcTransportCore> core_;
  std::shared_ptr<Acceptor> acceptor_;
  GrpcRawService service_;
  grpc::ServerCompletionQueue* queue_ = nullptr;  // the poller has it
  std::unique_ptr<grpc::Server> server_;
  GrpcListener listener_;  // ends before the server

  Mutex mutex_;
  int half_open_ ABSL_GUARDED_BY(mutex_) = 0;
  HalfOpenTable<LaneRef> table_ ABSL_GUARDED_BY(mutex_);
};

// The acceptor's end of a stream, from the moment that it waits for one.
class GrpcServerLane final : public GrpcLane {
 public:
  GrpcServerLane(std::shared_ptr<GrpcTransportCore> core, std::shared_ptr<GrpcServer> server,
                 int number)
      : GrpcLane(Role::kAcceptor, number, core->context().max_frame_bytes, core->poller(),
                 server.get()),
        core_(std::move(core)),
        server_(std::move(server)),
        context_(std::make_unique<grpc::ServerContext>()),
        stream_(std::make_unique<GrpcRawService::Stream>(context_.get())) {}

  void wait_for_stream(GrpcRawService* service, grpc::ServerCompletionQueue* queue);
  void begin() { begin_reading(stream_.get(), stream_.get()); }
  std::shared_ptr<const grpc::AuthContext> peer_auth() override;
  std::string remote() override;
  // The time for the handshake is over.
  void on_deadline() override;

  bool counted = false;  // half open; guarded by the server's mutex
  Hello hello;           // once it is in the table

 private:
  void on_accept(bool ok);
  void start_finish() override { stream_->Finish(grpc::Status::OK, finish_event()); }
  void start_half_close() override {}
  void cancel() override;
  void free_stream() override;
  void judge_end(bool ok, LaneEnd* end) override;
  void release() override { core_->lane_gone(this); }

  const std::shared_ptr<GrpcTransportCore> core_;
  const std::shared_ptr<GrpcServer> server_;
  std::shared_ptr<GrpcServerLane> self_;  // while it waits for a stream
  GrpcMemberEvent<GrpcServerLane, &GrpcServerLane::on_accept> accept_event_{this};
  Mutex context_mutex_;
  std::unique_ptr<grpc::ServerContext> context_;
  std::unique_ptr<GrpcRawService::Stream> stream_;
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_GRPC_SERVER_H_
