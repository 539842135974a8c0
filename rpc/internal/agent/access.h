#ifndef WEFT_RPC_INTERNAL_AGENT_ACCESS_H_
#define WEFT_RPC_INTERNAL_AGENT_ACCESS_H_

// Access: the rules of rpc/access_rule.h, put to the methods that there are. Constant; any thread.

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/rpc/access_rule.h"

namespace weft::internal {

// Whether `text` fits `pattern`, in which '*' stands for any characters, none included.
WEFT_API bool fits(std::string_view pattern, std::string_view text);

class WEFT_API Access {
 public:
  // Every worker may call every method.
  Access() = default;
  // Errors: invalid_argument for a rule that names no method of `methods`.
  static StatusOr<Access> make(const std::vector<AccessRule>& rules,
                               const std::vector<std::string>& methods);

  bool allows(std::string_view method, std::string_view caller) const;

 private:
  // Only methods that a rule names, each with the callers of all its rules.
  std::map<std::string, std::vector<std::string>, std::less<>> callers_;
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_AGENT_ACCESS_H_
