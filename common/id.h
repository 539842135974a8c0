#ifndef WEFT_COMMON_ID_H_
#define WEFT_COMMON_ID_H_

// Typed ids: numbers that cannot be mixed up. Value types; any thread.
//
//   WorkerId w(3);          to_string(w) == "3"
//   Incarnation i(0xbeef);  to_string(i) == "000000000000beef"
//   JobId j = random_job_id(runtime.random());   // 32 hex digits
//
// They compare, order and hash (std::hash and absl::Hash). No order that a trace can see may come
// from a hash; iterate ordered containers.

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "weft/common/api.h"

namespace weft {

class Random;  // common/runtime.h

template <class Tag>  // a number that is one kind of id
class Id {
 public:
  using Rep = typename Tag::Rep;  // the integer behind it

  constexpr Id() = default;
  constexpr explicit Id(Rep value) : value_(value) {}  // explicit: ids of two kinds never mix

  constexpr Rep value() const { return value_; }  // the integer
  friend constexpr auto operator<=>(Id, Id) = default;

  template <class H>
  friend H AbslHashValue(H h, Id id) {  // NOLINT(readability-identifier-naming): Abseil's hook
    return H::combine(std::move(h), id.value_);
  }

 private:
  Rep value_ = 0;
};

// A worker's number in its job: dense from 0, reused only by a worker that takes the same name.
struct WorkerIdTag {
  using Rep = uint32_t;  // ranks and drawn numbers
};
using WorkerId = Id<WorkerIdTag>;

// One life of a worker: random, never 0, so that a restarted worker is not taken for the old one.
struct IncarnationTag {
  using Rep = uint64_t;  // 64 random bits
};
using Incarnation = Id<IncarnationTag>;

// A call, unique for the caller's incarnation. 0 is no call.
struct CallIdTag {
  using Rep = uint64_t;  // counts up
};
using CallId = Id<CallIdTag>;

// A job: 128 random bits, equal for all its workers. Zero is no job.
class WEFT_API JobId {
 public:
  constexpr JobId() = default;
  constexpr JobId(uint64_t high, uint64_t low) : high_(high), low_(low) {}

  // 1 to 32 hexadecimal digits; nothing for other text.
  static std::optional<JobId> parse(std::string_view hex);

  constexpr uint64_t high() const { return high_; }                   // the first 64 bits
  constexpr uint64_t low() const { return low_; }                     // the last 64 bits
  constexpr bool is_zero() const { return high_ == 0 && low_ == 0; }  // no job
  friend constexpr auto operator<=>(const JobId&, const JobId&) = default;

  template <class H>
  friend H AbslHashValue(H h, const JobId& id) {  // NOLINT(readability-identifier-naming)
    return H::combine(std::move(h), id.high_, id.low_);
  }

 private:
  uint64_t high_ = 0;
  uint64_t low_ = 0;
};

WEFT_API std::string to_string(WorkerId id);      // decimal
WEFT_API std::string to_string(Incarnation id);   // 16 hexadecimal digits
WEFT_API std::string to_string(CallId id);        // decimal
WEFT_API std::string to_string(const JobId& id);  // 32 hexadecimal digits

// Never zero.
WEFT_API JobId random_job_id(Random& random);
WEFT_API Incarnation random_incarnation(Random& random);

}  // namespace weft

template <class Tag>
struct std::hash<weft::Id<Tag>> {
  size_t operator()(weft::Id<Tag> id) const noexcept {
    return std::hash<typename Tag::Rep>()(id.value());
  }
};

template <>
struct std::hash<weft::JobId> {
  size_t operator()(const weft::JobId& id) const noexcept {
    // The bits are random already: mixing them once is enough.
    return static_cast<size_t>(id.high() * 0x9e3779b97f4a7c15u ^ id.low());
  }
};

#endif  // WEFT_COMMON_ID_H_
