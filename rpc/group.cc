#include "weft/rpc/group.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/common/future.h"
#include "weft/common/mutex.h"
#include "weft/rpc/containers.h"
#include "weft/rpc/internal/launch/core.h"

// How calls of a gathering find each other:
//
//   GROUP-1  a set is its names with their incarnations: a member that comes back under its name
//            makes another set, in which all members begin to count anew.
//   GROUP-2  a gathering that failed is over for all its members: a later report is told so
//            immediately, with the next one that is not over. So members that try again after a
//            failure meet each other.
//   GROUP-3  what is remembered ends with the members: a set in which one is gone is forgotten, and
//            a report to it fails.

namespace weft {
namespace {

constexpr char kReport[] = "@group.report";
constexpr char kReportSignature[] =
    "(string,int,string,list(string),list(int),int,bytes,list(tensor))->gathered";

// How many failed gatherings of a set are remembered one by one, before all with lower numbers
// count as over; how many sets; and how many workers that are gone.
constexpr size_t kMostFailed = 64;
constexpr size_t kMostSets = 4096;
constexpr size_t kMostGone = internal::MemberList::kMostGone;
// The first number of an answer: the values follow; otherwise the gathering is over, and this is
// the next that is not, then comes the reason.
constexpr int64_t kValues = -1;

// A report: which gathering, who, and what.
struct Report {
  std::string set;       // the names with their incarnations, joined
  int64_t sequence = 0;  // of the reporter's calls for this set
  std::string name;
  std::vector<std::string> names;
  std::vector<uint64_t> incarnations;
  int64_t timeout_us = 0;
  Payload value;
};

Payload encode(const Report& report) {
  Payload out;
  Encoder e(&out);
  e.put(report.set);
  e.put(report.sequence);
  e.put(report.name);
  e.put(report.names);
  std::vector<int64_t> incarnations;
  for (const uint64_t i : report.incarnations) incarnations.push_back(static_cast<int64_t>(i));
  e.put(incarnations);
  e.put(report.timeout_us);
  e.put_bytes(report.value.body);
  e.put(report.value.tensors);
  return out;
}

StatusOr<Report> decode(Payload payload) {
  Decoder d(std::move(payload));
  Report r;
  WEFT_ASSIGN_OR_RETURN(r.set, d.take<std::string>());
  WEFT_ASSIGN_OR_RETURN(r.sequence, d.take<int64_t>());
  WEFT_ASSIGN_OR_RETURN(r.name, d.take<std::string>());
  WEFT_ASSIGN_OR_RETURN(r.names, d.take<std::vector<std::string>>());
  WEFT_ASSIGN_OR_RETURN(const auto incarnations, d.take<std::vector<int64_t>>());
  for (const int64_t i : incarnations) r.incarnations.push_back(static_cast<uint64_t>(i));
  WEFT_ASSIGN_OR_RETURN(r.timeout_us, d.take<int64_t>());
  WEFT_ASSIGN_OR_RETURN(r.value.body, d.take_bytes());
  WEFT_ASSIGN_OR_RETURN(r.value.tensors, d.take<std::vector<at::Tensor>>());
  WEFT_RETURN_IF_ERROR(d.finish());
  return r;
}

class GroupService : public Service, public std::enable_shared_from_this<GroupService> {
 public:
  // A set, and which of its gatherings.
  using Key = std::pair<std::string, int64_t>;

  explicit GroupService(const ServiceContext& context)
      : runtime_(context.runtime), executor_(context.executor), self_(context.worker->info()) {}

  std::vector<Method> methods() override {
    Method m;
    m.name = kReport;
    m.signature = kReportSignature;
    m.inline_ok = true;  // decodes and files; the last report answers all
    m.invoke = [weak = weak_from_this()](CallContext&, const std::shared_ptr<void>&,
                                         Payload arguments, ReplyFn reply) {
      auto self = weak.lock();
      StatusOr<Report> report = decode(std::move(arguments));
      if (self == nullptr || !report.ok()) {
        reply(report.ok() ? make_error(ErrorKind::kState, "the worker has shut down")
                          : report.status());
        return;
      }
      self->on_report(*std::move(report), std::move(reply));
    };
    return {std::move(m)};
  }

  // The key of the next gathering of these members.
  StatusOr<Key> begin(const std::vector<WorkerInfo>& members) {
    std::string set;
    MutexLock lock(&mutex_);
    for (const WorkerInfo& m : members) {
      const auto gone = gone_.find(m.incarnation);
      if (gone != gone_.end()) return gone->second;
      absl::StrAppend(&set, set.empty() ? "" : ",", m.name, "@",
                      absl::Hex(m.incarnation, absl::kZeroPad16));
    }
    Set& entry = use_set(set);
    for (const WorkerInfo& m : members) entry.incarnations.insert(m.incarnation);
    return Key(set, entry.next++);
  }
  // The gathering before `next` was over when we reported.
  void catch_up(const std::string& set, int64_t next) {
    MutexLock lock(&mutex_);
    const auto it = sets_.find(set);
    if (it != sets_.end()) it->second.next = std::max(it->second.next, next);
  }
  void on_worker_gone(const WorkerInfo& worker, const Status& why) override {
    {
      MutexLock lock(&mutex_);
      if (gone_.emplace(worker.incarnation, why).second) gone_order_.push_back(worker.incarnation);
      if (gone_order_.size() > kMostGone) {
        gone_.erase(gone_order_.front());
        gone_order_.pop_front();
      }
      for (auto it = sets_.begin(); it != sets_.end();) {
        it = it->second.incarnations.count(worker.incarnation) > 0 ? sets_.erase(it) : ++it;
      }
    }
    fail_where(why, [&worker](const Gathering& g) {
      return g.incarnations.count(worker.incarnation) > 0;
    });
  }

  void on_shutdown(const Status& why) override {
    fail_where(why, [](const Gathering&) { return true; });
  }

 private:
  struct Gathering {
    std::vector<std::string> names;
    std::set<uint64_t> incarnations;
    std::map<std::string, Payload> values;
    std::vector<ReplyFn> replies;
    std::unique_ptr<Timer> timer;
  };

  // What a worker knows of a set: where it is itself, and, as its leader, what is over.
  struct Set {
    std::set<uint64_t> incarnations;
    int64_t next = 0;
    int64_t over_below = 0;
    std::map<int64_t, Status> failed;
    uint64_t used = 0;
  };

  // The one of that name; makes it when there is none, in the place of the least recently used one
  // when there are kMostSets.
  Set& use_set(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (sets_.size() >= kMostSets && sets_.count(name) == 0) {
      sets_.erase(std::min_element(sets_.begin(), sets_.end(), [](const auto& a, const auto& b) {
        return a.second.used < b.second.used;
      }));
    }
    Set& set = sets_[name];
    set.used = ++uses_;
    return set;
  }

  // Why there is no such gathering any more, GROUP-2; `*next` is the next that is not over.
  Status why_over(const Report& report, int64_t* next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto set = sets_.find(report.set);
    if (set == sets_.end()) return absl::OkStatus();
    const Set& s = set->second;
    const auto failed = s.failed.find(report.sequence);
    if (failed == s.failed.end() && report.sequence >= s.over_below) return absl::OkStatus();
    *next = std::max(report.sequence + 1, s.over_below);
    while (s.failed.count(*next) > 0) ++*next;
    const Status why = failed == s.failed.end()
                           ? make_error(ErrorKind::kDeadline, "it failed long ago")
                           : failed->second;
    return annotate(why, absl::StrCat("gathering ", report.sequence, " of {",
                                      absl::StrJoin(report.names, ","), "} is over"));
  }

  // The error for a member that can never report, in a set that a worker made of an older list.
  Status gone_of(const Report& report) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (report.incarnations.size() != report.names.size() || report.names.empty()) {
      return make_error(ErrorKind::kProtocol,
                        absl::StrCat("a report of '", report.name, "' with ", report.names.size(),
                                     " names and ", report.incarnations.size(), " incarnations"));
    }
    for (const uint64_t incarnation : report.incarnations) {
      const auto gone = gone_.find(incarnation);
      if (gone != gone_.end()) return gone->second;
    }
    const auto me = std::lower_bound(report.names.begin(), report.names.end(), self_.name);
    const size_t at = static_cast<size_t>(me - report.names.begin());
    if (me != report.names.end() && *me == self_.name &&
        report.incarnations[at] != self_.incarnation) {
      return make_error(ErrorKind::kPeerLost,
                        absl::StrCat("worker '", self_.name, "' has been restarted: the one that '",
                                     report.name, "' wants to gather with is gone"));
    }
    return absl::OkStatus();
  }

  void on_report(Report report, ReplyFn reply) {
    const Key key(report.set, report.sequence);
    Status refused;
    std::shared_ptr<Gathering> complete;
    {
      MutexLock lock(&mutex_);
      refused = gone_of(report);
      int64_t next = 0;
      const Status over = refused.ok() ? why_over(report, &next) : absl::OkStatus();
      if (!refused.ok() || !over.ok()) {
        lock.unlock();
        return refused.ok() ? reply(encode_over(next, over)) : reply(refused);
      }
      // The leader knows the set from the first report on, whichever member sends it.
      Set& set = use_set(report.set);
      set.incarnations.insert(report.incarnations.begin(), report.incarnations.end());
      std::shared_ptr<Gathering>& g = open_[key];
      if (g == nullptr) {
        g = std::make_shared<Gathering>();
        g->names = report.names;
        g->incarnations.insert(report.incarnations.begin(), report.incarnations.end());
        // Posted, because expiring destroys the timer that is firing.
        g->timer = runtime_->make_timer([weak = weak_from_this(), executor = executor_, key] {
          executor->post([weak, key] {
            if (auto self = weak.lock()) self->expire(key);
          });
        });
        g->timer->arm(runtime_->now() + absl::Microseconds(report.timeout_us));
      }
      if (!std::binary_search(g->names.begin(), g->names.end(), report.name) ||
          !g->values.emplace(report.name, std::move(report.value)).second) {
        refused = make_error(
            ErrorKind::kInvalidArgument,
            absl::StrCat("'", report.name,
                         "' is not a member, or has reported already, of "
                         "gathering ",
                         report.sequence, " of {", absl::StrJoin(report.names, ","), "}"));
      } else {
        g->replies.push_back(std::move(reply));
        if (g->values.size() == g->names.size()) {
          complete = std::move(g);
          open_.erase(key);
        }
      }
    }
    if (!refused.ok()) return reply(refused);
    if (complete == nullptr) return;
    complete->timer->disarm();
    for (ReplyFn& r : complete->replies) {
      Payload all;
      Encoder e(&all);
      e.put(kValues);
      for (const auto& [name, value] : complete->values) {
        e.put_bytes(value.body);
        e.put(value.tensors);
      }
      if (e.status().ok()) {
        r(std::move(all));
      } else {
        r(e.status());
      }
    }
  }

  static StatusOr<Payload> encode_over(int64_t next, const Status& why) {
    Payload out;
    Encoder e(&out);
    e.put(next);
    e.put(static_cast<int64_t>(error_kind(why)));
    e.put(std::string(why.message()));
    WEFT_RETURN_IF_ERROR(e.status());
    return out;
  }

  void expire(const Key& key) {
    std::vector<std::string> missing;
    std::string names;
    {
      MutexLock lock(&mutex_);
      auto it = open_.find(key);
      if (it == open_.end()) return;
      names = absl::StrJoin(it->second->names, ",");
      for (const std::string& name : it->second->names) {
        if (it->second->values.count(name) == 0) missing.push_back(absl::StrCat("'", name, "'"));
      }
    }
    fail_where(make_error(ErrorKind::kDeadline,
                          absl::StrCat("gathering ", key.second, " of {", names,
                                       "} timed out without ", absl::StrJoin(missing, ", "))),
               [&key, this](const Gathering& g) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                 auto it = open_.find(key);
                 return it != open_.end() && it->second.get() == &g;
               });
  }

  template <class Match>
  void fail_where(const Status& why, Match match) {
    std::vector<std::shared_ptr<Gathering>> failed;
    {
      MutexLock lock(&mutex_);
      for (auto it = open_.begin(); it != open_.end();) {
        if (match(*it->second)) {
          remember_failed(it->first, why);
          failed.push_back(std::move(it->second));
          it = open_.erase(it);
        } else {
          ++it;
        }
      }
    }
    for (const auto& g : failed) {
      for (ReplyFn& r : g->replies) r(why);
    }
  }

  void remember_failed(const Key& key, const Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto it = sets_.find(key.first);
    if (it == sets_.end()) return;  // GROUP-3
    Set& set = it->second;
    set.failed.emplace(key.second, why);
    if (set.failed.size() <= kMostFailed) return;
    set.over_below = std::max(set.over_below, set.failed.begin()->first + 1);
    set.failed.erase(set.failed.begin());
  }

  const std::shared_ptr<Runtime> runtime_;
  const std::shared_ptr<Executor> executor_;
  const WorkerInfo self_;  // without its id, which comes later
  Mutex mutex_;
  std::map<std::string, Set> sets_ ABSL_GUARDED_BY(mutex_);
  uint64_t uses_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, Status> gone_ ABSL_GUARDED_BY(mutex_);
  std::deque<uint64_t> gone_order_ ABSL_GUARDED_BY(mutex_);
  std::map<Key, std::shared_ptr<Gathering>> open_ ABSL_GUARDED_BY(mutex_);
};

// Returns the current members of these names; waits for those that have not joined yet.
StatusOr<std::vector<WorkerInfo>> find_members(const Worker& worker,
                                               const std::vector<std::string>& names,
                                               absl::Time deadline) {
  const std::shared_ptr<internal::Core> core = lock_core(worker);
  if (core == nullptr) return make_error(ErrorKind::kState, "the worker is gone");
  while (true) {
    const internal::MemberListRef list = core->membership().list();
    std::vector<WorkerInfo> out;
    std::vector<std::string> missing;
    for (const std::string& name : names) {
      const auto member = list->resolve(Destination(name));
      if (member.ok()) {
        out.push_back((*member)->info);
      } else if (error_kind(member.status()) == ErrorKind::kNotFound) {
        missing.push_back(absl::StrCat("'", name, "'"));
      } else {
        return member.status();
      }
    }
    if (missing.empty()) return out;
    if (core->runtime().now() >= deadline || worker.is_shut_down()) {
      return make_error(
          ErrorKind::kDeadline,
          absl::StrCat("a gathering of {", absl::StrJoin(names, ","),
                       "} timed out: there is no worker ", absl::StrJoin(missing, ", ")));
    }
    core->membership().wait_list_change(list, deadline);
  }
}

}  // namespace

ServiceFactory group_service() {
  return [](const ServiceContext& context) { return std::make_shared<GroupService>(context); };
}

StatusOr<std::vector<Payload>> all_gather_payloads(const Worker& worker, Payload mine,
                                                   std::vector<std::string> names,
                                                   Timeout timeout) {
  const auto service = worker.service<GroupService>();
  if (service == nullptr) {
    return make_error(ErrorKind::kUnimplemented,
                      absl::StrCat("worker '", worker.name(),
                                   "' has no group service; list group_service() at join"));
  }
  if (!mine.references.empty()) {
    return make_error(
        ErrorKind::kInvalidArgument,
        "an RRef inside a value to be gathered: RRefs travel as arguments and results "
        "of calls only");
  }
  if (names.empty()) {
    for (const WorkerInfo& info : worker.worker_infos()) names.push_back(info.name);
  }
  std::sort(names.begin(), names.end());
  if (std::adjacent_find(names.begin(), names.end()) != names.end() ||
      !std::binary_search(names.begin(), names.end(), worker.name())) {
    return make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("the names {", absl::StrJoin(names, ", "), "} of a gathering must be ",
                     "unique and hold the caller, '", worker.name(), "'"));
  }
  const absl::Duration length = timeout.value_or(worker.rpc_timeout());
  WEFT_ASSIGN_OR_RETURN(
      const std::vector<WorkerInfo> members,
      find_members(worker, names, deadline_after(worker.runtime().now(), length)));
  Report report;
  WEFT_ASSIGN_OR_RETURN(const GroupService::Key key, service->begin(members));
  report.set = key.first;
  report.sequence = key.second;
  for (const WorkerInfo& member : members) report.incarnations.push_back(member.incarnation);
  report.name = worker.name();
  report.names = names;
  report.timeout_us = absl::ToInt64Microseconds(std::min(length, absl::Hours(24 * 365)));
  report.value = std::move(mine);

  UntypedCall call;
  call.method = kReport;
  call.signature = kReportSignature;
  call.arguments = encode(report);
  // The leader reports who is missing; this is for a leader that cannot be reached.
  call.options.deadline = length == absl::InfiniteDuration()
                              ? kInfinite
                              : Timeout(length * 1.25 + absl::Milliseconds(100));
  call.options.retry = Retry::kAtMostOnce;

  Promise<Payload> promise(executor_of(worker));
  Future<Payload> future = promise.future();
  future.state()->set_default_wait(absl::InfiniteDuration());
  start_call(worker, members.front(), std::move(call),
             [p = std::make_shared<Promise<Payload>>(std::move(promise))](
                 StatusOr<Payload> result) { p->try_set(std::move(result)); });
  WEFT_ASSIGN_OR_RETURN(Payload all, future.try_wait());
  Decoder d(std::move(all));
  WEFT_ASSIGN_OR_RETURN(const int64_t next, d.take<int64_t>());
  if (next != kValues) {  // GROUP-2
    service->catch_up(key.first, next);
    WEFT_ASSIGN_OR_RETURN(const int64_t kind, d.take<int64_t>());
    WEFT_ASSIGN_OR_RETURN(const std::string why, d.take<std::string>());
    WEFT_RETURN_IF_ERROR(d.finish());
    return make_error(static_cast<ErrorKind>(kind), why);
  }
  std::vector<Payload> out(names.size());
  for (Payload& one : out) {
    WEFT_ASSIGN_OR_RETURN(one.body, d.take_bytes());
    WEFT_ASSIGN_OR_RETURN(one.tensors, d.take<std::vector<at::Tensor>>());
  }
  WEFT_RETURN_IF_ERROR(d.finish());
  return out;
}

void barrier(const Worker& worker, std::vector<std::string> names, Timeout timeout) {
  throw_if_error(all_gather_payloads(worker, Payload{}, std::move(names), timeout).status());
}

}  // namespace weft
