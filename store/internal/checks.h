#ifndef WEFT_STORE_INTERNAL_CHECKS_H_
#define WEFT_STORE_INTERNAL_CHECKS_H_

// What all stores say in the same words: limits, deadlines and errors. Pure functions; any thread.

#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "weft/common/error.h"
#include "weft/common/runtime.h"
#include "weft/common/time.h"

namespace weft::internal {

inline constexpr size_t kMaxStoreKey = 1024;
inline constexpr size_t kMaxStoreValue = 1 << 20;
// Maximum number of keys in one check() or wait(), so that a request is bounded.
inline constexpr size_t kMaxStoreKeys = 65'536;
inline constexpr size_t kMaxStoreKeysBytes = 4 << 20;
inline constexpr absl::Duration kDefaultStoreTimeout = absl::Seconds(60);

// A key for messages: escaped, and cut when long.
std::string quote_key(std::string_view key);
// The first few, and how many more.
std::string quote_keys(const std::vector<std::string>& keys);

Status check_key(std::string_view key);
Status check_value(std::string_view value);
Status check_keys(const std::vector<std::string>& keys);

// One operation on one store: where errors get their first half from.
struct StoreOp {
  std::string store;  // describe()
  std::string what;   // "get('k')"
  absl::Time begin;
  absl::Time deadline;

  // REQUIRES: runtime is the one whose clock the times are on.
  static StoreOp make(const Runtime& runtime, std::string store, std::string what, Timeout timeout,
                      Timeout fallback);

  // "store hash://: get('k'): "
  std::string context() const;
  Status error(ErrorKind kind, std::string_view message) const;
  // Kind deadline; `detail` says what was missing.
  Status deadline_error(std::string_view detail) const;
  Status interrupted() const;
  Status wrap(const Status& status) const;
};

}  // namespace weft::internal

#endif  // WEFT_STORE_INTERNAL_CHECKS_H_
