#ifndef WEFT_COLLECTIVES_INTERNAL_GROUP_METRICS_H_
#define WEFT_COLLECTIVES_INTERNAL_GROUP_METRICS_H_

// GroupMetrics: the numbers weft_collectives_* of a worker or program, over all of its groups
// (docs/sight.md). Allocates nothing for an operation whose name it has seen before.
//
// Threads: operation_ended() by one at a time; the others by any.

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "weft/collectives/internal/link.h"
#include "weft/common/metrics.h"

namespace weft::internal {

class GroupMetrics {
 public:
  // Counts a group from here to the destructor. `metrics` may be null: then nothing is counted.
  explicit GroupMetrics(std::shared_ptr<Metrics> metrics);
  ~GroupMetrics();
  GroupMetrics(const GroupMetrics&) = delete;
  GroupMetrics& operator=(const GroupMetrics&) = delete;

  // `op`: a literal. `sent`: by the group so far; `between_hosts`: the part of it to other hosts;
  // `staged`: bytes between GPUs and host memory so far.
  void operation_ended(std::string_view op, bool ok, absl::Duration took, uint64_t bytes,
                       const Traffic& sent, const Traffic& between_hosts, uint64_t staged);
  void group_failed();

 private:
  struct Series {
    const char* op;
    Counter* operations;
    Counter* errors;
    Counter* bytes;
    Histogram* seconds;
  };
  const Series& series(std::string_view op);

  const std::shared_ptr<Metrics> metrics_;
  Gauge* groups_ = nullptr;
  Counter* failures_ = nullptr;
  Counter* messages_ = nullptr;
  Counter* sent_bytes_ = nullptr;
  Counter* far_messages_ = nullptr;
  Counter* far_bytes_ = nullptr;
  Counter* staged_bytes_ = nullptr;
  std::vector<Series> series_;
  Traffic counted_;
  Traffic counted_far_;
  uint64_t counted_staged_ = 0;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_GROUP_METRICS_H_
