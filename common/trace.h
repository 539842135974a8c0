#ifndef WEFT_COMMON_TRACE_H_
#define WEFT_COMMON_TRACE_H_

// TraceWriter: the timeline of one process as Chrome-trace JSON, to be opened in Perfetto or
// chrome://tracing. One file per rank.
//
//   TraceWriter* trace = worker_trace;                  // null: tracing is off, at the cost of a
//   test if (trace != nullptr) trace->async_begin("rpc", "add", id, now);     // calls that overlap
//   { TraceSpan span(trace, &clock, "codec", "decode"); ... }            // nested work of a thread
//   trace->flow_out("rpc", "add", id, now);  ...  other->flow_in("rpc", "add", id, now);  // an
//   arrow WEFT_RETURN_IF_ERROR(trace->write_file(&files, "trace.3.json"));
//
// Times are points on the worker's steady clock. Those of two processes have nothing in common, so
// the file also carries what calendar time the steady clock's zero was, for joining.
//
// Events are kept in memory, at most max_bytes of them; further ones are counted, not kept. Names
// may hold any bytes. Threads: all methods from anywhere.

#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"

namespace weft {

struct TraceOptions {             // how a timeline is made
  std::string process_name = {};  // as the timeline shows it
  int rank = 0;                   // the process's number in the timeline
  size_t max_bytes = size_t{64} << 20;
  // Calendar time minus steady time of this process.
  absl::Duration calendar_offset = absl::ZeroDuration();
};

// A detail of an event: a number or a text.
struct TraceArg {
  TraceArg(std::string_view k, int64_t v) : key(k), number(v) {}
  TraceArg(std::string_view k, std::string_view v) : key(k), text(v), is_text(true) {}

  std::string_view key;  // name of the detail
  std::string_view text;
  int64_t number = 0;
  bool is_text = false;  // text holds the value, not number
};

using TraceArgs = std::initializer_list<TraceArg>;  // details of one event

class WEFT_API TraceWriter {
 public:
  explicit TraceWriter(TraceOptions options);
  TraceWriter(const TraceWriter&) = delete;
  TraceWriter& operator=(const TraceWriter&) = delete;

  // Work of the calling thread, properly nested with its other such work.
  void complete(std::string_view category, std::string_view name, absl::Time start,
                absl::Duration length, TraceArgs args = {});
  // Work that may overlap: begin and end share category, name and id.
  void async_begin(std::string_view category, std::string_view name, uint64_t id, absl::Time when,
                   TraceArgs args = {});
  void async_end(std::string_view category, std::string_view name, uint64_t id, absl::Time when,
                 TraceArgs args = {});
  // An arrow between two pieces of complete() work, in the same or in another process: same
  // category, name and id at both ends.
  void flow_out(std::string_view category, std::string_view name, uint64_t id, absl::Time when);
  void flow_in(std::string_view category, std::string_view name, uint64_t id, absl::Time when);
  // Names the calling thread in the timeline.
  void name_thread(std::string_view name);

  // Events that were not kept because the memory was full.
  uint64_t dropped() const;
  size_t bytes() const;

  // The whole file.
  std::string json() const;
  absl::Status write_file(Files* files, std::string_view path) const;

 private:
  void add(char phase, std::string_view category, std::string_view name, absl::Time when,
           uint64_t extra, TraceArgs args);
  int thread_number_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool fits_locked(size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // else counted

  const TraceOptions options_;

  mutable Mutex mutex_;
  std::string events_ ABSL_GUARDED_BY(mutex_);
  uint64_t dropped_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::thread::id, int> threads_ ABSL_GUARDED_BY(mutex_);
};

// A complete() event for the length of a scope; nothing when `trace` is null. The strings outlive
// it.
class TraceSpan {
 public:
  TraceSpan(TraceWriter* trace, const Clock* clock, std::string_view category,
            std::string_view name)
      : trace_(trace), clock_(clock), category_(category), name_(name) {
    if (trace_ != nullptr) start_ = clock_->now();
  }
  ~TraceSpan() {
    if (trace_ != nullptr) trace_->complete(category_, name_, start_, clock_->now() - start_);
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  TraceWriter* const trace_;
  const Clock* const clock_;
  const std::string_view category_;
  const std::string_view name_;
  absl::Time start_;
};

// `text` between quotes as JSON: control bytes are escaped, what is not UTF-8 becomes U+FFFD.
WEFT_API std::string json_quoted(std::string_view text);

}  // namespace weft

#endif  // WEFT_COMMON_TRACE_H_
