#include "weft/rpc/spi/scope_slot.h"

#include <utility>

#include "weft/rpc/internal/agent/inner_scope.h"
#include "weft/rpc/internal/launch/core.h"
#include "weft/rpc/worker.h"

namespace weft {

const void* scope_key_of(const Worker& worker) {
  const auto core = lock_core(worker);
  return core == nullptr ? nullptr : core->agent().scope_key();
}

std::shared_ptr<void> find_slot(const void* scope_key, const std::string& name) {
  const CallScope* const scope = find_scope(scope_key);
  if (scope == nullptr) return nullptr;
  const auto slot = scope->slots.find(name);
  return slot == scope->slots.end() ? nullptr : slot->second;
}

ScopeRef scope_with_slot(const void* scope_key, const std::string& name,
                         std::shared_ptr<void> value) {
  const std::shared_ptr<CallScope> scope = internal::inner_scope(scope_key);
  scope->slots[name] = std::move(value);
  return scope;
}

}  // namespace weft
