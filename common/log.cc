#include "weft/common/log.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "weft/common/error.h"

namespace weft {
namespace {

void write_whole(std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(STDERR_FILENO, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;  // standard error is gone, so the failure cannot be reported
    text.remove_prefix(static_cast<size_t>(n));
  }
}

class StderrSink : public LogSink {
 public:
  void write(Severity, std::string_view line) override { write_whole(line); }
};

// The path below the source root, as __FILE__ may be longer in other people's builds.
std::string_view short_file(const char* file) {
  const std::string_view path(file);
  const size_t at = path.rfind("weft/");
  return at == std::string_view::npos ? path : path.substr(at + 5);
}

void append_safe(std::string* out, std::string_view text) {
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      out->append("\n    ");
    } else if ((byte < 0x20 && c != '\t') || byte == 0x7f) {
      absl::StrAppendFormat(out, "\\x%02x", byte);
    } else {
      out->push_back(c);
    }
  }
}

std::string prefix(char letter, absl::Time now, const char* file, int line) {
  return absl::StrCat(std::string(1, letter),
                      absl::FormatTime("%m%d %H:%M:%E6S", now, absl::LocalTimeZone()), " ",
                      static_cast<int64_t>(::syscall(SYS_gettid)), " ",
                      std::string(short_file(file)), ":", line, "] ");
}

}  // namespace

std::string_view severity_name(Severity severity) {
  switch (severity) {
    case Severity::kDebug: return "debug";
    case Severity::kInfo: return "info";
    case Severity::kWarning: return "warning";
    case Severity::kError: return "error";
    case Severity::kOff: return "off";
  }
  return "unknown";
}

std::optional<Severity> parse_severity(std::string_view name) {
  for (const Severity s :
       {Severity::kDebug, Severity::kInfo, Severity::kWarning, Severity::kError, Severity::kOff}) {
    if (severity_name(s) == name) return s;
  }
  return std::nullopt;
}

std::shared_ptr<LogSink> stderr_sink() { return std::make_shared<StderrSink>(); }

Logger::Logger(LoggerOptions options) : core_(std::make_shared<Core>()) {
  core_->level = options.level;
  core_->sink = options.sink != nullptr ? std::move(options.sink) : stderr_sink();
  core_->now = options.now != nullptr ? std::move(options.now) : [] { return absl::Now(); };
  set_identity(options.name, options.rank);
}

Logger Logger::with(std::string_view object) const {
  Logger out = *this;
  out.object_.append("[");
  append_safe(&out.object_, object);
  out.object_.append("] ");
  return out;
}

void Logger::set_level(Severity level) const {
  if (core_ != nullptr) core_->level.store(level, std::memory_order_relaxed);
}

void Logger::set_identity(std::string_view name, int rank) const {
  if (core_ == nullptr) return;
  std::string text;
  if (!name.empty() || rank >= 0) {
    text = "[";
    append_safe(&text, name);
    if (rank >= 0) absl::StrAppend(&text, "/", rank);
    text += "] ";
  }
  MutexLock lock(&core_->mutex);
  core_->identity = std::make_shared<const std::string>(std::move(text));
}

void Logger::write(Severity severity, const char* file, int line, std::string_view text) const {
  if (!enabled(severity) || severity == Severity::kOff) return;
  std::shared_ptr<const std::string> identity;
  {
    MutexLock lock(&core_->mutex);
    identity = core_->identity;
  }
  std::string out = prefix("DIWE"[static_cast<int>(severity)], core_ -> now(), file, line);
  out += *identity;
  out += object_;
  append_safe(&out, text);
  out.push_back('\n');
  core_->sink->write(severity, out);
}

std::optional<LogThrottle::Pass> LogThrottle::pass(absl::Time now) {
  const int64_t now_ns = absl::ToUnixNanos(now);
  int64_t next = next_ns_.load(std::memory_order_relaxed);
  if (now_ns < next ||
      !next_ns_.compare_exchange_strong(next, now_ns + interval_ns_, std::memory_order_relaxed)) {
    suppressed_.fetch_add(1, std::memory_order_relaxed);
    return std::nullopt;
  }
  return Pass{suppressed_.exchange(0, std::memory_order_relaxed)};
}

namespace internal {

void LineText::append(const absl::Status& status) {
  // Not ToString(), which would print our packed details.
  absl::StrAppend(&text_, absl::StatusCodeToString(status.code()));
  if (status.ok()) return;
  absl::StrAppend(&text_, " (", std::string(kind_name(error_kind(status))),
                  "): ", status.message());
}
void LineText::append(absl::Duration duration) { text_ += absl::FormatDuration(duration); }

CheckFailure::CheckFailure(const char* file, int line, const char* condition) {
  *this << prefix('F', absl::Now(), file, line) << "check failed: " << condition << " ";
}

CheckFailure::~CheckFailure() {
  std::string out;
  append_safe(&out, text());
  out.push_back('\n');
  write_whole(out);
  std::abort();
}

}  // namespace internal
}  // namespace weft
