// What a rank of weft::spawn leaves for the process that started it: whether its function began, and
// how it ended.
#ifndef WEFT_STORE_INTERNAL_LAUNCH_SPAWN_REPORT_H_
#define WEFT_STORE_INTERNAL_LAUNCH_SPAWN_REPORT_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "weft/common/error.h"
#include "weft/common/files.h"

namespace weft::launch {

struct SpawnReport {
  int64_t at_ns = 0;  // on the machine's monotonic clock
  int exit_code = 0;  // of the process
  Status status;      // OK: the function has returned 0
};

// In the call's private directory. Threads: any.
class SpawnReports {
 public:
  // `files` outlives the object.
  SpawnReports(Files* files, std::string directory)
      : files_(files), directory_(std::move(directory)) {}

  // In the rank itself.
  Status begin(int rank);
  bool begun(int rank);
  Status end(int rank, const SpawnReport& report);

  // In the process that has started it. not_found: the rank has ended without a report.
  StatusOr<SpawnReport> read(int rank);

 private:
  std::string path(std::string_view what, int rank) const;

  Files* const files_;
  const std::string directory_;
};

// Texts of more than 64 KiB are cut, a payload of more is left out.
std::string encode_report(const SpawnReport& report);
// Error: data_loss.
StatusOr<SpawnReport> decode_report(std::string_view bytes);

}  // namespace weft::launch

#endif  // WEFT_STORE_INTERNAL_LAUNCH_SPAWN_REPORT_H_
