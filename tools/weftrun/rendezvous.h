// How the weftruns of several nodes find each other.
//
// meet() exchanges the counts of all nodes through a store: node 0 collects a hello of every other
// node, proposes a plan that names the hello it has seen of each, waits until all agree, and says
// go. A hello carries a fresh number, so what a crashed run left in a store (a file, etcd) is
// neither taken for a node nor for a plan.
//
// meet() blocks; interrupting the store ends it.
//
//   absl::StatusOr<Job> job = meet(*store, {.node = 1, .nnodes = 2, ...});
#ifndef WEFT_TOOLS_WEFTRUN_RENDEZVOUS_H_
#define WEFT_TOOLS_WEFTRUN_RENDEZVOUS_H_

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "weft/store/internal/launch/plan.h"
#include "weft/store/store.h"

namespace weft::launch {

struct MeetingOptions {
  int node = 0;
  int nnodes = 1;
  int max_restarts = 0;
  Node self;
  // What node 0 gives to all; the others' are not looked at.
  std::string master_addr;  // empty: node 0's host, or 127.0.0.1 when all nodes are one host
  int master_port = 0;
  absl::Duration timeout = absl::Seconds(300);
  // For node 0: where the programs meet, made from the job's id and the address above.
  std::function<std::string(const Job&)> store_url = nullptr;
};

// All nodes agree on a Job. Errors: deadline_exceeded naming the nodes that have not come;
// failed_precondition when the nodes were started differently; what the store says.
absl::StatusOr<Job> meet(Store& store, const MeetingOptions& options);

}  // namespace weft::launch

#endif  // WEFT_TOOLS_WEFTRUN_RENDEZVOUS_H_
