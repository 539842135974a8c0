#include "weft/rpc/internal/agent/call_trace.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"

namespace weft::internal {
namespace {

// The finaliser of SplitMix64: neighbouring calls get ids that have nothing in common.
uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  x ^= x >> 31;
  return x == 0 ? 1 : x;
}

}  // namespace

uint64_t span_of_caller(uint64_t caller, uint64_t call) { return mixed(call_key(caller, call)); }
uint64_t span_of_callee(uint64_t caller, uint64_t call) { return mixed(~call_key(caller, call)); }

absl::Duration calendar_offset(const Clock& steady, absl::FunctionRef<absl::Time()> calendar) {
  constexpr int kReadings = 16;
  absl::Duration least = absl::InfiniteDuration();
  absl::Duration offset = absl::ZeroDuration();
  for (int i = 0; i < kReadings; ++i) {
    const absl::Time before = steady.now();
    const absl::Time date = calendar();
    const absl::Duration took = steady.now() - before;
    if (took < least) {
      least = took;
      offset = date - (before + took / 2);
    }
  }
  return offset;
}

CallTrace::CallTrace(std::shared_ptr<Runtime> runtime, std::string_view path,
                     const std::string& name, uint32_t id)
    : runtime_(std::move(runtime)),
      path_(absl::StrReplaceAll(std::string(path), {{"%r", absl::StrCat(id)}})),
      writer_(
          {.process_name = name,
           .rank = static_cast<int>(id),
           // A simulation's clock has nothing to do with the calendar, and must not depend on it.
           .calendar_offset = runtime_->simulated()
                                  ? absl::ZeroDuration()
                                  : internal::calendar_offset(runtime_->clock())}) {}

void CallTrace::call_begun(uint64_t caller, uint64_t call, std::string_view method,
                           std::string_view to, size_t bytes, const TraceContext& trace) {
  const auto size = static_cast<int64_t>(bytes);
  if (trace.empty()) {
    writer_.async_begin("rpc", method, call, runtime_->now(), {{"to", to}, {"bytes", size}});
    return;
  }
  writer_.async_begin("rpc", method, call, runtime_->now(),
                      {{"to", to},
                       {"bytes", size},
                       {"trace", trace.trace_id()},
                       {"span", span_text(span_of_caller(caller, call))},
                       {"parent", span_text(trace.span_id)}});
}

void CallTrace::serve_begun(uint64_t caller, uint64_t call, std::string_view method,
                            std::string_view from, const TraceContext& trace) {
  if (trace.empty()) {
    writer_.async_begin("serve", method, call_key(caller, call), runtime_->now(), {{"from", from}});
    return;
  }
  writer_.async_begin("serve", method, call_key(caller, call), runtime_->now(),
                      {{"from", from},
                       {"trace", trace.trace_id()},
                       {"span", span_text(span_of_callee(caller, call))},
                       {"parent", span_text(trace.span_id)}});
}

void CallTrace::call_ended(uint64_t call, std::string_view method, const Status& status) {
  if (status.ok()) {
    writer_.async_end("rpc", method, call, runtime_->now());
  } else {
    writer_.async_end(
        "rpc", method, call, runtime_->now(),
        {{"error", std::string_view(status.message().data(), status.message().size())}});
  }
}

void CallTrace::serve_ended(uint64_t caller, uint64_t call, std::string_view method,
                            const Status& status) {
  if (status.ok()) {
    writer_.async_end("serve", method, call_key(caller, call), runtime_->now());
  } else {
    writer_.async_end(
        "serve", method, call_key(caller, call), runtime_->now(),
        {{"error", std::string_view(status.message().data(), status.message().size())}});
  }
}

}  // namespace weft::internal
