// How a context ends on all workers.

#include <algorithm>
#include <utility>

#include "weft/dist_autograd/internal/service.h"

namespace weft::internal {
namespace {

constexpr absl::Duration kAnswersWithin = absl::Seconds(30);
constexpr absl::Duration kAgainAfter = absl::Milliseconds(100);
// A release that no call takes along goes alone.
constexpr absl::Duration kRidesWithin = absl::Milliseconds(10);
constexpr size_t kMostOnOneCall = 64;
// Contexts that live and that a release names, at most; of those beyond it says nothing.
constexpr size_t kMostAlive = 256;

}  // namespace

std::optional<ReleaseData> DistAutogradService::begin_release(const ContextRef& context) {
  ReleaseData data{.context = context->id()};
  MutexLock lock(&mutex_);
  if (!contexts_.contains(data.context)) return std::nullopt;
  data.released_below = last_context_ + 1;
  const AutogradContextId first{data.context.creator, 0};
  for (auto at = contexts_.lower_bound(first);
       at != contexts_.end() && at->first.creator == data.context.creator; ++at) {
    if (at->first == data.context) continue;
    if (data.alive.size() == kMostAlive) {
      data.released_below = at->first.counter;  // they are in order
      break;
    }
    data.alive.push_back(at->first.counter);
  }
  return data;
}

Future<void> DistAutogradService::release(const ContextRef& context) {
  const std::optional<ReleaseData> data = begin_release(context);
  if (!data.has_value()) return Future<void>::ready({});
  Promise<void> promise(context_.executor);
  Future<void> future = promise.future();
  release_here(
      *data, /*rides=*/false,
      [promise = std::move(promise)](const Status& status) mutable { promise.try_set(status); });
  return future;
}

void DistAutogradService::release_later(const ContextRef& context) {
  const std::optional<ReleaseData> data = begin_release(context);
  if (data.has_value()) release_here(*data, /*rides=*/true, [](const Status&) {});
}

std::vector<DistAutogradService::ReleaseRef> DistAutogradService::take_riding(const WorkerKey& to) {
  MutexLock lock(&mutex_);
  const auto at = riding_.find(to);
  if (at == riding_.end()) return {};
  ridden_.insert(to);
  std::vector<ReleaseRef> taken = std::exchange(at->second, {});
  if (taken.size() > kMostOnOneCall) {
    at->second.assign(taken.begin() + kMostOnOneCall, taken.end());
    taken.resize(kMostOnOneCall);
  } else {
    riding_.erase(at);
  }
  return taken;
}

void DistAutogradService::flush_riding(absl::Time now) {
  std::map<WorkerKey, std::vector<ReleaseRef>> all;
  {
    MutexLock lock(&mutex_);
    if (flush_riding_at_ > now) return watch_locked(flush_riding_at_);
    flush_riding_at_ = absl::InfiniteFuture();
    all.swap(riding_);
  }
  for (const auto& [to, releases] : all) {
    for (const ReleaseRef& release : releases) tell_released(release, to);
  }
}

void DistAutogradService::release_here(const ReleaseData& data, bool rides, OnTold done) {
  ContextRef context;
  {
    MutexLock lock(&mutex_);
    if (data.context.creator != self()) {
      Released& released = released_[data.context.creator];
      released.add_below(data.released_below, data.alive);
      released.add(data.context.counter);
    }
    const auto at = contexts_.find(data.context);
    if (at != contexts_.end()) {
      context = std::move(at->second);
      contexts_.erase(at);
    }
  }
  if (context == nullptr) return done(absl::OkStatus());
  std::set<WorkerKey> known = context->close(context->release_error());
  known.erase(data.context.creator);  // it knows
  auto release = std::make_shared<Release>();
  release->data = data;
  release->done = std::move(done);
  release->pending = static_cast<int64_t>(known.size()) + 1;
  release->told = known;
  {
    MutexLock lock(&mutex_);
    ++releases_;
    if (rides && closed_.ok() && !known.empty()) {
      for (const WorkerKey& worker : known) riding_[worker].push_back(release);
      flush_riding_at_ = std::min(flush_riding_at_, runtime().now() + kRidesWithin);
      watch_locked(flush_riding_at_);
      known.clear();
    }
  }
  for (const WorkerKey& worker : known) tell_released(release, worker);
  one_released(release);
}

void DistAutogradService::tell_released(const ReleaseRef& release, const WorkerKey& to) {
  send(to, kReleaseMethod, kBytesSignature, bytes_payload(encode(release->data)), kAnswersWithin,
       [weak = weak_from_this(), release, to](const StatusOr<std::string>& answer) {
         const auto self = weak.lock();
         if (self == nullptr) return release->done(shut_down_error());
         const ErrorKind kind = error_kind(answer.status());
         bool gone = kind == ErrorKind::kPeerLost || kind == ErrorKind::kNotFound ||
                     kind == ErrorKind::kState;
         bool again = !answer.ok() && !gone && kind != ErrorKind::kUnimplemented &&
                      kind != ErrorKind::kPermission;
         if (again) {
           MutexLock lock(&self->mutex_);
           gone = self->gone_.contains(to.incarnation);
           again = self->closed_.ok() && !gone;
           if (again) self->again_.emplace_back(release, to);
         }
         if (gone) self->tell_everybody_released(release);
         if (!again) return self->one_released(release);
         self->watch(self->runtime().now() + kAgainAfter);
       });
}

// It is unknown which workers a worker that is gone had told of the context.
void DistAutogradService::tell_everybody_released(const ReleaseRef& release) {
  std::vector<WorkerKey> more;
  const std::vector<WorkerInfo> members = worker().worker_infos();
  {
    MutexLock lock(&mutex_);
    for (const WorkerInfo& member : members) {
      const WorkerKey key = key_of(member);
      if (key == key_of(worker().info()) || key == release->data.context.creator) continue;
      if (gone_.contains(key.incarnation) || !release->told.insert(key).second) continue;
      ++release->pending;
      more.push_back(key);
    }
  }
  for (const WorkerKey& member : more) tell_released(release, member);
}

void DistAutogradService::tell_what_is_left() {
  const auto release = std::make_shared<Release>();
  release->done = [](const Status&) {};
  release->pending = 1;
  {
    MutexLock lock(&mutex_);
    if (!closed_.ok()) return;
    ++releases_;
    ReleaseData& data = release->data;
    data.context = AutogradContextId{self(), std::max<uint64_t>(last_context_, 1)};
    data.others = true;
    for (const auto& [id, context] : contexts_) {
      if (id.creator == data.context.creator) data.alive.push_back(id.counter);
    }
    data.released_below = last_context_ + 1;
  }
  tell_everybody_released(release);
  one_released(release);
}

void DistAutogradService::release_others(const ReleaseData& data) {
  const std::set<uint64_t> alive(data.alive.begin(), data.alive.end());
  for (const ContextRef& context : contexts()) {
    const AutogradContextId& id = context->id();
    if (id.creator != data.context.creator || id.counter > data.context.counter) continue;
    if (alive.contains(id.counter)) continue;
    release_here(ReleaseData{.context = id}, /*rides=*/false, [](const Status&) {});
  }
}

void DistAutogradService::one_released(const ReleaseRef& release) {
  {
    MutexLock lock(&mutex_);
    if (--release->pending > 0) return;
    --releases_;
  }
  release->done(absl::OkStatus());
}

void DistAutogradService::on_release(CallContext&, Payload arguments, ReplyFn reply) {
  const StatusOr<std::string> bytes = take_bytes(std::move(arguments));
  if (!bytes.ok()) return reply(bytes.status());
  const StatusOr<ReleaseData> data = decode_release(*bytes);
  if (!data.ok()) return reply(data.status());
  if (data->others) {
    release_others(*data);
    return reply(bytes_payload(""));
  }
  release_here(*data, /*rides=*/false, replying(std::move(reply)));
}

}  // namespace weft::internal
