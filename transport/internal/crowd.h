#ifndef WEFT_TRANSPORT_INTERNAL_CROWD_H_
#define WEFT_TRANSPORT_INTERNAL_CROWD_H_

// CrowdWatch: whether clearly more threads want to run on this machine than it has cores for. Then
// a poller that spins keeps others from the work that it waits for, yield or not: 8 processes on 2
// cores make a quarter more calls when theirs sleep at once (row T15 of docs/benchmarks.md).
//
// It asks the kernel for the number of runnable threads, at most once in 2 ms, and only while
// a thread wants to spin. Where the kernel does not tell, it reports no crowd. One thread.

#include <string>

#include "absl/time/time.h"
#include "weft/common/api.h"

namespace weft::internal {

class WEFT_API CrowdWatch {
 public:
  // `path`: of a file like /proc/loadavg. `cores`: 0 means those of the machine.
  explicit CrowdWatch(const std::string& path = "/proc/loadavg", int cores = 0);
  ~CrowdWatch();
  CrowdWatch(const CrowdWatch&) = delete;
  CrowdWatch& operator=(const CrowdWatch&) = delete;

  bool crowded(absl::Time now);

 private:
  int file_ = -1;
  const int cores_;
  absl::Time next_ = absl::InfinitePast();
  double running_;  // moving average
  bool crowded_ = false;
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_CROWD_H_
