#ifndef WEFT_COMMON_LAUNCH_INFO_H_
#define WEFT_COMMON_LAUNCH_INFO_H_

// LaunchInfo: who started this process, and which of how many it is.
//
//   Environment env = process_environment();
//   WEFT_ASSIGN_OR_RETURN(Config config, Config::from_environment(env));
//   WEFT_ASSIGN_OR_RETURN(LaunchInfo launch, launch_info(config, env));
//
// Looked for in this order, the first that is there decides:
//   RANK and WORLD_SIZE (the config's rank and world_size)    weftrun, torchrun, or by hand
//   JOB_COMPLETION_INDEX and WORLD_SIZE, without RANK         an Indexed Job of Kubernetes
//   OMPI_COMM_WORLD_RANK and _SIZE                            Open MPI
//   PMI_RANK and PMI_SIZE                                     MPICH and others
//   SLURM_PROCID and SLURM_STEP_NUM_TASKS                     srun
// PMI comes before Slurm because MPICH starts one Slurm task per node and several ranks below it. A
// Slurm batch script has SLURM_PROCID but no step: a program started in it plainly is on its own.
// Without any of them the process is rank 0 of 1.
//
// Pure functions; any thread.

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "weft/common/api.h"
#include "weft/common/config.h"

namespace weft {
// The program that started this process.
enum class Launcher { kNone, kWeftrun, kTorchrun, kByHand, kOpenMpi, kPmi, kSlurm, kKubernetes };

// "weftrun", "torchrun", "Open MPI", ...
WEFT_API std::string_view launcher_name(Launcher launcher);

struct LaunchInfo {
  Launcher launcher = Launcher::kNone;  // whose variables were found
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;        // number of this process on its machine
  int local_world_size = 1;  // processes on this machine
  // False when the launcher did not give the two values above: they are a guess.
  bool local_known = false;
  int node_rank = 0;
  int node_count = 1;
  bool nodes_known = false;
  // Equal for all processes of this job, and for no other job that lives at the same time on these
  // machines; "" when the launcher gives nothing of the kind.
  std::string job_key;
  // Host of rank 0 and a port there; "" and 0 when unknown.
  std::string master_addr;
  int master_port = 0;
  // torchrun's agent already listens on master_port with its own store: rank 0 cannot.
  bool agent_store = false;
  // How often weftrun (--max-restarts) or torchrun has started all processes again. Each life has a
  // job_key of its own.
  int restart_count = 0;

  // All processes are on this machine, and we know it.
  bool single_node() const {
    return (local_known && local_world_size == world_size) || (nodes_known && node_count == 1);
  }
};

// Errors (invalid_argument) name the variables: one of a pair is missing, not a number, a rank that
// is not below its size.
WEFT_API absl::StatusOr<LaunchInfo> launch_info(const Config& config,
                                                const Environment& environment);

// The first host of Slurm's list: "n[07-09,12],m1" gives "n07". "" when it cannot be read.
WEFT_API std::string first_slurm_host(std::string_view list);

}  // namespace weft

#endif  // WEFT_COMMON_LAUNCH_INFO_H_
