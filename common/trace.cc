#include "weft/common/trace.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "weft/common/files.h"
#include "weft/common/internal/utf8.h"

namespace weft {
namespace {

// Microseconds with three decimals, without the loss of a double.
std::string micros(int64_t nanos) {
  const bool negative = nanos < 0;
  const uint64_t n = negative ? 0 - static_cast<uint64_t>(nanos) : static_cast<uint64_t>(nanos);
  return absl::StrFormat("%s%d.%03d", negative ? "-" : "", n / 1000, n % 1000);
}

std::string id_text(uint64_t id) {
  // As text: a number above 2^53 would lose digits in a JavaScript viewer.
  return absl::StrCat("\"0x", absl::Hex(id), "\"");
}

}  // namespace

std::string json_quoted(std::string_view text) {
  std::string out = "\"";
  while (!text.empty()) {
    const char c = text[0];
    const size_t length = internal::utf8_length(text);
    if (length == 0) {
      out += "\\ufffd";
      text.remove_prefix(1);
      continue;
    }
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      absl::StrAppendFormat(&out, "\\u%04x", static_cast<unsigned char>(c));
    } else {
      out.append(text.substr(0, length));
    }
    text.remove_prefix(length);
  }
  out += '"';
  return out;
}

TraceWriter::TraceWriter(TraceOptions options) : options_(std::move(options)) {}

int TraceWriter::thread_number_locked() {
  // Numbers in the order of appearance: small, and the same in each run of a simulation.
  return threads_.try_emplace(std::this_thread::get_id(), static_cast<int>(threads_.size()) + 1)
      .first->second;
}

void TraceWriter::keep_locked(std::string event) {
  if (events_.size() + event.size() > options_.max_bytes) {
    ++dropped_;
    return;
  }
  events_ += event;
}

void TraceWriter::add(char phase, std::string_view category, std::string_view name, absl::Time when,
                      std::string_view extra, TraceArgs args) {
  std::string head = absl::StrFormat(
      ",\n{\"ph\":\"%c\",\"cat\":%s,\"name\":%s,\"ts\":%s,\"pid\":%d", phase, json_quoted(category),
      json_quoted(name), micros(absl::ToUnixNanos(when)), options_.rank);
  std::string tail(extra);
  if (args.size() > 0) {
    tail += ",\"args\":{";
    bool first = true;
    for (const TraceArg& arg : args) {
      absl::StrAppend(&tail, first ? "" : ",", json_quoted(arg.key), ":",
                      arg.is_text ? json_quoted(arg.text) : absl::StrCat(arg.number));
      first = false;
    }
    tail += "}";
  }
  tail += "}";
  MutexLock lock(&mutex_);
  absl::StrAppend(&head, ",\"tid\":", thread_number_locked(), tail);
  keep_locked(std::move(head));
}

void TraceWriter::complete(std::string_view category, std::string_view name, absl::Time start,
                           absl::Duration length, TraceArgs args) {
  add('X', category, name, start,
      absl::StrCat(",\"dur\":", micros(absl::ToInt64Nanoseconds(length))), args);
}

void TraceWriter::async_begin(std::string_view category, std::string_view name, uint64_t id,
                              absl::Time when, TraceArgs args) {
  add('b', category, name, when, absl::StrCat(",\"id\":", id_text(id)), args);
}

void TraceWriter::async_end(std::string_view category, std::string_view name, uint64_t id,
                            absl::Time when, TraceArgs args) {
  add('e', category, name, when, absl::StrCat(",\"id\":", id_text(id)), args);
}

void TraceWriter::flow_out(std::string_view category, std::string_view name, uint64_t id,
                           absl::Time when) {
  add('s', category, name, when, absl::StrCat(",\"id\":", id_text(id)), {});
}

void TraceWriter::flow_in(std::string_view category, std::string_view name, uint64_t id,
                          absl::Time when) {
  // "bp":"e" binds the arrow to the work around it, not to the next one.
  add('f', category, name, when, absl::StrCat(",\"id\":", id_text(id), ",\"bp\":\"e\""), {});
}

void TraceWriter::name_thread(std::string_view name) {
  MutexLock lock(&mutex_);
  keep_locked(absl::StrCat(",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":", options_.rank,
                           ",\"tid\":", thread_number_locked(),
                           ",\"args\":{\"name\":", json_quoted(name), "}}"));
}

uint64_t TraceWriter::dropped() const {
  MutexLock lock(&mutex_);
  return dropped_;
}

size_t TraceWriter::bytes() const {
  MutexLock lock(&mutex_);
  return events_.size();
}

std::string TraceWriter::json() const {
  MutexLock lock(&mutex_);
  return absl::StrCat(
      "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"weft_rank\":\"", options_.rank,
      "\",\"weft_dropped\":\"", dropped_, "\",\"weft_calendar_offset_us\":\"",
      micros(absl::ToInt64Nanoseconds(options_.calendar_offset)),
      "\"},\n\"traceEvents\":[\n{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":", options_.rank,
      ",\"args\":{\"name\":", json_quoted(options_.process_name), "}}", events_, "\n]}\n");
}

absl::Status TraceWriter::write_file(Files* files, std::string_view path) const {
  return files->write_atomic(path, json());
}

}  // namespace weft
