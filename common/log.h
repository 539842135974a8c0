#ifndef WEFT_COMMON_LOG_H_
#define WEFT_COMMON_LOG_H_

// Logs, and the check for our own bugs.
//
//   Logger log({.name = "trainer0", .rank = 1});
//   WEFT_LOG(log, kInfo) << "joined job " << id << " as worker " << rank;
//   Logger peer_log = log.with("peer ps0");      // names the object in every line
//   WEFT_CHECK(left >= 0) << "left=" << left;    // aborts: only for what no input can cause
//
// A line looks like
//   I1121 14:03:22.123456 4711 rpc/agent.cc:120] [trainer0/1] [peer ps0] text
// that is severity, month and day, local time, thread, place, worker name and rank, object, text.
// It is given to the sink whole and written to stderr in one write. What comes from elsewhere
// cannot forge a line: line breaks are indented and control bytes are escaped.
//
// There is no global logger: a Worker owns one. Logger is a cheap copyable handle; a default one
// drops everything. Threads: all methods from anywhere.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/mutex.h"

namespace weft {
// How grave a line is, and the least that a logger writes.
enum class Severity : uint8_t { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3, kOff = 4 };

// "debug", "info", "warning", "error", "off".
WEFT_API std::string_view severity_name(Severity severity);
WEFT_API std::optional<Severity> parse_severity(std::string_view name);

// Where lines go. write() may be called by several threads at once and must not log.
class LogSink {
 public:
  virtual ~LogSink() = default;
  // `line` ends with a line break.
  virtual void write(Severity severity, std::string_view line) = 0;
};

// Writes to the descriptor of stderr, each line with one write.
WEFT_API std::shared_ptr<LogSink> stderr_sink();

struct LoggerOptions {  // how a Logger is made
  std::string name = {};
  int rank = -1;  // unknown
  Severity level = Severity::kInfo;
  std::shared_ptr<LogSink> sink = nullptr;    // null: stderr_sink()
  std::function<absl::Time()> now = nullptr;  // calendar time; null: the system's
};

class WEFT_API Logger {
 public:
  // Drops everything.
  Logger() = default;
  explicit Logger(LoggerOptions options);

  // The same logger; its lines also name `object`.
  Logger with(std::string_view object) const;

  bool enabled(Severity severity) const {  // whether a line would be written
    return core_ != nullptr && severity >= core_->level.load(std::memory_order_relaxed);
  }
  // For this logger and all that were made from it by with() or by copying.
  void set_level(Severity level) const;
  // Known only after joining.
  void set_identity(std::string_view name, int rank) const;

  // Called by WEFT_LOG.
  void write(Severity severity, const char* file, int line, std::string_view text) const;

 private:
  struct Core {
    std::atomic<Severity> level;
    std::shared_ptr<LogSink> sink;
    std::function<absl::Time()> now;
    Mutex mutex;
    std::shared_ptr<const std::string> identity ABSL_GUARDED_BY(mutex);  // "[trainer0/1] "
  };
  std::shared_ptr<Core> core_;
  std::string object_;  // "[peer ps0] "
};

// Lets a repeated line through once per interval.
//
//   if (auto pass = throttle.pass(clock.now())) WEFT_LOG(log, kWarning) << "slow" << *pass;
class WEFT_API LogThrottle {
 public:
  explicit LogThrottle(absl::Duration interval)
      : interval_ns_(absl::ToInt64Nanoseconds(interval)) {}

  // How often it was asked in vain since it last let through.
  struct Pass {
    uint64_t suppressed = 0;  // lines since the last pass
  };
  // Nothing when the last line was less than the interval ago. `now` on any steady clock.
  std::optional<Pass> pass(absl::Time now);

 private:
  const int64_t interval_ns_;
  std::atomic<int64_t> next_ns_{INT64_MIN};
  std::atomic<uint64_t> suppressed_{0};
};

namespace internal {

// Collects the text of a line. Takes strings, numbers, bool, Status, times, and what has
// to_string().
class WEFT_API LineText {
 public:
  template <class T>
  LineText& operator<<(const T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      text_ += value ? "true" : "false";
    } else if constexpr (std::is_convertible_v<const T&, std::string_view>) {
      text_ += std::string_view(value);
    } else if constexpr (std::is_same_v<T, absl::Status>) {
      append(value);
    } else if constexpr (std::is_same_v<T, absl::Duration>) {
      append(value);
    } else if constexpr (std::is_same_v<T, LogThrottle::Pass>) {
      if (value.suppressed > 0) absl::StrAppend(&text_, " (", value.suppressed, " more like this)");
    } else if constexpr (requires { to_string(value); }) {
      text_ += to_string(value);
    } else {
      absl::StrAppend(&text_, value);
    }
    return *this;
  }
  const std::string& text() const { return text_; }

 private:
  void append(const absl::Status& status);
  void append(absl::Duration duration);

  std::string text_;
};

class WEFT_API LogLine : public LineText {
 public:
  LogLine(const Logger& logger, Severity severity, const char* file, int line)
      : logger_(logger), severity_(severity), file_(file), line_(line) {}
  ~LogLine() { logger_.write(severity_, file_, line_, text()); }

 private:
  const Logger& logger_;
  const Severity severity_;
  const char* const file_;
  const int line_;
};

// Makes WEFT_LOG one expression of type void, whatever was streamed.
struct Discard {
  void operator&(const LineText&) const {}
};

// Writes its text to stderr and aborts.
class WEFT_API CheckFailure : public LineText {
 public:
  CheckFailure(const char* file, int line, const char* condition);
  [[noreturn]] ~CheckFailure();
};

}  // namespace internal
}  // namespace weft

// `severity` is one of kDebug, kInfo, kWarning, kError. What follows is evaluated only when
// enabled.
#define WEFT_LOG(logger, severity)              \
  !(logger).enabled(::weft::Severity::severity) \
      ? static_cast<void>(0)                    \
      : ::weft::internal::Discard() &           \
            ::weft::internal::LogLine((logger), ::weft::Severity::severity, __FILE__, __LINE__)

// For our own bugs only: never reachable from what a peer, a file or a user gives.
#define WEFT_CHECK(condition) \
  while (!(condition)) ::weft::internal::CheckFailure(__FILE__, __LINE__, #condition)

#endif  // WEFT_COMMON_LOG_H_
