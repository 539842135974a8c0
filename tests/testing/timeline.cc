#include "weft/tests/testing/timeline.h"

#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"

namespace weft::testing {

Timelines::Timelines() : folder_(::testing::TempDir() + "/weft-trace-XXXXXX") {
  EXPECT_NE(mkdtemp(folder_.data()), nullptr);
}

Timelines::~Timelines() { std::filesystem::remove_all(folder_); }

std::vector<std::string> Timelines::events(const std::string& name,
                                           const std::vector<std::string>& words) const {
  std::ifstream in(path(name));
  const std::string text((std::istreambuf_iterator<char>(in)), {});
  EXPECT_FALSE(text.empty()) << name;
  std::vector<std::string> out;
  for (const auto& line : absl::StrSplit(text, '\n')) {
    const std::string event(line);
    if (std::all_of(words.begin(), words.end(),
                    [&](const std::string& w) { return absl::StrContains(event, w); })) {
      out.push_back(event);
    }
  }
  return out;
}

std::string id_of(const std::string& event) {
  const size_t at = event.find("\"id\":");
  return at == std::string::npos ? "" : event.substr(at, event.find_first_of(",}", at) - at);
}

int64_t number_of(const std::string& event, const std::string& key) {
  const std::string head = absl::StrCat("\"", key, "\":");
  const size_t at = event.find(head);
  return at == std::string::npos ? -1 : std::stoll(event.substr(at + head.size()));
}

}  // namespace weft::testing
