// The main of a fuzz target where libFuzzer is not. Runs it once over every seed of a corpus and
// compares what it says with what is expected; then over inputs made from the seeds, and counts
// what the decoder allocates.
//
//   hello_fuzzer CORPUS     CORPUS is a folder, CORPUS.expected a line per seed:
//                             name: ok                          accepted
//                             name: protocol: a name of 0       refused, with this kind and words
//
// A seed without a line and a line without a seed are failures: a seed that no longer reaches what
// it stands for must not pass for one.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>

#include "weft/tests/fuzz/memory.h"
#include "weft/tests/fuzz/target.h"

namespace {

namespace fs = std::filesystem;

// Inputs that are made of each seed.
constexpr int kMade = 300;
constexpr size_t kMaxMadeBytes = 64 << 10;
// What a decoder makes once, and an error with its words for each message.
constexpr size_t kConstantBytes = 4 << 10;
constexpr size_t kBytesPerMessage = 2 << 10;

// By name of the seed; empty when the file cannot be read.
std::map<std::string, std::string> read_expected(const std::string& path) {
  std::map<std::string, std::string> out;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) out[line.substr(0, colon)] = line.substr(colon + 2);
  }
  return out;
}

std::string verdict_text(const weft::Status& verdict) {
  if (verdict.ok()) return "ok";
  return std::string(weft::kind_name(weft::error_kind(verdict))) + ": " +
         std::string(verdict.message());
}

// "protocol: a name of 0": the kind, and somewhere in the message the words.
bool matches(const std::string& said, const std::string& expected) {
  if (expected == "ok" || said == "ok") return said == expected;
  const size_t colon = expected.find(": ");
  if (colon == std::string::npos) return false;
  return said.rfind(expected.substr(0, colon + 2), 0) == 0 &&
         said.find(expected.substr(colon + 2), colon + 2) != std::string::npos;
}

class Replay {
 public:
  // The verdict as text.
  std::string run(const std::string& name, const std::string& input) {
    // A heap block of the exact size, so that an address sanitizer sees a read one past the end.
    const std::unique_ptr<char[]> bytes(new char[input.size()]);
    std::copy(input.begin(), input.end(), bytes.get());
    reset_decoding_memory();
    const weft::Status verdict = fuzz_one(std::string_view(bytes.get(), input.size()));
    const DecodingMemory m = decoding_memory();
    const size_t free_bytes = kConstantBytes + kBytesPerMessage * m.messages + m.charged_bytes;
    if (m.allocated_bytes > free_bytes + kMostBytesPerByte * m.input_bytes) {
      fail(name, "its decoder allocates " + std::to_string(m.allocated_bytes) + " bytes for " +
                     std::to_string(m.input_bytes) + ", of which " +
                     std::to_string(m.charged_bytes) + " were charged; it says\n  " +
                     verdict_text(verdict));
    }
    if (m.allocated_bytes > free_bytes && m.input_bytes > 0) {
      worst_ = std::max(worst_, static_cast<double>(m.allocated_bytes - free_bytes) /
                                    static_cast<double>(m.input_bytes));
    }
    ++runs_;
    return verdict_text(verdict);
  }

  void fail(const std::string& name, const std::string& why) {
    if (++failures_ <= 20) std::printf("%s: %s\n", name.c_str(), why.c_str());
  }

  int runs() const { return runs_; }
  int failures() const { return failures_; }
  double worst() const { return worst_; }

 private:
  int runs_ = 0;
  int failures_ = 0;
  double worst_ = 0;
};

// Cut, changed, and with a piece repeated: what a count is checked against must be the bytes that
// are there. The same in every run.
std::string make_input(const std::string& seed, std::mt19937* random) {
  const auto draw = [random](size_t below) { return below == 0 ? 0 : (*random)() % below; };
  std::string out = seed;
  for (size_t changes = 1 + draw(3); changes > 0; --changes) {
    const size_t at = draw(out.size());
    switch (draw(5)) {
      case 0: out.resize(at); break;
      case 1:
        if (!out.empty()) out[at] = static_cast<char>((*random)());
        break;
      case 2: out.replace(at, std::min<size_t>(10, out.size() - at), std::string(9, '\xff')); break;
      case 3: out.insert(at, 1, static_cast<char>((*random)())); break;
      default: {
        const std::string piece = out.substr(at, 1 + draw(8));
        const size_t times = draw(2000);
        if (out.size() + piece.size() * times > kMaxMadeBytes) break;
        std::string many;
        for (size_t i = 0; i < times; ++i) many += piece;
        out.insert(at, many);
      }
    }
  }
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s CORPUS\n", argv[0]);
    return 2;
  }
  const std::string corpus = argv[1];
  std::map<std::string, std::string> expected = read_expected(corpus + ".expected");
  std::map<std::string, std::string> seeds;
  for (const auto& entry : fs::directory_iterator(corpus)) {
    std::ifstream in(entry.path(), std::ios::binary);
    seeds[entry.path().filename().string()] =
        std::string(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  Replay replay;
  for (const auto& [name, bytes] : seeds) (void)fuzz_one(bytes);  // what is made once
  for (const auto& [name, bytes] : seeds) {
    const std::string said = replay.run(name, bytes);
    const auto row = expected.find(name);
    if (row == expected.end()) {
      replay.fail(name, "nothing is expected of it; it says\n  " + said);
      continue;
    }
    if (!matches(said, row->second)) {
      replay.fail(name, "expected\n  " + row->second + "\nbut it says\n  " + said);
    }
    expected.erase(row);
  }
  for (const auto& [name, words] : expected) replay.fail(name, "there is no such seed: " + words);
  std::mt19937 random(1);
  for (const auto& [name, bytes] : seeds) {
    for (int i = 0; i < kMade; ++i) {
      (void)replay.run(name + " changed, number " + std::to_string(i), make_input(bytes, &random));
    }
  }
  std::printf(
      "%zu seeds, %d runs, %d failures; at most %.1f bytes allocated per byte, %zu allowed\n",
      seeds.size(), replay.runs(), replay.failures(), replay.worst(), kMostBytesPerByte);
  return !seeds.empty() && replay.failures() == 0 ? 0 : 1;
}
