#ifndef WEFT_RPC_INSPECT_H_
#define WEFT_RPC_INSPECT_H_

// inspect: asks a running worker what it does, from outside of its job. This is what the program
// weft-inspect calls (docs/inspect.md).
//
//   std::cout << weft::inspect({.address = "127.0.0.1:40123/local-13bb385ca1ae91a2"});
//
// The asking process is an observer: it proves who it is as a worker does (user, certificate,
// token, and JoinOptions::access for "@weft.inspect"), joins nothing, is no member, and can do
// nothing else. The worker answers on the thread that receives, so that one whose handlers are all
// stuck answers too.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/runtime.h"
#include "weft/common/worker_info.h"
#include "weft/store/store.h"
#include "weft/transport/credentials.h"
#include "weft/transport/transport.h"

namespace weft {

struct InspectOptions {  // as whom, how long and how much
  // Address of the worker, as its log, Worker::address() and list_workers() have it.
  std::string address{};
  Credentials credentials{};
  // The observer's name. Default: what its certificate says, else "weft-inspect".
  std::string name{};
  // Only this worker is to answer; default: whichever worker listens at the address.
  std::optional<WorkerInfo> wanted{};
  bool json = false;      // else text
  bool counters = false;  // with all of debug_info()
  int most_rows = 1000;   // of each table, 1 to 100,000
  absl::Duration deadline = absl::Seconds(10);
  std::shared_ptr<Runtime> runtime{};  // default: the system
  TransportFactory transport{};        // default: gRPC
};

// The tables "worker", "peers", "serving" (calls that run there), "pending" (calls that it waits
// for), those of its services ("rrefs"), and "counters". Blocks, not on a poller. Errors: kind
// unavailable (no worker there), permission (credentials, user, access), deadline, protocol (it
// speaks something else), state (no version in common), invalid_argument.
WEFT_API StatusOr<std::string> try_inspect(const InspectOptions& options);
WEFT_API std::string inspect(const InspectOptions& options);  // throws weft::Error

struct ListedWorker {  // a worker as the store has it
  std::string job_id;  // 32 hexadecimal digits
  WorkerInfo info;     // name, id and incarnation
  std::string address;
  std::string host;  // name of its machine
  int64_t pid = 0;   // number of its process there
};

// Returns the workers that have a record in the store, in order of job and id; the dead among them
// stay until another worker has seen their leases lapse. Only reads. `job_id` empty: all jobs.
WEFT_API StatusOr<std::vector<ListedWorker>> list_workers(
    Store& store, const std::string& job_id = {}, absl::Duration timeout = absl::Seconds(10));

}  // namespace weft

#endif  // WEFT_RPC_INSPECT_H_
