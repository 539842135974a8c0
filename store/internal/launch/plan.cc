#include "weft/store/internal/launch/plan.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "weft/store/internal/launch/system.h"

namespace weft::launch {

absl::StatusOr<std::vector<ProcessPlan>> make_plan(const Job& job, int node) {
  int world_size = 0;
  int first_rank = 0;
  std::map<std::string, int> role_size;   // over all nodes
  std::map<std::string, int> role_first;  // on the nodes before this one
  for (int i = 0; i < static_cast<int>(job.nodes.size()); ++i) {
    for (const RoleSpec& role : job.nodes[i].roles) {
      world_size += role.count;
      role_size[role.name] += role.count;
      if (i < node) {
        first_rank += role.count;
        role_first[role.name] += role.count;
      }
    }
  }
  // Over all nodes, so that every node refuses such a job, not only the one that holds the second
  // bearer.
  std::set<std::string> names;
  for (const auto& [role, size] : role_size) {
    for (int i = 0; i < size; ++i) {
      if (std::string name = absl::StrCat(role, i); !names.insert(name).second) {
        return absl::InvalidArgumentError(
            absl::StrCat("two processes would be called ", name,
                         ": choose role names that do not end in a digit"));
      }
    }
  }

  int local_size = 0;
  for (const RoleSpec& role : job.nodes[node].roles) local_size += role.count;

  std::vector<ProcessPlan> plan;
  for (const RoleSpec& role : job.nodes[node].roles) {
    for (int i = 0; i < role.count; ++i) {
      ProcessPlan process;
      process.local_rank = static_cast<int>(plan.size());
      process.rank = first_rank + process.local_rank;
      int role_rank = role_first[role.name] + i;
      process.name = absl::StrCat(role.name, role_rank);
      process.role = role.name;
      process.environment = {
          {"RANK", absl::StrCat(process.rank)},
          {"LOCAL_RANK", absl::StrCat(process.local_rank)},
          {"WORLD_SIZE", absl::StrCat(world_size)},
          {"LOCAL_WORLD_SIZE", absl::StrCat(local_size)},
          {"GROUP_RANK", absl::StrCat(node)},
          {"GROUP_WORLD_SIZE", absl::StrCat(job.nodes.size())},
          {"ROLE_RANK", absl::StrCat(role_rank)},
          {"ROLE_NAME", role.name},
          {"ROLE_WORLD_SIZE", absl::StrCat(role_size[role.name])},
          {"MASTER_ADDR", job.master_addr},
          {"MASTER_PORT", absl::StrCat(job.master_port)},
          {"WEFT_JOB_ID", job.id},
          {"WEFT_RESTART_COUNT", absl::StrCat(job.restart_count)},
          {"WEFT_STORE", job.store_url},
          {"WEFT_ROLE", role.name},
          {"WEFT_NAME", process.name},
      };
      plan.push_back(std::move(process));
    }
  }
  return plan;
}

bool is_foreign_variable(absl::string_view name) {
  static constexpr std::array<absl::string_view, 5> kPrefixes = {
      "TORCHELASTIC_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMI_", "PMIX_"};
  static constexpr std::array<absl::string_view, 9> kNames = {
      "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID",   "SLURM_NTASKS",        "SLURM_NPROCS",
      "SLURM_NNODES", "SLURM_STEP_ID", "SLURM_TASK_PID", "SLURM_STEP_NUM_TASKS"};
  for (absl::string_view prefix : kPrefixes) {
    if (absl::StartsWith(name, prefix)) return true;
  }
  for (absl::string_view known : kNames) {
    if (name == known) return true;
  }
  return false;
}

std::vector<std::string> inherited_environment(const std::string& tag,
                                               const std::vector<std::string>& dropped) {
  std::set<std::string> own(dropped.begin(), dropped.end());
  own.insert({"RANK",
              "LOCAL_RANK",
              "WORLD_SIZE",
              "LOCAL_WORLD_SIZE",
              "GROUP_RANK",
              "GROUP_WORLD_SIZE",
              "ROLE_RANK",
              "ROLE_NAME",
              "ROLE_WORLD_SIZE",
              "MASTER_ADDR",
              "MASTER_PORT",
              "WEFT_JOB_ID",
              "WEFT_RESTART_COUNT",
              "WEFT_PROCESS_RESTARTS",
              "WEFT_STORE",
              "WEFT_ROLE",
              "WEFT_NAME",
              "WEFT_SPAWN_PARENT",
              "WEFT_SPAWN_DIR",
              "WEFT_SPAWN_CALL"});
  std::vector<std::string> result;
  std::string tags = tag;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    absl::string_view text = *entry;
    absl::string_view name = text.substr(0, text.find('='));
    if (name == kTagVariable) {
      tags = absl::StrCat(text.substr(std::min(name.size() + 1, text.size())), ":", tag);
    } else if (!is_foreign_variable(name) && own.count(std::string(name)) == 0) {
      result.emplace_back(text);
    }
  }
  result.push_back(absl::StrCat(kTagVariable, "=", tags));
  return result;
}

int threads_per_process(size_t cores, int local_size) {
  return std::max(1, static_cast<int>(cores) / std::max(1, local_size));
}

std::vector<int> share_of_cores(const std::vector<int>& cores, int local_rank, int local_size) {
  if (cores.empty()) return {};
  size_t count = cores.size();
  size_t size = static_cast<size_t>(local_size);
  size_t rank = static_cast<size_t>(local_rank);
  if (count < size) return {cores[rank % count]};
  return {cores.begin() + static_cast<std::ptrdiff_t>(count * rank / size),
          cores.begin() + static_cast<std::ptrdiff_t>(count * (rank + 1) / size)};
}

}  // namespace weft::launch
