// Credentials for the processes of a job (`--tls`): made for this job alone, or given in a
// directory. Plain functions: safe on any thread.
#ifndef WEFT_TOOLS_WEFTRUN_TLS_H_
#define WEFT_TOOLS_WEFTRUN_TLS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "weft/store/internal/launch/plan.h"
#include "weft/transport/credentials.h"

namespace weft::launch {

// --tls auto: makes an authority whose key is never written, and in `directory`, which only this
// user can enter, ca.pem and for each process <name>.pem and <name>.key, bound to its name and
// rank. Adds the variables that name them.
absl::Status make_credentials(const std::string& directory, const std::string& job_id,
                              std::vector<ProcessPlan>& plan);

// --tls DIR: the same files, made by another program, and a `token` if there is one. Errors:
// not_found, naming the file that is missing.
absl::Status use_credentials(const std::string& directory, std::vector<ProcessPlan>& plan);

// weftrun's own credentials, for the meeting place of several nodes: weftrun.pem and weftrun.key.
Credentials own_credentials(const std::string& directory);

// The variables above, which a child must not inherit when --tls is given.
std::vector<std::string> tls_variables();

}  // namespace weft::launch

#endif  // WEFT_TOOLS_WEFTRUN_TLS_H_
