#ifndef WEFT_RPC_INTERNAL_AGENT_INNER_SCOPE_H_
#define WEFT_RPC_INTERNAL_AGENT_INNER_SCOPE_H_

// What TraceScope and slots change of a worker's scope on this thread. Pure; any thread.

#include <memory>

#include "weft/common/call_scope.h"

namespace weft::internal {

// A copy of the worker's innermost scope here, or a new one, for a ScopeGuard: all that is ambient on
// this thread stays around it.
inline std::shared_ptr<CallScope> inner_scope(const void* scope_key) {
  auto scope = std::make_shared<CallScope>();
  if (const CallScope* const around = find_scope(scope_key)) *scope = *around;
  scope->worker = scope_key;
  scope->outer = capture_scope();
  return scope;
}

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_AGENT_INNER_SCOPE_H_
