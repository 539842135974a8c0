#include "weft/examples/rnn_model_parallel/text.h"

#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <vector>

#include "ATen/ops/tensor.h"

namespace rnn {
namespace {

constexpr int64_t kTime = 32;
constexpr int64_t kStreams = 16;
constexpr std::array<const char*, 4> kLicences = {
    "/usr/share/common-licenses/GPL-3", "/usr/share/common-licenses/GPL-2",
    "/usr/share/common-licenses/Apache-2.0", "/usr/share/common-licenses/LGPL-2.1"};

std::string find_licence() {
  for (const char* path : kLicences) {
    if (std::filesystem::is_regular_file(path)) return path;
  }
  throw std::invalid_argument("this system has none of " + default_texts(", ") +
                              "; name a text to learn with --text FILE");
}

}  // namespace

std::string default_texts(const std::string& separator) {
  std::string out;
  for (const char* path : kLicences) out += (out.empty() ? "" : separator) + path;
  return out;
}

Text::Text(const std::string& characters) : size_(static_cast<int64_t>(characters.size())) {
  // Numbers only for the bytes that occur, in the order in which they do.
  std::array<int64_t, 256> number{};
  number.fill(-1);
  std::vector<int64_t> ids;
  ids.reserve(characters.size());
  for (const char c : characters) {
    int64_t& id = number[static_cast<uint8_t>(c)];
    if (id < 0) id = symbols_++;
    ids.push_back(id);
  }
  const int64_t length = size_ / kStreams;
  ids.resize(length * kStreams);
  streams_ = at::tensor(ids, at::kLong).reshape({kStreams, length}).t().contiguous();
}

Chunk Text::chunk(int64_t step) const {
  // The last character of a stream is a target only.
  const int64_t chunks = (streams_.size(0) - 1) / kTime;
  const int64_t begin = step % chunks * kTime;
  return {.inputs = streams_.narrow(0, begin, kTime),
          .targets = streams_.narrow(0, begin + 1, kTime),
          .fresh = begin == 0};
}

std::string read_characters(const std::string& path) {
  const std::string from = path.empty() ? find_licence() : path;
  std::ifstream file(from, std::ios::binary);
  if (!file || std::filesystem::is_directory(from)) {
    throw std::invalid_argument("cannot read the text " + from + "; name another with --text FILE");
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

Text read_text(const std::string& path) {
  const std::string characters = read_characters(path);
  constexpr int64_t kLeast = kStreams * (kTime + 1);
  if (static_cast<int64_t>(characters.size()) < kLeast) {
    throw std::invalid_argument("the text " + path + " has " + std::to_string(characters.size()) +
                                " characters, and at least " + std::to_string(kLeast) +
                                " are needed; name a longer one with --text FILE");
  }
  return Text(characters);
}

}  // namespace rnn
