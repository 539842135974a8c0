#ifndef WEFT_COLLECTIVES_INTERNAL_FLIGHT_RECORD_H_
#define WEFT_COLLECTIVES_INTERNAL_FLIGHT_RECORD_H_

// FlightRecord: the last operations of a group, to be read after a failure. Allocates
// nothing after it is made. Its owner locks.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "weft/collectives/internal/operation_note.h"
#include "weft/common/error.h"

namespace weft::internal {

class FlightRecord {
 public:
  static constexpr uint64_t kKept = 256;

  // Returns what end() wants.
  uint64_t begin(std::string_view op, uint64_t sequence, absl::Time now);
  void end(uint64_t entry, bool ok, const OperationNote& note, absl::Time now);
  // An array of objects, oldest first; times in seconds before `now`. The operation under way has
  // what `note` says, and waits for these ranks.
  std::string json(absl::Time now, const OperationNote& note,
                   const std::vector<int>& waits_for) const;

 private:
  struct Entry {
    std::string_view op;         // a literal
    std::string_view algorithm;  // a literal
    uint64_t sequence = 0;
    uint64_t bytes = 0;
    absl::Time begun;
    absl::Time ended;
    enum class State : uint8_t { kUnderWay, kDone, kFailed } state = State::kUnderWay;
  };
  std::array<Entry, kKept> entries_;
  uint64_t next_ = 0;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_FLIGHT_RECORD_H_
