#ifndef WEFT_COMMON_TRACE_CONTEXT_H_
#define WEFT_COMMON_TRACE_CONTEXT_H_

// TraceContext: where a call stands in a trace that may have begun outside of weft, in a web server,
// say. Source: W3C Trace Context, level 1 (https://www.w3.org/TR/trace-context-1/). A value type and
// pure functions; any thread.

#include <cstdint>
#include <string>
#include <string_view>

#include "weft/common/api.h"
#include "weft/common/error.h"

namespace weft {

struct TraceContext {
  // The id of the trace: 128 bits. Both 0: no trace.
  uint64_t trace_high = 0;
  uint64_t trace_low = 0;
  uint64_t span_id = 0;  // of the span whose children begin here; not 0 in a trace
  uint8_t flags = 0;     // bit 0: the trace is being recorded

  bool empty() const { return trace_high == 0 && trace_low == 0; }  // no trace
  bool sampled() const { return (flags & 1) != 0; }                 // the trace is being recorded
  WEFT_API std::string trace_id() const;                            // 32 hexadecimal digits
  // "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"; empty when there is no trace.
  WEFT_API std::string traceparent() const;

  friend bool operator==(const TraceContext&, const TraceContext&) = default;
};

// Reads a `traceparent` header. Of a version after 00 it takes what version 00 has, as the standard
// asks for. Error, kind invalid_argument: says what is wrong with the text.
WEFT_API StatusOr<TraceContext> parse_traceparent(std::string_view text);

// 16 hexadecimal digits: a span's id as others write it.
WEFT_API std::string span_text(uint64_t span_id);

}  // namespace weft

#endif  // WEFT_COMMON_TRACE_CONTEXT_H_
