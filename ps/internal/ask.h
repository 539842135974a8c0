#ifndef WEFT_PS_INTERNAL_ASK_H_
#define WEFT_PS_INTERNAL_ASK_H_

// Requests in bytes to the services of other workers, or of this one, awaited. Any thread that may wait.

#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/worker_info.h"

namespace weft {
class Worker;
}

namespace weft::ps::internal {

struct Question {
  WorkerInfo to{};
  std::string bytes{};
};
// All at once; their answers in the same order. `method` and `signature` are literals.
std::vector<StatusOr<std::string>> ask_all(const Worker& worker, std::string_view method,
                                           std::string_view signature,
                                           const std::vector<Question>& questions,
                                           absl::Duration deadline);
// Until `deadline`: those that get no answer within `attempt`, which doubles up to kAskTime, are asked again. For what may
// be asked twice.
inline constexpr absl::Duration kAskTime = absl::Seconds(10);
std::vector<StatusOr<std::string>> ask_all_again(const Worker& worker, std::string_view method,
                                                 std::string_view signature,
                                                 const std::vector<Question>& questions,
                                                 absl::Duration deadline,
                                                 absl::Duration attempt = kAskTime);
WEFT_API StatusOr<std::string> ask_bytes(const Worker& worker, const WorkerInfo& server,
                                         std::string_view method, std::string_view signature,
                                         const std::string& request, absl::Duration deadline);

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_ASK_H_
