#include "weft/store/internal/table.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "weft/store/internal/checks.h"

namespace weft::internal {

StatusOr<int64_t> add_to_counter(const std::optional<std::string>& current, int64_t delta) {
  int64_t value = 0;
  if (current.has_value() && !absl::SimpleAtoi(*current, &value)) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("the value is not a decimal number but ", quote_key(*current)));
  }
  int64_t sum = 0;
  if (__builtin_add_overflow(value, delta, &sum)) {
    return make_error(absl::StatusCode::kOutOfRange, ErrorKind::kInvalidArgument,
                      absl::StrCat(value, " + ", delta, " does not fit in 64 bits"));
  }
  return sum;
}

bool compare_matches(const std::optional<std::string>& current, std::string_view expected) {
  return current.has_value() ? *current == expected : expected.empty();
}

void StoreTable::set(std::string_view key, std::string_view value) {
  auto it = entries_.find(key);
  before_.reset();
  if (it == entries_.end()) {
    it = entries_.emplace(std::string(key), std::string()).first;
    bytes_ += key.size();
  } else {
    bytes_ -= it->second.size();
    before_ = std::move(it->second);
  }
  bytes_ += value.size();
  it->second.assign(value.data(), value.size());
  last_changed_.assign(key.data(), key.size());
}

void StoreTable::undo() {
  const std::string key = std::move(last_changed_);
  if (before_.has_value()) {
    const std::string value = *std::move(before_);
    set(key, value);
  } else {
    erase(key);
  }
}

const std::string* StoreTable::find(std::string_view key) const {
  auto it = entries_.find(key);
  return it == entries_.end() ? nullptr : &it->second;
}

std::optional<std::string> StoreTable::get(std::string_view key) const {
  const std::string* value = find(key);
  return value == nullptr ? std::nullopt : std::optional<std::string>(*value);
}

StatusOr<int64_t> StoreTable::add(std::string_view key, int64_t delta) {
  WEFT_ASSIGN_OR_RETURN(const int64_t sum, add_to_counter(get(key), delta));
  set(key, absl::StrCat(sum));
  return sum;
}

std::string StoreTable::compare_set(std::string_view key, std::string_view expected,
                                    std::string_view desired, bool* changed) {
  const std::optional<std::string> current = get(key);
  *changed = compare_matches(current, expected);
  if (!*changed) return current.value_or("");
  set(key, desired);
  return std::string(desired);
}

bool StoreTable::erase(std::string_view key) {
  auto it = entries_.find(key);
  if (it == entries_.end()) return false;
  bytes_ -= it->first.size() + it->second.size();
  last_changed_ = it->first;
  before_ = std::move(it->second);
  entries_.erase(it);
  return true;
}

std::vector<std::string> StoreTable::missing(const std::vector<std::string>& keys) const {
  std::vector<std::string> out;
  for (const std::string& key : keys) {
    if (entries_.find(key) == entries_.end()) out.push_back(key);
  }
  return out;
}

std::vector<std::string> StoreTable::list(std::string_view prefix) const {
  std::vector<std::string> out;
  for (auto it = entries_.lower_bound(prefix); it != entries_.end(); ++it) {
    if (std::string_view(it->first).substr(0, prefix.size()) != prefix) break;
    out.push_back(it->first);
  }
  return out;
}

std::vector<StoreEntry> StoreTable::list_entries(std::string_view prefix) const {
  std::vector<StoreEntry> out;
  for (auto it = entries_.lower_bound(prefix); it != entries_.end(); ++it) {
    if (std::string_view(it->first).substr(0, prefix.size()) != prefix) break;
    out.push_back({it->first, it->second});
  }
  return out;
}

}  // namespace weft::internal
