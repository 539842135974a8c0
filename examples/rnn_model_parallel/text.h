#ifndef WEFT_EXAMPLES_RNN_MODEL_PARALLEL_TEXT_H_
#define WEFT_EXAMPLES_RNN_MODEL_PARALLEL_TEXT_H_

// Text: the characters of a file as numbers, cut for truncated backpropagation through time.
//
//   const Text text = read_text("LICENSE");
//   Chunk chunk = text.chunk(/*step=*/0);   // 32 steps in time of 16 places in the text at once
//
// The text is cut into 16 streams of equal length. A chunk has the next 32 characters of each; the
// one after it goes on where it ended, so a network's state can be carried over. When the streams
// are used up, chunks begin again with `fresh`.

#include <cstdint>
#include <string>

#include "ATen/core/Tensor.h"

namespace rnn {

struct Chunk {
  at::Tensor inputs;   // int64, time x stream
  at::Tensor targets;  // int64, time x stream: the character after each
  bool fresh = false;  // nothing came before it
};

class Text {
 public:
  explicit Text(const std::string& characters);

  int64_t size() const { return size_; }
  int64_t symbols() const { return symbols_; }  // different characters
  Chunk chunk(int64_t step) const;

 private:
  int64_t size_ = 0;
  int64_t symbols_ = 0;
  at::Tensor streams_;  // int64, time x stream
};

// "": the first licence that the system has. Throws std::invalid_argument: no such file, none of
// them.
std::string read_characters(const std::string& path);
// The same, also when it is too short.
Text read_text(const std::string& path);
// What that looks for.
std::string default_texts(const std::string& separator);

}  // namespace rnn

#endif  // WEFT_EXAMPLES_RNN_MODEL_PARALLEL_TEXT_H_
