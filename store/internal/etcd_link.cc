#include "weft/store/internal/etcd_link.h"

#include <grpcpp/generic/generic_stub.h>

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "weft/common/call_scope.h"
#include "weft/store/internal/grpc_util.h"
#include "weft/store/internal/quiet_wait.h"

namespace weft::internal {
namespace {

using grpc::protobuf::MessageLite;

constexpr char kRange[] = "/etcdserverpb.KV/Range";
constexpr char kTxn[] = "/etcdserverpb.KV/Txn";
constexpr char kWatch[] = "/etcdserverpb.Watch/Watch";
constexpr char kLeaseGrant[] = "/etcdserverpb.Lease/LeaseGrant";

constexpr absl::Duration kLeaseTtl = absl::Minutes(10);
// One of several.
constexpr absl::Duration kWatchOfAMember = absl::Seconds(10);
// Less than the half of a lease that every marker has left.
constexpr absl::Duration kUnknownBound = absl::Minutes(4);
// etcd takes 128 operations in a transaction by default.
constexpr size_t kKeysPerTxn = 100;
constexpr int64_t kKeysPerPage = 4000;
// Most values are small; a page that is too large is asked for again in parts.
constexpr int64_t kValuesPerPage = 512;

// The end of the range of all keys that begin with `prefix`.
std::string prefix_end(std::string prefix) {
  while (!prefix.empty() && prefix.back() == '\xff') prefix.pop_back();
  if (prefix.empty()) return std::string(1, '\0');  // to the end of everything
  prefix.back() = static_cast<char>(prefix.back() + 1);
  return prefix;
}

}  // namespace

// A place for a marker, and the number of the operation that uses it (ETCD-3).
class EtcdLink::Marker {
 public:
  explicit Marker(EtcdLink* link) : link_(link) {
    MutexLock lock(&link_->mutex_);
    operation_ = link_->next_operation_++;
    if (link_->free_places_.empty()) {
      place_ = link_->next_place_++;
    } else {
      place_ = link_->free_places_.back();
      link_->free_places_.pop_back();
    }
    key_ = absl::StrCat(link_->prefix_, "/m/", link_->client_, "/", place_);
    head_ = absl::StrCat(operation_, " ");
  }
  ~Marker() {
    if (unknown) return;
    MutexLock lock(&link_->mutex_);
    link_->free_places_.push_back(place_);
  }
  Marker(const Marker&) = delete;
  Marker& operator=(const Marker&) = delete;

  const std::string& key() const { return key_; }
  std::string value(const std::string& result) const { return head_ + result; }
  // The result, when the marker in etcd is this operation's.
  std::optional<std::string> result(const std::string& value) const {
    if (value.compare(0, head_.size(), head_) != 0) return std::nullopt;
    return value.substr(head_.size());
  }

  bool unknown = false;  // an attempt was sent and its outcome is not known

 private:
  EtcdLink* const link_;
  uint64_t operation_ = 0;
  uint64_t place_ = 0;
  std::string key_;
  std::string head_;
};

EtcdLink::EtcdLink(std::shared_ptr<Runtime> runtime, std::unique_ptr<EtcdCluster> cluster,
                   std::string prefix)
    : runtime_(std::move(runtime)),
      prefix_(std::move(prefix)),
      url_(absl::StrCat("etcd://", cluster->addresses(), "/", prefix_)),
      client_(absl::StrCat(absl::Hex(runtime_->random().next(), absl::kZeroPad16))),
      cluster_(std::move(cluster)) {}

std::string EtcdLink::data_key(std::string_view key) const {
  return absl::StrCat(prefix_, "/k/", absl::string_view(key.data(), key.size()));
}

Status EtcdLink::before_next_attempt(const StoreOp& op, InterruptScope* scope,
                                     const grpc::Status& status, RetryBackoff* backoff) {
  if (scope->interrupted()) return op.interrupted();
  if (std::optional<Status> error = cluster_->error_if_final(op, status)) return *std::move(error);
  const std::shared_ptr<grpc::Channel> channel = cluster_->channel();
  if (!scope->pause(backoff->next(), op.deadline, channel.get())) return op.interrupted();
  // gRPC's clock may be a little ahead; that a member was silent is no reason to give up.
  const bool out_of_time =
      status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED && !cluster_->has_several();
  if (runtime_->now() < op.deadline && !out_of_time) return absl::OkStatus();
  if (channel->GetState(false) == GRPC_CHANNEL_READY) {
    return op.deadline_error(
        absl::StrCat("no answer came (the last: ", grpc_status_text(status), ")"));
  }
  const std::string hint = cluster_->hint();
  return op.error(
      ErrorKind::kUnavailable,
      absl::StrCat("cannot reach etcd within ", absl::FormatDuration(op.deadline - op.begin), " (",
                   backoff->attempts(), " attempts, the last: ", grpc_status_text(status), ")",
                   hint.empty() ? "" : "; ", hint));
}

StatusOr<bool> EtcdLink::ask_if_it_fits(const StoreOp& op, InterruptScope* scope,
                                        const char* method, const MessageLite& request,
                                        MessageLite* reply) {
  RetryBackoff backoff(&runtime_->random());
  while (true) {
    if (scope->interrupted()) return op.interrupted();
    grpc::Status status;
    {
      BlockingRegion region;
      WEFT_RETURN_IF_ERROR(region.status());
      status = cluster_->call(scope, op.deadline, method, request, reply);
    }
    if (status.ok()) return true;
    // gRPC's own words: nothing else tells this from a limit of etcd.
    if (status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED &&
        status.error_message().find("larger than max") != std::string::npos) {
      return false;
    }
    WEFT_RETURN_IF_ERROR(before_next_attempt(op, scope, status, &backoff));
  }
}

Status EtcdLink::ask(const StoreOp& op, InterruptScope* scope, const char* method,
                     const MessageLite& request, MessageLite* reply) {
  WEFT_ASSIGN_OR_RETURN(const bool fits, ask_if_it_fits(op, scope, method, request, reply));
  if (fits) return absl::OkStatus();
  return op.error(ErrorKind::kResource, "the answer of etcd is larger than a message can be");
}

StatusOr<int64_t> EtcdLink::lease(const StoreOp& op, InterruptScope* scope) {
  {
    MutexLock lock(&mutex_);
    if (lease_ != 0 && runtime_->now() < lease_until_) return lease_;
  }
  etcdserverpb::LeaseGrantRequest request;
  request.set_ttl(absl::ToInt64Seconds(kLeaseTtl));
  etcdserverpb::LeaseGrantResponse reply;
  // Two threads may both come here; the lease of one is then never used, and ends by itself.
  const absl::Time begin = runtime_->now();
  WEFT_RETURN_IF_ERROR(ask(op, scope, kLeaseGrant, request, &reply));
  if (reply.id() == 0) {
    return op.error(ErrorKind::kProtocol, absl::StrCat("etcd grants no lease: ", reply.error()));
  }
  MutexLock lock(&mutex_);
  lease_ = reply.id();
  lease_until_ = begin + kLeaseTtl / 2;
  return lease_;
}

void EtcdLink::drop_lease(int64_t id) {
  MutexLock lock(&mutex_);
  if (lease_ == id) lease_ = 0;
}

StatusOr<std::string> EtcdLink::change(const StoreOp& op, InterruptScope* scope,
                                       std::string_view key, const Decide& decide) {
  const std::string data = data_key(key);
  Marker marker(this);
  RetryBackoff backoff(&runtime_->random());
  absl::Time unknown_since = absl::InfiniteFuture();

  etcdserverpb::TxnRequest read;
  read.add_success()->mutable_request_range()->set_key(data);
  read.add_success()->mutable_request_range()->set_key(marker.key());

  while (true) {
    if (runtime_->now() > unknown_since + kUnknownBound) {
      return op.error(ErrorKind::kMaybeExecuted,
                      "etcd was out of reach for so long that it cannot be found out whether the "
                      "operation took effect");
    }
    etcdserverpb::TxnResponse seen;
    WEFT_RETURN_IF_ERROR(ask(op, scope, kTxn, read, &seen));
    if (seen.responses_size() != 2) return op.error(ErrorKind::kProtocol, "a wrong answer of etcd");
    const auto& marker_kvs = seen.responses(1).response_range().kvs();
    if (marker.unknown && !marker_kvs.empty()) {  // ETCD-2
      if (auto result = marker.result(marker_kvs[0].value())) {
        marker.unknown = false;
        return *std::move(result);
      }
    }
    const auto& kvs = seen.responses(0).response_range().kvs();
    std::optional<std::string> current;
    if (!kvs.empty()) current = kvs[0].value();
    StatusOr<Change> change = decide(current);
    // An attempt that is still under way was decided on an older revision, and fails.
    if (!change.ok()) return op.wrap(change.status());
    if (change->kind == Change::kNothing) return change->result;

    WEFT_ASSIGN_OR_RETURN(const int64_t lease_id, lease(op, scope));
    etcdserverpb::TxnRequest write;  // ETCD-1
    auto* guard = write.add_compare();
    guard->set_key(data);
    guard->set_target(etcdserverpb::Compare::MOD);
    guard->set_result(etcdserverpb::Compare::EQUAL);
    guard->set_mod_revision(kvs.empty() ? 0 : kvs[0].mod_revision());
    if (change->kind == Change::kPut) {
      auto* put = write.add_success()->mutable_request_put();
      put->set_key(data);
      put->set_value(change->value);
    } else {
      write.add_success()->mutable_request_delete_range()->set_key(data);
    }
    auto* put = write.add_success()->mutable_request_put();
    put->set_key(marker.key());
    put->set_value(marker.value(change->result));
    put->set_lease(lease_id);

    etcdserverpb::TxnResponse written;
    grpc::Status status;
    {
      BlockingRegion region;
      WEFT_RETURN_IF_ERROR(region.status());
      status = cluster_->call(scope, op.deadline, kTxn, write, &written);
    }
    if (status.ok() && written.succeeded()) {
      marker.unknown = false;
      return change->result;
    }
    if (status.ok()) {
      // Another client was faster. The pause keeps many clients from hindering each other for ever.
      if (!scope->pause(absl::Milliseconds(10) * runtime_->random().unit(), op.deadline,
                        cluster_->channel().get())) {
        return op.interrupted();
      }
      if (runtime_->now() >= op.deadline) {
        return op.deadline_error("others changed the key all the time");
      }
      continue;
    }
    if (status.error_code() == grpc::StatusCode::NOT_FOUND) {
      drop_lease(lease_id);  // it has expired; nothing was written
      continue;
    }
    marker.unknown = true;
    unknown_since = std::min(unknown_since, runtime_->now());
    WEFT_RETURN_IF_ERROR(before_next_attempt(op, scope, status, &backoff));
  }
}

StatusOr<EtcdLink::View> EtcdLink::look(const StoreOp& op, InterruptScope* scope,
                                        const std::vector<std::string>& keys, bool want_value) {
  View view;
  for (size_t begin = 0; begin < keys.size(); begin += kKeysPerTxn) {
    const size_t end = std::min(keys.size(), begin + kKeysPerTxn);
    etcdserverpb::TxnRequest read;
    for (size_t i = begin; i < end; ++i) {
      auto* range = read.add_success()->mutable_request_range();
      range->set_key(data_key(keys[i]));
      range->set_count_only(!want_value);
      range->set_revision(view.revision);
    }
    etcdserverpb::TxnResponse seen;
    WEFT_RETURN_IF_ERROR(ask(op, scope, kTxn, read, &seen));
    if (seen.responses_size() != static_cast<int>(end - begin)) {
      return op.error(ErrorKind::kProtocol, "a wrong answer of etcd");
    }
    if (view.revision == 0) view.revision = seen.header().revision();
    for (size_t i = begin; i < end; ++i) {
      const auto& range = seen.responses(static_cast<int>(i - begin)).response_range();
      if (range.count() == 0) view.missing.push_back(keys[i]);
      if (i == 0 && want_value && range.kvs_size() > 0) view.value = range.kvs(0).value();
    }
  }
  return view;
}

Status EtcdLink::watch(const StoreOp& op, InterruptScope* scope, const std::string& key,
                       int64_t revision, absl::Duration length, RetryBackoff* backoff) {
  if (scope->interrupted()) return op.interrupted();
  // A member that has been cut off from the others says nothing at all.
  if (cluster_->has_several()) length = std::min(length, kWatchOfAMember);
  EtcdCluster::Route route;
  grpc::Status status;
  bool changed = false;
  {
    BlockingRegion region;
    WEFT_RETURN_IF_ERROR(region.status());
    status = cluster_->route(scope, op.deadline, &route);
  }
  if (status.ok()) {
    BlockingRegion region;
    WEFT_RETURN_IF_ERROR(region.status());
    grpc::ClientContext context;
    context.set_deadline(grpc_after(length));
    route.sign(&context);
    InterruptScope::Guard guard(scope, &context);
    grpc::CompletionQueue queue;
    QuietWait wait(runtime_.get());
    grpc::TemplatedGenericStub<etcdserverpb::WatchRequest, etcdserverpb::WatchResponse> stub(
        route.channel);
    auto stream = stub.PrepareCall(&context, kWatch, &queue);
    etcdserverpb::WatchRequest request;
    request.mutable_create_request()->set_key(data_key(key));
    request.mutable_create_request()->set_start_revision(revision + 1);
    stream->StartCall(&context);
    bool going = wait.one(&queue);
    if (going) {
      stream->Write(request, &context);
      going = wait.one(&queue);
    }
    while (going && !changed) {
      etcdserverpb::WatchResponse response;
      stream->Read(&response, &context);
      going = wait.one(&queue);
      // Cancelled by etcd, when it has compacted that revision: looking again is right, too.
      changed = going && (response.events_size() > 0 || response.canceled());
    }
    if (changed) context.TryCancel();
    stream->Finish(&status, &context);
    wait.drain(&queue);
    // Silence is what a watch is made for.
    if (!changed && status.error_code() != grpc::StatusCode::DEADLINE_EXCEEDED) {
      cluster_->settle(route, status);
    }
  }
  if (scope->interrupted()) return op.interrupted();
  if (changed || status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED)
    return absl::OkStatus();
  if (std::optional<Status> error = cluster_->error_if_final(op, status)) return *std::move(error);
  // Broken, or ended by etcd, which knows the deadline too and may be first. Looking again tells
  // whether etcd is there.
  if (!scope->pause(backoff->next(), op.deadline, cluster_->channel().get())) {
    return op.interrupted();
  }
  return absl::OkStatus();
}

StatusOr<std::vector<StoreEntry>> EtcdLink::list(const StoreOp& op, InterruptScope* scope,
                                                 std::string_view prefix, bool want_values) {
  const size_t head = data_key("").size();
  etcdserverpb::RangeRequest request;
  request.set_key(data_key(prefix));
  request.set_range_end(prefix_end(request.key()));
  request.set_limit(want_values ? kValuesPerPage : kKeysPerPage);
  request.set_keys_only(!want_values);
  std::vector<StoreEntry> entries;
  while (true) {
    etcdserverpb::RangeResponse page;
    WEFT_ASSIGN_OR_RETURN(const bool fits, ask_if_it_fits(op, scope, kRange, request, &page));
    if (!fits) {
      if (request.limit() == 1) {
        return op.error(ErrorKind::kResource, "a value is larger than a message can be");
      }
      request.set_limit(std::max<int64_t>(request.limit() / 4, 1));
      continue;
    }
    for (auto& kv : *page.mutable_kvs()) {
      if (kv.key().size() <= head) continue;
      entries.push_back({kv.key().substr(head), std::move(*kv.mutable_value())});
    }
    if (!page.more() || page.kvs().empty()) return entries;
    request.set_revision(page.header().revision());
    request.set_key(page.kvs().rbegin()->key() + std::string(1, '\0'));
  }
}

StatusOr<std::vector<std::optional<std::string>>> EtcdLink::get_many(
    const StoreOp& op, InterruptScope* scope, const std::vector<std::string>& keys) {
  std::vector<std::optional<std::string>> values;
  values.reserve(keys.size());
  size_t at_once = kKeysPerTxn;
  while (values.size() < keys.size()) {
    const size_t begin = values.size();
    const size_t end = std::min(keys.size(), begin + at_once);
    etcdserverpb::TxnRequest read;
    for (size_t i = begin; i < end; ++i) {
      read.add_success()->mutable_request_range()->set_key(data_key(keys[i]));
    }
    etcdserverpb::TxnResponse seen;
    WEFT_ASSIGN_OR_RETURN(const bool fits, ask_if_it_fits(op, scope, kTxn, read, &seen));
    if (!fits) {
      if (at_once == 1) {
        return op.error(ErrorKind::kResource, "a value is larger than a message can be");
      }
      at_once = std::max<size_t>(at_once / 4, 1);
      continue;
    }
    if (seen.responses_size() != static_cast<int>(end - begin)) {
      return op.error(ErrorKind::kProtocol, "a wrong answer of etcd");
    }
    for (auto& response : *seen.mutable_responses()) {
      auto* kvs = response.mutable_response_range()->mutable_kvs();
      values.emplace_back(
          kvs->empty() ? std::nullopt
                       : std::optional<std::string>(std::move(*kvs->Mutable(0)->mutable_value())));
    }
  }
  return values;
}

StatusOr<int64_t> EtcdLink::count(const StoreOp& op, InterruptScope* scope) {
  etcdserverpb::RangeRequest request;
  request.set_key(data_key(""));
  request.set_range_end(prefix_end(request.key()));
  request.set_count_only(true);
  etcdserverpb::RangeResponse reply;
  WEFT_RETURN_IF_ERROR(ask(op, scope, kRange, request, &reply));
  return reply.count();
}

}  // namespace weft::internal
