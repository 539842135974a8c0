#include "weft/examples/rl/options.h"

#include <charconv>
#include <set>
#include <stdexcept>
#include <string_view>

namespace rl {
namespace {

template <class T>
T number(std::string_view name, std::string_view text, T low, T high) {
  T value{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) {
    throw std::invalid_argument(std::string(name) + " wants a whole number from " +
                                std::to_string(low) + " to " + std::to_string(high) + ", not '" +
                                std::string(text) + "'");
  }
  return value;
}

}  // namespace

std::string usage() {
  const Options defaults;
  return "usage: rl [options]\n"
         "\n"
         "Learns to balance a pole: one process, the agent, has the policy, the others play and "
         "ask "
         "it what to do.\n"
         "Started alone it starts all of them on this machine, with weftrun. It ends when the mean "
         "return of the\n"
         "last 100 episodes is at least 195 of 200. Or, started by somebody else:\n"
         "\n"
         "  weftrun -n 5 rl\n"
         "  weftrun --role agent:1 --role observer:4 rl\n"
         "  torchrun --no-python --nproc-per-node 5 rl\n"
         "\n"
         "Without roles, rank 0 is the agent.\n"
         "\n"
         "  --observers N  how many, when it starts them itself (" +
         std::to_string(kObservers) +
         ")\n"
         "  --seed N       equal seeds give equal runs (" +
         std::to_string(defaults.seed) +
         ")\n"
         "  --episodes N   gives up after so many, with exit code 1 (" +
         std::to_string(defaults.episodes) +
         ")\n"
         "  --batch        answers the observers together, with one evaluation of the policy (the "
         "default)\n"
         "  --no-batch     answers each at once\n"
         "  --svg FILE     draws the learning curve\n"
         "  --help\n";
}

Options parse_options(int argc, char** argv) {
  const std::set<std::string_view> with_value = {"--observers", "--seed", "--episodes", "--svg"};
  Options options;
  for (int i = 1; i < argc; ++i) {
    std::string_view name = argv[i];
    if (name == "--help" || name == "-h") {
      options.help = true;
      return options;
    }
    if (name == "--batch" || name == "--no-batch") {
      options.batch = name == "--batch";
      continue;
    }
    std::string_view value;
    if (size_t equals = name.find('='); equals != std::string_view::npos) {
      value = name.substr(equals + 1);
      name = name.substr(0, equals);
    } else if (i + 1 < argc) {
      value = argv[++i];
    }
    if (with_value.count(name) == 0) {
      throw std::invalid_argument("there is no option " + std::string(name) + "; see --help");
    }
    if (value.empty()) throw std::invalid_argument(std::string(name) + " wants a value");
    if (name == "--observers") options.observers = number<int>(name, value, 1, 1'000);
    if (name == "--seed") options.seed = number<uint64_t>(name, value, 0, 1'000'000'000);
    if (name == "--episodes") options.episodes = number<int64_t>(name, value, 100, 1'000'000);
    if (name == "--svg") options.svg = value;
  }
  return options;
}

}  // namespace rl
