#include "weft/store/hash_store.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "weft/common/condition.h"
#include "weft/common/mutex.h"
#include "weft/store/internal/table_store.h"

namespace weft {
namespace internal {
namespace {

// An operation that waits.
struct HashWaiter {
  explicit HashWaiter(Runtime* runtime) : changed(runtime) {}
  Condition changed;
};

// What all clients of one HashStore share.
struct HashData {
  explicit HashData(std::shared_ptr<Runtime> runtime_in) : runtime(std::move(runtime_in)) {}
  const std::shared_ptr<Runtime> runtime;
  Mutex mutex;
  StoreTable table ABSL_GUARDED_BY(mutex);
  // By the keys that they wait for: a change wakes those whom it may concern, not a thousand others.
  std::multimap<std::string, HashWaiter*> waiters ABSL_GUARDED_BY(mutex);

  void wake(const std::string& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    const auto [first, last] = waiters.equal_range(key);
    for (auto it = first; it != last; ++it) it->second->changed.notify_all();
  }
};

class HashClient : public TableStore {
 public:
  HashClient(std::shared_ptr<HashData> data, Timeout default_timeout)
      : TableStore(data->runtime, default_timeout), data_(std::move(data)) {}

  void interrupt() override {
    MutexLock lock(&data_->mutex);
    interrupted_ = true;
    for (const auto& [key, waiter] : data_->waiters) waiter->changed.notify_all();
  }
  std::string describe() const override { return "hash://"; }
  std::shared_ptr<HashClient> fork() const {
    return std::make_shared<HashClient>(data_, default_timeout());
  }

 private:
  using Places = std::vector<std::multimap<std::string, HashWaiter*>::iterator>;

  Status perform(const StoreOp& op, Access, const std::vector<std::string>& keys,
                 const Body& body) override {
    HashWaiter waiter(data_->runtime.get());
    Places places;
    MutexLock lock(&data_->mutex);
    const Status status = try_until(op, keys, body, &waiter, &places);
    for (const auto& place : places) data_->waiters.erase(place);
    return status;
  }

  Status try_until(const StoreOp& op, const std::vector<std::string>& keys, const Body& body,
                   HashWaiter* waiter, Places* places) ABSL_EXCLUSIVE_LOCKS_REQUIRED(data_->mutex) {
    while (true) {
      if (interrupted_) return op.interrupted();
      WEFT_ASSIGN_OR_RETURN(const Step step, body(&data_->table));
      if (step == Step::kChanged) data_->wake(data_->table.last_changed());
      if (step != Step::kNotYet) return absl::OkStatus();
      if (runtime().now() >= op.deadline) return make_error(ErrorKind::kDeadline, "");
      if (places->empty()) {
        for (const std::string& key : keys) {
          places->push_back(data_->waiters.emplace(key, waiter));
        }
      }
      // A deadline that comes here gets one more look at the table.
      const Status waited = waiter->changed.wait_until(&data_->mutex, op.deadline);
      if (!waited.ok() && error_kind(waited) != ErrorKind::kDeadline) return waited;
    }
  }

  const std::shared_ptr<HashData> data_;
  bool interrupted_ ABSL_GUARDED_BY(data_->mutex) = false;
};

}  // namespace
}  // namespace internal

HashStore::HashStore(std::shared_ptr<Runtime> runtime, Timeout default_timeout)
    : DelegatingStore(std::make_shared<internal::HashClient>(
          std::make_shared<internal::HashData>(std::move(runtime)), default_timeout)) {}

std::shared_ptr<Store> HashStore::new_client() {
  return std::shared_ptr<HashStore>(
      new HashStore(static_cast<internal::HashClient&>(*inner()).fork()));
}

}  // namespace weft
