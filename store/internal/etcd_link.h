#ifndef WEFT_STORE_INTERNAL_ETCD_LINK_H_
#define WEFT_STORE_INTERNAL_ETCD_LINK_H_

// EtcdLink: what EtcdStore asks of an etcd: reads, guarded changes, and waiting for an event.
// Shared by the clients that one EtcdStore gave out. It has no thread: a calling thread polls a
// completion queue of its own.
//
// ETCD-1  a change is one transaction: if the key's mod_revision is still r, write the key and a
//         marker that carries this operation's number and result. Revisions never return, so of
//         several attempts with the same r at most one succeeds, and an attempt that is still under
//         way somewhere fails as soon as another one has written the key.
// ETCD-2  after an attempt whose answer was lost, key and marker are read in one transaction: if
//         the marker is this operation's, it took effect, and the result is in it.
// ETCD-3  a marker's place is used by one operation at a time, and never again when the outcome of
//         its operation stayed unknown.
// Threads: any.

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/proto/etcd.pb.h"
#include "weft/store/internal/checks.h"
#include "weft/store/internal/etcd_cluster.h"
#include "weft/store/internal/interrupt_scope.h"
#include "weft/store/store.h"

namespace weft::internal {

class EtcdLink {
 public:
  EtcdLink(std::shared_ptr<Runtime> runtime, std::unique_ptr<EtcdCluster> cluster,
           std::string prefix);

  // What becomes of a key, decided from its value now. Called again when another client was faster.
  struct Change {
    enum Kind { kNothing, kPut, kDelete } kind = kNothing;
    std::string value;   // kPut
    std::string result;  // short: it is kept in the marker
  };
  using Decide = std::function<StatusOr<Change>(const std::optional<std::string>& current)>;
  // Gives the `result` of the change that took effect.
  StatusOr<std::string> change(const StoreOp& op, InterruptScope* scope, std::string_view key,
                               const Decide& decide);

  struct View {
    int64_t revision = 0;
    std::vector<std::string> missing;  // of the keys asked for
    std::optional<std::string> value;  // of the first
  };
  // All keys at one revision.
  StatusOr<View> look(const StoreOp& op, InterruptScope* scope,
                      const std::vector<std::string>& keys, bool want_value);

  // Waits until `key` changes after `revision`, or for `length`, or until it makes sense to look
  // again. OK in each case; errors are final.
  Status watch(const StoreOp& op, InterruptScope* scope, const std::string& key, int64_t revision,
               absl::Duration length, RetryBackoff* backoff);

  // Without `want_values`, values are empty.
  StatusOr<std::vector<StoreEntry>> list(const StoreOp& op, InterruptScope* scope,
                                         std::string_view prefix, bool want_values);
  StatusOr<std::vector<std::optional<std::string>>> get_many(const StoreOp& op,
                                                             InterruptScope* scope,
                                                             const std::vector<std::string>& keys);
  StatusOr<int64_t> count(const StoreOp& op, InterruptScope* scope);

  const std::string& url() const { return url_; }
  const std::shared_ptr<Runtime>& runtime() const { return runtime_; }

 private:
  class Marker;

  std::string data_key(std::string_view key) const;
  // For what may be asked any number of times: until it is answered or the deadline has come.
  Status ask(const StoreOp& op, InterruptScope* scope, const char* method,
             const grpc::protobuf::MessageLite& request, grpc::protobuf::MessageLite* reply);
  // The same for an answer that may be larger than a message can be; false: it was.
  StatusOr<bool> ask_if_it_fits(const StoreOp& op, InterruptScope* scope, const char* method,
                                const grpc::protobuf::MessageLite& request,
                                grpc::protobuf::MessageLite* reply);
  // After a failed attempt: an error when it was final or the time is over, otherwise pauses.
  Status before_next_attempt(const StoreOp& op, InterruptScope* scope, const grpc::Status& status,
                             RetryBackoff* backoff);
  // A lease with at least half of its time left.
  StatusOr<int64_t> lease(const StoreOp& op, InterruptScope* scope);
  void drop_lease(int64_t id);

  const std::shared_ptr<Runtime> runtime_;
  const std::string prefix_;
  const std::string url_;
  const std::string client_;  // 16 hexadecimal digits, drawn once
  const std::unique_ptr<EtcdCluster> cluster_;

  Mutex mutex_;
  int64_t lease_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time lease_until_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_operation_ ABSL_GUARDED_BY(mutex_) = 1;
  uint64_t next_place_ ABSL_GUARDED_BY(mutex_) = 1;
  std::vector<uint64_t> free_places_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_STORE_INTERNAL_ETCD_LINK_H_
