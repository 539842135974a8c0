#ifndef WEFT_TESTS_TESTING_MORTAL_STORE_H_
#define WEFT_TESTS_TESTING_MORTAL_STORE_H_

// For tests in which a worker of this process dies: interrupting its store must then end all that
// it does there. A worker takes a client of its own where a store gives them out; this one does not
// show that it could.

#include <memory>

#include "weft/rpc/worker.h"
#include "weft/store/delegating_store.h"

namespace weft::testing {

// Replaces the store of the options, and returns it.
inline std::shared_ptr<Store> hear_interrupts(JoinOptions* options) {
  options->store = std::make_shared<DelegatingStore>(options->store);
  return options->store;
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_MORTAL_STORE_H_
