#include "weft/examples/rl/report.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <stdexcept>

#include "absl/strings/str_format.h"

namespace rl {
namespace {

constexpr absl::Duration kOnTerminal = absl::Milliseconds(100);
constexpr absl::Duration kElsewhere = absl::Milliseconds(500);

// The picture, in its own units.
constexpr double kWidth = 720;
constexpr double kHeight = 400;
constexpr double kLeft = 50;
constexpr double kRight = 20;
constexpr double kTop = 40;
constexpr double kBottom = 50;
constexpr double kGreatest = 200;

double y_of(double value) {
  return kHeight - kBottom - value / kGreatest * (kHeight - kTop - kBottom);
}

// A round distance between the marks of the axis: at most eight of them.
int64_t distance_of_marks(int64_t episodes) {
  int64_t distance = 10;
  for (int step = 0; episodes / distance > 8; ++step) {
    distance = step % 3 == 1 ? distance / 2 * 5 : distance * 2;
  }
  return distance;
}

}  // namespace

void LearningCurve::add(double episode_return) {
  returns_.push_back(episode_return);
  const size_t n = std::min(returns_.size(), static_cast<size_t>(kWindow));
  double sum = 0;
  for (size_t i = returns_.size() - n; i < returns_.size(); ++i) sum += returns_[i];
  means_.push_back(sum / static_cast<double>(n));
}

std::string LearningCurve::svg(const std::string& title) const {
  const auto last = static_cast<double>(std::max<int64_t>(episodes(), 1));
  const auto x_of = [&](double episode) {
    return kLeft + episode / last * (kWidth - kLeft - kRight);
  };
  std::string text = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" font-family=\"sans-serif\" "
      "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n"
      "<text x=\"%g\" y=\"22\" font-size=\"15\">%s</text>\n",
      kWidth, kHeight, kLeft, title);
  for (int value = 0; value <= static_cast<int>(kGreatest); value += 50) {
    absl::StrAppendFormat(&text,
                          "<path d=\"M%g %.1fH%g\" stroke=\"#ddd\"/>"
                          "<text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%d</text>\n",
                          kLeft, y_of(value), kWidth - kRight, kLeft - 6, y_of(value) + 4, value);
  }
  const int64_t distance = distance_of_marks(episodes());
  for (int64_t episode = 0; episode <= episodes(); episode += distance) {
    absl::StrAppendFormat(&text, "<text x=\"%.1f\" y=\"%g\" text-anchor=\"middle\">%d</text>\n",
                          x_of(static_cast<double>(episode)), kHeight - kBottom + 18, episode);
  }
  absl::StrAppendFormat(&text,
                        "<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">episode</text>\n"
                        "<path d=\"M%g %.1fH%g\" stroke=\"#2a2\" stroke-dasharray=\"6 4\"/>\n"
                        "<g fill=\"#9bd\">\n",
                        kWidth / 2, kHeight - 12, kLeft, y_of(kSolved), kWidth - kRight);
  std::string line;
  for (size_t i = 0; i < returns_.size(); ++i) {
    const double x = x_of(static_cast<double>(i + 1));
    absl::StrAppendFormat(&text, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"1.5\"/>\n", x,
                          y_of(returns_[i]));
    absl::StrAppendFormat(&line, "%.1f,%.1f ", x, y_of(means_[i]));
  }
  absl::StrAppendFormat(&text,
                        "</g>\n<polyline points=\"%s\" fill=\"none\" stroke=\"#c33\" "
                        "stroke-width=\"2\"/>\n</svg>\n",
                        line);
  return text;
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path);
}

ProgressLine::ProgressLine(absl::Time now)
    : terminal_(isatty(STDOUT_FILENO) == 1), begun_(now), shown_(now) {}

void ProgressLine::show(const LearningCurve& curve, absl::Time now) {
  if (now - shown_ < (terminal_ ? kOnTerminal : kElsewhere)) return;
  shown_ = now;
  print(curve, now);
}

void ProgressLine::end(const LearningCurve& curve, absl::Time now) {
  if (printed_ != curve.episodes()) print(curve, now);
  if (terminal_) std::fputc('\n', stdout);
  std::fflush(stdout);
}

void ProgressLine::print(const LearningCurve& curve, absl::Time now) {
  printed_ = curve.episodes();
  absl::PrintF("%sepisode %d  mean return of the last %d: %.1f  (%.1f s)%s", terminal_ ? "\r" : "",
               curve.episodes(), std::min(curve.episodes(), LearningCurve::kWindow), curve.mean(),
               absl::ToDoubleSeconds(now - begun_), terminal_ ? "\x1b[K" : "\n");
  std::fflush(stdout);
}

}  // namespace rl
