#ifndef WEFT_EXAMPLES_RL_REPORT_H_
#define WEFT_EXAMPLES_RL_REPORT_H_

// What the agent tells people: the curve of its returns, as a progress line (redrawn on a terminal,
// plain lines elsewhere) and as a picture. One thread.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace rl {

class LearningCurve {
 public:
  static constexpr int64_t kWindow = 100;   // episodes
  static constexpr double kSolved = 195.0;  // mean return of so many

  void add(double episode_return);
  int64_t episodes() const { return static_cast<int64_t>(returns_.size()); }
  // Mean of the last kWindow episodes, or of all when there are fewer; 0 without any.
  double mean() const { return means_.empty() ? 0 : means_.back(); }
  bool solved() const { return episodes() >= kWindow && mean() >= kSolved; }
  // A point for each episode and a line of their means.
  std::string svg(const std::string& title) const;

 private:
  std::vector<double> returns_;
  std::vector<double> means_;
};

// Throws std::runtime_error.
void write_file(const std::string& path, const std::string& text);

class ProgressLine {
 public:
  // `now` as of the worker's clock.
  explicit ProgressLine(absl::Time now);

  // Shows where learning is, as often as the place where it is shown can bear.
  void show(const LearningCurve& curve, absl::Time now);
  // The last state, and the end of the line.
  void end(const LearningCurve& curve, absl::Time now);

 private:
  void print(const LearningCurve& curve, absl::Time now);

  const bool terminal_;
  const absl::Time begun_;
  absl::Time shown_;
  int64_t printed_ = 0;  // the episode that was shown last
};

}  // namespace rl

#endif  // WEFT_EXAMPLES_RL_REPORT_H_
