#ifndef WEFT_PS_SERVER_H_
#define WEFT_PS_SERVER_H_

// ps::Server: makes a worker a server of tables, for as long as it lives.
//
//   weft::Worker worker = weft::join({.name = "ps0"});   // lists ps_service()
//   weft::ps::Server server(worker);
//   worker.shutdown();                                   // until all others have finished
//
// Clients make the tables (ps/client.h). Any thread. debug_info() of the worker then has
// "ps_tables", "ps_clients", "ps_rows", "ps_bytes", "ps_remembered", "ps_waiting_pulls" and
// "ps_held_pushes"; weft-inspect shows the tables "ps_tables" and "ps_keys".

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/time.h"
#include "weft/ps/table.h"
#include "weft/rpc/spi/service.h"

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
  // Rules of users; a table with another one is refused. All servers and clients of a table give it.
  UserRules rules{};
};

class WEFT_API Server {
 public:
  // Throws weft::Error, kind state: the worker does not list ps_service(), or has a server.
  explicit Server(const Worker& worker, const ServerOptions& options = {});
  Server(Server&& other) noexcept = default;
  Server& operator=(Server&& other) noexcept;
  // Hands its copies of tables to the tables' other servers, while clients go on, and takes up no new one:
  // where it is a part's owner it changes places with the backup, where it is the backup another server becomes
  // that before it leaves, if there is one. Blocks until it has none; then its worker may shut down, and no push
  // is lost. Default: 60 s. Errors, after which it goes on serving: kind state, a table has one copy and is not
  // movable (naming it), or it drains already; deadline, a part is here still (naming it), as when there is no
  // other server for it.
  void drain(Timeout deadline = {});
  Status try_drain(Timeout deadline = {});
  // Takes over its share of the tables at these servers, and at others that have joined, while clients go on:
  // whole parts, until none of the servers has much more bytes than this one. Clients need not know this
  // server's name: they are told where parts are. From then on it may also become the backup of any
  // part. Of a table that is opened later it has no part at first. Blocks; gives how many parts it owns then.
  // Tables that are not movable stay where they are. Default: 60 s. Errors, after which what was moved stays:
  // state, it has ended or drains; resource, 4096 servers have joined; deadline; those of Client::move_part(). May
  // be called again, as after tables have grown.
  int64_t join(const std::vector<std::string>& servers, Timeout deadline = {});
  StatusOr<int64_t> try_join(const std::vector<std::string>& servers, Timeout deadline = {});
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
