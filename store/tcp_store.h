#ifndef WEFT_STORE_TCP_STORE_H_
#define WEFT_STORE_TCP_STORE_H_

// TcpStore: a store over the network: one server, which any process of the job can host, and a
// client in every process. Over gRPC; proto/store.proto is the specification.
//
//   auto server = weft::TcpStoreServer::start({.port = 29500}, runtime);      // rank 0
//   auto store = weft::TcpStore::connect("127.0.0.1", 29500, {}, runtime);    // everyone
//
// The client tries to connect, with backoff and jitter, until the deadline; a connection counts
// only when the other side proved to be a store of ours. A connection that breaks is made again; an
// operation that was under way is sent again and takes effect once. While the server does not
// answer, operations wait until their deadline and then fail with kind unavailable. The data is in
// the server's memory: a server that is started again is empty.
//
// Threads: any. A client has no thread of its own; the server has one, whatever the number of
// clients. (gRPC has its own few per process.)

#include <memory>
#include <string>
#include <string_view>

#include "weft/common/api.h"
#include "weft/store/delegating_store.h"

namespace weft {

namespace internal {
class TcpServer;
}

struct TcpStoreServerOptions {     // how a server is made
  std::string host = "127.0.0.1";  // a name or address of this machine
  int port = 0;                    // 0: any free one, see TcpStoreServer::port()
  // Without credentials, listening to more than this machine must be asked for.
  bool allow_insecure = false;
  // Mutual TLS: only clients with a certificate of the job's CA are let in, whatever their name,
  // and with a token only those that have the token too. Empty: plain text.
  Credentials credentials{};
  // Keys and values together, in bytes; more is an error of kind resource.
  size_t max_bytes = size_t{1} << 30;
};

class WEFT_API TcpStoreServer {
 public:
  // Fails with invalid_argument (a bad host or port), permission (beyond loopback without
  // allow_insecure or credentials; a bad certificate) or unavailable (the address is in use, or not
  // of this machine); each names the address.
  static StatusOr<std::unique_ptr<TcpStoreServer>> start(const TcpStoreServerOptions& options,
                                                         std::shared_ptr<Runtime> runtime);
  // As stop() without waiting for clients.
  ~TcpStoreServer();
  TcpStoreServer(const TcpStoreServer&) = delete;
  TcpStoreServer& operator=(const TcpStoreServer&) = delete;

  int port() const;
  std::string url() const;  // "tcp://127.0.0.1:29500"
  // Clients that are connected now.
  int num_clients() const;

  // Waits until every client has said goodbye or is gone, at most for `linger` (10 s when unset),
  // and ends the service; operations still waiting fail at their clients. At most 5 s more.
  // Idempotent.
  void stop(Timeout linger = {});

 private:
  explicit TcpStoreServer(std::unique_ptr<internal::TcpServer> server);
  const std::unique_ptr<internal::TcpServer> server_;
};

struct TcpStoreOptions {  // how a client is made
  // Default for operations that give none, and for connecting: 60 s when unset.
  Timeout timeout = {};
  // As the server's. Empty: plain text.
  Credentials credentials = {};
};

class WEFT_API TcpStore : public DelegatingStore, public ForkableStore {
 public:
  // Returns when the server has answered. Fails with unavailable (no answer in time), unimplemented
  // or protocol (something else listens there), permission (one side does not accept the other's
  // credentials), or invalid_argument.
  static StatusOr<std::shared_ptr<TcpStore>> connect(std::string_view host, int port,
                                                     const TcpStoreOptions& options,
                                                     std::shared_ptr<Runtime> runtime);
  std::shared_ptr<Store> new_client() override;

 private:
  explicit TcpStore(std::shared_ptr<Store> inner) : DelegatingStore(std::move(inner)) {}
};

}  // namespace weft

#endif  // WEFT_STORE_TCP_STORE_H_
