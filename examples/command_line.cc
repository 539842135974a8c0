#include "weft/examples/command_line.h"

#include <charconv>
#include <stdexcept>

namespace examples {

CommandLine::CommandLine(int argc, char** argv, const std::set<std::string>& known) {
  for (int i = 1; i < argc; ++i) {
    std::string option = argv[i];
    if (option == "--help" || option == "-h") {
      help_ = true;
      return;
    }
    std::string value;
    if (const size_t equals = option.find('='); equals != std::string::npos) {
      value = option.substr(equals + 1);
      option.resize(equals);
    } else if (i + 1 < argc) {
      value = argv[++i];
    }
    if (known.count(option) == 0) {
      throw std::invalid_argument("there is no option " + option + "; see --help");
    }
    if (value.empty()) throw std::invalid_argument(option + " wants a value");
    given_[option] = value;
  }
}

int64_t CommandLine::number(const std::string& option, int64_t otherwise, int64_t low,
                            int64_t high) const {
  const auto found = given_.find(option);
  if (found == given_.end()) return otherwise;
  const std::string& text = found->second;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) {
    throw std::invalid_argument(option + " wants a whole number from " + std::to_string(low) +
                                " to " + std::to_string(high) + ", not '" + text + "'");
  }
  return value;
}

std::string CommandLine::text(const std::string& option, const std::string& otherwise) const {
  const auto found = given_.find(option);
  return found == given_.end() ? otherwise : found->second;
}

}  // namespace examples
