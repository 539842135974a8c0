#include "weft/rpc/spi/trace_scope.h"

#include <memory>

#include "weft/rpc/internal/agent/inner_scope.h"
#include "weft/rpc/internal/launch/core.h"
#include "weft/rpc/spi/scope_slot.h"
#include "weft/rpc/worker.h"

namespace weft {
namespace {

ScopeRef scope_with_trace(const void* scope_key, const TraceContext& trace) {
  const std::shared_ptr<CallScope> scope = internal::inner_scope(scope_key);
  scope->trace = trace;
  return scope;
}

}  // namespace

TraceScope::TraceScope(const Worker& worker, const TraceContext& trace)
    : guard_(scope_with_trace(scope_key_of(worker), trace)) {}

StatusOr<TraceContext> try_new_trace(const Worker& worker) {
  const auto core = lock_core(worker);
  if (core == nullptr) {
    return make_error(ErrorKind::kState, "a trace of a worker that has left");
  }
  Random& random = core->agent().runtime()->random();
  TraceContext out{random.next(), random.next(), random.next(), 1};
  // The standard forbids these, and a draw of 64 zero bits can happen.
  if (out.empty()) out.trace_low = 1;
  if (out.span_id == 0) out.span_id = 1;
  return out;
}

TraceContext new_trace(const Worker& worker) { return value_or_throw(try_new_trace(worker)); }

TraceContext current_trace(const Worker& worker) {
  const CallScope* const scope = find_scope(scope_key_of(worker));
  return scope == nullptr ? TraceContext() : scope->trace;
}

}  // namespace weft
