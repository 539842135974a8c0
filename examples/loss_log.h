#ifndef WEFT_EXAMPLES_LOSS_LOG_H_
#define WEFT_EXAMPLES_LOSS_LOG_H_

// The losses of a training: a line of progress now and then, the first one, and how it ended.
//
//   LossLog log(worker, /*steps=*/400, /*every=*/20);
//   for (...) log.add(loss.item<double>());   // "step 20/400  loss 3.1204  25 steps/s  ETA 15 s"
//
// The worker must outlive it. One thread.

#include <cstdint>
#include <deque>

#include "absl/time/time.h"
#include "weft/weft.h"

namespace examples {

class LossLog {
 public:
  LossLog(const weft::Worker& worker, int64_t steps, int64_t every);

  void add(double loss);
  // The loss of the very first step.
  double first() const { return first_; }
  // The mean of the last ten: single batches differ.
  double last() const;

 private:
  const weft::Worker& worker_;
  const int64_t steps_;
  const int64_t every_;
  const absl::Time begun_;
  int64_t taken_ = 0;
  double first_ = 0;
  std::deque<double> recent_;
};

}  // namespace examples

#endif  // WEFT_EXAMPLES_LOSS_LOG_H_
