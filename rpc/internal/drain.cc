#include "weft/rpc/internal/drain.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace weft::internal {
namespace {

using End = ShutdownResult::Outcome;

// The first finds out what is held, the second takes it back.
constexpr int kMostSweeps = 3;

class GroupDrain {
 public:
  GroupDrain(Agent* agent, Membership* membership, const WorkerInfo& self,
             const DrainOptions& options)
      : agent_(*agent),
        membership_(*membership),
        runtime_(*agent->runtime()),
        self_(self),
        options_(options) {
    // Those who are here now, and those who were: a member that is gone already is missing.
    const MemberListRef list = membership_.list();
    for (const auto& [id, member] : list->by_id) {
      workers_.push_back({member.info, End::kDrained, ""});
    }
    for (const auto& [id, member] : list->gone) {
      missing_.push_back({member.info, End::kMissing, std::string(member.why.message())});
    }
  }

  ShutdownResult run() {
    Status status = arrive();
    if (status.ok()) {
      deadline_ = std::min(options_.hard_deadline, runtime_.now() + options_.later_timeout);
      status = rounds();
    }
    const Status services = ask_services();
    // Whatever happened, the record goes and the others are told (RPC-127, RPC-128).
    const absl::Time end = status.ok() ? deadline_ : runtime_.now() + absl::Seconds(2);
    agent_.stop_accepting();
    membership_.leave(std::min(end, options_.hard_deadline));
    if (status.ok()) status = farewell();
    if (status.ok()) status = services;
    return result(status);
  }

 private:
  Store& store() { return *membership_.store(); }
  // DRAIN-5.
  absl::Duration patience() const { return std::max(options_.heartbeat, absl::Seconds(5)); }

  // Waits until every living worker has its key; those that died meanwhile become missing. The
  // store wakes us when the keys are there; deaths are looked for once per heartbeat.
  Status wait_for_all(const std::string& what, absl::Time deadline, bool say_who) {
    absl::Time next_line = runtime_.now() + absl::Minutes(1);
    absl::Time answered = runtime_.now();
    const auto parker = runtime_.make_parker();
    while (true) {
      std::vector<std::string> keys;
      for (const auto& w : workers_) {
        if (w.outcome != End::kDrained) continue;
        keys.push_back(membership_.key(absl::StrCat(what, "/", hex(w.worker.incarnation))));
      }
      const absl::Time begin = runtime_.now();
      const absl::Duration slice = std::min(options_.heartbeat, deadline - begin);
      if (slice <= absl::ZeroDuration()) return late(what, keys);
      const Status waited = store().wait(keys, slice);
      if (waited.ok()) return waited;
      const ErrorKind kind = error_kind(waited);
      if (kind == ErrorKind::kUnavailable && runtime_.now() - answered < patience()) {
        parker->park_until(begin + slice);  // one that refuses does so at once
        continue;
      }
      if (kind != ErrorKind::kDeadline) {
        return annotate(waited,
                        absl::StrCat("shutting down: waiting for '", what, "' of all workers"));
      }
      answered = runtime_.now();
      notice_deaths(what);
      if (say_who && runtime_.now() >= next_line) {
        next_line += absl::Minutes(1);
        WEFT_LOG(options_.log, kInfo) << "shutdown waits for " << names_of_missing(keys);
      }
    }
  }

  void notice_deaths(const std::string& what) {
    const MemberListRef list = membership_.list();
    for (auto& w : workers_) {
      if (w.outcome != End::kDrained) continue;
      auto gone = list->gone.find(w.worker.id);
      const Member* there = list->find(w.worker.id);
      const bool replaced = there != nullptr && there->info.incarnation != w.worker.incarnation;
      if (gone == list->gone.end() && !replaced) continue;
      // One that has left did so in its own time: its last key is what counts.
      const auto has =
          store().check({membership_.key(absl::StrCat(what, "/", hex(w.worker.incarnation)))},
                        options_.heartbeat);
      if (has.ok() && *has) continue;
      const auto done = store().check(
          {membership_.key(absl::StrCat("done/", hex(w.worker.incarnation)))}, options_.heartbeat);
      if (done.ok() && *done) {
        w.outcome = End::kAborted;
        w.reason = absl::StrCat("it left before '", what, "'");
        continue;
      }
      // Its record goes before "done" is written (DRAIN-4): only death ends the wait for it.
      const auto dead = store().check(
          {membership_.key(absl::StrCat("dead/", hex(w.worker.incarnation)))}, options_.heartbeat);
      if (what == "done" && !(dead.ok() && *dead) && !replaced) continue;
      w.outcome = End::kMissing;
      w.reason = gone != list->gone.end() ? std::string(gone->second.why.message())
                                          : std::string("another incarnation took its place");
    }
  }

  std::string names_of_missing(const std::vector<std::string>& keys) {
    std::vector<std::string> names;
    for (const auto& w : workers_) {
      if (w.outcome != End::kDrained) continue;
      for (const std::string& key : keys) {
        if (key.find(hex(w.worker.incarnation)) == std::string::npos) continue;
        const auto there = store().check({key}, options_.heartbeat);
        if (!there.ok() || !*there) names.push_back(absl::StrCat("'", w.worker.name, "'"));
      }
    }
    return absl::StrJoin(names, ", ");
  }

  Status late(const std::string& what, const std::vector<std::string>& keys) {
    const std::string names = names_of_missing(keys);
    for (auto& w : workers_) {
      if (w.outcome == End::kDrained &&
          names.find(absl::StrCat("'", w.worker.name, "'")) != std::string::npos) {
        w.outcome = End::kMissing;
        w.reason = absl::StrCat("did not reach '", what, "' before the deadline");
      }
    }
    return make_error(ErrorKind::kDeadline,
                      absl::StrCat("shutdown of '", self_.name, "' waited for '", what, "' of ",
                                   names, " until its deadline"));
  }

  Status put(const std::string& what, const std::string& value) {
    return store().set(membership_.key(absl::StrCat(what, "/", hex(self_.incarnation))), value,
                       patience());
  }

  // One that was stopped for a lease may go on after the others have left without it: then their
  // keys are all there, and yet nothing was drained together.
  Status still_a_member() {
    WEFT_ASSIGN_OR_RETURN(
        const std::optional<std::string> dead,
        store().try_get(membership_.key(absl::StrCat("dead/", hex(self_.incarnation))),
                        patience()));
    if (!dead.has_value()) return absl::OkStatus();
    return make_error(ErrorKind::kState,
                      absl::StrCat("shutdown of '", self_.name,
                                   "', which was declared dead by the others: ", *dead));
  }

  Status arrive() {
    WEFT_RETURN_IF_ERROR(still_a_member());
    WEFT_RETURN_IF_ERROR(put("arrived", "1"));
    return wait_for_all("arrived", std::min(options_.arrival_deadline, options_.hard_deadline),
                        true);
  }

  Service::Load services_load() const {
    Service::Load sum;
    for (const auto& service : options_.services) {
      const Service::Load load = service->load();
      sum.pending += load.pending;
      sum.live += load.live;
    }
    return sum;
  }

  // What services send again waits for its time, and no call is under way until then.
  Service::Load wait_for_services() {
    const absl::Time until = std::min(deadline_, runtime_.now() + options_.heartbeat);
    const auto parker = runtime_.make_parker();
    Service::Load load = services_load();
    while (load.pending > 0 && runtime_.now() < until) {
      parker->park_until(std::min(until, runtime_.now() + absl::Milliseconds(5)));
      load = services_load();
    }
    return load;
  }

  // The services' last word, when everything else has gone well.
  Status ask_services() {
    for (const auto& service : options_.services) WEFT_RETURN_IF_ERROR(service->drained());
    return absl::OkStatus();
  }

  Status rounds() {
    std::string before;
    int sweeps = 0;
    for (int round = 0;; ++round) {
      // Our own calls and handlers first: a round is cheap to skip while they run. Not for long: a
      // handler here may wait for a worker that waits for our count.
      agent_.wait_drained(std::min(deadline_, runtime_.now() + options_.heartbeat));
      // The services first: what they send next is a call by then, or still counted.
      const Service::Load services = wait_for_services();
      Agent::Load load = agent_.load();
      load.pending += services.pending;
      const std::string what = absl::StrCat("drain/", round);
      WEFT_RETURN_IF_ERROR(put(what, absl::StrCat(load.pending, " ", load.serving, " ", load.issued,
                                                  " ", load.served, " ", services.live)));
      Status waited = wait_for_all(what, deadline_, false);
      if (!waited.ok()) {
        return annotate(waited, absl::StrCat("draining: here ", load.pending, " calls and ",
                                             load.serving, " handlers are not complete"));
      }
      bool zero = true;
      bool live = false;
      std::string totals;
      for (const auto& w : workers_) {
        if (w.outcome != End::kDrained) continue;
        WEFT_ASSIGN_OR_RETURN(
            const std::optional<std::string> counts,
            store().try_get(membership_.key(absl::StrCat(what, "/", hex(w.worker.incarnation)))));
        if (!counts.has_value()) continue;
        const std::vector<std::string> parts = absl::StrSplit(*counts, ' ');
        zero = zero && parts.size() == 5 && parts[0] == "0" && parts[1] == "0";
        live = live || (parts.size() == 5 && parts[4] != "0");
        absl::StrAppend(&totals, hex(w.worker.incarnation), ":", *counts, ";");
      }
      if (zero && totals == before) {  // DRAIN-1
        if (!live || sweeps == kMostSweeps) return absl::OkStatus();
        ++sweeps;
        for (const auto& service : options_.services) service->sweep();
        before.clear();
        continue;
      }
      before = zero ? totals : "";
      if (runtime_.now() >= deadline_) {
        return make_error(ErrorKind::kDeadline,
                          absl::StrCat("shutdown of '", self_.name,
                                       "': calls are still under way at its deadline: here ",
                                       load.pending, " calls and ", load.serving, " handlers"));
      }
    }
  }

  Status farewell() {
    WEFT_RETURN_IF_ERROR(still_a_member());
    WEFT_RETURN_IF_ERROR(put("done", "1"));
    return wait_for_all("done", deadline_, false);
  }

  ShutdownResult result(Status status) {
    ShutdownResult out;
    for (auto& w : workers_) {
      if (!status.ok() && w.outcome == End::kDrained && w.worker == self_) {
        w.outcome = End::kAborted;
        w.reason = std::string(status.message());
      }
      out.workers.push_back(w);
    }
    for (auto& w : missing_) out.workers.push_back(w);
    std::sort(out.workers.begin(), out.workers.end(),
              [](const auto& a, const auto& b) { return a.worker.id < b.worker.id; });
    std::vector<std::string> missing;
    for (const auto& w : out.workers) {
      if (w.outcome == End::kMissing)
        missing.push_back(absl::StrCat("'", w.worker.name, "': ", w.reason));
    }
    if (status.ok() && !missing.empty()) {
      status = make_error(ErrorKind::kPeerLost,
                          absl::StrCat("shutdown of '", self_.name, "' went on without ",
                                       absl::StrJoin(missing, "; ")));
    }
    out.status = std::move(status);
    return out;
  }

  Agent& agent_;
  Membership& membership_;
  Runtime& runtime_;
  const WorkerInfo self_;
  const DrainOptions options_;
  absl::Time deadline_;
  std::vector<ShutdownResult::Entry> workers_;
  std::vector<ShutdownResult::Entry> missing_;
};

}  // namespace

ShutdownResult drain_group(Agent* agent, Membership* membership, const WorkerInfo& self,
                           const DrainOptions& options) {
  return GroupDrain(agent, membership, self, options).run();
}

ShutdownResult drain_one(Agent* agent, Membership* membership, const WorkerInfo& self,
                         const DrainOptions& options) {
  const absl::Time deadline =
      std::min(options.hard_deadline, agent->runtime()->now() + options.later_timeout);
  ShutdownResult out;
  // Out of the lists first, so that nobody begins something new with us; what is under way ends.
  membership->leave(deadline);
  if (!agent->wait_drained(deadline)) {
    const Agent::Load load = agent->load();
    out.status = make_error(ErrorKind::kDeadline,
                            absl::StrCat("worker '", self.name, "' leaves with ", load.pending,
                                         " calls and ", load.serving, " handlers not complete"));
  }
  out.workers.push_back(
      {self, out.status.ok() ? End::kDrained : End::kAborted, std::string(out.status.message())});
  return out;
}

}  // namespace weft::internal
