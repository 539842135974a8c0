#include "weft/tests/integration/answer.h"

#include <cstdlib>
#include <vector>

#include "absl/strings/str_split.h"

namespace weft::integration {

Destination destination(const std::string& text) {
  if (text[0] == '#') return Destination(std::atoll(text.c_str() + 1));
  const std::vector<std::string> parts = absl::StrSplit(text, '/');
  if (parts.size() != 3) return Destination(text);
  return Destination(WorkerInfo{parts[0], static_cast<uint32_t>(std::atoll(parts[1].c_str())),
                                std::strtoull(parts[2].c_str(), nullptr, 10)});
}

}  // namespace weft::integration
