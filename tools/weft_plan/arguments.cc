#include "weft/tools/weft_plan/arguments.h"

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "weft/common/error.h"

namespace weft::plan_tool {

void usage(const std::string& what) {
  throw_error(make_error(ErrorKind::kInvalidArgument,
                         absl::StrCat(what, " (weft-plan --help lists the options)")));
}

Arguments parse(const std::vector<std::string>& all) {
  static const std::set<std::string> valued = {
      "--stages",         "--micro-batches", "--costs",     "--latency", "--bytes", "--bandwidth",
      "--activation",     "--memory-cap",    "--schedules", "--plan",    "--svg",   "--trace",
      "--ranks",          "--alpha",         "--beta",      "--profile", "--gamma", "--operation",
      "--ranks-per-host", "--local-alpha",   "--local-beta"};
  static const std::set<std::string> plain = {"--overlapped", "--json", "--help", "--version"};
  Arguments out;
  for (size_t i = 0; i < all.size(); ++i) {
    const std::string& word = all[i];
    if (word == "-" || !absl::StartsWith(word, "-")) {
      out.words.push_back(word);
    } else if (plain.count(word) > 0) {
      out.flags.insert(word);
    } else if (valued.count(word) == 0) {
      usage(absl::StrCat("there is no option ", word));
    } else if (++i == all.size()) {
      usage(absl::StrCat(word, " wants a value"));
    } else if (!out.values.emplace(word, all[i]).second) {
      usage(absl::StrCat(word, " is given twice"));
    }
  }
  return out;
}

void allow(const Arguments& a, const std::string& command, const std::set<std::string>& names,
           size_t words) {
  for (const auto& [name, value] : a.values) {
    if (names.count(name) == 0) usage(absl::StrCat(command, " takes no ", name));
  }
  for (const std::string& name : a.flags) {
    if (names.count(name) == 0) usage(absl::StrCat(command, " takes no ", name));
  }
  if (a.words.size() > words) usage(absl::StrCat("one too many: ", a.words[words]));
}

int64_t number(const Arguments& a, const std::string& name, int64_t otherwise, int64_t least,
               int64_t most) {
  const auto it = a.values.find(name);
  if (it == a.values.end()) return otherwise;
  int64_t out = 0;
  if (absl::SimpleAtoi(it->second, &out) && out >= least && out <= most) return out;
  usage(
      absl::StrCat(name, " wants a number from ", least, " to ", most, ", got '", it->second, "'"));
}

int size_of(const Arguments& a, const std::string& name, int most) {
  if (!a.has(name)) usage(absl::StrCat("how many? ", name, " N"));
  return static_cast<int>(number(a, name, 0, 1, most));
}

}  // namespace weft::plan_tool
