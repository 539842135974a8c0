#ifndef WEFT_STORE_INTERNAL_TCP_LINK_H_
#define WEFT_STORE_INTERNAL_TCP_LINK_H_

// TcpLink: a process's end of the connection to a store server: the channel, the session, the
// request ids. Shared by the clients that one TcpStore gave out. It has no thread: a calling thread
// polls a completion queue of its own.
//
// LINK-1  a request that changes something has one id, kept over all attempts, and is in flight
//         until its caller has returned; done_below is the least id in flight.
// LINK-2  operations are sent only with a session; the first caller without one opens it, the
//         others wait.
// Threads: any.

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <memory>
#include <set>
#include <string>

#include "weft/common/condition.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/proto/store.pb.h"
#include "weft/store/internal/checks.h"
#include "weft/store/internal/interrupt_scope.h"
#include "weft/transport/grpc_tls.h"

namespace weft::internal {

class TcpLink {
 public:
  // `tls` is null for plain text.
  TcpLink(std::shared_ptr<Runtime> runtime, std::string host, int port,
          std::shared_ptr<const GrpcTls> tls);
  ~TcpLink();
  TcpLink(const TcpLink&) = delete;
  TcpLink& operator=(const TcpLink&) = delete;

  // Tries until there is a session or the deadline has come.
  Status open(const StoreOp& op, InterruptScope* scope);

  // Sends the request, as often as needed, until there is an answer to it (DONE, NOT_YET; FAILED
  // becomes the error that it carries). `changes`: the operation changes something.
  // Kind deadline: the server is there but did not answer in time.
  StatusOr<v1::StoreReply> call(const StoreOp& op, InterruptScope* scope, bool changes,
                                v1::StoreRequest request);

  // Makes waiting threads check their scope again, after it was interrupted.
  void wake();

  const std::string& url() const { return url_; }
  const std::shared_ptr<Runtime>& runtime() const { return runtime_; }

 private:
  struct Session;
  class RequestId;

  Status open_session(const StoreOp& op, InterruptScope* scope, RetryBackoff* backoff);
  // Once. Kind unavailable: it may go better next time; `*turned_away`: see GrpcTls::Fault.
  StatusOr<std::unique_ptr<Session>> try_session(const StoreOp& op, InterruptScope* scope,
                                                 bool* turned_away);
  grpc::Status attempt(const StoreOp& op, InterruptScope* scope, const v1::StoreRequest& request,
                       v1::StoreReply* reply);
  // The session of that number did not hold.
  void lose_session(uint64_t number);
  Status pause(const StoreOp& op, InterruptScope* scope, RetryBackoff* backoff,
               std::string_view last_error);
  // What the end of the time means, with the last thing that went wrong.
  Status out_of_time(const StoreOp& op, int attempts, std::string_view last_error) const;

  const std::shared_ptr<Runtime> runtime_;
  const std::string url_;
  const uint64_t client_id_;
  const std::shared_ptr<const GrpcTls> tls_;
  const std::shared_ptr<grpc::Channel> channel_;

  mutable Mutex mutex_;
  Condition changed_;
  bool opening_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<Session> session_ ABSL_GUARDED_BY(mutex_);
  uint64_t session_number_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t server_id_ ABSL_GUARDED_BY(mutex_) = 0;
  // Raised when the server has forgotten what we did before (STORE-2).
  uint64_t memory_epoch_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t next_request_ ABSL_GUARDED_BY(mutex_) = 1;
  std::set<uint64_t> in_flight_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_STORE_INTERNAL_TCP_LINK_H_
