#include "weft/common/trace_context.h"

#include <algorithm>
#include <optional>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace weft {
namespace {

// Version, trace, span and flags, with dashes between them.
constexpr size_t kLength = 55;

// Lower case only, as the standard has it.
std::optional<uint64_t> hex_digits(std::string_view text) {
  uint64_t out = 0;
  for (const char c : text) {
    if (c >= '0' && c <= '9') {
      out = out << 4 | static_cast<uint64_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      out = out << 4 | static_cast<uint64_t>(c - 'a' + 10);
    } else {
      return std::nullopt;
    }
  }
  return out;
}

Status wrong(std::string_view text, std::string_view why) {
  const std::string shown(text.substr(0, 2 * kLength));
  return make_error(
      ErrorKind::kInvalidArgument,
      absl::StrCat("traceparent '", absl::CHexEscape(shown), "': ", std::string(why)));
}

}  // namespace

std::string span_text(uint64_t span_id) {
  return absl::StrCat(absl::Hex(span_id, absl::kZeroPad16));
}

std::string TraceContext::trace_id() const {
  return absl::StrCat(absl::Hex(trace_high, absl::kZeroPad16),
                      absl::Hex(trace_low, absl::kZeroPad16));
}

std::string TraceContext::traceparent() const {
  if (empty()) return "";
  return absl::StrCat("00-", trace_id(), "-", span_text(span_id), "-",
                      absl::Hex(flags, absl::kZeroPad2));
}

StatusOr<TraceContext> parse_traceparent(std::string_view text) {
  if (text.size() < kLength) {
    return wrong(text, absl::StrCat("it has ", text.size(), " characters, ", kLength,
                                    " are needed: version-trace-span-flags"));
  }
  if (text[2] != '-' || text[35] != '-' || text[52] != '-') {
    return wrong(text,
                 "version, trace, span and flags have 2, 32, 16 and 2 digits, with '-' between");
  }
  const auto version = hex_digits(text.substr(0, 2));
  const auto high = hex_digits(text.substr(3, 16));
  const auto low = hex_digits(text.substr(19, 16));
  const auto span = hex_digits(text.substr(36, 16));
  const auto flags = hex_digits(text.substr(53, 2));
  if (!version || !high || !low || !span || !flags) {
    return wrong(text, "it takes digits 0 to 9 and a to f");
  }
  if (*version == 0xff) return wrong(text, "there is no version ff");
  const bool goes_on = text.size() > kLength;
  if (goes_on && (*version == 0 || text[kLength] != '-')) {
    return wrong(text,
                 absl::StrCat("it has ", text.size(), " characters, version 00 has ", kLength));
  }
  if (*high == 0 && *low == 0) return wrong(text, "the trace is 0");
  if (*span == 0) return wrong(text, "the span is 0");
  return TraceContext{*high, *low, *span, static_cast<uint8_t>(*flags)};
}

}  // namespace weft
