#ifndef WEFT_EXAMPLES_DDP_DIGITS_CURVE_H_
#define WEFT_EXAMPLES_DDP_DIGITS_CURVE_H_

// Loss and accuracy by epoch: as a picture, and as a text that a checkpoint keeps. One thread.

#include <string>
#include <vector>

namespace ddp_digits {

class Curve {
 public:
  void add(double loss, double accuracy) { points_.push_back({loss, accuracy}); }
  // The losses of the first and the last epoch; 0 without any.
  double first_loss() const { return points_.empty() ? 0 : points_.front().loss; }
  double last_loss() const { return points_.empty() ? 0 : points_.back().loss; }
  double last_accuracy() const { return points_.empty() ? 0 : points_.back().accuracy; }

  std::string text() const;
  // What text() has given; an empty curve for anything else.
  static Curve parse(const std::string& text);
  // Two lines, each with its own axis: the loss on the left, the accuracy on the right.
  std::string svg(const std::string& title) const;

 private:
  struct Point {
    double loss = 0;
    double accuracy = 0;
  };
  std::vector<Point> points_;
};

}  // namespace ddp_digits

#endif  // WEFT_EXAMPLES_DDP_DIGITS_CURVE_H_
