#include "weft/store/hash_store.h"

#include <utility>

#include "weft/common/condition.h"
#include "weft/common/mutex.h"
#include "weft/store/internal/table_store.h"

namespace weft {
namespace internal {
namespace {

// What all clients of one HashStore share.
struct HashData {
  explicit HashData(std::shared_ptr<Runtime> runtime_in)
      : runtime(std::move(runtime_in)), changed(runtime.get()) {}
  const std::shared_ptr<Runtime> runtime;
  Mutex mutex;
  Condition changed;
  StoreTable table ABSL_GUARDED_BY(mutex);
};

class HashClient : public TableStore {
 public:
  HashClient(std::shared_ptr<HashData> data, Timeout default_timeout)
      : TableStore(data->runtime, default_timeout), data_(std::move(data)) {}

  void interrupt() override {
    MutexLock lock(&data_->mutex);
    interrupted_ = true;
    data_->changed.notify_all();
  }
  std::string describe() const override { return "hash://"; }
  std::shared_ptr<HashClient> fork() const {
    return std::make_shared<HashClient>(data_, default_timeout());
  }

 private:
  Status perform(const StoreOp& op, Access, const Body& body) override {
    MutexLock lock(&data_->mutex);
    while (true) {
      if (interrupted_) return op.interrupted();
      WEFT_ASSIGN_OR_RETURN(const Step step, body(&data_->table));
      if (step == Step::kChanged) data_->changed.notify_all();
      if (step != Step::kNotYet) return absl::OkStatus();
      if (runtime().now() >= op.deadline) return make_error(ErrorKind::kDeadline, "");
      // A deadline that comes here gets one more look at the table.
      const Status waited = data_->changed.wait_until(&data_->mutex, op.deadline);
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
