// The service itself: its handles, its part as a Service, and what effects ask for.

#include "weft/rref/internal/service.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/call_scope.h"

namespace weft::internal {
// ---- RRefHandle --------------------------------------------------------------------------------

RRefHandle::~RRefHandle() {
  if (const auto service = service_.lock()) service->drop(*this);
}

std::string RRefHandle::text() const {
  return absl::StrCat(to_string(handle_.rref), " of '", owner_.name, "'");
}

uint64_t RRefHandle::on_failure(std::function<void(const Status&)> fn) const {
  if (!may_fail()) return 0;
  MutexLock lock(&mutex_);
  watchers_.emplace(++last_watcher_, std::move(fn));
  return last_watcher_;
}

void RRefHandle::remove(uint64_t id) const {
  std::function<void(const Status&)> removed;  // destroyed without the mutex
  MutexLock lock(&mutex_);
  auto it = watchers_.find(id);
  if (it == watchers_.end()) return;
  removed = std::move(it->second);
  watchers_.erase(it);
  lock.unlock();
}

void RRefHandle::fail(const Status& why) const {
  std::map<uint64_t, std::function<void(const Status&)>> watchers;
  {
    MutexLock lock(&mutex_);
    watchers.swap(watchers_);
  }
  for (const auto& [id, fn] : watchers) fn(why);
}

// ---- RRefService -------------------------------------------------------------------------------

RRefService::RRefService(ServiceContext context, RRefOptions options)
    : context_(std::move(context)), options_(options) {}

RRefService::~RRefService() = default;

RRefProtocol& RRefService::protocol() {
  if (!protocol_.has_value()) {
    protocol_.emplace(key_of(worker().info()));
  }
  return *protocol_;
}

Status RRefService::closed_error() const {
  return make_error(ErrorKind::kState, absl::StrCat("RRefs cannot be used any more: ",
                                                    std::string(closed_.message())));
}

std::string RRefService::name_of(const WorkerKey& key) const {
  return absl::StrCat("'", info_of(key).name, "'");
}

RRefValueRef RRefService::make_value(KeptObject kept) const {
  // Looked up once: a library does not change.
  const Library* const library = library_of(worker());
  std::string class_name;
  bool concurrent = false;
  if (library != nullptr && kept.type != nullptr) {
    concurrent = library->is_concurrent(*kept.type);
    if (auto name = library->class_name_of(*kept.type); name.ok()) class_name = *std::move(name);
  }
  return std::make_shared<RRefValue>(RRefValue{
      std::move(kept), concurrent ? nullptr : make_object_turns(), std::move(class_name)});
}

RRefValueRef RRefService::find_value_locked(const RRefId& rref) const {
  const auto it = values_.find(rref);
  return it == values_.end() ? nullptr : it->second;
}

StatusOr<RRefValueRef> RRefService::value_for_use(const RRefId& rref) const {
  MutexLock lock(&mutex_);
  if (!closed_.ok()) return leaving_error();
  RRefValueRef value = find_value_locked(rref);
  if (value == nullptr) {
    return make_error(ErrorKind::kState, absl::StrCat(to_string(rref), " is gone"));
  }
  return value;
}

Status RRefService::leaving_error() const {
  return make_error(ErrorKind::kPeerLost,
                    absl::StrCat("an owner of RRefs is leaving: ", std::string(closed_.message())));
}

std::shared_ptr<RRefHandle> RRefService::make_handle(const Handle& handle, bool is_creator,
                                                     CreationSite site) {
  auto made = std::make_shared<RRefHandle>(weak_from_this(), handle, info_of(handle.owner),
                                           is_creator, std::move(site), context_.runtime->now());
  if (!handle.fork.is_zero()) {
    MutexLock lock(&mutex_);
    handles_[handle.fork] = made;
  }
  return made;
}

void RRefService::sort_out_locked(Effects effects, Todo* todo) {
  for (Effect& effect : effects) {
    if (auto* send = std::get_if<SendMessage>(&effect)) {
      enqueue_locked(send->to, std::move(send->message), todo);
    } else if (auto* failed = std::get_if<HandleFailed>(&effect)) {
      auto it = handles_.find(failed->handle.fork);
      if (it == handles_.end()) continue;
      if (auto handle = it->second.lock()) {
        todo->run.push_back([handle, why = failed->status] { handle->fail(why); });
      }
    } else if (auto* ready = std::get_if<ArrivalReady>(&effect)) {
      auto it = arrivals_.find({ready->from, ready->carrier});
      if (it == arrivals_.end()) continue;
      todo->run.push_back([on = std::move(it->second)]() mutable { on(absl::OkStatus()); });
      arrivals_.erase(it);
    } else if (auto* lost = std::get_if<ArrivalFailed>(&effect)) {
      auto it = arrivals_.find({lost->from, lost->carrier});
      if (it == arrivals_.end()) continue;
      todo->run.push_back([on = std::move(it->second), why = lost->status]() mutable { on(why); });
      arrivals_.erase(it);
    } else if (auto* done = std::get_if<UseDone>(&effect)) {
      auto it = uses_.find(done->token);
      if (it == uses_.end()) continue;
      todo->run.push_back([on = std::move(it->second.done), status = done->status]() mutable {
        on(std::move(status));
      });
      uses_.erase(it);
    } else if (auto* release = std::get_if<ReleaseValue>(&effect)) {
      auto it = values_.find(release->rref);
      if (it == values_.end()) continue;
      todo->released.push_back(std::move(it->second));
      values_.erase(it);
    }
  }
  arm_for_waiting_locked(todo);
}

void RRefService::perform(Todo todo) {
  if (todo.empty()) return;
  if (todo.arm.has_value()) timer_->arm(*todo.arm);
  for (const WorkerKey& to : todo.send_now) send_batch(to);
  for (const WorkerKey& to : todo.send_soon) {
    Task task = [weak = weak_from_this(), to] {
      if (auto self = weak.lock()) self->send_batch(to);
    };
    // A pool that takes nothing more is that of a worker that has shut down.
    (void)context_.executor->post(std::move(task));
  }
  for (auto& fn : todo.run) fn();
  destroy_later(std::move(todo.released));
}

// Destructors of users' objects run on the pool.
void RRefService::destroy_later(std::vector<RRefValueRef> values) {
  if (values.empty()) return;
  Task task = [values = std::move(values)]() mutable { values.clear(); };
  post_or_run(context_.executor.get(), std::move(task));
}

// ---- handles -----------------------------------------------------------------------------------

StatusOr<RRefHandleRef> RRefService::make_local(KeptObject value, CreationSite site) {
  RRefValueRef made_value = make_value(std::move(value));
  Handle handle;
  {
    MutexLock lock(&mutex_);
    if (!closed_.ok()) return closed_error();
    handle = protocol().create_local(/*running=*/false);
    values_[handle.rref] = std::move(made_value);
  }
  auto made = make_handle(handle, /*is_creator=*/false, std::move(site));
  made->set_ready();
  return made;
}

Status RRefService::check(const RRefHandle& handle) {
  MutexLock lock(&mutex_);
  if (!closed_.ok()) return annotate(closed_error(), handle.text());
  return protocol().check(handle.handle());
}

bool RRefService::confirmed(const RRefHandle& handle) {
  MutexLock lock(&mutex_);
  return closed_.ok() && protocol().confirmed(handle.handle());
}

void RRefService::drop(const RRefHandle& handle) {
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!handle.is_owner()) handles_.erase(handle.handle().fork);
    p.drop(handle.handle(), out);
  });
}

// ---- Service -----------------------------------------------------------------------------------

std::vector<Method> RRefService::methods() {
  const std::weak_ptr<RRefService> weak = weak_from_this();
  // Here, since a service is shared only once it is made; the first use comes after.
  timer_ = context_.runtime->make_timer([weak, executor = context_.executor] {
    (void)executor->post([weak] {
      if (auto self = weak.lock()) self->tick();
    });
  });
  Method control;
  control.name = std::string(kControlMethod);
  control.signature = std::string(kControlSignature);
  control.inline_ok = true;
  control.invoke = [weak](CallContext& call, const std::shared_ptr<void>&, Payload arguments,
                          ReplyFn reply) {
    const auto self = weak.lock();
    if (self == nullptr) return reply(make_error(ErrorKind::kState, "the worker has shut down"));
    self->on_control(call, std::move(arguments), std::move(reply));
  };
  Method fetch;
  fetch.name = std::string(kFetchMethod);
  fetch.signature = std::string(kFetchSignature);
  fetch.inline_ok = true;
  fetch.is_const = true;
  fetch.invoke = [weak](CallContext&, const std::shared_ptr<void>& object, Payload, ReplyFn reply) {
    const auto self = weak.lock();
    if (self == nullptr) return reply(make_error(ErrorKind::kState, "the worker has shut down"));
    self->on_fetch(object, std::move(reply));
  };
  Method creation;
  creation.name = std::string(kCreationMethod);
  creation.signature = std::string(kCreationSignature);
  creation.inline_ok = true;
  creation.is_const = true;
  creation.invoke = [](CallContext&, const std::shared_ptr<void>& object, Payload, ReplyFn reply) {
    if (object == nullptr) {
      return reply(
          make_error(ErrorKind::kProtocol, "a question that does not say about which RRef"));
    }
    Payload none;
    Encoder(&none).put_none();
    reply(std::move(none));
  };
  std::vector<Method> all;
  all.push_back(std::move(control));
  all.push_back(std::move(fetch));
  all.push_back(std::move(creation));
  return all;
}

void RRefService::on_reconnected(const WorkerInfo& info) {
  const WorkerKey peer = key_of(info);
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    p.audit_answers(peer, answers_to_ask_locked(peer), out);
    const auto box = outboxes_.find(peer);
    if (box != outboxes_.end()) box->second.ask_again = !box->second.answers.empty();
  });
}

void RRefService::on_worker_gone(const WorkerInfo& info, const Status& why) {
  lose(key_of(info), absl::StrCat("'", info.name, "': ", std::string(why.message())));
}

void RRefService::on_shutdown(const Status& why) {
  std::map<ArrivalKey, OnArrival> arrivals;
  std::map<uint64_t, ParkedUse> uses;
  std::vector<RRefHandleRef> handles;
  absl::flat_hash_map<RRefId, RRefValueRef> values;
  Status closed;
  Status lost;
  {
    MutexLock lock(&mutex_);
    if (!closed_.ok()) return;
    closed_ = why;
    closed = closed_error();
    lost = leaving_error();
    arrivals.swap(arrivals_);
    uses.swap(uses_);
    values.swap(values_);
    outboxes_.clear();
    flushes_.clear();
    for (const auto& [fork, weak] : handles_) {
      if (auto handle = weak.lock()) handles.push_back(std::move(handle));
    }
  }
  if (timer_ != nullptr) timer_->disarm();
  for (auto& [key, on] : arrivals) on(lost);
  for (auto& [token, use] : uses) use.done(use.local ? closed : lost);
  std::sort(handles.begin(), handles.end(),
            [](const auto& a, const auto& b) { return a->handle().fork < b->handle().fork; });
  for (const auto& handle : handles) handle->fail(closed);
}

}  // namespace weft::internal

namespace weft {

ServiceFactory rref_service(RRefOptions options) {
  return [options](const ServiceContext& context) {
    return std::make_shared<internal::RRefService>(context, options);
  };
}

}  // namespace weft
