#ifndef WEFT_PS_SERVER_H_
#define WEFT_PS_SERVER_H_

// ps::Server: makes a worker a server of tables, for as long as it lives.
//
//   weft::Worker worker = weft::join({.name = "ps0"});   // lists ps_service()
//   weft::ps::Server server(worker);
//   worker.shutdown();                                   // until all others have finished
//
// Clients make the tables (ps/client.h). Any thread. debug_info() of the worker then has
// "ps_tables", "ps_clients", "ps_rows", "ps_bytes", "ps_waiting_pulls" and "ps_held_pushes".

#include <cstdint>
#include <memory>

#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/time.h"
#include "weft/rpc/service.h"

namespace weft {

class Worker;

namespace ps {

namespace internal {
class PsService;
}

struct ServerOptions {  // bounds of a server
  // Values with the rules' state, over all tables; a table or row beyond is refused, kind resource.
  int64_t table_bytes = int64_t{16} << 30;
  // Pushes that wait for their step to end (BSP, batch); one beyond is refused, kind resource.
  int64_t queue_bytes = int64_t{1} << 30;
  // Of each part of a table of two copies: what its backup has not confirmed; a push beyond is
  // refused, kind resource.
  int64_t log_bytes = int64_t{256} << 20;
};

class WEFT_API Server {
 public:
  // Throws weft::Error, kind state: the worker does not list ps_service(), or has a server.
  explicit Server(const Worker& worker, const ServerOptions& options = {});
  Server(Server&& other) noexcept = default;
  Server& operator=(Server&& other) noexcept;
  // Hands its copies of tables to the tables' other servers, while clients go on, and takes up no new one:
  // where it is a part's owner the backup takes over, where it is the backup another server becomes that.
  // Blocks until it has none; then its worker may shut down, and no push is lost. Until the next image has
  // arrived such a part has one copy. Default: 60 s. Errors, after which it goes on serving: kind state, a
  // table has one copy (naming it), or it drains already; deadline, a part is here still (naming it), as
  // when there is no other server for it.
  void drain(Timeout deadline = {});
  Status try_drain(Timeout deadline = {});
  // Removes its tables; requests that wait for them get an error.
  ~Server();

 private:
  std::shared_ptr<internal::PsService> service_;
};

}  // namespace ps

// To be listed at join by servers and clients; weft::join does.
WEFT_API ServiceFactory ps_service();

}  // namespace weft

#endif  // WEFT_PS_SERVER_H_
