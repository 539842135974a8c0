#ifndef WEFT_COMMON_INTERNAL_AMBIENT_H_
#define WEFT_COMMON_INTERNAL_AMBIENT_H_

// What a thread is in the middle of: the project's only thread_local (tests/globals_test.py).

#include "weft/common/call_scope.h"

namespace weft {

class DrivingScope;
class WakeScope;

namespace internal {

struct Ambient {
  ScopeRef scope;                         // call_scope.h
  BlockingHook* blocking_hook = nullptr;  // the pool whose task runs
  WakeScope* wake_scope = nullptr;        // wake_scope.h
  DrivingScope* driving = nullptr;        // wait_driver.h
};

Ambient& ambient();

}  // namespace internal
}  // namespace weft

#endif  // WEFT_COMMON_INTERNAL_AMBIENT_H_
