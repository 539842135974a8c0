#ifndef WEFT_STORE_DELEGATING_STORE_H_
#define WEFT_STORE_DELEGATING_STORE_H_

// DelegatingStore: a Store that passes everything on to another one. The base for stores that wrap:
// override what should differ.
//
//   class CountingStore : public weft::DelegatingStore {
//     using DelegatingStore::DelegatingStore;
//     Status set(std::string_view key, std::string_view value, Timeout timeout = {}) override {
//       ++sets;
//       return inner()->set(key, value, timeout);
//     }
//   };
//
// Threads: as the inner store.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/common/api.h"
#include "weft/store/store.h"

namespace weft {

class WEFT_API DelegatingStore : public Store {
 public:
  // REQUIRES: inner is not null.
  explicit DelegatingStore(std::shared_ptr<Store> inner) : inner_(std::move(inner)) {}

  Status set(std::string_view key, std::string_view value, Timeout timeout = {}) override {
    return inner_->set(key, value, timeout);
  }
  StatusOr<std::optional<std::string>> try_get(std::string_view key,
                                               Timeout timeout = {}) override {
    return inner_->try_get(key, timeout);
  }
  StatusOr<std::string> get(std::string_view key, Timeout timeout = {}) override {
    return inner_->get(key, timeout);
  }
  StatusOr<int64_t> add(std::string_view key, int64_t delta, Timeout timeout = {}) override {
    return inner_->add(key, delta, timeout);
  }
  StatusOr<std::string> compare_set(std::string_view key, std::string_view expected,
                                    std::string_view desired, Timeout timeout = {}) override {
    return inner_->compare_set(key, expected, desired, timeout);
  }
  StatusOr<bool> delete_key(std::string_view key, Timeout timeout = {}) override {
    return inner_->delete_key(key, timeout);
  }
  StatusOr<bool> check(const std::vector<std::string>& keys, Timeout timeout = {}) override {
    return inner_->check(keys, timeout);
  }
  Status wait(const std::vector<std::string>& keys, Timeout timeout = {}) override {
    return inner_->wait(keys, timeout);
  }
  StatusOr<std::optional<std::string>> wait_change(std::string_view key,
                                                   const std::optional<std::string>& seen,
                                                   Timeout timeout = {}) override {
    return inner_->wait_change(key, seen, timeout);
  }
  StatusOr<std::vector<std::string>> list_keys(std::string_view prefix,
                                               Timeout timeout = {}) override {
    return inner_->list_keys(prefix, timeout);
  }
  StatusOr<int64_t> num_keys(Timeout timeout = {}) override { return inner_->num_keys(timeout); }
  StatusOr<std::vector<std::optional<std::string>>> multi_get(const std::vector<std::string>& keys,
                                                              Timeout timeout = {}) override {
    return inner_->multi_get(keys, timeout);
  }
  StatusOr<std::vector<StoreEntry>> list_entries(std::string_view prefix,
                                                 Timeout timeout = {}) override {
    return inner_->list_entries(prefix, timeout);
  }
  void interrupt() override { inner_->interrupt(); }
  std::string describe() const override { return inner_->describe(); }

 protected:
  const std::shared_ptr<Store>& inner() const { return inner_; }

 private:
  const std::shared_ptr<Store> inner_;
};

// A store that can give out further clients of the same data, each with an interrupt() of its own.
// A worker takes one for itself, so that leaving can end what it waits for there; at a store that
// is none, an operation that hangs delays it by up to a second.
class WEFT_API ForkableStore {
 public:
  virtual ~ForkableStore() = default;
  virtual std::shared_ptr<Store> new_client() = 0;  // a client of its own connection
};

}  // namespace weft

#endif  // WEFT_STORE_DELEGATING_STORE_H_
