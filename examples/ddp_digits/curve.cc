#include "weft/examples/ddp_digits/curve.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace ddp_digits {
namespace {

// The picture, in its own units.
constexpr double kWidth = 720;
constexpr double kHeight = 400;
constexpr double kSide = 60;
constexpr double kTop = 40;
constexpr double kBottom = 50;
constexpr int kMarks = 5;

double y_of(double share) { return kHeight - kBottom - share * (kHeight - kTop - kBottom); }

}  // namespace

std::string Curve::text() const {
  std::string out;
  for (const Point& one : points_) {
    absl::StrAppendFormat(&out, "%s%.17g:%.17g", out.empty() ? "" : " ", one.loss, one.accuracy);
  }
  return out;
}

Curve Curve::parse(const std::string& text) {
  Curve out;
  const std::vector<std::string> parts = absl::StrSplit(text, ' ', absl::SkipEmpty());
  for (const std::string& part : parts) {
    const std::pair<std::string, std::string> both = absl::StrSplit(part, ':');
    Point point;
    if (!absl::SimpleAtod(both.first, &point.loss)) return {};
    if (!absl::SimpleAtod(both.second, &point.accuracy)) return {};
    out.points_.push_back(point);
  }
  return out;
}

std::string Curve::svg(const std::string& title) const {
  double most = 1e-9;
  for (const Point& one : points_) most = std::max(most, one.loss);
  const auto epochs = static_cast<double>(std::max<size_t>(points_.size(), 2) - 1);
  const auto x_of = [&](size_t epoch) {
    return kSide + static_cast<double>(epoch) / epochs * (kWidth - 2 * kSide);
  };
  std::string text = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" font-family=\"sans-serif\" "
      "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n"
      "<text x=\"%g\" y=\"22\" font-size=\"15\">%s</text>\n",
      kWidth, kHeight, kSide, title);
  for (int i = 0; i <= kMarks; ++i) {
    const double share = static_cast<double>(i) / kMarks;
    absl::StrAppendFormat(&text,
                          "<path d=\"M%g %.1fH%g\" stroke=\"#ddd\"/>"
                          "<text x=\"%g\" y=\"%.1f\" text-anchor=\"end\" fill=\"#c33\">%.2f</text>"
                          "<text x=\"%g\" y=\"%.1f\" fill=\"#27c\">%.1f</text>\n",
                          kSide, y_of(share), kWidth - kSide, kSide - 6, y_of(share) + 4,
                          share * most, kWidth - kSide + 6, y_of(share) + 4, share);
  }
  std::string losses;
  std::string accuracies;
  const size_t distance = points_.size() / 10 + 1;
  for (size_t i = 0; i < points_.size(); ++i) {
    absl::StrAppendFormat(&losses, "%.1f,%.1f ", x_of(i), y_of(points_[i].loss / most));
    absl::StrAppendFormat(&accuracies, "%.1f,%.1f ", x_of(i), y_of(points_[i].accuracy));
    if (i % distance != 0) continue;
    absl::StrAppendFormat(&text, "<text x=\"%.1f\" y=\"%g\" text-anchor=\"middle\">%d</text>\n",
                          x_of(i), kHeight - kBottom + 18, i + 1);
  }
  absl::StrAppendFormat(
      &text,
      "<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">epoch</text>\n"
      "<text x=\"%g\" y=\"%g\" text-anchor=\"middle\" fill=\"#c33\">loss</text>\n"
      "<text x=\"%g\" y=\"%g\" text-anchor=\"middle\" fill=\"#27c\">accuracy</text>\n"
      "<polyline id=\"loss\" points=\"%s\" fill=\"none\" stroke=\"#c33\" stroke-width=\"2\"/>\n"
      "<polyline id=\"accuracy\" points=\"%s\" fill=\"none\" stroke=\"#27c\" "
      "stroke-width=\"2\"/>\n</svg>\n",
      kWidth / 2, kHeight - 12, kSide, kHeight - 12, kWidth - kSide, kHeight - 12, losses,
      accuracies);
  return text;
}

}  // namespace ddp_digits
