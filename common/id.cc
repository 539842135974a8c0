#include "weft/common/id.h"

#include "absl/strings/str_cat.h"
#include "weft/common/runtime.h"

namespace weft {
namespace {

int digit_of(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

std::string hex(uint64_t value) { return absl::StrCat(absl::Hex(value, absl::kZeroPad16)); }

uint64_t nonzero(Random& random) {
  while (true) {
    if (const uint64_t value = random.next(); value != 0) return value;
  }
}

}  // namespace

std::optional<JobId> JobId::parse(std::string_view text) {
  if (text.empty() || text.size() > 32) return std::nullopt;
  uint64_t high = 0;
  uint64_t low = 0;
  for (const char c : text) {
    const int digit = digit_of(c);
    if (digit < 0) return std::nullopt;
    high = high << 4 | low >> 60;
    low = low << 4 | static_cast<uint64_t>(digit);
  }
  return JobId(high, low);
}

std::string to_string(WorkerId id) { return absl::StrCat(id.value()); }
std::string to_string(Incarnation id) { return hex(id.value()); }
std::string to_string(CallId id) { return absl::StrCat(id.value()); }
std::string to_string(const JobId& id) { return hex(id.high()) + hex(id.low()); }

JobId random_job_id(Random& random) {
  const uint64_t high = nonzero(random);
  return JobId(high, random.next());
}

Incarnation random_incarnation(Random& random) { return Incarnation(nonzero(random)); }

}  // namespace weft
