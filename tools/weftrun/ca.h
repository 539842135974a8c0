// `weftrun ca`: makes and renews the credentials of a job's processes in a directory, in the form
// that `--tls DIR` takes: ca.pem, and for each process NAME.pem and NAME.key. The authority's key,
// ca.key, stays in the directory in which it was made.
//
// Any thread; two at one directory do not know of each other.
#ifndef WEFT_TOOLS_WEFTRUN_CA_H_
#define WEFT_TOOLS_WEFTRUN_CA_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace weft::launch {

struct CaOptions {
  std::string directory = {};
  // As they were given: "trainer0", or "trainer:2" for trainer0 and trainer1. Empty: those that are
  // in the directory.
  std::vector<std::string> names = {};
  int days = 90;               // how long certificates are valid, 1 to 3,650
  bool all = false;            // renew what is valid for long, too
  bool new_authority = false;  // a second authority beside the present one
  bool help = false;
};

std::string ca_usage();

// The arguments after "ca". Errors: invalid_argument, which says what is wrong with which argument.
absl::StatusOr<CaOptions> parse_ca_options(const std::vector<std::string>& args);

// Returns a line for each file that was made or kept. A certificate is renewed when less than a
// third of `days` is left of it. Files are replaced by renaming, so that a process that reads them
// sees the old or the new one. Errors name the file and the next step; certificates that were
// written before the error are valid.
absl::StatusOr<std::vector<std::string>> run_ca(const CaOptions& options, absl::Time now);

}  // namespace weft::launch

#endif  // WEFT_TOOLS_WEFTRUN_CA_H_
