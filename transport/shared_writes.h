#ifndef WEFT_TRANSPORT_SHARED_WRITES_H_
#define WEFT_TRANSPORT_SHARED_WRITES_H_

// SharedWrites: how one writer stores into memory that other cores read, again and again: plainly,
// or around the caches.
//
// A plain store to a line that another core has read first takes that line back. Between cores that
// share a cache this is cheap, and what was written is still near when it is read. Between cores of
// different caches it takes several times as long as a store around all caches, which waits for
// nothing (docs/collectives.md has figures). Threads move between cores, and a hypervisor moves the
// cores of a virtual machine, so the writer goes by how long its own plain writes take.
//
//   WRITES-1  kPatience slow plain writes one after the other, and the next kStreamed go around
//   WRITES-2  then one plain write decides: slow, and kStreamed more go around; else plain writes
//   WRITES-3  a write of less than kSmallest bytes is plain, and decides nothing
//
// Threads: one at a time.

#include <cstddef>

#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/runtime.h"

namespace weft::internal {

class WEFT_API SharedWrites {
 public:
  static constexpr size_t kSmallest = size_t{16} << 10;
  static constexpr size_t kPiece = size_t{1} << 20;
  static constexpr int kPatience = 2;
  static constexpr int kStreamed = 128;
  // A plain write that takes longer per MiB is slow. To lines that another core has read it takes 80
  // to 110 us on an EPYC within a cache domain and 450 between two, around the caches 38 in both.
  static constexpr absl::Duration kSlowMiB = absl::Microseconds(230);

  // Whether the next write goes around the caches.
  bool streams(size_t bytes) const { return bytes >= kSmallest && streamed_left_ > 0; }
  // It was made as streams() said, and took that long.
  void wrote(size_t bytes, absl::Duration took);

  // In pieces of kPiece, each as its turn has it.
  void copy(const Clock& clock, void* to, const void* from, size_t bytes);

  // Calls write(whether around the caches), which stores `bytes`.
  template <class F>
  void write(const Clock& clock, size_t bytes, F write) {
    if (bytes < kSmallest) return write(false);
    const bool around = streams(bytes);
    const absl::Time before = clock.now();
    write(around);
    wrote(bytes, clock.now() - before);
  }

 private:
  int slow_in_a_row_ = 0;  // plain writes
  int streamed_left_ = 0;
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_SHARED_WRITES_H_
