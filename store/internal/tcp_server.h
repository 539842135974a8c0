#ifndef WEFT_STORE_INTERNAL_TCP_SERVER_H_
#define WEFT_STORE_INTERNAL_TCP_SERVER_H_

// TcpServer: gRPC's side of TcpStoreServer: one completion queue, one thread that polls it and does
// everything: accepts calls, applies them to TcpData, keeps those that wait.
//
// How it ends, in this order, so that no operation is ever started on a queue that was shut down:
// stop() wakes the thread, which answers whatever is open and takes on nothing more; stop() then
// shuts the gRPC server down, which returns every call to the thread, and wakes it again; when the
// last call has come back, the thread itself shuts the queue down, drains it and ends.

#include <grpcpp/alarm.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include <map>
#include <memory>
#include <set>
#include <string>

#include "weft/common/condition.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/store/internal/tcp_data.h"
#include "weft/store/tcp_store.h"
#include "weft/transport/grpc_tls.h"

namespace weft::internal {

class TcpServer {
 public:
  static StatusOr<std::unique_ptr<TcpServer>> start(const TcpStoreServerOptions& options,
                                                    std::shared_ptr<Runtime> runtime);
  ~TcpServer();

  const std::string& host() const { return host_; }
  int port() const { return port_; }
  int num_clients() const ABSL_LOCKS_EXCLUDED(mutex_);
  void stop(absl::Duration linger) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Call;
  enum class Event { kAccepted, kRead, kWritten, kFinished, kDone, kWake };
  struct Tag {
    Call* call = nullptr;
    Event event = Event::kWake;
  };

  TcpServer(const TcpStoreServerOptions& options, std::shared_ptr<Runtime> runtime);

  // All below runs on the polling thread.
  void poll();
  void on_event(Call* call, Event event, bool ok);
  void accept();
  void on_accepted(Call* call, bool ok);
  void on_read(Call* call, bool ok);
  void begin_session(Call* call);
  void begin_operation(Call* call);
  // Answers the request or parks it; then serves the parked requests that its change concerns.
  void run_operation(Call* call);
  void reply(Call* call, const v1::StoreReply& reply);
  void finish(Call* call, const grpc::Status& status);
  void park(Call* call, const std::string& key);
  void unpark(Call* call);
  void wake_parked(const std::string& key);
  void expire_parked();
  void begin_closing();
  void release_if_done(Call* call);
  void count_clients();

  const std::shared_ptr<Runtime> runtime_;
  const std::string host_;
  std::shared_ptr<const GrpcTls> tls_;  // null: plain text
  int port_ = 0;
  grpc::AsyncGenericService service_;
  std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Thread> thread_;

  // Owned by the polling thread.
  TcpData data_;
  std::map<Call*, std::unique_ptr<Call>> calls_;
  std::multimap<std::string, Call*> parked_;
  std::multimap<absl::Time, Call*> expiries_;
  int accepting_ = 0;
  bool closing_ = false;

  Mutex stop_mutex_;  // one stop() at a time
  bool stopped_ ABSL_GUARDED_BY(stop_mutex_) = false;
  grpc::Alarm close_alarm_;
  grpc::Alarm down_alarm_;
  Tag close_tag_;
  Tag down_tag_;

  mutable Mutex mutex_;
  Condition clients_changed_;
  int num_clients_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace weft::internal

#endif  // WEFT_STORE_INTERNAL_TCP_SERVER_H_
