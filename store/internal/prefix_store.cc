#include "weft/store/prefix_store.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/store/internal/checks.h"

namespace weft {
namespace {

std::shared_ptr<Store> own_client(std::shared_ptr<Store> store) {
  auto* forkable = dynamic_cast<ForkableStore*>(store.get());
  return forkable == nullptr ? store : forkable->new_client();
}

std::string join(std::string_view prefix, std::string_view key) {
  std::string out(prefix);
  out.append(key);
  return out;
}

}  // namespace

PrefixStore::PrefixStore(std::string_view prefix, std::shared_ptr<Store> store)
    : DelegatingStore(own_client(std::move(store))), prefix_(join(prefix, "/")) {}

std::shared_ptr<Store> PrefixStore::new_client() {
  return std::make_shared<PrefixStore>(std::string_view(prefix_).substr(0, prefix_.size() - 1),
                                       inner());
}

StatusOr<std::string> PrefixStore::below(std::string_view key) const {
  // The store below sees the prefix and would take an empty key for a good one.
  Status status = internal::check_key(key);
  if (status.ok() && prefix_.size() + key.size() > internal::kMaxStoreKey) {
    status = make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("a key has 1 to ", internal::kMaxStoreKey, " bytes, this one has ", key.size(),
                     " and its prefix ", internal::quote_key(prefix_), " ", prefix_.size()));
  }
  if (!status.ok()) return annotate(status, absl::StrCat("store ", describe()));
  return join(prefix_, key);
}

StatusOr<std::vector<std::string>> PrefixStore::below(const std::vector<std::string>& keys) const {
  std::vector<std::string> out;
  out.reserve(keys.size());
  for (const std::string& key : keys) {
    WEFT_ASSIGN_OR_RETURN(std::string full, below(key));
    out.push_back(std::move(full));
  }
  return out;
}

Status PrefixStore::set(std::string_view key, std::string_view value, Timeout timeout) {
  WEFT_ASSIGN_OR_RETURN(const std::string full, below(key));
  return inner()->set(full, value, timeout);
}

StatusOr<std::optional<std::string>> PrefixStore::try_get(std::string_view key, Timeout timeout) {
  WEFT_ASSIGN_OR_RETURN(const std::string full, below(key));
  return inner()->try_get(full, timeout);
}

StatusOr<std::string> PrefixStore::get(std::string_view key, Timeout timeout) {
  WEFT_ASSIGN_OR_RETURN(const std::string full, below(key));
  return inner()->get(full, timeout);
}

StatusOr<int64_t> PrefixStore::add(std::string_view key, int64_t delta, Timeout timeout) {
  WEFT_ASSIGN_OR_RETURN(const std::string full, below(key));
  return inner()->add(full, delta, timeout);
}

StatusOr<std::string> PrefixStore::compare_set(std::string_view key, std::string_view expected,
                                               std::string_view desired, Timeout timeout) {
  WEFT_ASSIGN_OR_RETURN(const std::string full, below(key));
  return inner()->compare_set(full, expected, desired, timeout);
}

StatusOr<bool> PrefixStore::delete_key(std::string_view key, Timeout timeout) {
  WEFT_ASSIGN_OR_RETURN(const std::string full, below(key));
  return inner()->delete_key(full, timeout);
}

StatusOr<bool> PrefixStore::check(const std::vector<std::string>& keys, Timeout timeout) {
  WEFT_ASSIGN_OR_RETURN(const std::vector<std::string> full, below(keys));
  return inner()->check(full, timeout);
}

Status PrefixStore::wait(const std::vector<std::string>& keys, Timeout timeout) {
  WEFT_ASSIGN_OR_RETURN(const std::vector<std::string> full, below(keys));
  return inner()->wait(full, timeout);
}

StatusOr<std::optional<std::string>> PrefixStore::wait_change(
    std::string_view key, const std::optional<std::string>& seen, Timeout timeout) {
  WEFT_ASSIGN_OR_RETURN(const std::string full, below(key));
  return inner()->wait_change(full, seen, timeout);
}

StatusOr<std::vector<std::string>> PrefixStore::list_keys(std::string_view prefix,
                                                          Timeout timeout) {
  WEFT_ASSIGN_OR_RETURN(std::vector<std::string> keys,
                        inner()->list_keys(join(prefix_, prefix), timeout));
  for (std::string& key : keys) key.erase(0, prefix_.size());
  return keys;
}

StatusOr<std::vector<std::optional<std::string>>> PrefixStore::multi_get(
    const std::vector<std::string>& keys, Timeout timeout) {
  WEFT_ASSIGN_OR_RETURN(const std::vector<std::string> full, below(keys));
  return inner()->multi_get(full, timeout);
}

StatusOr<std::vector<StoreEntry>> PrefixStore::list_entries(std::string_view prefix,
                                                            Timeout timeout) {
  WEFT_ASSIGN_OR_RETURN(std::vector<StoreEntry> entries,
                        inner()->list_entries(join(prefix_, prefix), timeout));
  for (StoreEntry& entry : entries) entry.key.erase(0, prefix_.size());
  return entries;
}

StatusOr<int64_t> PrefixStore::num_keys(Timeout timeout) {
  WEFT_ASSIGN_OR_RETURN(const std::vector<std::string> keys, inner()->list_keys(prefix_, timeout));
  return static_cast<int64_t>(keys.size());
}

}  // namespace weft
