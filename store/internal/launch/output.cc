#include "weft/store/internal/launch/output.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"

namespace weft::launch {

LineSplitter::LineSplitter(Sink sink, size_t limit) : sink_(std::move(sink)), limit_(limit) {}

void LineSplitter::feed(absl::string_view bytes) {
  while (!bytes.empty()) {
    if (skip_newline_) {
      skip_newline_ = false;
      if (bytes.front() == '\n') {
        bytes.remove_prefix(1);
        continue;
      }
    }
    size_t end = bytes.find_first_of("\r\n");
    absl::string_view text = bytes.substr(0, end);
    // Without a line end in sight the text is kept, at most `limit_` bytes of it.
    while (partial_.size() + text.size() > limit_) {
      size_t take = limit_ - partial_.size();
      partial_.append(text.data(), take);
      text.remove_prefix(take);
      sink_(partial_, std::exchange(continued_, true));
      partial_.clear();
    }
    if (end == absl::string_view::npos) {
      partial_.append(text.data(), text.size());
      return;
    }
    bool carriage_return = bytes[end] == '\r';
    // "\r" at the start of a redrawn line ends nothing; an empty line that the program meant has a
    // "\n".
    bool redraw = carriage_return && partial_.empty() && text.empty() && !continued_ &&
                  !(end + 1 < bytes.size() && bytes[end + 1] == '\n');
    if (partial_.empty()) {
      if (!redraw) sink_(text, std::exchange(continued_, false));
    } else {
      partial_.append(text.data(), text.size());
      sink_(partial_, std::exchange(continued_, false));
      partial_.clear();
    }
    skip_newline_ = carriage_return && !redraw;
    bytes.remove_prefix(end + 1);
  }
}

void LineSplitter::finish() {
  if (!partial_.empty()) sink_(std::exchange(partial_, {}), continued_);
  continued_ = false;
  skip_newline_ = false;
}

LastLines::LastLines(size_t capacity) : capacity_(capacity) {}

void LastLines::add(absl::string_view line) {
  constexpr size_t kMaxKept = 2000;
  if (lines_.size() == capacity_) lines_.pop_front();
  if (line.size() <= kMaxKept) {
    lines_.emplace_back(line);
  } else {
    lines_.push_back(
        absl::StrCat(line.substr(0, kMaxKept), "... (", line.size() - kMaxKept, " more bytes)"));
  }
}

std::vector<std::string> LastLines::lines() const { return {lines_.begin(), lines_.end()}; }

std::string line_prefix(absl::string_view name, int index, bool color, bool continued) {
  static constexpr std::array<absl::string_view, 6> kColors = {"36", "33", "32", "35", "34", "31"};
  absl::string_view mark = continued ? "+ " : " ";
  if (!color) return absl::StrCat("[", name, "]", mark);
  return absl::StrCat("\x1b[", kColors[static_cast<size_t>(index) % kColors.size()], "m[", name,
                      "]\x1b[0m", mark);
}

bool wants_color(int fd) {
  const char* no_color = std::getenv("NO_COLOR");
  const char* term = std::getenv("TERM");
  return isatty(fd) != 0 && (no_color == nullptr || *no_color == '\0') && term != nullptr &&
         absl::string_view(term) != "dumb";
}

}  // namespace weft::launch
