// The service itself: its handles, its part as a Service, and what effects ask for.

#include "weft/rref/internal/service.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/common/call_scope.h"

namespace weft::internal {
namespace {

// A shutdown's log lists no more than this.
constexpr size_t kMostListed = 20;

std::string text(const LiveRRef& live) {
  return absl::StrCat(
      to_string(live.id), " of ", live.owner, ", held by ", live.holder,
      live.created_at.empty() ? std::string() : absl::StrCat(", created at ", live.created_at),
      live.age > absl::ZeroDuration()
          ? absl::StrCat(", ", absl::FormatDuration(absl::Trunc(live.age, absl::Milliseconds(1))),
                         " old")
          : std::string());
}

std::string text(const std::vector<LiveRRef>& all) {
  std::vector<std::string> lines;
  for (const LiveRRef& live : all) {
    if (lines.size() == kMostListed) {
      lines.push_back(absl::StrCat("and ", all.size() - kMostListed, " more"));
      break;
    }
    lines.push_back(text(live));
  }
  return absl::StrJoin(lines, "; ");
}

}  // namespace

// ---- RRefHandle --------------------------------------------------------------------------------

RRefHandle::~RRefHandle() {
  if (const auto service = service_.lock()) service->drop(*this);
}

std::string RRefHandle::text() const {
  return absl::StrCat(to_string(handle_.rref), " of '", owner_.name, "'");
}

uint64_t RRefHandle::on_failure(std::function<void(const Status&)> fn) const {
  if (!is_creator_ || ready()) return 0;
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
    const WorkerInfo& self = worker().info();
    protocol_.emplace(WorkerKey{WorkerId(self.id), Incarnation(self.incarnation)});
  }
  return *protocol_;
}

Status RRefService::closed_error() const {
  return make_error(ErrorKind::kState, absl::StrCat("RRefs cannot be used any more: ",
                                                    std::string(closed_.message())));
}

WorkerInfo RRefService::info_of(const WorkerKey& key) const {
  const StatusOr<WorkerInfo> info = worker().try_get_worker_info(key.id.value());
  if (info.ok() && info->incarnation == key.incarnation.value()) return *info;
  return WorkerInfo{to_string(key), key.id.value(), key.incarnation.value()};
}

std::string RRefService::name_of(const WorkerKey& key) const {
  return absl::StrCat("'", info_of(key).name, "'");
}

std::shared_ptr<RRefHandle> RRefService::make_handle(const Handle& handle, bool is_creator,
                                                     CallSite site) {
  auto made = std::make_shared<RRefHandle>(weak_from_this(), handle, info_of(handle.owner),
                                           is_creator, site, context_.runtime->now());
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

StatusOr<RRefHandleRef> RRefService::make_local(KeptObject value, CallSite site) {
  Handle handle;
  {
    MutexLock lock(&mutex_);
    if (!closed_.ok()) return closed_error();
    handle = protocol().create_local(/*running=*/false);
    values_[handle.rref] =
        std::make_shared<RRefValue>(RRefValue{std::move(value), make_object_turns()});
  }
  auto made = make_handle(handle, /*is_creator=*/false, site);
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

struct RRefService::LocalUse {
  LocalUse(RRefHandleRef h, LocalDone d) : handle(std::move(h)), done(std::move(d)) {}

  const RRefHandleRef handle;
  LocalDone done;  // whoever sets `ended` calls it
  std::atomic<bool> ended{false};
  uint64_t token = 0;
  std::unique_ptr<Timer> timer;
};

CallHandle RRefService::start_local_use(const RRefHandleRef& handle, const std::type_info& type,
                                        Timeout deadline, LocalDone done) {
  const absl::Time start = context_.runtime->now();
  auto use = std::make_shared<LocalUse>(handle, std::move(done));
  if (!handle->is_owner()) {
    end_local_use(
        use, make_error(ErrorKind::kState,
                        absl::StrCat("local_value() of ", handle->text(), " at '", worker().name(),
                                     "': only its owner has the object; fetch a copy "
                                     "with to_here()")));
    return CallHandle();
  }
  const RRefId rref = handle->handle().rref;
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    use->token = ++last_token_;
    uses_[use->token] = ParkedUse{
        rref, /*local=*/true, [this, use, rref, &type](Status status) {
          RRefValueRef value;
          if (status.ok()) {
            MutexLock lock(&mutex_);
            auto it = values_.find(rref);
            if (it != values_.end()) value = it->second;
          }
          if (status.ok() && value == nullptr) {
            status = make_error(ErrorKind::kState, "the object is gone");
          }
          if (status.ok() && *value->kept.type != type) {
            status = make_error(ErrorKind::kSignature,
                                absl::StrCat("the object is of type ", value->kept.type->name(),
                                             ", the RRef says ", type.name()));
          }
          if (!status.ok()) return end_local_use(use, annotate(status, use->handle->text()));
          use->handle->set_ready();
          end_local_use(use, value->kept.object);
        }};
    p.use(use->token, p.self(), Use{rref, ForkId(), 0}, out);
  });
  if (use->token == 0) end_local_use(use, check(*handle));
  if (use->ended.load()) return CallHandle();
  const absl::Duration patience = deadline.value_or(worker().rpc_timeout());
  const std::weak_ptr<RRefService> weak = weak_from_this();
  const std::weak_ptr<LocalUse> weak_use = use;  // weak: the use owns the timer
  if (patience != absl::InfiniteDuration()) {
    use->timer =
        context_.runtime->make_timer([weak, weak_use, patience, executor = context_.executor] {
          // Elsewhere, since the timer may go with the use.
          (void)executor->post([weak, weak_use, patience] {
            const auto self = weak.lock();
            const auto late = weak_use.lock();
            if (self == nullptr || late == nullptr) return;
            self->cancel_local_use(
                late, make_error(ErrorKind::kDeadline,
                                 absl::StrCat("local_value() of ", late->handle->text(),
                                              ": deadline of ", absl::FormatDuration(patience),
                                              " exceeded: its function still runs")));
          });
        });
    use->timer->arm(deadline_after(start, patience));
  }
  return CallHandle([weak, weak_use] {
    const auto self = weak.lock();
    const auto given_up = weak_use.lock();
    if (self == nullptr || given_up == nullptr) return;
    self->cancel_local_use(given_up, make_error(ErrorKind::kCancelled, "cancelled by the caller"));
  });
}

void RRefService::end_local_use(const std::shared_ptr<LocalUse>& use,
                                StatusOr<std::shared_ptr<void>> result) {
  if (!use->ended.exchange(true)) std::exchange(use->done, nullptr)(std::move(result));
}

void RRefService::cancel_local_use(const std::shared_ptr<LocalUse>& use, const Status& why) {
  OnUse dropped;
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    auto it = uses_.find(use->token);
    if (it == uses_.end()) return;
    p.cancel_use(it->first, it->second.rref, out);
    dropped = std::move(it->second.done);
    uses_.erase(it);
  });
  end_local_use(use, why);
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
  std::vector<Method> all;
  all.push_back(std::move(control));
  all.push_back(std::move(fetch));
  return all;
}

void RRefService::on_reconnected(const WorkerInfo& info) {
  const WorkerKey peer{WorkerId(info.id), Incarnation(info.incarnation)};
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    p.audit_answers(peer, answers_to_ask_locked(peer), out);
    const auto box = outboxes_.find(peer);
    if (box != outboxes_.end()) box->second.ask_again = !box->second.answers.empty();
  });
}

void RRefService::on_worker_gone(const WorkerInfo& info, const Status&) {
  lose(WorkerKey{WorkerId(info.id), Incarnation(info.incarnation)});
}

void RRefService::on_shutdown(const Status& why) {
  std::map<ArrivalKey, OnArrival> arrivals;
  std::map<uint64_t, ParkedUse> uses;
  std::vector<RRefHandleRef> handles;
  absl::flat_hash_map<RRefId, RRefValueRef> values;
  Status closed;
  {
    MutexLock lock(&mutex_);
    if (!closed_.ok()) return;
    closed_ = why;
    closed = closed_error();
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
  // Others are told what their call would have been told a moment later.
  const Status lost =
      make_error(ErrorKind::kPeerLost,
                 absl::StrCat("an owner of RRefs is leaving: ", std::string(why.message())));
  for (auto& [key, on] : arrivals) on(lost);
  for (auto& [token, use] : uses) use.done(use.local ? closed : lost);
  std::sort(handles.begin(), handles.end(),
            [](const auto& a, const auto& b) { return a->handle().fork < b->handle().fork; });
  for (const auto& handle : handles) handle->fail(closed);
}

void RRefService::put_debug_info(std::map<std::string, int64_t>* out) const {
  MutexLock lock(&mutex_);
  const RRefProtocol::Counts c =
      protocol_.has_value() ? protocol_->counts() : RRefProtocol::Counts();
  const auto put = [out](const char* name, size_t value) {
    (*out)[name] = static_cast<int64_t>(value);
  };
  put("rref_owners", c.owners);
  put("rref_forks", c.forks);
  put("rref_users", c.users);
  put("rref_pending_users", c.pending_users);
  put("rref_pending_children", c.pending_children);
  put("rref_parked_uses", c.parked_uses);
  put("rref_arrivals", c.arrivals);
  put("rref_unacknowledged", c.unacknowledged);
  put("rref_tombstones", c.tombstones);
  put("rref_values", values_.size());
  (*out)["rref_faults"] = protocol_.has_value() ? static_cast<int64_t>(protocol_->faults()) : 0;
  (*out)["rref_control_batches"] = batches_;
  (*out)["rref_control_items"] = items_;
  (*out)["rref_control_resent"] = resent_;
}

void RRefService::put_inspection(Inspection* out) const {
  Inspection::Table& table = out->table("rrefs", {"id", "owner", "holder", "age_s", "created_at"});
  const std::vector<LiveRRef> all = live();
  for (const LiveRRef& rref : all) {
    if (table.full()) {
      table.leave_out(all.size() - table.rows().size());
      break;
    }
    // Of a share that another holds only its holder knows the age.
    table.add({to_string(rref.id), rref.owner, rref.holder,
               rref.created_at.empty() && rref.age == absl::ZeroDuration()
                   ? Inspection::Cell(std::string())
                   : Inspection::Cell(absl::ToDoubleSeconds(rref.age)),
               rref.created_at});
  }
}

RRefProtocol::Counts RRefService::counts() const {
  MutexLock lock(&mutex_);
  return protocol_.has_value() ? protocol_->counts() : RRefProtocol::Counts();
}

Service::Load RRefService::load() const {
  MutexLock lock(&mutex_);
  if (!protocol_.has_value() || !closed_.ok()) return {};
  const RRefProtocol::Counts c = protocol_->counts();
  return Load{c.unacknowledged + c.arrivals + c.parked_uses,
              c.users + c.forks + c.pending_children};
}

std::vector<LiveRRef> RRefService::live_locked() const {
  std::vector<LiveRRef> out;
  const std::string self = absl::StrCat("'", worker().name(), "'");
  const absl::Time now = context_.runtime->now();
  for (const auto& [fork, weak] : handles_) {
    const auto handle = weak.lock();
    if (handle == nullptr) continue;
    const CallSite& site = handle->site();
    const std::string_view file(site.file);
    LiveRRef live;
    live.id = handle->handle().rref;
    live.owner = absl::StrCat("'", handle->owner().name, "'");
    live.holder = self;
    live.age = now - handle->created();
    if (site.line != 0) {
      live.created_at = absl::StrCat(std::string(file.substr(file.rfind('/') + 1)), ":", site.line);
    }
    out.push_back(std::move(live));
  }
  if (protocol_.has_value()) {
    for (const auto& [rref, holder] : protocol_->holders()) {
      LiveRRef live;
      live.id = rref;
      live.owner = self;
      live.holder = name_of(holder);
      out.push_back(std::move(live));
    }
  }
  std::sort(out.begin(), out.end(), [](const LiveRRef& a, const LiveRRef& b) {
    return std::tie(a.id, a.holder, a.created_at) < std::tie(b.id, b.holder, b.created_at);
  });
  return out;
}

std::vector<LiveRRef> RRefService::live() const {
  // Handles that end while they are listed would drop themselves under the mutex.
  std::vector<RRefHandleRef> kept;
  MutexLock lock(&mutex_);
  for (const auto& [fork, weak] : handles_) {
    if (auto handle = weak.lock()) kept.push_back(std::move(handle));
  }
  std::vector<LiveRRef> out = live_locked();
  lock.unlock();
  return out;
}

void RRefService::sweep() {
  bool first = false;
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    first = !std::exchange(swept_, true);
    if (!first) return;
    // RRefs in answers that were lost are held by nobody, and are no leak.
    std::vector<WorkerKey> peers;
    for (const auto& [key, outbox] : outboxes_) peers.push_back(key);
    for (const WorkerKey& peer : peers) p.audit_answers(peer, p.next_carrier(peer), out);
  });
  if (first) return;
  std::vector<LiveRRef> leaks = live();
  if (!leaks.empty()) {
    WEFT_LOG(worker().log(), kWarning)
        << leaks.size() << " RRefs are still alive at shutdown and are taken back: " << text(leaks);
  }
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    leaks_ = std::move(leaks);
    p.drop_all(out);
  });
}

Status RRefService::drained() {
  MutexLock lock(&mutex_);
  if (!protocol_.has_value() || leaks_.empty() || !options_.fail_on_leak) return absl::OkStatus();
  return make_error(ErrorKind::kState,
                    absl::StrCat("worker '", worker().name(), "' left with ", leaks_.size(),
                                 " RRefs still alive: ", text(leaks_)));
}

}  // namespace weft::internal

namespace weft {

ServiceFactory rref_service(RRefOptions options) {
  return [options](const ServiceContext& context) {
    return std::make_shared<internal::RRefService>(context, options);
  };
}

std::vector<LiveRRef> live_rrefs(const Worker& worker) {
  const auto service = worker.service<internal::RRefService>();
  if (service == nullptr) {
    throw_error(make_error(ErrorKind::kState, absl::StrCat("worker '", worker.name(),
                                                           "' does not list rref_service()")));
  }
  return service->live();
}

}  // namespace weft
