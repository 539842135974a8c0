#ifndef WEFT_RPC_INTERNAL_AGENT_CALL_TRACE_H_
#define WEFT_RPC_INTERNAL_AGENT_CALL_TRACE_H_

// CallTrace: the timeline of one worker's calls, for Perfetto. Categories:
//
//   rpc    a call at its caller, from issue to completion; these overlap
//   serve  the same at its callee, from the request's arrival to the answer
//   send   the encoding and queueing of a request, on the thread that does it; an arrow leads from
//          it to
//   run    the handler, on the thread that runs it
//   bulk   a large message, from its being queued until the transport has let go of its last byte
//
// Made only when a trace is requested; otherwise its pointers are null. Threads: any.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/runtime.h"
#include "weft/common/trace.h"
#include "weft/common/trace_context.h"

namespace weft::internal {

// Calendar time minus steady time. A thread that reads two clocks may lose its processor between
// them, for milliseconds, and timelines of several workers would not fit together: so of several
// readings the one that took least counts.
WEFT_API absl::Duration calendar_offset(const Clock& steady,
                                        absl::FunctionRef<absl::Time()> calendar = absl::Now);

// The same at both ends of a call; `caller` is an incarnation.
inline uint64_t call_key(uint64_t caller, uint64_t call) {
  return caller + call * 0x9E3779B97F4A7C15u;
}
// The two spans of a call, as either end can tell. Not 0.
WEFT_API uint64_t span_of_caller(uint64_t caller, uint64_t call);
WEFT_API uint64_t span_of_callee(uint64_t caller, uint64_t call);

class CallTrace {
 public:
  // `path`: where write() puts it; "%r" stands for `id`.
  CallTrace(std::shared_ptr<Runtime> runtime, std::string_view path, const std::string& name,
            uint32_t id);

  TraceWriter* writer() { return &writer_; }
  const Clock* clock() const { return &runtime_->clock(); }
  const std::string& path() const { return path_; }
  Status write() { return writer_.write_file(&runtime_->files(), path_); }

  // `trace`: of what makes the call.
  void call_begun(uint64_t caller, uint64_t call, std::string_view method, std::string_view to,
                  size_t bytes, const TraceContext& trace);
  void call_ended(uint64_t call, std::string_view method, const Status& status);
  // `trace`: as it came with the call.
  void serve_begun(uint64_t caller, uint64_t call, std::string_view method, std::string_view from,
                   const TraceContext& trace);
  void serve_ended(uint64_t caller, uint64_t call, std::string_view method, const Status& status);
  // Inside the work at whose ends the arrow is to be. `caller` is the caller's incarnation.
  void request_out(uint64_t caller, uint64_t call, std::string_view method) {
    writer_.flow_out("rpc", method, call_key(caller, call), runtime_->now());
  }
  void request_in(uint64_t caller, uint64_t call, std::string_view method) {
    writer_.flow_in("rpc", method, call_key(caller, call), runtime_->now());
  }
  void bulk_begun(const void* message, int lane, std::string_view to, size_t bytes) {
    writer_.async_begin(
        "bulk", "message", reinterpret_cast<uintptr_t>(message), runtime_->now(),
        {{"to", to}, {"lane", int64_t{lane}}, {"bytes", static_cast<int64_t>(bytes)}});
  }
  void bulk_ended(const void* message) {
    writer_.async_end("bulk", "message", reinterpret_cast<uintptr_t>(message), runtime_->now());
  }

 private:
  const std::shared_ptr<Runtime> runtime_;
  const std::string path_;
  TraceWriter writer_;
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_AGENT_CALL_TRACE_H_
