#include "weft/collectives/internal/flight_record.h"

#include "absl/strings/str_join.h"
#include "weft/collectives/internal/text.h"
#include "weft/common/trace.h"

namespace weft::internal {

uint64_t FlightRecord::begin(std::string_view op, uint64_t sequence, absl::Time now) {
  Entry& at = entries_[next_ % kKept];
  at = {};
  at.op = op;
  at.sequence = sequence;
  at.begun = at.ended = now;
  return next_++;
}

void FlightRecord::end(uint64_t entry, bool ok, const OperationNote& note, absl::Time now) {
  if (next_ - entry > kKept) return;  // long over, and written over
  Entry& at = entries_[entry % kKept];
  at.algorithm = note.algorithm();
  at.bytes = note.bytes();
  at.ended = now;
  at.state = ok ? Entry::State::kDone : Entry::State::kFailed;
}

std::string FlightRecord::json(absl::Time now, const OperationNote& note,
                               const std::vector<int>& waits_for) const {
  constexpr std::string_view kStates[] = {"under way", "done", "failed"};
  std::string out = "[";
  for (uint64_t i = next_ > kKept ? next_ - kKept : 0; i < next_; ++i) {
    const Entry& one = entries_[i % kKept];
    const bool over = one.state != Entry::State::kUnderWay;
    cat_to(&out, out.size() > 1 ? "," : "", "{\"op\":", json_quoted(one.op),
           ",\"sequence\":", one.sequence,
           ",\"state\":", json_quoted(kStates[static_cast<size_t>(one.state)]),
           ",\"begun_seconds_ago\":", absl::ToDoubleSeconds(now - one.begun),
           ",\"seconds\":", absl::ToDoubleSeconds((over ? one.ended : now) - one.begun),
           ",\"algorithm\":", json_quoted(over ? one.algorithm : note.algorithm()),
           ",\"bytes\":", over ? one.bytes : note.bytes());
    if (!over) cat_to(&out, ",\"waits_for\":[", absl::StrJoin(waits_for, ","), "]");
    out += "}";
  }
  return out + "]";
}

}  // namespace weft::internal
