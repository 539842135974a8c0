#ifndef WEFT_TESTS_TESTING_TIMELINE_H_
#define WEFT_TESTS_TESTING_TIMELINE_H_

// Timelines that workers have written (JoinOptions::trace_file), read line by line: each event is
// one.

#include <cstdint>
#include <string>
#include <vector>

namespace weft::testing {

// A folder of its own, which goes with it.
class Timelines {
 public:
  Timelines();
  ~Timelines();
  Timelines(const Timelines&) = delete;
  Timelines& operator=(const Timelines&) = delete;

  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  // The events of a file that hold all of `words`.
  std::vector<std::string> events(const std::string& name,
                                  const std::vector<std::string>& words) const;

 private:
  std::string folder_;
};

// "\"id\":..." of an event.
std::string id_of(const std::string& event);
// The number of an event under this key; -1: it has none.
int64_t number_of(const std::string& event, const std::string& key);

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_TIMELINE_H_
