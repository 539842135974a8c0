#include "weft/tests/contract/store_world.h"

#include <utility>

#include "weft/rpc/hash_store.h"

namespace weft::testing {
namespace {

class HashWorld : public StoreWorld {
 public:
  explicit HashWorld(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}
  std::shared_ptr<Store> client(Timeout timeout) override {
    if (first_ == nullptr) return first_ = std::make_shared<HashStore>(runtime_, timeout);
    return first_->new_client();
  }

 private:
  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<HashStore> first_;
};

template <class World>
StoreKind kind(std::string name) {
  StoreKind out;
  out.name = std::move(name);
  out.make = [](std::shared_ptr<Runtime> runtime) {
    return std::make_unique<World>(std::move(runtime));
  };
  return out;
}

}  // namespace

std::vector<StoreKind> all_store_kinds() {
  std::vector<StoreKind> kinds;
  kinds.push_back(kind<HashWorld>("hash"));
  return kinds;
}

}  // namespace weft::testing
