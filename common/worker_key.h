#ifndef WEFT_COMMON_WORKER_KEY_H_
#define WEFT_COMMON_WORKER_KEY_H_

// WorkerKey: one life of a worker, and what it numbers in that life. Value types; they compare,
// hash and order.

#include <cstdint>
#include <string>
#include <utility>

#include "weft/common/api.h"
#include "weft/common/id.h"
#include "weft/common/worker_info.h"

namespace weft {

// The incarnation alone is unique; the id says where to send.
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
  WorkerKey creator;  // the worker that made the id
  uint64_t counter = 0;

  constexpr bool is_zero() const { return counter == 0; }  // no id
  friend constexpr auto operator<=>(const CreatedId&, const CreatedId&) = default;
  template <class H>
  friend H AbslHashValue(H h, const CreatedId& id) {  // NOLINT(readability-identifier-naming)
    return H::combine(std::move(h), id.creator, id.counter);
  }
};

inline WorkerKey key_of(const WorkerInfo& info) {  // id and incarnation
  return WorkerKey{WorkerId(info.id), Incarnation(info.incarnation)};
}

WEFT_API std::string to_string(const WorkerKey& key);  // "worker 2 (00000000000000ab)"

}  // namespace weft

#endif  // WEFT_COMMON_WORKER_KEY_H_
