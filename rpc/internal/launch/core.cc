#include "weft/rpc/internal/launch/core.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/rpc/internal/device/device_backend.h"
#include "weft/rpc/internal/membership/drain.h"
#include "weft/store/rendezvous.h"

namespace weft::internal {
namespace {

constexpr absl::Duration kEndingGrace = absl::Seconds(2);

}  // namespace

void Core::on_change(const MembershipChange& change) {
  if (change.worker.incarnation == self_.incarnation) return;
  if (change.kind != MembershipChange::Kind::kJoined) {
    const bool died = change.kind == MembershipChange::Kind::kDied;
    const Status why = make_error(
        ErrorKind::kPeerLost,
        absl::StrCat("worker '", change.worker.name, "' (id ", change.worker.id, ") ",
                     died ? absl::StrCat("is dead: ", change.reason) : std::string("has left")));
    if (agent_ready_.load()) agent_->peer_gone(change.worker.incarnation, why);
    for (const auto& service : services_) service->on_worker_gone(change.worker, why);
  }
  if (change.kind == MembershipChange::Kind::kJoined && devices_ != nullptr &&
      membership_->dynamic()) {
    // A map for it is looked at for the first time.
    const MemberListRef list = membership_->list();
    const Member* const member = list->find(std::string_view(change.worker.name));
    const auto map = devices_->maps.find(change.worker.name);
    if (member != nullptr && map != devices_->maps.end()) {
      const std::string wrong =
          check_device_map(self_.name, map->first, map->second, member->devices.get());
      if (!wrong.empty()) {
        WEFT_LOG(log_, kError) << wrong << "; calls that need this map will fail";
      }
    }
  }
  subscribers_->tell(change);
}

std::map<std::string, int64_t> Core::debug_info() const {
  std::map<std::string, int64_t> out = agent_->debug_info();
  out["worker_threads"] = worker_threads_;
  if (metrics_port_ != 0) out["metrics_port"] = metrics_port_;
  if (health_port_ != 0) out["health_port"] = health_port_;
  out["members"] = static_cast<int64_t>(membership_->list()->by_id.size());
  out["members_gone"] = static_cast<int64_t>(membership_->list()->gone.size());
  out["membership_version"] = static_cast<int64_t>(membership_->list()->version);
  agent_->put_peer_numbers(&out);
  if (transport_ != nullptr) {
    for (const auto& [name, value] : transport_->counters()) out[name] = value;
  }
  for (const auto& service : services_) service->put_debug_info(&out);
  return out;
}

ShutdownResult Core::shutdown(const ShutdownOptions& options) {
  if (find_scope(agent_->scope_key()) != nullptr) {
    ShutdownResult refused;
    refused.status = make_error(
        ErrorKind::kState,
        absl::StrCat("shutdown of '", self_.name,
                     "' was called from one of its own handlers, which it would wait for"));
    return refused;
  }
  if (subscribers_->telling_here()) {
    ShutdownResult refused;
    refused.status = make_error(
        ErrorKind::kState,
        absl::StrCat("shutdown of '", self_.name,
                     "' was called from one of its membership subscribers, which it would wait "
                     "for: call it from the thread that owns the worker"));
    return refused;
  }
  {
    MutexLock lock(&shutdown_mutex_);
    if (shutdown_begun_) {
      // Another thread runs the shutdown, or it is over: all callers get the same result.
      while (!shutdown_result_.has_value()) {
        const Status waited = shutdown_done_->wait_until(&shutdown_mutex_, absl::InfiniteFuture());
        if (!waited.ok()) return ShutdownResult{waited, {}};
      }
      return *shutdown_result_;
    }
    shutdown_begun_ = true;
  }
  ShutdownResult result = do_shutdown(options);
  {
    MutexLock lock(&shutdown_mutex_);
    shutdown_result_ = result;
  }
  shutdown_done_->notify_all();
  return result;
}

ShutdownResult Core::do_shutdown(const ShutdownOptions& options) {
  const absl::Time start = runtime_->now();
  const absl::Time hard =
      options.deadline.is_set()
          ? deadline_after(start, options.deadline.value_or(absl::InfiniteDuration()))
          : absl::InfiniteFuture();
  ShutdownResult result;
  health_->ready = false;
  if (options.graceful) {
    DrainOptions d;
    d.arrival_deadline = hard;
    d.later_timeout = config_.shutdown_timeout;
    d.hard_deadline = hard;
    d.heartbeat = config_.heartbeat_interval;
    d.log = log_;
    d.services = services_;
    result = membership_->dynamic() ? drain_one(agent_.get(), self_, d)
                                    : drain_group(agent_.get(), membership_.get(), self_, d);
  } else {
    result.workers.push_back({self_, ShutdownResult::Outcome::kDrained, ""});
  }
  down_.store(true);
  if (auto* place = dynamic_cast<SharedPlace*>(store_.get());
      place != nullptr && options.graceful && result.status.ok()) {
    place->others_are_leaving();
  }
  const Status why =
      make_error(ErrorKind::kState, absl::StrCat("worker '", self_.name, "' has shut down"));
  const absl::Time end =
      std::min(hard, runtime_->now() + std::min(config_.shutdown_timeout, absl::Seconds(5)));
  const Status torn = tear_down(why, end, hard);
  if (!torn.ok()) {
    if (result.status.ok()) result.status = torn;
    for (auto& w : result.workers) {
      if (w.worker != self_) continue;
      w.outcome = ShutdownResult::Outcome::kAborted;
      w.reason = std::string(torn.message());
    }
  }
  WEFT_LOG(log_, kInfo) << "shut down: "
                        << (result.status.ok() ? std::string("drained")
                                               : std::string(result.status.message()));
  return result;
}

void Core::close_services(const Status& why) {
  if (services_closed_.exchange(true)) return;
  for (const auto& service : services_) service->on_shutdown(why);
}

Status Core::tear_down(const Status& why, absl::Time deadline, absl::Time hard) {
  Status status;
  close_services(why);
  if (agent_ != nullptr) {
    agent_->stop_accepting();
    // Before the goodbye: peers close their connections on it, which would look like a broken one.
    agent_->fail_calls(why);
    agent_->say_goodbye();
  }
  if (membership_ != nullptr) {
    // While an exception unwinds nothing is waited for; the others find out by the lease.
    if (std::uncaught_exceptions() == 0) membership_->leave(deadline);
    membership_->stop();
  }
  // What is about to end gets its time, though the rest has taken longer than it should: more threads may want to run
  // than there are cores.
  const auto some_time = [&] {
    return std::max(deadline, std::min(hard, runtime_->now() + kEndingGrace));
  };
  if (agent_ != nullptr) agent_->close(why);
  if (agent_ != nullptr && !agent_->wait_idle(some_time())) {
    status = make_error(ErrorKind::kDeadline,
                        absl::StrCat("worker '", self_.name, "' left with handlers still running: ",
                                     agent_->running_handlers()));
  }
  if (transport_ != nullptr) transport_->shutdown();
  if (device_backend_ != nullptr) device_backend_->shutdown(why);
  // A handler that never ends keeps its thread and what it uses; all other threads are joined.
  if (pool_ != nullptr && !pool_->shutdown_until(status.ok() ? some_time() : deadline) &&
      status.ok()) {
    status =
        make_error(ErrorKind::kDeadline,
                   absl::StrCat("worker '", self_.name, "' left with continuations still running"));
  }
  if (trace_ != nullptr) {
    const Status written = trace_->write();
    if (written.ok()) {
      WEFT_LOG(log_, kInfo) << "timeline of the calls: " << trace_->path();
    } else {
      WEFT_LOG(log_, kWarning) << "the timeline cannot be written to " << trace_->path() << ": "
                               << written;
    }
  }
  // Last: until here the metrics tell how the end goes.
  metrics_http_.reset();
  health_http_.reset();
  return status;
}

void Core::abandon() {
  {
    MutexLock lock(&shutdown_mutex_);
    if (shutdown_begun_) return;
    shutdown_begun_ = true;
  }
  down_.store(true);
  health_->ready = false;
  const Status why =
      make_error(ErrorKind::kState,
                 absl::StrCat("worker '", self_.name, "' was destroyed without shutdown()"));
  const absl::Time end =
      runtime_->now() + (std::uncaught_exceptions() > 0 ? absl::ZeroDuration() : absl::Seconds(1));
  ShutdownResult result;
  result.status = tear_down(why, end, end);
  MutexLock lock(&shutdown_mutex_);
  shutdown_result_ = std::move(result);
}

Core::~Core() {
  // Transport and membership call into the agent: they go first. Both have been stopped.
  if (agent_ != nullptr) agent_->release_transport();
  transport_.reset();
  membership_.reset();
}

}  // namespace weft::internal
