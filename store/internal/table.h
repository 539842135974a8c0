#ifndef WEFT_STORE_INTERNAL_TABLE_H_
#define WEFT_STORE_INTERNAL_TABLE_H_

// StoreTable: the content of a store, and each operation on it as a plain function: what HashStore,
// FileStore and the server of TcpStore have in common. Ordered, so that lists come out sorted and a
// simulation sees one order. Not thread-safe: its owner locks.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/common/error.h"
#include "weft/store/store.h"

namespace weft::internal {

class WEFT_API StoreTable {
 public:
  using Entries = std::map<std::string, std::string, std::less<>>;

  // Replaces or makes the entry.
  void set(std::string_view key, std::string_view value);
  // Null when missing; valid until the next change.
  const std::string* find(std::string_view key) const;
  std::optional<std::string> get(std::string_view key) const;
  // invalid_argument when the value is no decimal number or the sum leaves 64 bits; nothing changes
  // then.
  StatusOr<int64_t> add(std::string_view key, int64_t delta);
  // Store::compare_set; *changed tells whether it was replaced. An empty `expected` matches a
  // missing key and an empty value.
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          bool* changed);
  bool erase(std::string_view key);
  std::vector<std::string> missing(const std::vector<std::string>& keys) const;
  std::vector<std::string> list(std::string_view prefix) const;
  std::vector<StoreEntry> list_entries(std::string_view prefix) const;
  int64_t size() const { return static_cast<int64_t>(entries_.size()); }
  // Keys and values together.
  size_t bytes() const { return bytes_; }
  const Entries& entries() const { return entries_; }
  // The key of the last set() or erase() that did something.
  const std::string& last_changed() const { return last_changed_; }
  // Takes that back. REQUIRES: there was one since the last undo().
  void undo();

 private:
  Entries entries_;
  std::string last_changed_;
  std::optional<std::string> before_;  // its value before
  size_t bytes_ = 0;
};

// What add() does with the value it finds; shared with stores that keep their data elsewhere.
// `current` is empty when the key is missing.
StatusOr<int64_t> add_to_counter(const std::optional<std::string>& current, int64_t delta);
// Whether compare_set replaces `current`.
bool compare_matches(const std::optional<std::string>& current, std::string_view expected);

}  // namespace weft::internal

#endif  // WEFT_STORE_INTERNAL_TABLE_H_
