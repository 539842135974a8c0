#ifndef WEFT_TESTS_INTEGRATION_ANSWER_H_
#define WEFT_TESTS_INTEGRATION_ANSWER_H_

// How a worker of the integration tests says in one line how something ended: "ok ..." or
// "error KIND ...", and whom a word of a test means.

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "weft/common/error.h"
#include "weft/common/worker_info.h"
#include "weft/rpc/spi/destination.h"

namespace weft::integration {

inline std::string one_line(absl::string_view text) {
  return absl::StrReplaceAll(text, {{"\\", "\\\\"}, {"\n", "\\n"}});
}

inline std::string answer(const Status& status) {
  if (status.ok()) return "ok";
  return absl::StrCat("error ", std::string(kind_name(error_kind(status))), " ",
                      one_line(status.message()));
}
template <class T>
std::string answer(const StatusOr<T>& result) {
  return result.ok() ? absl::StrCat("ok ", *result) : answer(result.status());
}

// "name", "#id" or "name/id/incarnation".
Destination destination(const std::string& text);

}  // namespace weft::integration

#endif  // WEFT_TESTS_INTEGRATION_ANSWER_H_
