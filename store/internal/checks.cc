#include "weft/store/internal/checks.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"

namespace weft::internal {
namespace {

constexpr size_t kShownKeyBytes = 96;
constexpr size_t kShownKeys = 8;

}  // namespace

std::string quote_key(std::string_view key) {
  std::string out = absl::StrCat("'", absl::CHexEscape(view(key.substr(0, kShownKeyBytes))), "'");
  if (key.size() > kShownKeyBytes) absl::StrAppend(&out, "... (", key.size(), " bytes)");
  return out;
}

std::string quote_keys(const std::vector<std::string>& keys) {
  std::string out;
  for (size_t i = 0; i < keys.size() && i < kShownKeys; ++i) {
    absl::StrAppend(&out, i == 0 ? "" : ", ", quote_key(keys[i]));
  }
  if (keys.size() > kShownKeys) absl::StrAppend(&out, " and ", keys.size() - kShownKeys, " more");
  return out;
}

Status check_key(std::string_view key) {
  if (!key.empty() && key.size() <= kMaxStoreKey) return absl::OkStatus();
  return make_error(ErrorKind::kInvalidArgument, absl::StrCat("a key has 1 to ", kMaxStoreKey,
                                                              " bytes, this one has ", key.size()));
}

Status check_value(std::string_view value) {
  if (value.size() <= kMaxStoreValue) return absl::OkStatus();
  return make_error(
      ErrorKind::kInvalidArgument,
      absl::StrCat("a value has at most ", kMaxStoreValue, " bytes, this one has ", value.size()));
}

Status check_keys(const std::vector<std::string>& keys) {
  size_t bytes = 0;
  for (const std::string& key : keys) {
    WEFT_RETURN_IF_ERROR(check_key(key));
    bytes += key.size();
  }
  if (keys.size() <= kMaxStoreKeys && bytes <= kMaxStoreKeysBytes) return absl::OkStatus();
  return make_error(
      ErrorKind::kInvalidArgument,
      absl::StrCat("one call names at most ", kMaxStoreKeys, " keys of ", kMaxStoreKeysBytes,
                   " bytes together, this one ", keys.size(), " of ", bytes));
}

StoreOp StoreOp::make(const Runtime& runtime, std::string store, std::string what, Timeout timeout,
                      Timeout fallback) {
  StoreOp op;
  op.store = std::move(store);
  op.what = std::move(what);
  op.begin = runtime.now();
  op.deadline = deadline_after(op.begin, timeout.value_or(fallback.value_or(kDefaultStoreTimeout)));
  return op;
}

std::string StoreOp::context() const { return absl::StrCat("store ", store, ": ", what); }

Status StoreOp::error(ErrorKind kind, std::string_view message) const {
  return make_error(kind, absl::StrCat(context(), ": ", view(message)));
}

Status StoreOp::deadline_error(std::string_view detail) const {
  return error(ErrorKind::kDeadline,
               absl::StrCat(view(detail), " within ", absl::FormatDuration(deadline - begin)));
}

Status StoreOp::interrupted() const {
  return error(ErrorKind::kCancelled, "the store was interrupted, its owner is shutting down");
}

Status StoreOp::wrap(const Status& status) const { return annotate(status, context()); }

}  // namespace weft::internal
