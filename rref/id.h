#ifndef WEFT_RREF_ID_H_
#define WEFT_RREF_ID_H_

// Names of remote references and of their forks. Value types; they compare, hash and order.

#include <cstdint>
#include <string>
#include <utility>

#include "weft/common/api.h"
#include "weft/common/id.h"

namespace weft {

// One life of a worker. The incarnation alone is unique; the id says where to send.
struct WorkerKey {
  WorkerId id;
  Incarnation incarnation;

  friend constexpr auto operator<=>(const WorkerKey&, const WorkerKey&) = default;
  template <class H>
  friend H AbslHashValue(H h, const WorkerKey& key) {  // NOLINT(readability-identifier-naming)
    return H::combine(std::move(h), key.incarnation, key.id);
  }
};

// What a worker has numbered in one of its lives: never used again. A counter of 0 is no id.
template <class Tag>
struct CreatedId {
  WorkerKey creator;
  uint64_t counter = 0;

  constexpr bool is_zero() const { return counter == 0; }
  friend constexpr auto operator<=>(const CreatedId&, const CreatedId&) = default;
  template <class H>
  friend H AbslHashValue(H h, const CreatedId& id) {  // NOLINT(readability-identifier-naming)
    return H::combine(std::move(h), id.creator, id.counter);
  }
};

// A remote object, named by the worker that created the reference.
using RRefId = CreatedId<struct RRefIdTag>;
// One worker's share in it, named by the worker that made the fork.
using ForkId = CreatedId<struct ForkIdTag>;

// Where in a program something was made; no line: not known.
struct CallSite {
  const char* file = "";
  uint32_t line = 0;
};

WEFT_API std::string to_string(const WorkerKey& key);  // "worker 2 (00000000000000ab)"
WEFT_API std::string to_string(const RRefId& id);      // "RRef 2/00000000000000ab/17"
WEFT_API std::string to_string(const ForkId& id);      // "fork 2/00000000000000ab/18"

}  // namespace weft

#endif  // WEFT_RREF_ID_H_
