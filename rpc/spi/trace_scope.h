#ifndef WEFT_RPC_SPI_TRACE_SCOPE_H_
#define WEFT_RPC_SPI_TRACE_SCOPE_H_

// TraceScope: calls of a worker as parts of a trace. What is called on this thread while it lives
// carries the trace, and so do the calls that its handlers make, over any number of workers.
//
//   weft::TraceScope scope(worker, *weft::parse_traceparent(http.header("traceparent")));
//   worker.rpc_async("ps", lookup, ids);    // the handler of lookup: CallContext::trace()
//
// Each call is two spans, one of its caller and one of its callee. Timelines (JoinOptions::
// trace_file) have their ids, and tools/otlp.py gives them to a collector. Threads: a scope belongs
// to one thread.

#include "weft/common/api.h"
#include "weft/common/call_scope.h"
#include "weft/common/trace_context.h"

namespace weft {

class Worker;

class WEFT_API TraceScope {
 public:
  // An empty `trace`: calls are in no trace.
  TraceScope(const Worker& worker, const TraceContext& trace);
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  const ScopeGuard guard_;
};

// A trace that begins here, recorded (flags 01): ids by the randomness of the worker's Runtime.
// Error: the worker has left.
WEFT_API StatusOr<TraceContext> try_new_trace(const Worker& worker);
WEFT_API TraceContext new_trace(const Worker& worker);
// The trace of what this thread runs for the worker: by a TraceScope, or by the call whose handler
// runs here. Empty when there is none.
WEFT_API TraceContext current_trace(const Worker& worker);

}  // namespace weft

#endif  // WEFT_RPC_SPI_TRACE_SCOPE_H_
