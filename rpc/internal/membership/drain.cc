#include "weft/rpc/internal/membership/drain.h"

#include <algorithm>
#include <map>
#include <optional>
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
// Heartbeats after which a wait looks at who is there although nothing speaks for it.
constexpr int kLookAnyway = 5;
// Time for the last look at the missing workers, when the deadline is over.
constexpr absl::Duration kLastLook = absl::Milliseconds(100);

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
    const WorkerInfo* lowest = &self_;
    for (const auto& all : {&missing_, &workers_}) {
      for (const auto& w : *all) {
        if (w.worker.id <= lowest->id) lowest = &w.worker;
      }
    }
    group_ = hex(lowest->incarnation);
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
  // For an operation that must be over by `deadline`.
  absl::Duration limit(absl::Time deadline) const {
    return std::clamp(deadline - runtime_.now(), absl::Milliseconds(1), patience());
  }
  std::string key(std::string_view what, const std::string& of) const {
    return membership_.key(absl::StrCat(absl::string_view(what.data(), what.size()), "/", of));
  }

  std::string gate(const std::string& what) const {
    return key(absl::StrCat("gate/", group_), what);
  }

  // What each worker has written, by incarnation.
  using Said = std::map<std::string, std::string>;

  Status put(const std::string& what, const std::string& value, absl::Time deadline) {
    return store().set(key(what, hex(self_.incarnation)), value, limit(deadline));
  }

  // After put(): the last to be counted opens the gate.
  Status count(const std::string& what, absl::Time deadline) {
    WEFT_ASSIGN_OR_RETURN(const int64_t n, store().add(key(absl::StrCat("count/", group_), what), 1,
                                                       limit(deadline)));
    const auto living = std::count_if(workers_.begin(), workers_.end(),
                                      [](const auto& w) { return w.outcome == End::kDrained; });
    if (n < living) return absl::OkStatus();
    return store().set(gate(what), "1", limit(deadline));
  }

  StatusOr<Said> read(const std::string& what, absl::Duration timeout) {
    const std::string prefix = key(what, "");
    WEFT_ASSIGN_OR_RETURN(std::vector<StoreEntry> entries, store().list_entries(prefix, timeout));
    Said said;
    for (StoreEntry& e : entries) said[e.key.substr(prefix.size())] = std::move(e.value);
    return said;
  }

  // Waits until every living worker has written `what`; those that died meanwhile become missing.
  StatusOr<Said> wait_for_all(const std::string& what, absl::Time deadline, bool say_who) {
    absl::Time answered = runtime_.now();
    absl::Time next_line = answered + absl::Minutes(1);
    absl::Time next_look = answered + kLookAnyway * options_.heartbeat;
    absl::Duration pause = absl::Milliseconds(5);  // when the gate was opened too early
    bool open = false;
    bool reachable = true;
    const auto parker = runtime_.make_parker();
    while (true) {
      const absl::Time begin = runtime_.now();
      const absl::Duration slice = std::min(options_.heartbeat, deadline - begin);
      if (slice <= absl::ZeroDuration()) return late(what, reachable);
      const bool anyway = begin >= next_look;
      if (anyway) next_look = begin + kLookAnyway * options_.heartbeat;
      StatusOr<std::optional<Said>> all = look(what, slice, anyway, &open);
      const ErrorKind kind = error_kind(all.status());
      reachable = all.ok();
      if (!all.ok() && (kind != ErrorKind::kUnavailable && kind != ErrorKind::kDeadline)) {
        return unable(what, all.status());
      }
      if (!all.ok()) {
        if (runtime_.now() - answered >= patience()) return unable(what, all.status());
        parker->park_until(begin + slice);  // one that refuses does so at once
        continue;
      }
      if (all->has_value()) return **std::move(all);
      answered = runtime_.now();
      if (open) {
        parker->park_until(std::min(answered + pause, deadline));
        pause = std::min(2 * pause, options_.heartbeat);
      }
      if (say_who && answered >= next_line) {
        next_line += absl::Minutes(1);
        const auto said = read(what, limit(deadline));
        if (said.ok()) {
          WEFT_LOG(options_.log, kInfo) << "shutdown waits for " << names(missing_from(*said));
        }
      }
    }
  }

  // Once: waits for the gate, and reads what was written when that can be all. Nothing: not yet.
  StatusOr<std::optional<Said>> look(const std::string& what, absl::Duration slice, bool anyway,
                                     bool* open) {
    if (!*open) {
      const Status gate = store().wait({this->gate(what)}, slice);
      if (!gate.ok() && error_kind(gate) != ErrorKind::kDeadline) return gate;
      *open = gate.ok();
    }
    // Before what was written: a worker that has gone wrote nothing after.
    const MemberListRef list = membership_.list();
    if (!*open && !anyway && missing_.empty() && !somebody_left(*list)) return std::nullopt;
    WEFT_ASSIGN_OR_RETURN(Said said, read(what, slice));
    WEFT_RETURN_IF_ERROR(notice_deaths(what, *list, said, slice));
    if (!missing_from(said).empty()) return std::nullopt;
    return std::optional<Said>(std::move(said));
  }

  static bool has_left(const MemberList& list, const WorkerInfo& worker) {
    const Member* there = list.find(worker.id);
    return list.gone.count(worker.id) > 0 ||
           (there != nullptr && there->info.incarnation != worker.incarnation);
  }
  bool somebody_left(const MemberList& list) const {
    return std::any_of(workers_.begin(), workers_.end(), [&list](const auto& w) {
      return w.outcome == End::kDrained && has_left(list, w.worker);
    });
  }

  // The entries of the workers that are still waited for.
  std::vector<ShutdownResult::Entry*> missing_from(const Said& said) {
    std::vector<ShutdownResult::Entry*> out;
    for (auto& w : workers_) {
      if (w.outcome == End::kDrained && said.count(hex(w.worker.incarnation)) == 0) {
        out.push_back(&w);
      }
    }
    return out;
  }
  static std::string names(const std::vector<ShutdownResult::Entry*>& workers) {
    return absl::StrJoin(workers, ", ", [](std::string* out, const auto* w) {
      absl::StrAppend(out, "'", w->worker.name, "'");
    });
  }

  // One that has left did so in its own time: what it has written is what counts.
  Status notice_deaths(const std::string& what, const MemberList& list, const Said& said,
                       absl::Duration timeout) {
    std::vector<ShutdownResult::Entry*> left;
    std::vector<std::string> keys;
    for (ShutdownResult::Entry* w : missing_from(said)) {
      if (!has_left(list, w->worker)) continue;
      left.push_back(w);
      keys.push_back(key("done", hex(w->worker.incarnation)));
      keys.push_back(key("dead", hex(w->worker.incarnation)));
    }
    if (left.empty()) return absl::OkStatus();
    WEFT_ASSIGN_OR_RETURN(const auto values, store().multi_get(keys, timeout));
    for (size_t i = 0; i < left.size(); ++i) {
      ShutdownResult::Entry& w = *left[i];
      const bool done = values[2 * i].has_value();
      const bool dead = values[2 * i + 1].has_value();
      const auto gone = list.gone.find(w.worker.id);
      const bool replaced = gone == list.gone.end();
      if (what == "done") {
        // Its record goes before "done" is written (DRAIN-4): only death ends the wait for it.
        if (done || (!dead && !replaced)) continue;
      } else if (done) {
        w.outcome = End::kAborted;
        w.reason = absl::StrCat("it left before '", what, "'");
        continue;
      }
      w.outcome = End::kMissing;
      w.reason = replaced ? std::string("another incarnation took its place")
                          : std::string(gone->second.why.message());
    }
    return absl::OkStatus();
  }

  static Status unable(const std::string& what, const Status& why) {
    return annotate(why, absl::StrCat("shutting down: waiting for '", what, "' of all workers"));
  }

  Status late(const std::string& what, bool reachable) {
    StatusOr<Said> said = make_error(ErrorKind::kUnavailable, "the store does not answer");
    if (reachable) said = read(what, std::min(options_.heartbeat, kLastLook));
    if (!said.ok()) {
      return make_error(
          ErrorKind::kUnavailable,
          absl::StrCat("shutdown of '", self_.name, "' waited for '", what,
                       "' of all workers until its deadline, and cannot find out who is missing: ",
                       absl::string_view(said.status().message())));
    }
    const std::vector<ShutdownResult::Entry*> missing = missing_from(*said);
    const Status status = make_error(
        ErrorKind::kDeadline, absl::StrCat("shutdown of '", self_.name, "' waited for '", what,
                                           "' of ", names(missing), " until its deadline"));
    for (ShutdownResult::Entry* w : missing) {
      w->outcome = End::kMissing;
      w->reason = absl::StrCat("did not reach '", what, "' before the deadline");
    }
    return status;
  }

  // One that was stopped for a lease may go on after the others have left without it: then their
  // keys are all there, and yet nothing was drained together.
  Status still_a_member(absl::Time deadline) {
    WEFT_ASSIGN_OR_RETURN(const std::optional<std::string> dead,
                          store().try_get(key("dead", hex(self_.incarnation)), limit(deadline)));
    if (!dead.has_value()) return absl::OkStatus();
    return make_error(ErrorKind::kState,
                      absl::StrCat("shutdown of '", self_.name,
                                   "', which was declared dead by the others: ", *dead));
  }

  Status arrive() {
    const absl::Time deadline = std::min(options_.arrival_deadline, options_.hard_deadline);
    WEFT_RETURN_IF_ERROR(still_a_member(deadline));
    WEFT_RETURN_IF_ERROR(put("arrived", "1", deadline));
    WEFT_RETURN_IF_ERROR(count("arrived", deadline));
    return wait_for_all("arrived", deadline, true).status();
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
      WEFT_RETURN_IF_ERROR(put(what,
                               absl::StrCat(load.pending, " ", load.serving, " ", load.issued, " ",
                                            load.served, " ", services.live),
                               deadline_));
      WEFT_RETURN_IF_ERROR(count(what, deadline_));
      const StatusOr<Said> said = wait_for_all(what, deadline_, false);
      if (!said.ok()) {
        return annotate(said.status(), absl::StrCat("draining: here ", load.pending, " calls and ",
                                                    load.serving, " handlers are not complete"));
      }
      // A worker that has written this has read what was written before it.
      const std::string read = round == 0 ? "arrived" : absl::StrCat("drain/", round - 1);
      const auto deleted =
          store().delete_key(key(read, hex(self_.incarnation)), limit(deadline_)).status();
      if (!deleted.ok()) WEFT_LOG(options_.log, kInfo) << "leaving '" << read << "': " << deleted;
      bool zero = true;
      bool live = false;
      std::string totals;
      for (const auto& w : workers_) {
        if (w.outcome != End::kDrained) continue;
        const std::string& counts = said->at(hex(w.worker.incarnation));
        const std::vector<std::string> parts = absl::StrSplit(counts, ' ');
        zero = zero && parts.size() == 5 && parts[0] == "0" && parts[1] == "0";
        live = live || (parts.size() == 5 && parts[4] != "0");
        absl::StrAppend(&totals, hex(w.worker.incarnation), ":", counts, ";");
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
    WEFT_RETURN_IF_ERROR(still_a_member(deadline_));
    WEFT_RETURN_IF_ERROR(put("done", "1", deadline_));
    Status status = count("done", deadline_);
    if (status.ok()) status = wait_for_all("done", deadline_, false).status();
    if (status.ok() || error_kind(status) == ErrorKind::kDeadline) return status;
    // DRAIN-7.
    WEFT_LOG(options_.log, kInfo) << "the others have left with the store: " << status;
    return absl::OkStatus();
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
  std::string group_;
  std::vector<ShutdownResult::Entry> workers_;
  std::vector<ShutdownResult::Entry> missing_;
};

}  // namespace

ShutdownResult drain_group(Agent* agent, Membership* membership, const WorkerInfo& self,
                           const DrainOptions& options) {
  return GroupDrain(agent, membership, self, options).run();
}

ShutdownResult drain_one(Agent* agent, const WorkerInfo& self, const DrainOptions& options) {
  const absl::Time deadline =
      std::min(options.hard_deadline, agent->runtime()->now() + options.later_timeout);
  ShutdownResult out;
  // DRAIN-8: still in the lists, so that no peer gives up calls that are under way. The end of the
  // worker, which follows, takes it out of them.
  agent->begin_leaving(deadline);
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
