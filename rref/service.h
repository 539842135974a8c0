#ifndef WEFT_RREF_SERVICE_H_
#define WEFT_RREF_SERVICE_H_

// The service of remote references, to be listed at join by every worker that makes, holds or
// passes on an RRef:
//
//   weft::Worker::join({.library = library(), .services = {weft::rref_service()}});
//
// What it does is in docs/rref.md. debug_info() of a worker then has "rref_owners" (objects here),
// "rref_forks" (shares of others in them), "rref_users" (shares of this worker in others' objects),
// and what is under way: "rref_pending_users", "rref_pending_children", "rref_parked_uses",
// "rref_arrivals", "rref_unacknowledged"; with "rref_tombstones", "rref_faults" and the control
// messages and items sent so far.

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/rpc/spi/service.h"
#include "weft/rref/id.h"

namespace weft {

class Worker;

struct RRefOptions {  // leases and bounds
  // A graceful shutdown takes back every RRef that is still held then, and logs it. True: it also
  // ends with an error that lists them, for tests and for programs that want to know.
  bool fail_on_leak = false;
};

WEFT_API ServiceFactory rref_service(RRefOptions options = {});

// One RRef that this worker holds, or one share in an object of this worker that another one holds.
struct LiveRRef {
  RRefId id{};          // of the object
  std::string owner{};  // names; "worker 3 (...)" when it has none any more
  std::string holder{};
  absl::Duration age{};
  // "file.cc:12", or "app.T.f() over RRef 1/00ab/3"; "" where this worker did not create the
  // handle.
  std::string created_at{};
};
// In order of ids. Throws weft::Error, kind state, without the service.
WEFT_API std::vector<LiveRRef> live_rrefs(const Worker& worker);

}  // namespace weft

#endif  // WEFT_RREF_SERVICE_H_
