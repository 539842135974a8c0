#include "weft/store/tcp_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/store/internal/address.h"
#include "weft/store/internal/checks.h"
#include "weft/store/internal/tcp_link.h"

namespace weft {
namespace internal {
namespace {

class TcpClient : public Store {
 public:
  TcpClient(std::shared_ptr<TcpLink> link, Timeout default_timeout)
      : link_(std::move(link)), default_timeout_(default_timeout), scope_(link_->runtime()) {}

  Status open() {
    const StoreOp op = this->op("connect()", {});
    if (op.deadline <= op.begin) return op.deadline_error("not begun: no time was given");
    return link_->open(op, &scope_);
  }
  std::shared_ptr<TcpClient> fork() const {
    return std::make_shared<TcpClient>(link_, default_timeout_);
  }

  Status set(std::string_view key, std::string_view value, Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("set(", quote_key(key), ")"), timeout);
    WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
    WEFT_RETURN_IF_ERROR(op.wrap(check_value(value)));
    v1::StoreRequest request;
    request.mutable_set()->set_key(std::string(key));
    request.mutable_set()->set_value(std::string(value));
    return run(op, kChanges, std::move(request)).status();
  }

  StatusOr<std::optional<std::string>> try_get(std::string_view key, Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("try_get(", quote_key(key), ")"), timeout);
    WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
    v1::StoreRequest request;
    request.mutable_get()->set_key(std::string(key));
    WEFT_ASSIGN_OR_RETURN(v1::StoreReply reply, run(op, kReads, std::move(request)));
    return value_of(&reply);
  }

  StatusOr<std::string> get(std::string_view key, Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("get(", quote_key(key), ")"), timeout);
    WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
    v1::StoreRequest request;
    request.mutable_wait_keys()->add_keys(std::string(key));
    request.mutable_wait_keys()->set_want_value(true);
    WEFT_ASSIGN_OR_RETURN(v1::StoreReply reply, run_waiting(op, std::move(request)));
    if (reply.outcome() == v1::StoreReply::NOT_YET) {
      return op.deadline_error("the key did not appear");
    }
    return std::move(*reply.mutable_value());
  }

  StatusOr<int64_t> add(std::string_view key, int64_t delta, Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("add(", quote_key(key), ", ", delta, ")"), timeout);
    WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
    v1::StoreRequest request;
    request.mutable_add()->set_key(std::string(key));
    request.mutable_add()->set_delta(delta);
    WEFT_ASSIGN_OR_RETURN(const v1::StoreReply reply, run(op, kChanges, std::move(request)));
    return reply.number();
  }

  StatusOr<std::string> compare_set(std::string_view key, std::string_view expected,
                                    std::string_view desired, Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("compare_set(", quote_key(key), ")"), timeout);
    WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
    WEFT_RETURN_IF_ERROR(op.wrap(check_value(expected)));
    WEFT_RETURN_IF_ERROR(op.wrap(check_value(desired)));
    v1::StoreRequest request;
    request.mutable_compare_set()->set_key(std::string(key));
    request.mutable_compare_set()->set_expected(std::string(expected));
    request.mutable_compare_set()->set_desired(std::string(desired));
    WEFT_ASSIGN_OR_RETURN(v1::StoreReply reply, run(op, kChanges, std::move(request)));
    return std::move(*reply.mutable_value());
  }

  StatusOr<bool> delete_key(std::string_view key, Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("delete_key(", quote_key(key), ")"), timeout);
    WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
    v1::StoreRequest request;
    request.mutable_delete_()->set_key(std::string(key));
    WEFT_ASSIGN_OR_RETURN(const v1::StoreReply reply, run(op, kChanges, std::move(request)));
    return reply.number() != 0;
  }

  StatusOr<bool> check(const std::vector<std::string>& keys, Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("check(", quote_keys(keys), ")"), timeout);
    WEFT_RETURN_IF_ERROR(op.wrap(check_keys(keys)));
    v1::StoreRequest request;
    request.mutable_wait_keys()->mutable_keys()->Assign(keys.begin(), keys.end());
    WEFT_ASSIGN_OR_RETURN(const v1::StoreReply reply, run(op, kReads, std::move(request)));
    return reply.outcome() == v1::StoreReply::DONE;
  }

  Status wait(const std::vector<std::string>& keys, Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("wait(", quote_keys(keys), ")"), timeout);
    WEFT_RETURN_IF_ERROR(op.wrap(check_keys(keys)));
    v1::StoreRequest request;
    request.mutable_wait_keys()->mutable_keys()->Assign(keys.begin(), keys.end());
    WEFT_ASSIGN_OR_RETURN(const v1::StoreReply reply, run_waiting(op, std::move(request)));
    if (reply.outcome() == v1::StoreReply::DONE) return absl::OkStatus();
    return op.deadline_error(absl::StrCat(
        "still missing: ", quote_keys({reply.keys().begin(), reply.keys().end()}), ";"));
  }

  StatusOr<std::optional<std::string>> wait_change(std::string_view key,
                                                   const std::optional<std::string>& seen,
                                                   Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("wait_change(", quote_key(key), ")"), timeout);
    WEFT_RETURN_IF_ERROR(op.wrap(check_key(key)));
    v1::StoreRequest request;
    request.mutable_wait_change()->set_key(std::string(key));
    // A value that no store can hold differs from every one.
    if (seen.has_value() && seen->size() <= kMaxStoreValue) {
      request.mutable_wait_change()->set_seen(*seen);
    } else if (seen.has_value()) {
      request.mutable_wait_change()->set_seen(std::string(kMaxStoreValue + 1, '\0'));
    }
    WEFT_ASSIGN_OR_RETURN(v1::StoreReply reply, run_waiting(op, std::move(request)));
    if (reply.outcome() == v1::StoreReply::NOT_YET) {
      return op.deadline_error("the value did not change");
    }
    return value_of(&reply);
  }

  StatusOr<std::vector<std::string>> list_keys(std::string_view prefix, Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("list_keys(", quote_key(prefix), ")"), timeout);
    // No key is that long, so none has such a prefix.
    if (prefix.size() > kMaxStoreKey) return std::vector<std::string>();
    v1::StoreRequest request;
    request.mutable_list()->set_prefix(std::string(prefix));
    std::vector<std::string> keys;
    while (true) {
      WEFT_ASSIGN_OR_RETURN(v1::StoreReply reply, run(op, kReads, request));
      for (std::string& key : *reply.mutable_keys()) keys.push_back(std::move(key));
      if (!reply.more() || keys.empty()) return keys;
      request.mutable_list()->set_after(keys.back());
    }
  }

  StatusOr<std::vector<StoreEntry>> list_entries(std::string_view prefix,
                                                 Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("list_entries(", quote_key(prefix), ")"), timeout);
    if (prefix.size() > kMaxStoreKey) return std::vector<StoreEntry>();
    v1::StoreRequest request;
    request.mutable_list()->set_prefix(std::string(prefix));
    request.mutable_list()->set_want_values(true);
    std::vector<StoreEntry> entries;
    while (true) {
      WEFT_ASSIGN_OR_RETURN(v1::StoreReply reply, run(op, kReads, request));
      if (reply.values_size() != reply.keys_size()) return wrong_number(op, reply);
      for (int i = 0; i < reply.keys_size(); ++i) {
        entries.push_back({std::move(*reply.mutable_keys(i)),
                           std::move(*reply.mutable_values(i)->mutable_value())});
      }
      if (!reply.more() || entries.empty()) return entries;
      request.mutable_list()->set_after(entries.back().key);
    }
  }

  StatusOr<std::vector<std::optional<std::string>>> multi_get(const std::vector<std::string>& keys,
                                                              Timeout timeout) override {
    const StoreOp op = this->op(absl::StrCat("multi_get(", quote_keys(keys), ")"), timeout);
    WEFT_RETURN_IF_ERROR(op.wrap(check_keys(keys)));
    std::vector<std::optional<std::string>> values;
    values.reserve(keys.size());
    do {
      v1::StoreRequest request;
      const auto rest = keys.begin() + static_cast<std::ptrdiff_t>(values.size());
      request.mutable_multi_get()->mutable_keys()->Assign(rest, keys.end());
      WEFT_ASSIGN_OR_RETURN(v1::StoreReply reply, run(op, kReads, std::move(request)));
      const size_t left = keys.size() - values.size();
      const auto got = static_cast<size_t>(reply.values_size());
      if (got > left || (got < left && (got == 0 || !reply.more()))) {
        return wrong_number(op, reply);
      }
      for (v1::StoreReply::Value& value : *reply.mutable_values()) {
        values.emplace_back(value.has_value()
                                ? std::optional<std::string>(std::move(*value.mutable_value()))
                                : std::nullopt);
      }
    } while (values.size() < keys.size());
    return values;
  }

  StatusOr<int64_t> num_keys(Timeout timeout) override {
    v1::StoreRequest request;
    request.mutable_count();
    WEFT_ASSIGN_OR_RETURN(const v1::StoreReply reply,
                          run(op("num_keys()", timeout), kReads, std::move(request)));
    return reply.number();
  }

  void interrupt() override {
    scope_.interrupt();
    link_->wake();
  }
  std::string describe() const override { return link_->url(); }

 private:
  static constexpr bool kChanges = true;
  static constexpr bool kReads = false;
  // From the end of a wait at the server until its answer is here.
  static constexpr absl::Duration kAnswerTime = absl::Milliseconds(200);

  StoreOp op(std::string what, Timeout timeout) const {
    return StoreOp::make(*link_->runtime(), link_->url(), std::move(what), timeout,
                         default_timeout_);
  }

  static Status wrong_number(const StoreOp& op, const v1::StoreReply& reply) {
    return op.error(ErrorKind::kProtocol,
                    absl::StrCat("the server answers with ", reply.values_size(), " values and ",
                                 reply.keys_size(), " keys; it may be older than this client"));
  }

  static std::optional<std::string> value_of(v1::StoreReply* reply) {
    if (!reply->has_value()) return std::nullopt;
    return std::move(*reply->mutable_value());
  }

  StatusOr<v1::StoreReply> run(const StoreOp& op, bool changes, v1::StoreRequest request) {
    if (op.deadline <= op.begin) return op.deadline_error("not begun: no time was given");
    return link_->call(op, &scope_, changes, std::move(request));
  }

  // Asks the server to wait for all of the time: its answer, which names what is missing, may come
  // a moment after that. NOT_YET: the time is over.
  StatusOr<v1::StoreReply> run_waiting(const StoreOp& op, v1::StoreRequest request) {
    if (op.deadline <= op.begin) return op.deadline_error("not begun: no time was given");
    StoreOp patient = op;
    patient.deadline += kAnswerTime;
    while (true) {
      const absl::Duration left = op.deadline - link_->runtime()->now();
      const absl::Duration slice = std::min(left, absl::Minutes(10));
      const auto ms = static_cast<uint32_t>(std::max<int64_t>(absl::ToInt64Milliseconds(slice), 1));
      if (request.has_wait_keys()) {
        request.mutable_wait_keys()->set_max_wait_ms(ms);
      } else {
        request.mutable_wait_change()->set_max_wait_ms(ms);
      }
      WEFT_ASSIGN_OR_RETURN(v1::StoreReply reply, run(patient, kReads, request));
      const bool over = op.deadline - link_->runtime()->now() < absl::Milliseconds(1);
      if (reply.outcome() == v1::StoreReply::DONE || over) return reply;
    }
  }

  const std::shared_ptr<TcpLink> link_;
  const Timeout default_timeout_;
  InterruptScope scope_;
};

}  // namespace
}  // namespace internal

StatusOr<std::shared_ptr<TcpStore>> TcpStore::connect(std::string_view host, int port,
                                                      const TcpStoreOptions& options,
                                                      std::shared_ptr<Runtime> runtime) {
  WEFT_RETURN_IF_ERROR(internal::check_dial_address("a store", host, port));
  std::shared_ptr<const internal::GrpcTls> tls;
  if (!options.credentials.empty()) {
    WEFT_ASSIGN_OR_RETURN(tls, internal::GrpcTls::make(options.credentials, *runtime));
  }
  auto client = std::make_shared<internal::TcpClient>(
      std::make_shared<internal::TcpLink>(std::move(runtime), std::string(host), port,
                                          std::move(tls)),
      options.timeout);
  WEFT_RETURN_IF_ERROR(client->open());
  return std::shared_ptr<TcpStore>(new TcpStore(std::move(client)));
}

std::shared_ptr<Store> TcpStore::new_client() {
  return std::shared_ptr<TcpStore>(
      new TcpStore(static_cast<internal::TcpClient&>(*inner()).fork()));
}

}  // namespace weft
