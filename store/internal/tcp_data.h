#ifndef WEFT_STORE_INTERNAL_TCP_DATA_H_
#define WEFT_STORE_INTERNAL_TCP_DATA_H_

// TcpData: what a TcpStore's server knows and decides, without a network: the table, the clients
// and what is remembered of them. Invariants STORE-1 to STORE-4 of proto/store.proto live here. Not
// thread-safe: the server's one thread owns it.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/proto/store.pb.h"
#include "weft/store/internal/table.h"

namespace weft::internal {

inline constexpr char kStoreMagic[] = "weft-store";
inline constexpr uint32_t kStoreProtocol = 1;
inline constexpr char kStoreSessionMethod[] = "/weft.v1.Store/Session";
inline constexpr char kStoreDoMethod[] = "/weft.v1.Store/Do";

class WEFT_API TcpData {
 public:
  TcpData(uint64_t server_id, size_t max_bytes) : server_id_(server_id), max_bytes_(max_bytes) {}

  // Begins a session. `now` is for forgetting clients that left long ago.
  StatusOr<v1::StoreSessionReply> open_session(const v1::StoreSessionRequest& request,
                                               absl::Time now);
  void close_session(uint64_t client_id, absl::Time now);

  // What came of a request. While `parked_on` is not empty there is no reply yet: ask again when
  // that key has changed.
  struct Result {
    v1::StoreReply reply;
    std::string parked_on;
    std::string changed;  // the key that this request changed; empty: none
  };
  // REQUIRES: nothing of `request`; it may say anything.
  Result handle(const v1::StoreRequest& request);
  // The answer to a request that waits and whose time is over.
  v1::StoreReply not_yet(const v1::StoreRequest& request) const;

  size_t clients_remembered() const { return clients_.size(); }

 private:
  struct Client {
    int sessions = 0;
    absl::Time left;
    uint64_t done_below = 0;
    std::map<uint64_t, v1::StoreReply> replies;
  };

  void forget(Client* client, uint64_t below);
  void handle_change(const v1::StoreRequest& request, Client* client, Result* result);
  Status apply(const v1::StoreRequest& request, Result* result);
  Status check_room(size_t key, size_t value) const;
  void handle_wait_keys(const v1::StoreRequest::WaitKeys& wait, Result* result) const;
  void handle_list(const v1::StoreRequest::List& list, v1::StoreReply* reply) const;
  Status handle_multi_get(const v1::StoreRequest::MultiGet& get, v1::StoreReply* reply) const;

  const uint64_t server_id_;
  const size_t max_bytes_;
  StoreTable table_;
  std::map<uint64_t, Client> clients_;
  size_t remembered_bytes_ = 0;  // in all `replies`
};

}  // namespace weft::internal

#endif  // WEFT_STORE_INTERNAL_TCP_DATA_H_
