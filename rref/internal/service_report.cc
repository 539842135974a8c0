// What a worker says of its RRefs: counts, the list of what is alive, and what is left at shutdown.

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/rref/internal/service.h"

namespace weft::internal {
namespace {

// A shutdown's log lists no more than this.
constexpr size_t kMostListed = 20;

std::string text(const LiveRRef& live) {
  return absl::StrCat(
      to_string(live.id), " of ", live.owner, ", held by ", live.holder,
      live.created_at.empty() ? std::string() : absl::StrCat(", from ", live.created_at),
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

std::string CreationSite::text() const {
  if (at.line == 0) return through;
  const std::string_view file(at.file);
  return absl::StrCat(std::string(file.substr(file.rfind('/') + 1)), ":", at.line);
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
  put("rref_workers_gone", protocol_.has_value() ? protocol_->workers_gone() : 0);
  put("rref_values", values_.size());
  (*out)["rref_faults"] = protocol_.has_value() ? static_cast<int64_t>(protocol_->faults()) : 0;
  (*out)["rref_control_batches"] = batches_;
  (*out)["rref_looks"] = looks_;
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
    // Only its holder knows the age of a share that another worker holds.
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
    LiveRRef live;
    live.id = handle->handle().rref;
    live.owner = absl::StrCat("'", handle->owner().name, "'");
    live.holder = self;
    live.age = now - handle->created();
    live.created_at = handle->site().text();
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
  int sweep = 0;
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    sweep = ++sweeps_;
    if (sweep == 1) {
      // RRefs in answers that were lost have no holder, and are no leak.
      std::vector<WorkerKey> peers;
      for (const auto& [key, outbox] : outboxes_) peers.push_back(key);
      for (const WorkerKey& peer : peers) p.audit_answers(peer, p.next_carrier(peer), out);
    } else if (sweep == 3) {
      p.drop_all(out);
    }
  });
  if (sweep != 2) return;
  // Before any worker gives anything back: an owner lists what its holders have, too.
  std::vector<LiveRRef> leaks = live();
  if (!leaks.empty()) {
    WEFT_LOG(worker().log(), kWarning)
        << leaks.size() << " RRefs are still alive at shutdown and are taken back: " << text(leaks);
  }
  MutexLock lock(&mutex_);
  leaks_ = std::move(leaks);
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

std::vector<LiveRRef> live_rrefs(const Worker& worker) {
  const auto service = worker.service<internal::RRefService>();
  if (service == nullptr) {
    throw_error(make_error(ErrorKind::kState, absl::StrCat("worker '", worker.name(),
                                                           "' does not list rref_service()")));
  }
  return service->live();
}

}  // namespace weft
