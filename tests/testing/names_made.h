#ifndef WEFT_TESTS_TESTING_NAMES_MADE_H_
#define WEFT_TESTS_TESTING_NAMES_MADE_H_

// NamesMade: every name that a file gets in a folder, also one that it has for a moment.
//
// Threads: one.

#include <sys/inotify.h>
#include <unistd.h>

#include <set>
#include <string>

#include "gtest/gtest.h"

namespace weft::testing {

class NamesMade {
 public:
  explicit NamesMade(const std::string& folder)
      : queue_(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC)) {
    EXPECT_GE(::inotify_add_watch(queue_, folder.c_str(), IN_CREATE | IN_MOVED_TO), 0);
  }
  ~NamesMade() { ::close(queue_); }
  NamesMade(const NamesMade&) = delete;
  NamesMade& operator=(const NamesMade&) = delete;

  // Since it was made, or since the last time.
  std::set<std::string> take() const {
    std::set<std::string> out;
    alignas(inotify_event) char events[16 << 10];
    while (true) {
      const ssize_t n = ::read(queue_, events, sizeof events);
      if (n <= 0) return out;
      for (const char* at = events; at < events + n;) {
        const auto* const one = reinterpret_cast<const inotify_event*>(at);
        EXPECT_EQ(one->mask & IN_Q_OVERFLOW, 0u);
        if (one->len > 0) out.insert(one->name);
        at += sizeof(inotify_event) + one->len;
      }
    }
  }

 private:
  const int queue_;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_NAMES_MADE_H_
