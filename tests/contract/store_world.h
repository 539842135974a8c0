#ifndef WEFT_TESTS_CONTRACT_STORE_WORLD_H_
#define WEFT_TESTS_CONTRACT_STORE_WORLD_H_

// What the contract suite of stores needs of a kind of store: clients of one fresh, empty store.

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "weft/common/runtime.h"
#include "weft/store/store.h"

namespace weft::testing {

class StoreWorld {
 public:
  virtual ~StoreWorld() = default;
  // A new client of this world's data. `timeout` is its default for every operation.
  virtual std::shared_ptr<Store> client(Timeout timeout = {}) = 0;
  // Bytes that this world puts before every key.
  virtual size_t key_overhead() const { return 0; }
};

struct StoreKind {
  std::string name;
  std::function<std::unique_ptr<StoreWorld>(std::shared_ptr<Runtime>)> make;
  // Why this kind cannot be tested on this machine; empty when it can.
  std::function<std::string()> missing = [] { return std::string(); };
};
inline std::ostream& operator<<(std::ostream& out, const StoreKind& kind) {
  return out << kind.name;
}

std::vector<StoreKind> all_store_kinds();

// A new, empty directory; the caller removes it.
std::string make_temp_dir();

}  // namespace weft::testing

#endif  // WEFT_TESTS_CONTRACT_STORE_WORLD_H_
