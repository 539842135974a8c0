#ifndef WEFT_PS_CLIENT_H_
#define WEFT_PS_CLIENT_H_

// ps::Client: opens tables at servers; ps::Table: pushes to one and pulls from it.
//
//   weft::ps::Client client(worker, {.servers = {"ps0", "ps1"}});
//   const auto sgd = weft::ps::rule<weft::optim::SGD>();
//   weft::ps::Table w = client.open_table("w", weft::ps::dense({64, 10}, sgd));
//   torch::Tensor now = w.pull().wait();
//   w.push(gradient).wait();                                          // acknowledged: applied once
//   torch::Tensor next = w.push_pull(gradient, {.advance = true}).wait();   // the end of a step
//
//   const auto adagrad = weft::ps::rule<weft::optim::Adagrad>();
//   weft::ps::Table e = client.open_table("e", weft::ps::sparse(64, adagrad));
//   torch::Tensor rows = e.pull_rows(keys).wait();                    // keys: int64, bits of a u64
//   e.push_rows(keys, gradients).wait();
//
// An operation on a table goes to all servers that have a part of it, in parallel. A push that
// fails may have been applied to some parts and not to others, and to none of them twice; the error
// names the part. Steps: an operation with `advance` is sent when every push before it is
// acknowledged, and operations after it are sent when it has ended, but for pulls of an ASP table, which
// wait for nothing. An argument must not be changed
// until the future is complete; a tensor that was pulled may lie in memory that its server shares:
// clone it before writing to it. Threads: all methods from anywhere.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/future.h"
#include "weft/common/time.h"
#include "weft/ps/snapshot.h"
#include "weft/ps/table.h"

namespace weft {

class Worker;

namespace ps {

namespace internal {
class TableHandle;
struct TableAccess;
}  // namespace internal

struct ClientOptions {  // how a client is made
  // Names of workers with a ps::Server. All clients of a table give the same, in the same order.
  std::vector<std::string> servers{};
  // Time without an answer after which a request is sent again. Default: 10 s.
  Timeout attempt_timeout{};
  // Rules of users, of the tables that are opened.
  UserRules rules{};
};

struct OpenOptions {  // of open()
  // Deadline for the servers to join, and for another client to make a table that is opened without
  // a definition. Default: 60 s.
  Timeout deadline{};
  // An observer only pulls; it waits for no other client, and none waits for it.
  bool observer = false;
};

struct PushOptions {  // of push()
  // Ends a step of the client: see Consistency.
  bool advance = false;
  // Replaces the rule's own learning rate.
  std::optional<double> rate{};
  // The gradient is made smaller to this L2 norm, over all rows and parts of the push, when its norm is larger.
  std::optional<double> max_norm{};
  // Rule DelayCompensatedSGD: the values with which the gradient was computed, as they were pulled. Default: those of
  // the last pull of this client's table that has ended; without one nothing is compensated.
  at::Tensor computed_with{};
  // What the caller has read of its data when this push is in, in a form of its own; a snapshot keeps that of
  // the last push which is in it. "": as with the push before.
  std::string position{};
  // Default: the worker's rpc_timeout.
  Timeout deadline{};
};

struct PushResult {  // the outcome of a push
  // batch: at some part the push arrived after its step had ended, and was not applied there.
  bool dropped = false;
  // Number of updates since the values that were pulled last: the largest of all parts.
  uint64_t behind = 0;
};

// Counters of a client's table, since it was opened.
struct TableStats {
  uint64_t pushes = 0;  // acknowledged
  uint64_t dropped = 0;
  uint64_t pulls = 0;
  uint64_t repeats = 0;      // requests that were sent again
  uint64_t moves = 0;        // times that a part had another owner, with two copies
  uint64_t most_behind = 0;  // largest PushResult::behind
  uint64_t sum_behind = 0;
  uint64_t most_lag = 0;  // most steps that the slowest client was behind at a pull
};

class WEFT_API Table {
 public:
  const std::string& name() const;            // as it was opened
  const TableDefinition& definition() const;  // equal at all clients
  // Returns how many steps this client has finished.
  uint64_t clock() const;
  TableStats stats() const;

  // ---- dense ----
  // Returns the values, when the table's consistency allows it.
  Future<at::Tensor> pull(Timeout deadline = {}) const;
  // Sends a gradient, to which the table's rule is applied when its consistency says.
  Future<PushResult> push(const at::Tensor& gradient, const PushOptions& options = {}) const;
  // A push, then a pull, in one request to each server.
  Future<at::Tensor> push_pull(const at::Tensor& gradient, const PushOptions& options = {}) const;
  // Replaces the values, whatever the consistency; the rule's state stays.
  Future<void> assign(const at::Tensor& values, const PushOptions& options = {}) const;

  // ---- sparse ----
  // Returns one row for each key, in the order of the keys.
  Future<at::Tensor> pull_rows(const at::Tensor& keys, Timeout deadline = {}) const;
  // Pushes a gradient for the row of each key. Keys may be in any order; the gradients of a key
  // that occurs twice are added up.
  Future<PushResult> push_rows(const at::Tensor& keys, const at::Tensor& gradients,
                               const PushOptions& options = {}) const;
  // A push of some rows, then a pull of the rows of `pull_keys`.
  Future<at::Tensor> push_pull_rows(const at::Tensor& keys, const at::Tensor& gradients,
                                    const at::Tensor& pull_keys,
                                    const PushOptions& options = {}) const;

  // Ends a step without a push.
  Future<void> advance(Timeout deadline = {}) const;
  // Ends this client's part in the table; later operations fail. The destruction of the last copy
  // of a Table does the same.
  Future<void> leave(Timeout deadline = {}) const;

 private:
  friend class Client;
  friend struct internal::TableAccess;
  explicit Table(std::shared_ptr<internal::TableHandle> handle) : handle_(std::move(handle)) {}

  std::shared_ptr<internal::TableHandle> handle_;
};

class WEFT_API Client {
 public:
  // Throws weft::Error when the worker does not list ps_service(), or `servers` is empty.
  Client(const Worker& worker, ClientOptions options);

  // Opens a table, and makes it if it does not exist. Waits for the servers to join. Errors: kind
  // invalid_argument, a wrong definition, or not the one that the table has (naming what differs);
  // deadline, naming the missing worker, or that the table was not made.
  Table open_table(std::string_view name, const TableDefinition& definition,
                   const OpenOptions& options = {}) const;
  // Opens a table that another client makes. Only the first of `servers` need be known.
  Table open_table(std::string_view name, const OpenOptions& options = {}) const;
  StatusOr<Table> try_open_table(std::string_view name,
                                 const std::optional<TableDefinition>& definition,
                                 const OpenOptions& options = {}) const;

  // Has part `part` of a table of two copies, or a movable one, counted from 0, at the server of this name, which
  // need not be among this client's `servers`, while all clients go on: it is copied there, that server becomes its
  // owner, and with two copies the one before its backup. No push is lost. Blocks until it is done.
  // Default: 60 s. Errors: kind not_found, no server has the part, or none of that name has joined; state, the
  // server drains, or the table has one copy and is not movable; resource, it has no room, or cannot follow the
  // log; peer_lost, it has died; unavailable, it serves no tables; deadline, also when the part moves to yet
  // another server (naming it). The part is at one server or the other, after deadline it may still move.
  void move_part(std::string_view table, size_t part, std::string_view server,
                 Timeout deadline = {}) const;
  Status try_move_part(std::string_view table, size_t part, std::string_view server,
                       Timeout deadline = {}) const;

  // Writes a snapshot of tables (ps/snapshot.h), while clients go on; blocks until it is there. Errors, after
  // which the one before is as it was: kind unavailable, the cut was given up (a client or server that does
  // not answer, a part that moves, another cut), worth another try; peer_lost, a server was lost while it wrote;
  // that of the file system, naming the file.
  SnapshotInfo snapshot(std::string_view folder, const SnapshotOptions& options = {}) const;
  StatusOr<SnapshotInfo> try_snapshot(std::string_view folder,
                                      const SnapshotOptions& options = {}) const;
  // Makes the tables of the newest snapshot that is whole at this client's servers, in their state then. Waits
  // up to a minute for servers that have not joined.
  // Tables that are there are replaced: their clients get an error of kind state, which says up to which of
  // their pushes the table has them, and open it again. Errors, after which nothing has changed: kind
  // not_found, there is none; invalid_argument, none is whole (why, for each file), or a table is there
  // with another definition or other servers; resource, it does not fit; peer_lost, or that a server has not
  // come, naming it. A server that is lost while the
  // tables are put in place leaves some of them restored (naming it).
  SnapshotInfo restore(std::string_view folder, const RestoreOptions& options = {}) const;
  StatusOr<SnapshotInfo> try_restore(std::string_view folder,
                                     const RestoreOptions& options = {}) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace ps
}  // namespace weft

#endif  // WEFT_PS_CLIENT_H_
