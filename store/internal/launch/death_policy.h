// Which failures of processes the job outlives: --restart and --may-die.
//
// A failure takes a restart of the process's role while one is left, then a permitted death, and ends
// the job when neither is left. Counts are of one node and one life of the job. Not thread-safe.
//
//   DeathPolicy policy(options.restarts, options.may_die);
//   DeathPolicy::Verdict verdict = policy.on_failure("ps");   // verdict.action, verdict.left
#ifndef WEFT_STORE_INTERNAL_LAUNCH_DEATH_POLICY_H_
#define WEFT_STORE_INTERNAL_LAUNCH_DEATH_POLICY_H_

#include <map>
#include <string>
#include <vector>

#include "weft/store/internal/launch/plan.h"

namespace weft::launch {

class DeathPolicy {
 public:
  enum class Action { kEndJob, kRestart, kGoOn };
  struct Verdict {
    Action action = Action::kEndJob;
    int left = 0;   // restarts or deaths of the role after this one
    int given = 0;  // as on the command line
  };

  DeathPolicy(const std::vector<RoleSpec>& restarts, const std::vector<RoleSpec>& may_die) {
    for (const RoleSpec& role : restarts) restarts_[role.name] = {role.count, role.count};
    for (const RoleSpec& role : may_die) deaths_[role.name] = {role.count, role.count};
  }

  // Takes one of what is left.
  Verdict on_failure(const std::string& role) {
    if (Allowance& restarts = restarts_[role]; restarts.left > 0) {
      return {Action::kRestart, --restarts.left, restarts.given};
    }
    if (Allowance& deaths = deaths_[role]; deaths.left > 0) {
      return {Action::kGoOn, --deaths.left, deaths.given};
    }
    return {};
  }

 private:
  struct Allowance {
    int left = 0;
    int given = 0;
  };
  std::map<std::string, Allowance> restarts_;
  std::map<std::string, Allowance> deaths_;
};

}  // namespace weft::launch

#endif  // WEFT_STORE_INTERNAL_LAUNCH_DEATH_POLICY_H_
