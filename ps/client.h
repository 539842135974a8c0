#ifndef WEFT_PS_CLIENT_H_
#define WEFT_PS_CLIENT_H_

// ps::Client: opens tables at servers; ps::Table: pushes to one and pulls from it.
//
//   weft::ps::Client client(worker, {.servers = {"ps0", "ps1"}});
//   weft::ps::Table w = client.open_table("w", weft::ps::dense({64, 10},
//   weft::ps::rule<weft::optim::SGD>())); torch::Tensor now = w.pull().wait();
//   w.push(gradient).wait();                                        // acknowledged: it is in, once
//   torch::Tensor next = w.push_pull(gradient, {.advance = true}).wait();   // the end of a step
//
//   weft::ps::Table e = client.open_table("e", weft::ps::sparse(64,
//   weft::ps::rule<weft::optim::Adagrad>())); torch::Tensor rows = e.pull_rows(keys).wait();
//             // keys: int64, the bits of u64 e.push_rows(keys, gradients).wait();
//
// What is asked of a table goes to all servers that have a part in it, at once. A push that fails
// may be in some parts and not in others, and is in none of them twice; the error names the part.
// Steps: an operation with `advance` leaves when every push before it is acknowledged, and what is
// asked after it leaves when it has ended. A tensor that is given is borrowed until the future is
// complete; one that is pulled may lie in memory that its server shares: clone it to write into it.
// Threads: all methods from anywhere.

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
  // After so long without an answer a request is sent again. Default: 10 s.
  Timeout attempt_timeout{};
};

struct OpenOptions {  // of open()
  // For the servers to come, and for a table without a definition to be made by another client.
  // Default: 60 s.
  Timeout deadline{};
  // Only pulls; it waits for no other client, and none waits for it.
  bool observer = false;
};

struct PushOptions {  // of push()
  // This ends a step of the client: see Consistency.
  bool advance = false;
  // Instead of the rule's own learning rate.
  std::optional<double> rate{};
  // Default: the worker's rpc_timeout.
  Timeout deadline{};
};

struct PushResult {  // what became of a push
  // batch: in some part it came after its step had ended, and is not in the values there.
  bool dropped = false;
  // The most updates, in any part, since the values that were pulled last.
  uint64_t behind = 0;
};

// What this handle has seen.
struct TableStats {
  uint64_t pushes = 0;  // acknowledged
  uint64_t dropped = 0;
  uint64_t pulls = 0;
  uint64_t repeats = 0;      // requests that were sent again
  uint64_t moves = 0;        // owners that were found anew, with two copies
  uint64_t most_behind = 0;  // of a push, in updates
  uint64_t sum_behind = 0;
  uint64_t most_lag = 0;  // of a pull, in steps of the slowest client
};

class WEFT_API Table {
 public:
  const std::string& name() const;            // as it was opened
  const TableDefinition& definition() const;  // equal at all clients
  // How many steps this client has finished.
  uint64_t clock() const;
  TableStats stats() const;

  // ---- dense ----
  Future<at::Tensor> pull(Timeout deadline = {}) const;
  Future<PushResult> push(const at::Tensor& gradient, const PushOptions& options = {}) const;
  Future<at::Tensor> push_pull(const at::Tensor& gradient, const PushOptions& options = {}) const;
  // Replaces the values, whatever the consistency; the rule's state stays.
  Future<void> assign(const at::Tensor& values, const PushOptions& options = {}) const;

  // ---- sparse ----
  // One row for each key, in their order.
  Future<at::Tensor> pull_rows(const at::Tensor& keys, Timeout deadline = {}) const;
  // Keys in any order; rows of a key that comes twice add up.
  Future<PushResult> push_rows(const at::Tensor& keys, const at::Tensor& gradients,
                               const PushOptions& options = {}) const;
  Future<at::Tensor> push_pull_rows(const at::Tensor& keys, const at::Tensor& gradients,
                                    const at::Tensor& pull_keys,
                                    const PushOptions& options = {}) const;

  // Ends a step without a push.
  Future<void> advance(Timeout deadline = {}) const;
  // Takes part no more; everything asked later fails. The last copy of a Table does it, too.
  Future<void> leave(Timeout deadline = {}) const;

 private:
  friend class Client;
  friend struct internal::TableAccess;
  explicit Table(std::shared_ptr<internal::TableHandle> handle) : handle_(std::move(handle)) {}

  std::shared_ptr<internal::TableHandle> handle_;
};

class WEFT_API Client {
 public:
  // Throws weft::Error: the worker does not list ps_service(); no servers.
  Client(const Worker& worker, ClientOptions options);

  // Opens the table, and makes it if it is not there. Waits for the servers. Errors: kind
  // invalid_argument, a wrong definition, or not the one that the table has (naming what differs);
  // deadline, naming the missing worker, or that the table was not made.
  Table open_table(std::string_view name, const TableDefinition& definition,
                   const OpenOptions& options = {}) const;
  // One that another client makes. Only the first of `servers` need be known.
  Table open_table(std::string_view name, const OpenOptions& options = {}) const;
  StatusOr<Table> try_open_table(std::string_view name,
                                 const std::optional<TableDefinition>& definition,
                                 const OpenOptions& options = {}) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace ps
}  // namespace weft

#endif  // WEFT_PS_CLIENT_H_
