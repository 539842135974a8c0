#ifndef WEFT_EXAMPLES_COMMAND_LINE_H_
#define WEFT_EXAMPLES_COMMAND_LINE_H_

// The command line of small programs: options with a value, as "--seed 7" or "--seed=7".
//
//   const CommandLine line(argc, argv, {"--steps", "--seed"});
//   if (line.help()) ...
//   options.steps = line.number("--steps", 400, 1, 100'000);
//
// All throw std::invalid_argument with a text for the user.

#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace examples {

class CommandLine {
 public:
  // Options that are not in `known` are refused; --help and -h always are known.
  CommandLine(int argc, char** argv, const std::set<std::string>& known);

  bool help() const { return help_; }
  // What was given, or the default.
  int64_t number(const std::string& option, int64_t otherwise, int64_t low, int64_t high) const;
  std::string text(const std::string& option, const std::string& otherwise) const;

 private:
  std::map<std::string, std::string> given_;
  bool help_ = false;
};

}  // namespace examples

#endif  // WEFT_EXAMPLES_COMMAND_LINE_H_
