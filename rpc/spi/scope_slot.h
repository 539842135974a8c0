#ifndef WEFT_RPC_SPI_SCOPE_SLOT_H_
#define WEFT_RPC_SPI_SCOPE_SLOT_H_

// What a service keeps in the ambient CallScope of its worker: the slot that
// IncomingRequest::set_slot fills for a handler. Any thread.

#include <memory>
#include <string>

#include "weft/common/api.h"
#include "weft/common/call_scope.h"

namespace weft {

class Worker;

// By which scopes of this worker are told from those of others; null for one that left.
WEFT_API const void* scope_key_of(const Worker& worker);

// The slot in the innermost scope of that worker on this thread; null when there is none.
WEFT_API std::shared_ptr<void> find_slot(const void* scope_key, const std::string& name);

// The thread's scope with that slot filled, for a ScopeGuard.
WEFT_API ScopeRef scope_with_slot(const void* scope_key, const std::string& name,
                                  std::shared_ptr<void> value);

}  // namespace weft

#endif  // WEFT_RPC_SPI_SCOPE_SLOT_H_
