#ifndef WEFT_TESTS_TESTING_GLOO_NAMES_GLOO_CONTEXT_H_
#define WEFT_TESTS_TESTING_GLOO_NAMES_GLOO_CONTEXT_H_

// The names of gloo that LibTorch's ProcessGroupGloo.hpp mentions, and nothing else of gloo. The
// torch wheel has gloo inside libtorch_cpu, but not its headers. c10d's classes hold gloo's objects
// by pointer only, so their layout does not depend on these; no object of these types is made or
// touched here, and what ProcessGroupGloo.hpp spells inline with them (GlooStore, setTimeout) must
// not be used: it is for gloo_group.cc alone.

#include <chrono>
#include <string>
#include <vector>

namespace gloo {

class Context {
 public:
  virtual ~Context();
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace rendezvous {
class Store {
 public:
  virtual ~Store();
  virtual void set(const std::string& key, const std::vector<char>& value) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys,
                    const std::chrono::milliseconds& timeout) = 0;
};
}  // namespace rendezvous

namespace transport {
class Device;
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer();
};
}  // namespace transport

}  // namespace gloo

#endif  // WEFT_TESTS_TESTING_GLOO_NAMES_GLOO_CONTEXT_H_
