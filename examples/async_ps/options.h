#ifndef WEFT_EXAMPLES_ASYNC_PS_OPTIONS_H_
#define WEFT_EXAMPLES_ASYNC_PS_OPTIONS_H_

// The command line of async_ps.

#include <cstdint>
#include <string>

namespace async_ps {

struct Options {
  std::string data;  // "": beside the program, ../share/weft/digits.csv
  std::string checkpoint = "async_ps.pt";
  int64_t epochs = 30;
  uint64_t seed = 1;
  bool autograd = false;  // --mode
  bool help = false;
};

std::string usage();
// Throws std::invalid_argument.
Options parse_options(int argc, char** argv);

}  // namespace async_ps

#endif  // WEFT_EXAMPLES_ASYNC_PS_OPTIONS_H_
