// The main of a fuzz target where libFuzzer is not: runs it once over every seed of a corpus and
// compares what it says with what is expected.
//
//   hello_fuzzer CORPUS     CORPUS is a folder, CORPUS.expected a line per seed:
//                             name: ok                          accepted
//                             name: protocol: a name of 0       refused, with this kind and words
//
// A seed without a line and a line without a seed are failures: a seed that no longer reaches what
// it stands for must not pass for one.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "weft/tests/fuzz/target.h"

namespace {

namespace fs = std::filesystem;

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

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s CORPUS\n", argv[0]);
    return 2;
  }
  const std::string corpus = argv[1];
  std::map<std::string, std::string> expected = read_expected(corpus + ".expected");
  int seeds = 0;
  int failures = 0;
  for (const auto& entry : fs::directory_iterator(corpus)) {
    const std::string name = entry.path().filename().string();
    std::ifstream in(entry.path(), std::ios::binary);
    // A heap block of the exact size, so that the address sanitizer sees a read one past the end.
    const std::vector<char> bytes((std::istreambuf_iterator<char>(in)),
                                  std::istreambuf_iterator<char>());
    const std::string said = verdict_text(fuzz_one(std::string_view(bytes.data(), bytes.size())));
    ++seeds;
    const auto row = expected.find(name);
    if (row == expected.end()) {
      std::printf("%s: nothing is expected of it; it says\n  %s\n", name.c_str(), said.c_str());
      ++failures;
    } else if (!matches(said, row->second)) {
      std::printf("%s: expected\n  %s\nbut it says\n  %s\n", name.c_str(), row->second.c_str(),
                  said.c_str());
      ++failures;
    }
    if (row != expected.end()) expected.erase(row);
  }
  for (const auto& [name, words] : expected) {
    std::printf("%s: there is no such seed (%s)\n", name.c_str(), words.c_str());
    ++failures;
  }
  std::printf("%d seeds, %d failures\n", seeds, failures);
  return seeds > 0 && failures == 0 ? 0 : 1;
}
