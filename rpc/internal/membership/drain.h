#ifndef WEFT_RPC_INTERNAL_MEMBERSHIP_DRAIN_H_
#define WEFT_RPC_INTERNAL_MEMBERSHIP_DRAIN_H_

// The graceful part of shutdown, by way of the store. Keys, below "weft/<job>/":
//   arrived/inc       the worker has called shutdown()
//   drain/N/inc       round N: "pending serving issued served live", counted by that worker, with
//                     what its services have under way
//   done/inc          the worker's drain is over and its record is gone
//   count/G/WHAT      how many have written WHAT/inc, for WHAT = arrived, drain/N, done; G is the
//                     incarnation of the lowest rank, by which a group differs from later ones
//   gate/G/WHAT       "1": all have; written by the last of them
//
//   DRAIN-1  no worker leaves while a call is under way anywhere: a round in which every worker
//            counts zero calls and zero handlers ends the drain only when the round before said the
//            same with the same totals (two equal waves: nothing can have been in flight between
//            them). When they count something live then (Service::Load), all workers sweep first,
//            and it goes on.
//   DRAIN-2  a worker that dies, or whose lease lapses, is missing: it is named, and no longer
//            waited for.
//   DRAIN-3  waiting for arrival has no bound but leases; everything after has the deadline.
//   DRAIN-4  records are removed before the last wait, so a worker that joins again right after it
//            cannot meet a record of the group that has just ended.
//   DRAIN-5  a store that cannot be asked for a moment ends no wait; one that does not answer for
//            5 s, or a heartbeat if that is longer, does.
//   DRAIN-6  what a phase costs the store does not grow with the number of workers: each waits for
//            the gate and reads what all have written once. The gate is a hint: the list of members
//            decides, and it is read once per heartbeat after a worker has gone, and every five in
//            any case. Keys without readers are deleted.
//   DRAIN-7  a worker that has written "done" has drained: the store may leave with the others
//            then.
//   DRAIN-8  a dynamic worker leaves the lists when its calls, its handlers and its peers' calls to
//            it have ended; new ones, in both directions, are refused until then (kind state).

#include "weft/rpc/internal/agent/agent.h"
#include "weft/rpc/internal/membership/membership.h"
#include "weft/rpc/worker.h"

namespace weft::internal {

struct DrainOptions {
  absl::Time arrival_deadline;   // infinite by default (DRAIN-3)
  absl::Duration later_timeout;  // from the moment all have arrived
  absl::Time hard_deadline;      // given by the user for everything
  absl::Duration heartbeat;
  Logger log;
  std::vector<std::shared_ptr<Service>> services;
};

// A static group: all of DRAIN-1..4.
ShutdownResult drain_group(Agent* agent, Membership* membership, const WorkerInfo& self,
                           const DrainOptions& options);
// A dynamic one: waits for what is under way here and at its peers. The end of the worker is next:
// that leaves the lists.
ShutdownResult drain_one(Agent* agent, const WorkerInfo& self, const DrainOptions& options);

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_MEMBERSHIP_DRAIN_H_
