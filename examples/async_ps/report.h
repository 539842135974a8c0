#ifndef WEFT_EXAMPLES_ASYNC_PS_REPORT_H_
#define WEFT_EXAMPLES_ASYNC_PS_REPORT_H_

// What the server tells people: a progress line while it trains (redrawn on a terminal, plain lines
// elsewhere), and a block at the end. One thread.

#include <string>

#include "absl/time/time.h"
#include "weft/examples/async_ps/server.h"

namespace async_ps {

class ProgressLine {
 public:
  // `now` as of the worker's clock.
  explicit ProgressLine(absl::Time now);

  // Shows where training is, as often as the place where it is shown can bear.
  void show(const Progress& progress, absl::Time now);
  // The last state, and the end of the line.
  void end(const Progress& progress, absl::Time now);
  // How often to call show().
  absl::Duration interval() const;

 private:
  void print(const Progress& progress, absl::Time now);

  const bool terminal_;
  absl::Time begun_;
  absl::Time shown_;
  bool started_ = false;
  int64_t printed_ = -1;  // the version that was shown last
};

// The updates of each trainer and the greatest staleness.
std::string closing_block(const Progress& progress, absl::Duration taken);

}  // namespace async_ps

#endif  // WEFT_EXAMPLES_ASYNC_PS_REPORT_H_
