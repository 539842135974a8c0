#ifndef WEFT_STORE_PREFIX_STORE_H_
#define WEFT_STORE_PREFIX_STORE_H_

// PrefixStore: a part of another store, whose keys all begin with "<prefix>/". It sees and counts
// only those. Prefixes of prefixes nest.
//
//   auto group = std::make_shared<weft::PrefixStore>("job7/group0", store);
//   group->set("k", "v");                       // "job7/group0/k" in `store`
//
// A key may have 1,024 bytes with its prefix. Error messages name the whole key. interrupt() ends
// the operations of this object alone when the store below can give out clients of its own
// (ForkableStore, as all stores of weft can); otherwise it interrupts the store below.
// Threads: any.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/common/api.h"
#include "weft/store/delegating_store.h"

namespace weft {

class WEFT_API PrefixStore : public DelegatingStore, public ForkableStore {
 public:
  // REQUIRES: prefix is not empty, store is not null.
  PrefixStore(std::string_view prefix, std::shared_ptr<Store> store);
  std::shared_ptr<Store> new_client() override;

  Status set(std::string_view key, std::string_view value, Timeout timeout = {}) override;
  StatusOr<std::optional<std::string>> try_get(std::string_view key, Timeout timeout = {}) override;
  StatusOr<std::string> get(std::string_view key, Timeout timeout = {}) override;
  StatusOr<int64_t> add(std::string_view key, int64_t delta, Timeout timeout = {}) override;
  StatusOr<std::string> compare_set(std::string_view key, std::string_view expected,
                                    std::string_view desired, Timeout timeout = {}) override;
  StatusOr<bool> delete_key(std::string_view key, Timeout timeout = {}) override;
  StatusOr<bool> check(const std::vector<std::string>& keys, Timeout timeout = {}) override;
  Status wait(const std::vector<std::string>& keys, Timeout timeout = {}) override;
  StatusOr<std::optional<std::string>> wait_change(std::string_view key,
                                                   const std::optional<std::string>& seen,
                                                   Timeout timeout = {}) override;
  StatusOr<std::vector<std::string>> list_keys(std::string_view prefix,
                                               Timeout timeout = {}) override;
  StatusOr<std::vector<std::optional<std::string>>> multi_get(const std::vector<std::string>& keys,
                                                              Timeout timeout = {}) override;
  StatusOr<std::vector<StoreEntry>> list_entries(std::string_view prefix,
                                                 Timeout timeout = {}) override;
  // Counts by listing.
  StatusOr<int64_t> num_keys(Timeout timeout = {}) override;

 private:
  StatusOr<std::string> below(std::string_view key) const;
  StatusOr<std::vector<std::string>> below(const std::vector<std::string>& keys) const;

  const std::string prefix_;  // with its slash
};

}  // namespace weft

#endif  // WEFT_STORE_PREFIX_STORE_H_
