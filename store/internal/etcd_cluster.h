#ifndef WEFT_STORE_INTERNAL_ETCD_CLUSTER_H_
#define WEFT_STORE_INTERNAL_ETCD_CLUSTER_H_

// EtcdCluster: the members of an etcd, which of them is asked now, and as which user.
//
// ETCD-4  a request goes to one member. A member that cannot be reached, or does not answer for
//         kMemberTime while there are others, is left for the next of the list. What it may still
//         do with the request is an attempt whose answer was lost (ETCD-1, ETCD-2).
// ETCD-5  a request that is refused for its token was not executed; it is sent once more with a new
//         one.
// Threads: any.

#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/store/etcd_store.h"
#include "weft/store/internal/checks.h"
#include "weft/store/internal/interrupt_scope.h"

namespace weft::internal {

class EtcdCluster {
 public:
  // Reads the files that `options` names. Errors: invalid_argument, permission.
  static StatusOr<std::unique_ptr<EtcdCluster>> make(const std::vector<EtcdEndpoint>& endpoints,
                                                     const EtcdStoreOptions& options,
                                                     std::shared_ptr<Runtime> runtime);

  // The member asked, and the token for it; empty without a user.
  struct Route {
    std::shared_ptr<grpc::Channel> channel;
    std::string token;
    void sign(grpc::ClientContext* context) const;
  };
  // Asks etcd for a token when there is a user and none is known.
  grpc::Status route(InterruptScope* scope, absl::Time deadline, Route* out);
  // Tells what became of a request: turns to the next member, or forgets the token. True: the
  // token was refused (ETCD-5).
  bool settle(const Route& route, const grpc::Status& status);

  // One request and its answer: ETCD-4 and ETCD-5, once.
  grpc::Status call(InterruptScope* scope, absl::Time deadline, const char* method,
                    const grpc::protobuf::MessageLite& request, grpc::protobuf::MessageLite* reply);

  // An error when another attempt cannot end differently.
  std::optional<Status> error_if_final(const StoreOp& op, const grpc::Status& status);

  // What may be wrong when connections end as soon as they are made; empty: nothing is known.
  std::string hint() const;

  std::shared_ptr<grpc::Channel> channel() const;  // of the member asked now
  bool has_several() const { return channels_.size() > 1; }
  // "a:2379,b:2379"
  const std::string& addresses() const { return addresses_; }

 private:
  explicit EtcdCluster(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}
  grpc::Status send(const Route& route, InterruptScope* scope, absl::Time deadline,
                    const char* method, const grpc::protobuf::MessageLite& request,
                    grpc::protobuf::MessageLite* reply);
  std::optional<Status> tls_error(const StoreOp& op, const grpc::Status& status) const;

  const std::shared_ptr<Runtime> runtime_;
  // Constant after make().
  std::string addresses_;
  std::string prefix_;
  std::string user_;
  std::string password_;
  std::string ca_file_;
  std::string cert_file_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_;

  mutable Mutex mutex_;
  size_t current_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string token_ ABSL_GUARDED_BY(mutex_);
  int turned_away_ ABSL_GUARDED_BY(mutex_) = 0;  // in a row
};

}  // namespace weft::internal

#endif  // WEFT_STORE_INTERNAL_ETCD_CLUSTER_H_
