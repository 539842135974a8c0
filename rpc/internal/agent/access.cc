#include "weft/rpc/internal/agent/access.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace weft::internal {

// The last '*' that was met takes one character more whenever what follows it does not fit.
bool fits(std::string_view pattern, std::string_view text) {
  size_t p = 0;
  size_t t = 0;
  size_t star = std::string_view::npos;
  size_t taken = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      taken = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++taken;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

StatusOr<Access> Access::make(const std::vector<AccessRule>& rules,
                              const std::vector<std::string>& methods) {
  Access out;
  for (const AccessRule& rule : rules) {
    bool found = false;
    for (const std::string& method : methods) {
      const bool service = !method.empty() && method[0] == '@';
      if (service && (rule.methods.empty() || rule.methods[0] != '@')) continue;
      if (!fits(rule.methods, method)) continue;
      found = true;
      std::vector<std::string>& callers = out.callers_[method];
      callers.insert(callers.end(), rule.callers.begin(), rule.callers.end());
    }
    if (!found) {
      // Silence would leave open to all what was meant to be closed.
      return make_error(ErrorKind::kInvalidArgument,
                        absl::StrCat("an access rule is about '", rule.methods,
                                     "', and no method is registered that this could be"));
    }
  }
  return out;
}

bool Access::allows(std::string_view method, std::string_view caller) const {
  if (callers_.empty()) return true;
  const auto it = callers_.find(method);
  if (it == callers_.end()) return true;
  return std::any_of(it->second.begin(), it->second.end(),
                     [&](const std::string& pattern) { return fits(pattern, caller); });
}

}  // namespace weft::internal
