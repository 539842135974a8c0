#include "weft/common/launch_info.h"

#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "weft/common/error.h"

namespace weft {
namespace {

absl::Status bad(const std::string& message) {
  return make_error(ErrorKind::kInvalidArgument, message);
}

// "" when unset.
std::string text_of(const Environment& environment, const std::string& name) {
  const auto it = environment.find(name);
  return it == environment.end() ? "" : it->second;
}

absl::StatusOr<OptionalInt> number_of(const Environment& environment, const std::string& name) {
  const std::string text = text_of(environment, name);
  if (text.empty()) return OptionalInt();
  int value = 0;
  if (!absl::SimpleAtoi(text, &value) || value < 0) {
    return bad(absl::StrCat("environment variable ", name, " is '", absl::CHexEscape(text),
                            "', expected a whole number of at least 0"));
  }
  return OptionalInt(value);
}

absl::Status check_pair(const std::string& rank_name, int rank, const std::string& size_name,
                        int size) {
  if (size < 1) return bad(absl::StrCat(size_name, "=", size, ", expected at least 1"));
  if (rank >= size) {
    return bad(absl::StrCat(rank_name, "=", rank, " is not below ", size_name, "=", size));
  }
  return absl::OkStatus();
}

// Reads a rank and a size that belong together. False: neither is there.
absl::StatusOr<bool> read_pair(const Environment& environment, const std::string& rank_name,
                               const std::string& size_name, int* rank, int* size) {
  WEFT_ASSIGN_OR_RETURN(const OptionalInt r, number_of(environment, rank_name));
  WEFT_ASSIGN_OR_RETURN(const OptionalInt s, number_of(environment, size_name));
  if (!r.has_value() && !s.has_value()) return false;
  if (r.has_value() != s.has_value()) {
    return bad(absl::StrCat(r.has_value() ? rank_name : size_name, " is set but ",
                            r.has_value() ? size_name : rank_name, " is not"));
  }
  WEFT_RETURN_IF_ERROR(check_pair(rank_name, *r, size_name, *s));
  *rank = *r;
  *size = *s;
  return true;
}

absl::Status read_local(const Environment& environment, const std::string& rank_name,
                        const std::string& size_name, LaunchInfo* info) {
  WEFT_ASSIGN_OR_RETURN(info->local_known, read_pair(environment, rank_name, size_name,
                                                     &info->local_rank, &info->local_world_size));
  return absl::OkStatus();
}

// A pod of an Indexed Job whose manifest says WORLD_SIZE. Without it the pods are independent programs.
bool is_indexed_pod(const Config& config, const Environment& environment) {
  return !config.rank.has_value() && config.world_size.has_value() &&
         !text_of(environment, "JOB_COMPLETION_INDEX").empty();
}

absl::StatusOr<LaunchInfo> from_completion_index(const Config& config,
                                                 const Environment& environment) {
  LaunchInfo info;
  info.launcher = Launcher::kKubernetes;
  WEFT_ASSIGN_OR_RETURN(const OptionalInt index, number_of(environment, "JOB_COMPLETION_INDEX"));
  info.rank = *index;
  info.world_size = *config.world_size;
  WEFT_RETURN_IF_ERROR(
      check_pair("JOB_COMPLETION_INDEX", info.rank, "WORLD_SIZE", info.world_size));
  info.local_known = true;
  info.node_rank = info.rank;
  info.node_count = info.world_size;
  info.nodes_known = true;
  info.master_addr = config.master_addr;
  info.master_port = config.master_port.value_or(0);
  info.job_key = config.job_id;
  if (info.job_key.empty() && !info.master_addr.empty() && info.master_port != 0) {
    info.job_key = absl::StrCat("kubernetes-", info.master_addr, "-", info.master_port);
  }
  return info;
}

// RANK and its companions, which are keys of the configuration.
absl::StatusOr<LaunchInfo> from_rank(const Config& config, const Environment& environment) {
  LaunchInfo info;
  if (!config.rank.has_value()) return bad("WORLD_SIZE is set but RANK is not");
  if (!config.world_size.has_value()) return bad("RANK is set but WORLD_SIZE is not");
  info.rank = *config.rank;
  info.world_size = *config.world_size;
  WEFT_RETURN_IF_ERROR(check_pair("RANK", info.rank, "WORLD_SIZE", info.world_size));
  if (config.local_world_size.has_value()) {
    if (!config.local_rank.has_value()) return bad("LOCAL_WORLD_SIZE is set but LOCAL_RANK is not");
    WEFT_RETURN_IF_ERROR(
        check_pair("LOCAL_RANK", *config.local_rank, "LOCAL_WORLD_SIZE", *config.local_world_size));
    info.local_world_size = *config.local_world_size;
    info.local_known = true;
  }
  if (config.local_rank.has_value()) {
    info.local_rank = *config.local_rank;
    if (!info.local_known) info.local_world_size = info.local_rank + 1;
  }
  if (config.group_rank.has_value() && config.group_world_size.has_value()) {
    WEFT_RETURN_IF_ERROR(
        check_pair("GROUP_RANK", *config.group_rank, "GROUP_WORLD_SIZE", *config.group_world_size));
    info.node_rank = *config.group_rank;
    info.node_count = *config.group_world_size;
    info.nodes_known = true;
  }
  info.master_addr = config.master_addr;
  info.master_port = config.master_port.value_or(0);
  const std::string run_id = text_of(environment, "TORCHELASTIC_RUN_ID");
  if (!config.job_id.empty()) {
    info.launcher = Launcher::kWeftrun;
    info.job_key = config.job_id;
    WEFT_ASSIGN_OR_RETURN(const OptionalInt restarts, number_of(environment, "WEFT_RESTART_COUNT"));
    info.restart_count = restarts.value_or(0);
  } else if (!run_id.empty()) {
    info.launcher = Launcher::kTorchrun;
    WEFT_ASSIGN_OR_RETURN(const OptionalInt restarts,
                          number_of(environment, "TORCHELASTIC_RESTART_COUNT"));
    info.restart_count = restarts.value_or(0);
    info.agent_store = text_of(environment, "TORCHELASTIC_USE_AGENT_STORE") == "True";
    // The run id alone may be "none"; no other job has this port now.
    info.job_key = absl::StrCat("torchrun-", run_id, "-", info.master_addr, "-", info.master_port,
                                "-", info.restart_count);
  } else {
    info.launcher = Launcher::kByHand;
    if (!info.master_addr.empty() && info.master_port != 0) {
      info.job_key = absl::StrCat("env-", info.master_addr, "-", info.master_port);
    }
  }
  return info;
}

// Slurm's counts per node, "2(x3),1": the one of node `node`, or 0.
int tasks_on_node(const std::string& list, int node) {
  for (const absl::string_view part : absl::StrSplit(list, ',')) {
    const std::pair<absl::string_view, absl::string_view> halves =
        absl::StrSplit(part, absl::MaxSplits("(x", 1));
    int count = 0;
    int times = 1;
    if (!absl::SimpleAtoi(halves.first, &count)) return 0;
    if (!halves.second.empty() &&
        !absl::SimpleAtoi(halves.second.substr(0, halves.second.size() - 1), &times)) {
      return 0;
    }
    if (node < times) return count;
    node -= times;
  }
  return 0;
}

absl::Status fill_slurm(const Environment& environment, LaunchInfo* info) {
  info->launcher = Launcher::kSlurm;
  WEFT_ASSIGN_OR_RETURN(const OptionalInt node, number_of(environment, "SLURM_NODEID"));
  WEFT_ASSIGN_OR_RETURN(OptionalInt nodes, number_of(environment, "SLURM_STEP_NUM_NODES"));
  if (!nodes.has_value()) {
    WEFT_ASSIGN_OR_RETURN(nodes, number_of(environment, "SLURM_NNODES"));
  }
  if (node.has_value() && nodes.has_value()) {
    WEFT_RETURN_IF_ERROR(check_pair("SLURM_NODEID", *node, "the number of Slurm nodes", *nodes));
    info->node_rank = *node;
    info->node_count = *nodes;
    info->nodes_known = true;
  }
  WEFT_ASSIGN_OR_RETURN(const OptionalInt local, number_of(environment, "SLURM_LOCALID"));
  if (local.has_value()) {
    info->local_rank = *local;
    info->local_world_size = *local + 1;
    int count = tasks_on_node(text_of(environment, "SLURM_STEP_TASKS_PER_NODE"), info->node_rank);
    if (count == 0) {
      WEFT_ASSIGN_OR_RETURN(const OptionalInt each,
                            number_of(environment, "SLURM_NTASKS_PER_NODE"));
      count = each.value_or(0);
    }
    if (count > 0) {
      WEFT_RETURN_IF_ERROR(
          check_pair("SLURM_LOCALID", *local, "the number of tasks on the node", count));
      info->local_world_size = count;
      info->local_known = true;
    }
  }
  const std::string job = text_of(environment, "SLURM_JOB_ID");
  if (!job.empty()) {
    info->job_key = absl::StrCat("slurm-", job, "-", text_of(environment, "SLURM_STEP_ID"));
  }
  info->master_addr = first_slurm_host(text_of(environment, "SLURM_STEP_NODELIST"));
  return absl::OkStatus();
}

// A step of srun; false outside of one.
absl::StatusOr<bool> read_slurm(const Environment& environment, LaunchInfo* info) {
  const bool in_step = !text_of(environment, "SLURM_STEP_NUM_TASKS").empty();
  if (!in_step && text_of(environment, "SLURM_STEP_ID").empty()) return false;
  return read_pair(environment, "SLURM_PROCID", in_step ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS",
                   &info->rank, &info->world_size);
}

}  // namespace

std::string_view launcher_name(Launcher launcher) {
  switch (launcher) {
    case Launcher::kNone: return "no launcher";
    case Launcher::kWeftrun: return "weftrun";
    case Launcher::kTorchrun: return "torchrun";
    case Launcher::kByHand: return "RANK and WORLD_SIZE";
    case Launcher::kOpenMpi: return "Open MPI";
    case Launcher::kPmi: return "PMI";
    case Launcher::kSlurm: return "Slurm";
    case Launcher::kKubernetes: return "Kubernetes";
  }
  return "unknown";
}

absl::StatusOr<LaunchInfo> launch_info(const Config& config, const Environment& environment) {
  if (is_indexed_pod(config, environment)) return from_completion_index(config, environment);
  if (config.rank.has_value() || config.world_size.has_value()) {
    return from_rank(config, environment);
  }
  LaunchInfo info;
  info.master_addr = config.master_addr;
  info.master_port = config.master_port.value_or(0);
  WEFT_ASSIGN_OR_RETURN(const bool open_mpi,
                        read_pair(environment, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                  &info.rank, &info.world_size));
  if (open_mpi) {
    info.launcher = Launcher::kOpenMpi;
    WEFT_RETURN_IF_ERROR(
        read_local(environment, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", &info));
    const std::string space = text_of(environment, "PMIX_NAMESPACE");
    if (!space.empty()) info.job_key = absl::StrCat("ompi-", space);
    return info;
  }

  LaunchInfo slurm;
  WEFT_ASSIGN_OR_RETURN(const bool in_slurm, read_slurm(environment, &slurm));
  WEFT_ASSIGN_OR_RETURN(
      const bool pmi, read_pair(environment, "PMI_RANK", "PMI_SIZE", &info.rank, &info.world_size));
  // srun with its PMI plugin sets both alike, and then Slurm knows more.
  if (pmi && !(in_slurm && slurm.rank == info.rank && slurm.world_size == info.world_size)) {
    info.launcher = Launcher::kPmi;
    WEFT_RETURN_IF_ERROR(read_local(environment, "MPI_LOCALRANKID", "MPI_LOCALNRANKS", &info));
    return info;
  }
  if (in_slurm) {
    WEFT_RETURN_IF_ERROR(fill_slurm(environment, &slurm));
    if (!config.master_addr.empty()) slurm.master_addr = config.master_addr;
    slurm.master_port = config.master_port.value_or(0);
    return slurm;
  }
  info.local_known = true;
  info.nodes_known = true;
  return info;
}

std::string first_slurm_host(std::string_view list) {
  const size_t bracket = list.find('[');
  const size_t comma = list.find(',');
  if (bracket == std::string_view::npos || comma < bracket) {
    return std::string(list.substr(0, comma));
  }
  const std::string_view rest = list.substr(bracket + 1);
  const size_t end = rest.find_first_of(",-]");
  const size_t close = rest.find(']');
  if (close == std::string_view::npos) return "";
  std::string host(list.substr(0, bracket));
  host.append(rest.substr(0, end));
  // What follows the bracket belongs to the name: "n[1-2]-ib".
  const std::string_view tail = rest.substr(close + 1);
  const size_t tail_end = tail.find_first_of(",[");
  if (tail_end != std::string_view::npos && tail[tail_end] == '[') return "";
  host.append(tail.substr(0, tail_end));
  return host;
}

}  // namespace weft
