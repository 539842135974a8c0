#ifndef WEFT_TOOLS_WEFT_PLAN_ARGUMENTS_H_
#define WEFT_TOOLS_WEFT_PLAN_ARGUMENTS_H_

// The command line of weft-plan. What is wrong in it throws weft::Error, kind invalid_argument.
// Any thread.

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace weft::plan_tool {

inline constexpr int kExitRefused = 1;
inline constexpr int kExitUsage = 2;

struct Arguments {
  std::vector<std::string> words;
  std::map<std::string, std::string> values;
  std::set<std::string> flags;

  bool has(const std::string& name) const { return values.count(name) > 0; }
};

[[noreturn]] void usage(const std::string& what);
Arguments parse(const std::vector<std::string>& all);
// Refuses what a command does not use: it is a mistake, not a detail.
void allow(const Arguments& a, const std::string& command, const std::set<std::string>& names,
           size_t words);
int64_t number(const Arguments& a, const std::string& name, int64_t otherwise, int64_t least,
               int64_t most);
// A count that has to be given.
int size_of(const Arguments& a, const std::string& name, int most);

}  // namespace weft::plan_tool

#endif  // WEFT_TOOLS_WEFT_PLAN_ARGUMENTS_H_
