#ifndef WEFT_TESTS_TESTING_GATE_H_
#define WEFT_TESTS_TESTING_GATE_H_

#include <memory>

#include "weft/common/condition.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"

namespace weft::testing {

// A gate that handlers wait at until the test opens it: what tests use instead of sleeping.
class Gate {
 public:
  explicit Gate(std::shared_ptr<Runtime> runtime);
  void open();
  void arrive_and_wait();    // counts, then waits for open()
  void wait_arrived(int n);  // the test's side

 private:
  std::shared_ptr<Runtime> runtime_;
  Mutex mutex_;
  Condition changed_;
  bool open_ ABSL_GUARDED_BY(mutex_) = false;
  int arrived_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_GATE_H_
