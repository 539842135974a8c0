#ifndef WEFT_STORE_HASH_STORE_H_
#define WEFT_STORE_HASH_STORE_H_

// HashStore: a store in this process, for workers that live in one program, for tests, and for
// simulation (it waits through the Runtime, so virtual time works).
//
//   auto store = std::make_shared<weft::HashStore>(runtime);
//   store->set("k", "v");
//   auto other = store->new_client();   // the same data, interrupted on its own
//
// Threads: any. Nothing is retried and nothing is ever unavailable.

#include <memory>

#include "weft/common/api.h"
#include "weft/store/delegating_store.h"

namespace weft {

class WEFT_API HashStore : public DelegatingStore, public ForkableStore {
 public:
  // A new, empty store. `default_timeout` is for operations that give none: 60 s when unset.
  explicit HashStore(std::shared_ptr<Runtime> runtime, Timeout default_timeout = {});
  std::shared_ptr<Store> new_client() override;

 private:
  explicit HashStore(std::shared_ptr<Store> inner) : DelegatingStore(std::move(inner)) {}
};

}  // namespace weft

#endif  // WEFT_STORE_HASH_STORE_H_
