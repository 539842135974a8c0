#include "weft/store/internal/table_store.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace weft::internal {
namespace {

std::string nothing() { return "did not finish"; }

}  // namespace

StoreOp TableStore::op(std::string what, Timeout timeout) const {
  return StoreOp::make(*runtime_, describe(), std::move(what), timeout, default_timeout_);
}

Status TableStore::run(const StoreOp& op, Access access, const Body& body,
                       const std::function<std::string()>& not_yet,
                       const std::vector<std::string>& keys) {
  // A timeout of zero has expired already: nothing is done then, alike in all stores.
  if (op.deadline <= op.begin) return op.deadline_error("not begun: no time was given");
  const Status status = perform(op, access, keys, body);
  if (error_kind(status) == ErrorKind::kDeadline) return op.deadline_error(not_yet());
  if (error_kind(status) == ErrorKind::kCancelled) return op.interrupted();
  return status.ok() ? status : op.wrap(status);
}

Status TableStore::set(std::string_view key, std::string_view value, Timeout timeout) {
  const StoreOp op = this->op(absl::StrCat("set(", quote_key(key), ")"), timeout);
  WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
  WEFT_RETURN_IF_ERROR(op.wrap(check_value(value)));
  return run(
      op, Access::kChange,
      [&](StoreTable* table) -> StatusOr<Step> {
        table->set(key, value);
        return Step::kChanged;
      },
      nothing);
}

template <class Read>
StatusOr<std::invoke_result_t<const Read&, const StoreTable&>> TableStore::look(const StoreOp& op,
                                                                                const Read& read) {
  std::invoke_result_t<const Read&, const StoreTable&> found{};
  WEFT_RETURN_IF_ERROR(run(
      op, Access::kLook,
      [&](StoreTable* table) -> StatusOr<Step> {
        found = read(*table);
        return Step::kDone;
      },
      nothing));
  return found;
}

StatusOr<std::optional<std::string>> TableStore::try_get(std::string_view key, Timeout timeout) {
  const StoreOp op = this->op(absl::StrCat("try_get(", quote_key(key), ")"), timeout);
  WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
  return look(op, [&](const StoreTable& table) { return table.get(key); });
}

StatusOr<std::string> TableStore::get(std::string_view key, Timeout timeout) {
  const StoreOp op = this->op(absl::StrCat("get(", quote_key(key), ")"), timeout);
  WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
  std::string value;
  WEFT_RETURN_IF_ERROR(run(
      op, Access::kLook,
      [&](StoreTable* table) -> StatusOr<Step> {
        const std::string* found = table->find(key);
        if (found == nullptr) return Step::kNotYet;
        value = *found;
        return Step::kDone;
      },
      [] { return std::string("the key did not appear"); }, {std::string(key)}));
  return value;
}

StatusOr<int64_t> TableStore::add(std::string_view key, int64_t delta, Timeout timeout) {
  const StoreOp op = this->op(absl::StrCat("add(", quote_key(key), ", ", delta, ")"), timeout);
  WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
  int64_t sum = 0;
  WEFT_RETURN_IF_ERROR(run(
      op, Access::kChange,
      [&](StoreTable* table) -> StatusOr<Step> {
        WEFT_ASSIGN_OR_RETURN(sum, table->add(key, delta));
        return Step::kChanged;
      },
      nothing));
  return sum;
}

StatusOr<std::string> TableStore::compare_set(std::string_view key, std::string_view expected,
                                              std::string_view desired, Timeout timeout) {
  const StoreOp op = this->op(absl::StrCat("compare_set(", quote_key(key), ")"), timeout);
  WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
  WEFT_RETURN_IF_ERROR(op.wrap(check_value(expected)));
  WEFT_RETURN_IF_ERROR(op.wrap(check_value(desired)));
  std::string now;
  WEFT_RETURN_IF_ERROR(run(
      op, Access::kLook,
      [&](StoreTable* table) -> StatusOr<Step> {
        bool changed = false;
        now = table->compare_set(key, expected, desired, &changed);
        return changed ? Step::kChanged : Step::kDone;
      },
      nothing));
  return now;
}

StatusOr<bool> TableStore::delete_key(std::string_view key, Timeout timeout) {
  const StoreOp op = this->op(absl::StrCat("delete_key(", quote_key(key), ")"), timeout);
  WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
  bool erased = false;
  WEFT_RETURN_IF_ERROR(run(
      op, Access::kLook,
      [&](StoreTable* table) -> StatusOr<Step> {
        erased = table->erase(key);
        return erased ? Step::kChanged : Step::kDone;
      },
      nothing));
  return erased;
}

StatusOr<bool> TableStore::check(const std::vector<std::string>& keys, Timeout timeout) {
  const StoreOp op = this->op(absl::StrCat("check(", quote_keys(keys), ")"), timeout);
  WEFT_RETURN_IF_ERROR(op.wrap(check_keys(keys)));
  return look(op, [&](const StoreTable& table) { return table.missing(keys).empty(); });
}

Status TableStore::wait(const std::vector<std::string>& keys, Timeout timeout) {
  const StoreOp op = this->op(absl::StrCat("wait(", quote_keys(keys), ")"), timeout);
  WEFT_RETURN_IF_ERROR(op.wrap(check_keys(keys)));
  std::vector<std::string> missing;
  return run(
      op, Access::kLook,
      [&](StoreTable* table) -> StatusOr<Step> {
        missing = table->missing(keys);
        return missing.empty() ? Step::kDone : Step::kNotYet;
      },
      [&] { return absl::StrCat("still missing: ", quote_keys(missing), ";"); }, keys);
}

StatusOr<std::optional<std::string>> TableStore::wait_change(std::string_view key,
                                                             const std::optional<std::string>& seen,
                                                             Timeout timeout) {
  const StoreOp op = this->op(absl::StrCat("wait_change(", quote_key(key), ")"), timeout);
  WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
  std::optional<std::string> value;
  WEFT_RETURN_IF_ERROR(run(
      op, Access::kLook,
      [&](StoreTable* table) -> StatusOr<Step> {
        value = table->get(key);
        return value == seen ? Step::kNotYet : Step::kDone;
      },
      [] { return std::string("the value did not change"); }, {std::string(key)}));
  return value;
}

StatusOr<std::vector<std::string>> TableStore::list_keys(std::string_view prefix, Timeout timeout) {
  const StoreOp op = this->op(absl::StrCat("list_keys(", quote_key(prefix), ")"), timeout);
  return look(op, [&](const StoreTable& table) { return table.list(prefix); });
}

StatusOr<std::vector<std::optional<std::string>>> TableStore::multi_get(
    const std::vector<std::string>& keys, Timeout timeout) {
  const StoreOp op = this->op(absl::StrCat("multi_get(", quote_keys(keys), ")"), timeout);
  WEFT_RETURN_IF_ERROR(op.wrap(check_keys(keys)));
  return look(op, [&](const StoreTable& table) {
    std::vector<std::optional<std::string>> values;
    for (const std::string& key : keys) values.push_back(table.get(key));
    return values;
  });
}

StatusOr<std::vector<StoreEntry>> TableStore::list_entries(std::string_view prefix,
                                                           Timeout timeout) {
  const StoreOp op = this->op(absl::StrCat("list_entries(", quote_key(prefix), ")"), timeout);
  return look(op, [&](const StoreTable& table) { return table.list_entries(prefix); });
}

StatusOr<int64_t> TableStore::num_keys(Timeout timeout) {
  return look(op("num_keys()", timeout), [](const StoreTable& table) { return table.size(); });
}

}  // namespace weft::internal
