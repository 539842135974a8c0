#ifndef WEFT_EXAMPLES_RL_OPTIONS_H_
#define WEFT_EXAMPLES_RL_OPTIONS_H_

// The command line of rl.

#include <cstdint>
#include <optional>
#include <string>

namespace rl {

struct Options {
  std::optional<int> observers;  // default: kObservers, or as many as were started
  uint64_t seed = 1;
  int64_t episodes = 3000;  // gives up after so many
  bool batch = true;
  std::string svg;  // "": none
  bool help = false;
};

inline constexpr int kObservers = 4;

std::string usage();
// Throws std::invalid_argument.
Options parse_options(int argc, char** argv);

}  // namespace rl

#endif  // WEFT_EXAMPLES_RL_OPTIONS_H_
