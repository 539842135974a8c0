#include "weft/store/etcd_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "weft/store/internal/checks.h"
#include "weft/store/internal/etcd_link.h"
#include "weft/store/internal/table.h"

namespace weft {
namespace internal {
namespace {

constexpr size_t kMaxPrefix = 256;

class EtcdClient : public Store {
 public:
  EtcdClient(std::shared_ptr<EtcdLink> link, Timeout default_timeout)
      : link_(std::move(link)), default_timeout_(default_timeout), scope_(link_->runtime()) {}

  Status open() {
    const StoreOp op = this->op("connect()", {});
    WEFT_RETURN_IF_ERROR(begin(op));
    return link_->count(op, &scope_).status();
  }
  std::shared_ptr<EtcdClient> fork() const {
    return std::make_shared<EtcdClient>(link_, default_timeout_);
  }

  Status set(std::string_view key, std::string_view value, Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("set(", quote_key(key), ")"), timeout);
    WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
    WEFT_RETURN_IF_ERROR(op.wrap(check_value(value)));
    WEFT_RETURN_IF_ERROR(begin(op));
    return link_
        ->change(op, &scope_, key,
                 [&](const std::optional<std::string>&) -> StatusOr<EtcdLink::Change> {
                   return EtcdLink::Change{EtcdLink::Change::kPut, std::string(value), ""};
                 })
        .status();
  }

  StatusOr<std::optional<std::string>> try_get(std::string_view key, Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("try_get(", quote_key(key), ")"), timeout);
    WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
    WEFT_RETURN_IF_ERROR(begin(op));
    WEFT_ASSIGN_OR_RETURN(EtcdLink::View view, link_->look(op, &scope_, {std::string(key)}, true));
    return std::move(view.value);
  }

  StatusOr<std::string> get(std::string_view key, Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("get(", quote_key(key), ")"), timeout);
    WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
    EtcdLink::View view;
    WEFT_RETURN_IF_ERROR(watch_until(
        op, {std::string(key)}, true, &view, [&] { return view.value.has_value(); },
        [] { return std::string("the key did not appear"); }));
    return *std::move(view.value);
  }

  StatusOr<int64_t> add(std::string_view key, int64_t delta, Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("add(", quote_key(key), ", ", delta, ")"), timeout);
    WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
    WEFT_RETURN_IF_ERROR(begin(op));
    WEFT_ASSIGN_OR_RETURN(
        const std::string result,
        link_->change(
            op, &scope_, key,
            [&](const std::optional<std::string>& current) -> StatusOr<EtcdLink::Change> {
              WEFT_ASSIGN_OR_RETURN(const int64_t sum, add_to_counter(current, delta));
              return EtcdLink::Change{EtcdLink::Change::kPut, absl::StrCat(sum), absl::StrCat(sum)};
            }));
    int64_t sum = 0;
    if (!absl::SimpleAtoi(result, &sum)) {
      return op.error(ErrorKind::kProtocol, "someone else wrote our marker");
    }
    return sum;
  }

  StatusOr<std::string> compare_set(std::string_view key, std::string_view expected,
                                    std::string_view desired, Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("compare_set(", quote_key(key), ")"), timeout);
    WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
    WEFT_RETURN_IF_ERROR(op.wrap(check_value(expected)));
    WEFT_RETURN_IF_ERROR(op.wrap(check_value(desired)));
    WEFT_RETURN_IF_ERROR(begin(op));
    std::string found;
    WEFT_ASSIGN_OR_RETURN(
        const std::string result,
        link_->change(
            op, &scope_, key,
            [&](const std::optional<std::string>& current) -> StatusOr<EtcdLink::Change> {
              if (compare_matches(current, expected)) {
                return EtcdLink::Change{EtcdLink::Change::kPut, std::string(desired), "replaced"};
              }
              found = current.value_or("");
              return EtcdLink::Change{};
            }));
    return result.empty() ? found : std::string(desired);
  }

  StatusOr<bool> delete_key(std::string_view key, Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("delete_key(", quote_key(key), ")"), timeout);
    WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
    WEFT_RETURN_IF_ERROR(begin(op));
    WEFT_ASSIGN_OR_RETURN(
        const std::string result,
        link_->change(op, &scope_, key,
                      [](const std::optional<std::string>& current) -> StatusOr<EtcdLink::Change> {
                        if (!current.has_value()) return EtcdLink::Change{};
                        return EtcdLink::Change{EtcdLink::Change::kDelete, "", "deleted"};
                      }));
    return !result.empty();
  }

  StatusOr<bool> check(const std::vector<std::string>& keys, Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("check(", quote_keys(keys), ")"), timeout);
    WEFT_RETURN_IF_ERROR(op.wrap(check_keys(keys)));
    WEFT_RETURN_IF_ERROR(begin(op));
    WEFT_ASSIGN_OR_RETURN(const EtcdLink::View view, link_->look(op, &scope_, keys, false));
    return view.missing.empty();
  }

  Status wait(const std::vector<std::string>& keys, Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("wait(", quote_keys(keys), ")"), timeout);
    WEFT_RETURN_IF_ERROR(op.wrap(check_keys(keys)));
    EtcdLink::View view;
    return watch_until(
        op, keys, false, &view, [&] { return view.missing.empty(); },
        [&] { return absl::StrCat("still missing: ", quote_keys(view.missing), ";"); });
  }

  StatusOr<std::optional<std::string>> wait_change(std::string_view key,
                                                   const std::optional<std::string>& seen,
                                                   Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("wait_change(", quote_key(key), ")"), timeout);
    WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
    EtcdLink::View view;
    WEFT_RETURN_IF_ERROR(watch_until(
        op, {std::string(key)}, true, &view, [&] { return view.value != seen; },
        [] { return std::string("the value did not change"); }));
    return std::move(view.value);
  }

  StatusOr<std::vector<std::string>> list_keys(std::string_view prefix, Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("list_keys(", quote_key(prefix), ")"), timeout);
    WEFT_RETURN_IF_ERROR(begin(op));
    if (prefix.size() > kMaxStoreKey) return std::vector<std::string>();
    WEFT_ASSIGN_OR_RETURN(std::vector<StoreEntry> entries, link_->list(op, &scope_, prefix, false));
    std::vector<std::string> keys;
    keys.reserve(entries.size());
    for (StoreEntry& entry : entries) keys.push_back(std::move(entry.key));
    return keys;
  }

  StatusOr<std::vector<StoreEntry>> list_entries(std::string_view prefix,
                                                 Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("list_entries(", quote_key(prefix), ")"), timeout);
    WEFT_RETURN_IF_ERROR(begin(op));
    if (prefix.size() > kMaxStoreKey) return std::vector<StoreEntry>();
    return link_->list(op, &scope_, prefix, true);
  }

  StatusOr<std::vector<std::optional<std::string>>> multi_get(const std::vector<std::string>& keys,
                                                              Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("multi_get(", quote_keys(keys), ")"), timeout);
    WEFT_RETURN_IF_ERROR(op.wrap(check_keys(keys)));
    WEFT_RETURN_IF_ERROR(begin(op));
    return link_->get_many(op, &scope_, keys);
  }

  StatusOr<int64_t> num_keys(Timeout timeout) override {
    const StoreOp op = this->op("num_keys()", timeout);
    WEFT_RETURN_IF_ERROR(begin(op));
    return link_->count(op, &scope_);
  }

  void interrupt() override { scope_.interrupt(); }
  std::string describe() const override { return link_->url(); }

 private:
  StoreOp op(std::string what, Timeout timeout) const {
    return StoreOp::make(*link_->runtime(), link_->url(), std::move(what), timeout,
                         default_timeout_);
  }
  Status begin(const StoreOp& op) const {
    if (op.deadline <= op.begin) return op.deadline_error("not begun: no time was given");
    return absl::OkStatus();
  }

  // Looks, and again after every change that may matter, until `done` likes the view. Half of the
  // time is watched at most before the next look, so that the message is about what is missing in
  // the end.
  Status watch_until(const StoreOp& op, const std::vector<std::string>& keys, bool want_value,
                     EtcdLink::View* view, const std::function<bool()>& done,
                     const std::function<std::string()>& not_yet) {
    WEFT_RETURN_IF_ERROR(begin(op));
    RetryBackoff backoff(&link_->runtime()->random());
    bool looked = false;
    while (true) {
      StatusOr<EtcdLink::View> now = link_->look(op, &scope_, keys, want_value);
      if (!now.ok()) {
        if (looked && error_kind(now.status()) == ErrorKind::kDeadline) {
          return op.deadline_error(not_yet());
        }
        return now.status();
      }
      looked = true;
      *view = *std::move(now);
      if (done()) return absl::OkStatus();
      const absl::Duration left = op.deadline - link_->runtime()->now();
      if (left <= absl::ZeroDuration()) return op.deadline_error(not_yet());
      const absl::Duration slice = left > absl::Milliseconds(20) ? left / 2 : left;
      const std::string& key = view->missing.empty() ? keys.front() : view->missing.front();
      WEFT_RETURN_IF_ERROR(link_->watch(op, &scope_, key, view->revision,
                                        std::min(slice, absl::Minutes(10)), &backoff));
    }
  }

  const std::shared_ptr<EtcdLink> link_;
  const Timeout default_timeout_;
  InterruptScope scope_;
};

}  // namespace
}  // namespace internal

StatusOr<std::shared_ptr<EtcdStore>> EtcdStore::connect(const std::vector<EtcdEndpoint>& endpoints,
                                                        const EtcdStoreOptions& options,
                                                        std::shared_ptr<Runtime> runtime) {
  if (options.prefix.empty() || options.prefix.size() > internal::kMaxPrefix) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("an etcd store needs a prefix of 1 to ", internal::kMaxPrefix,
                                   " bytes, this one has ", options.prefix.size()));
  }
  WEFT_ASSIGN_OR_RETURN(std::unique_ptr<internal::EtcdCluster> cluster,
                        internal::EtcdCluster::make(endpoints, options, runtime));
  auto client = std::make_shared<internal::EtcdClient>(
      std::make_shared<internal::EtcdLink>(std::move(runtime), std::move(cluster), options.prefix),
      options.timeout);
  WEFT_RETURN_IF_ERROR(client->open());
  return std::shared_ptr<EtcdStore>(new EtcdStore(std::move(client)));
}

StatusOr<std::shared_ptr<EtcdStore>> EtcdStore::connect(std::string_view host, int port,
                                                        const EtcdStoreOptions& options,
                                                        std::shared_ptr<Runtime> runtime) {
  return connect({EtcdEndpoint{std::string(host), port}}, options, std::move(runtime));
}

std::shared_ptr<Store> EtcdStore::new_client() {
  return std::shared_ptr<EtcdStore>(
      new EtcdStore(static_cast<internal::EtcdClient&>(*inner()).fork()));
}

}  // namespace weft
