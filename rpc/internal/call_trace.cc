#include "weft/rpc/internal/call_trace.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"

namespace weft::internal {

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
    writer_.async_end("serve", method, both(caller, call), runtime_->now());
  } else {
    writer_.async_end(
        "serve", method, both(caller, call), runtime_->now(),
        {{"error", std::string_view(status.message().data(), status.message().size())}});
  }
}

}  // namespace weft::internal
