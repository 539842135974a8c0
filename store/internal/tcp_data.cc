#include "weft/store/internal/tcp_data.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/store/internal/checks.h"

namespace weft::internal {
namespace {

constexpr absl::Duration kRemembered = absl::Minutes(5);
constexpr size_t kMaxReplies = 8192;
constexpr size_t kListBytes = 1 << 20;

bool changes_something(const v1::StoreRequest& request) {
  switch (request.op_case()) {
    case v1::StoreRequest::kSet:
    case v1::StoreRequest::kAdd:
    case v1::StoreRequest::kCompareSet:
    case v1::StoreRequest::kDelete: return true;
    default: return false;
  }
}

v1::StoreReply failed(const Status& status) {
  v1::StoreReply reply;
  reply.set_outcome(v1::StoreReply::FAILED);
  reply.set_error_kind(static_cast<uint32_t>(error_kind(status)));
  reply.set_error_code(static_cast<uint32_t>(status.code()));
  reply.set_error(std::string(status.message()));
  return reply;
}

v1::StoreReply refused(v1::StoreReply::Outcome why) {
  v1::StoreReply reply;
  reply.set_outcome(why);
  return reply;
}

Status check_all_keys(const v1::StoreRequest::WaitKeys& wait) {
  return check_keys({wait.keys().begin(), wait.keys().end()});
}

}  // namespace

StatusOr<v1::StoreSessionReply> TcpData::open_session(const v1::StoreSessionRequest& request,
                                                      absl::Time now) {
  if (request.magic() != kStoreMagic || request.client_id() == 0) {
    return make_error(ErrorKind::kProtocol, "this is a weft store, and the caller no client of it");
  }
  if (request.protocol() != kStoreProtocol) {
    return make_error(ErrorKind::kProtocol,
                      absl::StrCat("the client speaks store protocol ", request.protocol(),
                                   ", this server ", kStoreProtocol));
  }
  for (auto it = clients_.begin(); it != clients_.end();) {
    if (it->second.sessions == 0 && it->second.left + kRemembered <= now) {
      forget(&it->second, UINT64_MAX);
      it = clients_.erase(it);
    } else {
      ++it;
    }
  }
  v1::StoreSessionReply reply;
  reply.set_magic(kStoreMagic);
  reply.set_protocol(kStoreProtocol);
  reply.set_server_id(server_id_);
  reply.set_known(request.last_server_id() != server_id_ ||
                  clients_.count(request.client_id()) > 0);
  // A client that reconnects may be here before the end of its old stream was noticed.
  ++clients_[request.client_id()].sessions;
  return reply;
}

void TcpData::close_session(uint64_t client_id, absl::Time now) {
  auto it = clients_.find(client_id);
  if (it == clients_.end()) return;
  --it->second.sessions;
  it->second.left = now;
}

void TcpData::forget(Client* client, uint64_t below) {
  while (!client->replies.empty() && client->replies.begin()->first < below) {
    remembered_bytes_ -= client->replies.begin()->second.ByteSizeLong();
    client->replies.erase(client->replies.begin());
  }
}

TcpData::Result TcpData::handle(const v1::StoreRequest& request) {
  Result result;
  result.reply.set_outcome(v1::StoreReply::DONE);
  auto it = clients_.find(request.client_id());
  if (it == clients_.end() || it->second.sessions == 0) {
    result.reply = refused(v1::StoreReply::REFUSED_NO_SESSION);
    return result;
  }
  Client& client = it->second;
  if (request.done_below() > client.done_below) {
    client.done_below = request.done_below();
    forget(&client, client.done_below);
  }
  if (changes_something(request)) {
    handle_change(request, &client, &result);
    return result;
  }
  const Status status = apply(request, &result);
  if (!status.ok()) result.reply = failed(status);
  return result;
}

// STORE-1.
void TcpData::handle_change(const v1::StoreRequest& request, Client* client, Result* result) {
  const uint64_t id = request.request_id();
  if (id == 0 || id < client->done_below) {
    result->reply = refused(v1::StoreReply::REFUSED_OLD);
    return;
  }
  const auto before = client->replies.find(id);
  if (before != client->replies.end()) {
    result->reply = before->second;
    return;
  }
  Status status;
  if (client->replies.size() >= kMaxReplies || remembered_bytes_ > max_bytes_) {
    status = make_error(ErrorKind::kResource, "too many operations of one client in flight");
  } else {
    status = apply(request, result);
  }
  if (!status.ok()) {
    result->changed.clear();
    result->reply = failed(status);
  }
  remembered_bytes_ += result->reply.ByteSizeLong();
  client->replies.emplace(id, result->reply);
}

Status TcpData::check_room(size_t key, size_t value) const {
  if (table_.bytes() + key + value <= max_bytes_) return absl::OkStatus();
  return make_error(ErrorKind::kResource,
                    absl::StrCat("the store is full: it holds ", table_.bytes(), " of at most ",
                                 max_bytes_, " bytes"));
}

Status TcpData::apply(const v1::StoreRequest& request, Result* result) {
  v1::StoreReply& reply = result->reply;
  switch (request.op_case()) {
    case v1::StoreRequest::kSet: {
      const auto& op = request.set();
      WEFT_RETURN_IF_ERROR(check_key(op.key()));
      WEFT_RETURN_IF_ERROR(check_value(op.value()));
      WEFT_RETURN_IF_ERROR(check_room(op.key().size(), op.value().size()));
      table_.set(op.key(), op.value());
      result->changed = op.key();
      return absl::OkStatus();
    }
    case v1::StoreRequest::kGet: {
      WEFT_RETURN_IF_ERROR(check_key(request.get().key()));
      if (const std::string* value = table_.find(request.get().key())) reply.set_value(*value);
      return absl::OkStatus();
    }
    case v1::StoreRequest::kAdd: {
      const auto& op = request.add();
      WEFT_RETURN_IF_ERROR(check_key(op.key()));
      WEFT_RETURN_IF_ERROR(check_room(op.key().size(), 20));
      WEFT_ASSIGN_OR_RETURN(const int64_t sum, table_.add(op.key(), op.delta()));
      reply.set_number(sum);
      result->changed = op.key();
      return absl::OkStatus();
    }
    case v1::StoreRequest::kCompareSet: {
      const auto& op = request.compare_set();
      WEFT_RETURN_IF_ERROR(check_key(op.key()));
      WEFT_RETURN_IF_ERROR(check_value(op.expected()));
      WEFT_RETURN_IF_ERROR(check_value(op.desired()));
      WEFT_RETURN_IF_ERROR(check_room(op.key().size(), op.desired().size()));
      bool changed = false;
      reply.set_value(table_.compare_set(op.key(), op.expected(), op.desired(), &changed));
      if (changed) result->changed = op.key();
      return absl::OkStatus();
    }
    case v1::StoreRequest::kDelete: {
      WEFT_RETURN_IF_ERROR(check_key(request.delete_().key()));
      const bool erased = table_.erase(request.delete_().key());
      reply.set_number(erased ? 1 : 0);
      if (erased) result->changed = request.delete_().key();
      return absl::OkStatus();
    }
    case v1::StoreRequest::kWaitKeys: {
      WEFT_RETURN_IF_ERROR(check_all_keys(request.wait_keys()));
      handle_wait_keys(request.wait_keys(), result);
      return absl::OkStatus();
    }
    case v1::StoreRequest::kWaitChange: {
      const auto& op = request.wait_change();
      WEFT_RETURN_IF_ERROR(check_key(op.key()));
      const std::string* value = table_.find(op.key());
      const bool same = value == nullptr ? !op.has_seen() : op.has_seen() && op.seen() == *value;
      if (value != nullptr) reply.set_value(*value);
      if (same) {
        reply = not_yet(request);
        if (op.max_wait_ms() > 0) result->parked_on = op.key();
      }
      return absl::OkStatus();
    }
    case v1::StoreRequest::kList: handle_list(request.list(), &reply); return absl::OkStatus();
    case v1::StoreRequest::kMultiGet: return handle_multi_get(request.multi_get(), &reply);
    case v1::StoreRequest::kCount: reply.set_number(table_.size()); return absl::OkStatus();
    case v1::StoreRequest::OP_NOT_SET: break;
  }
  return make_error(ErrorKind::kUnimplemented, "an operation that this server does not know");
}

void TcpData::handle_wait_keys(const v1::StoreRequest::WaitKeys& wait, Result* result) const {
  const std::string* first_missing = nullptr;
  for (const std::string& key : wait.keys()) {
    if (table_.find(key) != nullptr) continue;
    if (first_missing == nullptr) first_missing = &key;
    // While it waits only one is needed; the list is made when it gives up.
    if (wait.max_wait_ms() > 0) break;
    result->reply.add_keys(key);
  }
  if (first_missing == nullptr) {
    if (wait.want_value() && wait.keys_size() == 1) {
      result->reply.set_value(*table_.find(wait.keys(0)));
    }
    return;
  }
  result->reply.set_outcome(v1::StoreReply::NOT_YET);
  if (wait.max_wait_ms() > 0) result->parked_on = *first_missing;
}

void TcpData::handle_list(const v1::StoreRequest::List& list, v1::StoreReply* reply) const {
  const auto& entries = table_.entries();
  auto it = list.has_after() && list.after() >= list.prefix() ? entries.upper_bound(list.after())
                                                              : entries.lower_bound(list.prefix());
  size_t bytes = 0;
  for (; it != entries.end(); ++it) {
    const std::string& key = it->first;
    if (key.compare(0, list.prefix().size(), list.prefix()) != 0) return;
    bytes += key.size() + (list.want_values() ? it->second.size() : 0);
    if (bytes > kListBytes && reply->keys_size() > 0) {
      reply->set_more(true);
      return;
    }
    reply->add_keys(key);
    if (list.want_values()) reply->add_values()->set_value(it->second);
  }
}

Status TcpData::handle_multi_get(const v1::StoreRequest::MultiGet& get,
                                 v1::StoreReply* reply) const {
  WEFT_RETURN_IF_ERROR(check_keys({get.keys().begin(), get.keys().end()}));
  size_t bytes = 0;
  for (const std::string& key : get.keys()) {
    const std::string* value = table_.find(key);
    bytes += value == nullptr ? 0 : value->size();
    if (bytes > kListBytes && reply->values_size() > 0) {
      reply->set_more(true);
      return absl::OkStatus();
    }
    v1::StoreReply::Value* out = reply->add_values();
    if (value != nullptr) out->set_value(*value);
  }
  return absl::OkStatus();
}

v1::StoreReply TcpData::not_yet(const v1::StoreRequest& request) const {
  v1::StoreReply reply;
  reply.set_outcome(v1::StoreReply::NOT_YET);
  for (const std::string& key : request.wait_keys().keys()) {
    if (table_.find(key) == nullptr) reply.add_keys(key);
  }
  return reply;
}

}  // namespace weft::internal
