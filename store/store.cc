#include "weft/store/store.h"

#include <utility>

namespace weft {

StatusOr<std::vector<std::optional<std::string>>> Store::multi_get(
    const std::vector<std::string>& keys, Timeout timeout) {
  std::vector<std::optional<std::string>> out;
  out.reserve(keys.size());
  for (const std::string& key : keys) {
    WEFT_ASSIGN_OR_RETURN(std::optional<std::string> value, try_get(key, timeout));
    out.push_back(std::move(value));
  }
  return out;
}

StatusOr<std::vector<StoreEntry>> Store::list_entries(std::string_view prefix, Timeout timeout) {
  WEFT_ASSIGN_OR_RETURN(std::vector<std::string> keys, list_keys(prefix, timeout));
  std::vector<StoreEntry> out;
  for (std::string& key : keys) {
    WEFT_ASSIGN_OR_RETURN(std::optional<std::string> value, try_get(key, timeout));
    if (value.has_value()) out.push_back({std::move(key), *std::move(value)});
  }
  return out;
}

}  // namespace weft
