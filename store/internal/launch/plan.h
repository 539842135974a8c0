// The processes to start: from the counts of all nodes to the ranks, names and variables of the
// processes of this one.
//
// Ranks run through the nodes in their order and inside a node through its roles in their order. A
// name is the role and the index within the role over all nodes: ps0, trainer0, trainer1. Pure
// functions: safe on any thread.
//
//   auto plan = make_plan(job, /*node=*/0);
//   plan->at(0).environment   // {{"RANK", "0"}, {"WEFT_NAME", "ps0"}, ...}
#ifndef WEFT_STORE_INTERNAL_LAUNCH_PLAN_H_
#define WEFT_STORE_INTERNAL_LAUNCH_PLAN_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weft::launch {

// One role and how many processes of it a node starts.
struct RoleSpec {
  std::string name;
  int count = 0;

  friend bool operator==(const RoleSpec&, const RoleSpec&) = default;
};

// How many processes one node may start; a larger number is a mistyped one.
inline constexpr int kMaxLocalSize = 4096;

struct Node {
  std::string host;
  std::vector<RoleSpec> roles;

  friend bool operator==(const Node&, const Node&) = default;
};

// What all nodes agree on before anything is started.
struct Job {
  std::string id;  // 128 random bits in hexadecimal
  std::string store_url;
  std::string master_addr;
  int master_port = 0;
  std::vector<Node> nodes;
  int restart_count = 0;  // lives of the job before this one
};

struct ProcessPlan {
  int rank = 0;
  int local_rank = 0;
  std::string name;
  std::string role;
  std::vector<std::pair<std::string, std::string>> environment;
};

// The processes of node `node`. Errors: invalid_argument when two processes would have the same
// name (roles `a` and `a1` with enough members).
absl::StatusOr<std::vector<ProcessPlan>> make_plan(const Job& job, int node);

// Variables of an outer launcher that a child must not inherit: they would tell it a rank that is
// not its own.
bool is_foreign_variable(absl::string_view name);

// What the processes inherit from the environment of this one: everything but the variables of
// launchers, which are set for each process, and those in `dropped`; with `tag` added to the tags of
// the launchers around. "NAME=value".
std::vector<std::string> inherited_environment(const std::string& tag,
                                               const std::vector<std::string>& dropped);

// The number of threads that a process computes with where the user has not said it.
int threads_per_process(size_t cores, int local_size);

// The cores of local rank `local_rank` out of `local_size` when the cores in `cores` are shared
// out: neighbouring cores, sizes that differ by at most one; one core each, in turn, when there are
// fewer cores than processes.
std::vector<int> share_of_cores(const std::vector<int>& cores, int local_rank, int local_size);

}  // namespace weft::launch

#endif  // WEFT_STORE_INTERNAL_LAUNCH_PLAN_H_
