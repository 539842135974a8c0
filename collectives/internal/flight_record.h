#ifndef WEFT_COLLECTIVES_INTERNAL_FLIGHT_RECORD_H_
#define WEFT_COLLECTIVES_INTERNAL_FLIGHT_RECORD_H_

// FlightRecord: the last operations of a group, to be read after a failure. Allocates
// nothing after it is made. Its owner locks.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/time/time.h"
#include "weft/common/error.h"

namespace weft::internal {

class FlightRecord {
 public:
  static constexpr uint64_t kKept = 256;

  // Returns what end() wants.
  uint64_t begin(std::string_view op, uint64_t sequence, absl::Time now);
  void end(uint64_t entry, bool ok, absl::Time now);
  // An array of objects, oldest first; times in seconds before `now`.
  std::string json(absl::Time now) const;

 private:
  struct Entry {
    std::string_view op;  // a literal
    uint64_t sequence = 0;
    absl::Time begun;
    absl::Time ended;
    enum class State : uint8_t { kUnderWay, kDone, kFailed } state = State::kUnderWay;
  };
  std::array<Entry, kKept> entries_;
  uint64_t next_ = 0;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_FLIGHT_RECORD_H_
