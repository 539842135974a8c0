#ifndef WEFT_EXAMPLES_COMMAND_LINE_H_
#define WEFT_EXAMPLES_COMMAND_LINE_H_

// The command line of small programs: options with a value, as "--seed 7" or "--seed=7".
//
//   const CommandLine line(argc, argv, {"--steps", "--seed"});
//   if (line.help()) ...
//   options.steps = line.number("--steps", 400, 1, 100'000);
//
// All throw std::invalid_argument with a text for the user. main() of a program is
//
//   int main(int argc, char** argv) { return examples::run_main("digits", &run, argc, argv); }

#include <cstdint>
#include <cstdio>
#include <exception>
#include <map>
#include <set>
#include <stdexcept>
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

// Returns the exit code of `run`: its result, 2 after std::invalid_argument (the command line is
// wrong), 1 after any other exception. The exception's text goes to stderr, after the program's
// name. Inline, so that a program with options of another kind needs no source of this one.
inline int run_main(const char* program, int (*run)(int argc, char** argv), int argc, char** argv) {
  int code = 1;
  std::string why;
  try {
    return run(argc, argv);
  } catch (const std::invalid_argument& e) {
    code = 2;
    why = e.what();
  } catch (const std::exception& e) {
    why = e.what();
  }
  std::fprintf(stderr, "%s: %s\n", program, why.c_str());
  return code;
}

}  // namespace examples

#endif  // WEFT_EXAMPLES_COMMAND_LINE_H_
