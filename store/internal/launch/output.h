// What the processes write and how it reaches the terminal: whole lines, each behind the name of
// its process.
//
// A LineSplitter cuts one stream into lines, an OutputQueue (output_queue.h) writes them, a LastLines
// keeps the end for the report of a failure. Not thread-safe: all of it belongs to the main thread.
//
//   LineSplitter out([&](absl::string_view line, bool) { queue.add(absl::StrCat("[worker0] ", line,
//   "\n")); }); out.feed(bytes); out.finish();  // the partial last line
#ifndef WEFT_STORE_INTERNAL_LAUNCH_OUTPUT_H_
#define WEFT_STORE_INTERNAL_LAUNCH_OUTPUT_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace weft::launch {

// Cuts bytes into lines. "\n", "\r\n" and a lone "\r" (a progress line redrawn in place) end a
// line; every other byte passes unchanged. A line longer than `limit` bytes comes in pieces of that
// size.
class LineSplitter {
 public:
  // `line` has no line end. `continued` is true for every piece of a long line but its first.
  using Sink = std::function<void(absl::string_view line, bool continued)>;

  static constexpr size_t kDefaultLimit = 64 * 1024;

  explicit LineSplitter(Sink sink, size_t limit = kDefaultLimit);

  void feed(absl::string_view bytes);
  // Emits what stands after the last line end, if anything.
  void finish();

 private:
  Sink sink_;
  const size_t limit_;
  std::string partial_;
  bool continued_ = false;     // a piece of the current line was emitted already
  bool skip_newline_ = false;  // the last byte was '\r': a '\n' now belongs to it
};

// The last lines of one process, bounded in number and in bytes.
class LastLines {
 public:
  explicit LastLines(size_t capacity = 20);

  void add(absl::string_view line);
  std::vector<std::string> lines() const;

 private:
  const size_t capacity_;
  std::deque<std::string> lines_;
};

// "[trainer1] ", or with `color` in one of six colours chosen by `index`. `continued` marks a
// further piece of a long line: "[trainer1]+ ".
std::string line_prefix(absl::string_view name, int index, bool color, bool continued);

// True when descriptor `fd` is a terminal that understands colours and the user did not set
// NO_COLOR.
bool wants_color(int fd);

}  // namespace weft::launch

#endif  // WEFT_STORE_INTERNAL_LAUNCH_OUTPUT_H_
