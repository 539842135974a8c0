#include "weft/common/trace.h"

#include <cstring>
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

// ---- events ------------------------------------------------------------------------------------
//
// An event is kept as it came, and becomes text when the file is written: text takes as long as what the event is about.

namespace {

struct Event {
  int64_t when = 0;    // nanoseconds
  uint64_t extra = 0;  // 'X': length in nanoseconds; else the id
  int32_t thread = 0;
  char phase = 0;
  uint8_t args = 0;
};

template <class T>
void put(const T& value, std::string* out) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(value));
}
size_t size_of(std::string_view text) { return sizeof(uint32_t) + text.size(); }
void put_text(std::string_view text, std::string* out) {
  put(static_cast<uint32_t>(text.size()), out);
  out->append(text);
}
template <class T>
T take(std::string_view* in) {
  T value;
  std::memcpy(&value, in->data(), sizeof(value));
  in->remove_prefix(sizeof(value));
  return value;
}
std::string_view take_text(std::string_view* in) {
  const auto size = take<uint32_t>(in);
  const std::string_view text = in->substr(0, size);
  in->remove_prefix(size);
  return text;
}

void append_event(std::string_view* in, int rank, std::string* out) {
  const auto event = take<Event>(in);
  if (event.phase == 'M') {
    return absl::StrAppend(out, ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":", rank,
                           ",\"tid\":", event.thread,
                           ",\"args\":{\"name\":", json_quoted(take_text(in)), "}}");
  }
  const std::string_view category = take_text(in);
  const std::string_view name = take_text(in);
  absl::StrAppend(out, ",\n{\"ph\":\"", std::string(1, event.phase),
                  "\",\"cat\":", json_quoted(category), ",\"name\":", json_quoted(name),
                  ",\"ts\":", micros(event.when), ",\"pid\":", rank, ",\"tid\":", event.thread);
  if (event.phase == 'X') {
    absl::StrAppend(out, ",\"dur\":", micros(static_cast<int64_t>(event.extra)));
  } else {
    absl::StrAppend(out, ",\"id\":", id_text(event.extra));
  }
  // It binds the arrow to the work around it, not to the next one.
  if (event.phase == 'f') absl::StrAppend(out, ",\"bp\":\"e\"");
  for (int i = 0; i < event.args; ++i) {
    absl::StrAppend(out, i == 0 ? ",\"args\":{" : ",", json_quoted(take_text(in)), ":");
    if (take<bool>(in)) {
      absl::StrAppend(out, json_quoted(take_text(in)));
    } else {
      absl::StrAppend(out, take<int64_t>(in));
    }
  }
  absl::StrAppend(out, event.args > 0 ? "}}" : "}");
}

}  // namespace

bool TraceWriter::fits_locked(size_t bytes) {
  if (events_.size() + bytes <= options_.max_bytes) return true;
  ++dropped_;
  return false;
}

void TraceWriter::add(char phase, std::string_view category, std::string_view name, absl::Time when,
                      uint64_t extra, TraceArgs args) {
  size_t bytes = sizeof(Event) + size_of(category) + size_of(name);
  for (const TraceArg& arg : args) {
    bytes += size_of(arg.key) + sizeof(bool) + (arg.is_text ? size_of(arg.text) : sizeof(int64_t));
  }
  Event event{absl::ToUnixNanos(when), extra, 0, phase, static_cast<uint8_t>(args.size())};
  MutexLock lock(&mutex_);
  if (!fits_locked(bytes)) return;
  event.thread = thread_number_locked();
  put(event, &events_);
  put_text(category, &events_);
  put_text(name, &events_);
  for (const TraceArg& arg : args) {
    put_text(arg.key, &events_);
    put(arg.is_text, &events_);
    if (arg.is_text) {
      put_text(arg.text, &events_);
    } else {
      put(arg.number, &events_);
    }
  }
}

void TraceWriter::complete(std::string_view category, std::string_view name, absl::Time start,
                           absl::Duration length, TraceArgs args) {
  add('X', category, name, start, static_cast<uint64_t>(absl::ToInt64Nanoseconds(length)), args);
}

void TraceWriter::async_begin(std::string_view category, std::string_view name, uint64_t id,
                              absl::Time when, TraceArgs args) {
  add('b', category, name, when, id, args);
}

void TraceWriter::async_end(std::string_view category, std::string_view name, uint64_t id,
                            absl::Time when, TraceArgs args) {
  add('e', category, name, when, id, args);
}

void TraceWriter::flow_out(std::string_view category, std::string_view name, uint64_t id,
                           absl::Time when) {
  add('s', category, name, when, id, {});
}

void TraceWriter::flow_in(std::string_view category, std::string_view name, uint64_t id,
                          absl::Time when) {
  add('f', category, name, when, id, {});
}

void TraceWriter::name_thread(std::string_view name) {
  MutexLock lock(&mutex_);
  if (!fits_locked(sizeof(Event) + size_of(name))) return;
  put(Event{.thread = thread_number_locked(), .phase = 'M'}, &events_);
  put_text(name, &events_);
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
  std::string out = absl::StrCat(
      "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"weft_rank\":\"", options_.rank,
      "\",\"weft_dropped\":\"", dropped_, "\",\"weft_calendar_offset_us\":\"",
      micros(absl::ToInt64Nanoseconds(options_.calendar_offset)),
      "\"},\n\"traceEvents\":[\n{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":", options_.rank,
      ",\"args\":{\"name\":", json_quoted(options_.process_name), "}}");
  for (std::string_view in = events_; !in.empty();) append_event(&in, options_.rank, &out);
  return out + "\n]}\n";
}

absl::Status TraceWriter::write_file(Files* files, std::string_view path) const {
  return files->write_atomic(path, json());
}

}  // namespace weft
