#ifndef WEFT_COMMON_WORKER_INFO_H_
#define WEFT_COMMON_WORKER_INFO_H_

// WorkerInfo: who a worker is. A value type.

#include <cstdint>
#include <string>
#include <utility>

#include "weft/common/api.h"

namespace weft {

// (name, id, incarnation): the incarnation is 64 random bits drawn each time a worker of that name
// starts, so a message meant for the one before is refused. Compares and hashes by all three. May
// be sent as an argument or a result.
struct WorkerInfo {
  std::string name;
  uint32_t id = 0;
  uint64_t incarnation = 0;

  friend bool operator==(const WorkerInfo& a, const WorkerInfo& b) {
    return a.id == b.id && a.incarnation == b.incarnation && a.name == b.name;
  }
  friend bool operator!=(const WorkerInfo& a, const WorkerInfo& b) { return !(a == b); }
  friend bool operator<(const WorkerInfo& a, const WorkerInfo& b) {
    if (a.id != b.id) return a.id < b.id;
    if (a.incarnation != b.incarnation) return a.incarnation < b.incarnation;
    return a.name < b.name;
  }
  template <class H>
  friend H AbslHashValue(H h, const WorkerInfo& info) {
    return H::combine(std::move(h), info.name, info.id, info.incarnation);
  }
};

WEFT_API std::string to_string(
    const WorkerInfo& info);  // "'ps0' (id 2, incarnation 00000000000000ab)"

}  // namespace weft

#endif  // WEFT_COMMON_WORKER_INFO_H_
