#ifndef WEFT_COLLECTIVES_SERVICE_H_
#define WEFT_COLLECTIVES_SERVICE_H_

// Process groups of workers. A worker lists collectives_service() at join; weft::join does.
//
//   auto worker = weft::join({.library = library()});
//   auto group = weft::init_process_group(worker);     // all workers, rank by rank
//   group.all_reduce(grad);
//
// Such a group takes its ranks, its place in the store, runtime, threads for continuations, log,
// metrics, timeline, listening address and credentials from the worker, and hears of deaths from
// the membership: a member whose process ended, or whose lease is over, fails the group
// immediately, with kind peer_lost, also while the group is still being made. Its operations go
// over connections of the group's own, never through calls. Groups that it gives (new_group, split,
// rebuild) do the same.
//
// A graceful shutdown of the worker waits for operations under way, as for calls; then its groups
// are left. debug_info() has "collective_groups" (that this worker is in), "collective_groups_failed"
// (of these), "collective_operations" (that these have begun) and "collective_operations_pending".
// weft-inspect shows a table `groups`: each group's generation, the operation under way and the
// ranks that it waits for.
//
// Threads: any.

#include <string>
#include <vector>

#include "weft/collectives/process_group.h"
#include "weft/common/api.h"
#include "weft/rpc/spi/service.h"
#include "weft/rpc/worker.h"

namespace weft {

WEFT_API ServiceFactory collectives_service();

// `workers`: the members by name, in the order of their ranks; only they call this. Empty: all
// workers of a static group, each with its rank. Of `options`, store, rendezvous, rank, size,
// runtime and executor come from the worker and must not be given; so does the log. listen_address
// does unless it is given. Errors: invalid_argument (these; a name twice; the caller is not in the list),
// not_found (there is no worker of a name), peer_lost (a member is gone), state (the service is not
// listed, or the worker has shut down), and those of init_process_group(options).
WEFT_API StatusOr<ProcessGroup> try_init_process_group(
    const Worker& worker, const ProcessGroupOptions& options = {},
    const std::vector<std::string>& workers = {});
WEFT_API ProcessGroup init_process_group(const Worker& worker,
                                         const ProcessGroupOptions& options = {},
                                         const std::vector<std::string>& workers = {});

}  // namespace weft

#endif  // WEFT_COLLECTIVES_SERVICE_H_
