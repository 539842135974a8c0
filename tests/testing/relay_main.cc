// The relay as a process: relay TARGET prints its address, then obeys lines on its input until that
// ends:
//   ACTION to_target|to_client CONNECTION AT_BYTE COUNT MILLIS   (cut reset half_close stall delay
//                                                                throttle garbage flip)
//   clear | cut_all | reset_all | refuse | accept
//   accepted   answered with how many connections there have been
//   passed CONNECTION to_target|to_client   answered with a number of bytes
#include <iostream>
#include <sstream>

#include "weft/tests/testing/relay.h"

namespace {

using weft::testing::RelayAction;

bool parse_action(const std::string& name, RelayAction* out) {
  const std::pair<const char*, RelayAction> all[] = {{"cut", RelayAction::kCut},
                                                     {"reset", RelayAction::kReset},
                                                     {"half_close", RelayAction::kHalfClose},
                                                     {"stall", RelayAction::kStall},
                                                     {"delay", RelayAction::kDelay},
                                                     {"throttle", RelayAction::kThrottle},
                                                     {"garbage", RelayAction::kGarbage},
                                                     {"flip", RelayAction::kFlip}};
  for (const auto& [text, action] : all) {
    if (name == text) {
      *out = action;
      return true;
    }
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: relay 127.0.0.1:PORT\n";
    return 2;
  }
  auto relay = weft::testing::Relay::start(argv[1]);
  if (relay == nullptr) {
    std::cerr << "relay: no socket to listen on for " << argv[1] << "\n";
    return 1;
  }
  std::cout << relay->address() << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string verb, direction;
    weft::testing::RelayRule rule;
    words >> verb;
    if (verb == "accepted") {
      std::cout << relay->accepted() << std::endl;
      continue;
    }
    if (verb == "passed") {
      int connection = 0;
      words >> connection >> direction;
      std::cout << relay->passed(connection, direction == "to_target") << std::endl;
      continue;
    }
    if (verb == "clear") {
      relay->clear();
    } else if (verb == "cut_all" || verb == "reset_all") {
      relay->cut_all(verb == "reset_all");
    } else if (verb == "refuse" || verb == "accept") {
      relay->refuse(verb == "refuse");
    } else if (parse_action(verb, &rule.action) &&
               words >> direction >> rule.connection >> rule.at_byte >> rule.count >> rule.millis) {
      rule.to_target = direction == "to_target";
      relay->add(rule);
    } else {
      std::cerr << "relay: not understood: " << line << "\n";
      return 2;
    }
    std::cout << "ok" << std::endl;
  }
  return 0;
}
