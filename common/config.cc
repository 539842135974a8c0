#include "weft/common/config.h"

#include <unistd.h>

#include <cstdlib>
#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "weft/common/error.h"
#include "weft/common/internal/text.h"

namespace weft {
namespace {

using internal::view;

// What a person typed, safe to print and not endless.
std::string quoted(std::string_view text) {
  constexpr size_t kMost = 100;
  const bool cut = text.size() > kMost;
  return absl::StrCat("'", absl::CHexEscape(view(text.substr(0, kMost))), cut ? "...'" : "'");
}

// For each type: its name, how it is written, how it is read. parse() leaves `out` alone on
// failure.

const char* type_name(const std::string&) { return "text"; }
const char* type_name(bool) { return "bool"; }
const char* type_name(int) { return "int"; }
const char* type_name(const OptionalInt&) { return "int"; }
const char* type_name(uint64_t) { return "bytes"; }
const char* type_name(absl::Duration) { return "duration"; }
const char* type_name(Severity) { return "log level"; }

const char* expectation(const std::string&) { return "text without zero bytes"; }
const char* expectation(bool) { return "1, true, yes, 0, false or no"; }
const char* expectation(int) { return "a whole number of at least 0"; }
const char* expectation(const OptionalInt&) { return "a whole number of at least 0"; }
const char* expectation(uint64_t) { return "a number of bytes such as 65536, 64KiB, 1MiB or 2GiB"; }
const char* expectation(absl::Duration) { return "a duration such as 500ms, 15s, 2m or inf"; }
const char* expectation(Severity) { return "debug, info, warning, error or off"; }

bool parse(std::string_view text, std::string* out) {
  if (text.find('\0') != std::string_view::npos) return false;
  *out = std::string(text);
  return true;
}

bool parse(std::string_view text, bool* out) {
  const std::string lower = absl::AsciiStrToLower(view(text));
  if (lower == "1" || lower == "true" || lower == "yes") {
    *out = true;
  } else if (lower == "0" || lower == "false" || lower == "no") {
    *out = false;
  } else {
    return false;
  }
  return true;
}

bool parse(std::string_view text, int* out) {
  int value = 0;
  if (!absl::SimpleAtoi(view(text), &value) || value < 0) return false;
  *out = value;
  return true;
}

bool parse(std::string_view text, OptionalInt* out) {
  int value = 0;
  if (!parse(text, &value)) return false;
  *out = value;
  return true;
}

constexpr std::pair<const char*, int> kByteUnits[] = {
    {"TiB", 40}, {"GiB", 30}, {"MiB", 20}, {"KiB", 10}, {"B", 0}};

bool parse(std::string_view text, uint64_t* out) {
  int shift = 0;
  for (const auto& [unit, unit_shift] : kByteUnits) {
    const std::string_view suffix(unit);
    if (text.size() > suffix.size() && text.substr(text.size() - suffix.size()) == suffix) {
      text.remove_suffix(suffix.size());
      shift = unit_shift;
      break;
    }
  }
  uint64_t value = 0;
  if (text.empty() || text[0] == '-' || !absl::SimpleAtoi(view(text), &value)) return false;
  if (value > std::numeric_limits<uint64_t>::max() >> shift) return false;
  *out = value << shift;
  return true;
}

bool parse(std::string_view text, absl::Duration* out) {
  absl::Duration value;
  if (!absl::ParseDuration(view(text), &value) || value < absl::ZeroDuration()) return false;
  *out = value;
  return true;
}

bool parse(std::string_view text, Severity* out) {
  const auto value = parse_severity(absl::AsciiStrToLower(view(text)));
  if (!value.has_value()) return false;
  *out = *value;
  return true;
}

std::string format(const std::string& value) { return value; }
std::string format(bool value) { return value ? "true" : "false"; }
std::string format(int value) { return absl::StrCat(value); }
std::string format(const OptionalInt& value) {
  return value.has_value() ? absl::StrCat(*value) : "";
}
std::string format(uint64_t value) {
  for (const auto& [unit, shift] : kByteUnits) {
    if (shift > 0 && value != 0 && value % (uint64_t{1} << shift) == 0) {
      return absl::StrCat(value >> shift, unit);
    }
  }
  return absl::StrCat(value);
}
std::string format(absl::Duration value) { return absl::FormatDuration(value); }
std::string format(Severity value) { return std::string(severity_name(value)); }

// Calls `visit(name, environment, help, member)` for each row until it returns true.
template <class C, class Visit>
bool any_key(C& config, Visit visit) {
#define WEFT_VISIT_KEY(type, key, value, environment, help)                                \
  if (visit(std::string_view(#key), std::string_view(environment), std::string_view(help), \
            config.key))                                                                   \
    return true;
  WEFT_CONFIG_KEYS(WEFT_VISIT_KEY)
#undef WEFT_VISIT_KEY
  return false;
}

absl::Status out_of_range(std::string_view key, std::string_view value, std::string_view expected) {
  return make_error(
      ErrorKind::kInvalidArgument,
      absl::StrCat("setting '", view(key), "' is ", view(value), ", expected ", view(expected)));
}

}  // namespace

Environment process_environment() {
  Environment out;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    out.emplace(std::string(text.substr(0, equals)), std::string(text.substr(equals + 1)));
  }
  return out;
}

absl::StatusOr<Config> Config::from_environment(const Environment& environment) {
  Config config;
  absl::Status status;
  any_key(config, [&](std::string_view name, std::string_view variable, std::string_view, auto&) {
    const auto it = environment.find(std::string(variable));
    if (it == environment.end() || it->second.empty()) return false;
    status = config.set(name, it->second);
    if (!status.ok())
      status = annotate(status, absl::StrCat("environment variable ", view(variable)));
    return !status.ok();
  });
  WEFT_RETURN_IF_ERROR(status);
  WEFT_RETURN_IF_ERROR(config.validate());
  return config;
}

absl::Status Config::set(std::string_view wanted, std::string_view text) {
  absl::Status status;
  const bool found =
      any_key(*this, [&](std::string_view name, std::string_view, std::string_view, auto& member) {
        if (name != wanted) return false;
        if (!parse(text, &member)) {
          status = make_error(ErrorKind::kInvalidArgument,
                              absl::StrCat("setting '", view(name), "' cannot be ", quoted(text),
                                           ", expected ", expectation(member)));
        }
        return true;
      });
  if (!found) {
    return make_error(ErrorKind::kNotFound, absl::StrCat("there is no setting ", quoted(wanted),
                                                         "; Config::help_text() lists them"));
  }
  return status;
}

absl::StatusOr<std::string> Config::get(std::string_view wanted) const {
  std::string text;
  const bool found = any_key(
      *this, [&](std::string_view name, std::string_view, std::string_view, const auto& member) {
        if (name != wanted) return false;
        text = format(member);
        return true;
      });
  if (!found) {
    return make_error(ErrorKind::kNotFound, absl::StrCat("there is no setting ", quoted(wanted)));
  }
  return text;
}

absl::Status Config::validate() const {
  const auto port_like = [](int p) { return p >= 0 && p <= 65535; };
  if (!port_like(port)) return out_of_range("port", format(port), "0 to 65535");
  if (master_port.has_value() && !port_like(*master_port)) {
    return out_of_range("master_port", format(master_port), "0 to 65535");
  }
  if (!port_range.empty()) {
    if (auto range = parse_port_range(port_range); !range.ok()) {
      return annotate(range.status(), "setting 'port_range'");
    }
  }
  if (heartbeat_interval <= absl::ZeroDuration() ||
      heartbeat_interval == absl::InfiniteDuration()) {
    return out_of_range("heartbeat_interval", format(heartbeat_interval), "more than 0, not inf");
  }
  if (lease < 2 * heartbeat_interval) {
    return out_of_range(
        "lease", format(lease),
        absl::StrCat("at least twice the heartbeat_interval (", format(heartbeat_interval), ")"));
  }
  if (max_blocked < 1) return out_of_range("max_blocked", format(max_blocked), "at least 1");
  if (chunk_bytes < 4096 || chunk_bytes > (uint64_t{64} << 20)) {
    return out_of_range("chunk_bytes", format(chunk_bytes), "4KiB to 64MiB");
  }
  if (inline_bytes > chunk_bytes) {
    return out_of_range("inline_bytes", format(inline_bytes),
                        absl::StrCat("at most chunk_bytes (", format(chunk_bytes), ")"));
  }
  if (max_message_bytes < chunk_bytes) {
    return out_of_range("max_message_bytes", format(max_message_bytes),
                        absl::StrCat("at least chunk_bytes (", format(chunk_bytes), ")"));
  }
  return absl::OkStatus();
}

std::vector<ConfigKey> Config::keys() {
  std::vector<ConfigKey> out;
  const Config defaults;
  any_key(defaults, [&](std::string_view name, std::string_view variable, std::string_view help,
                        const auto& member) {
    out.push_back({std::string(name), type_name(member), format(member), std::string(variable),
                   std::string(help)});
    return false;
  });
  return out;
}

std::string Config::help_text() {
  std::string out;
  for (const ConfigKey& key : keys()) {
    absl::StrAppendFormat(&out, "%s (%s, %s%s)\n    %s\n", key.environment, key.name, key.type,
                          key.default_text.empty() ? "" : ", default " + key.default_text,
                          key.help);
  }
  return out;
}

absl::StatusOr<std::pair<int, int>> parse_port_range(std::string_view text) {
  const size_t dash = text.find('-');
  int first = 0;
  int last = 0;
  if (dash == std::string_view::npos || !parse(text.substr(0, dash), &first) ||
      !parse(text.substr(dash + 1), &last) || first < 1 || last > 65535 || first > last) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat(quoted(text), " is not a range of ports such as 20000-20100"));
  }
  return std::make_pair(first, last);
}

std::vector<std::string> unknown_variables(const Environment& environment) {
  std::vector<std::string> out;
  const std::vector<ConfigKey> known = Config::keys();
  for (const auto& [variable, value] : environment) {
    if (variable.rfind("WEFT_", 0) != 0) continue;
    bool found = false;
    for (const ConfigKey& key : known) found = found || key.environment == variable;
    if (!found) out.push_back(variable);
  }
  return out;
}

}  // namespace weft
