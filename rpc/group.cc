#include "weft/rpc/group.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/common/future.h"
#include "weft/common/mutex.h"
#include "weft/rpc/containers.h"

namespace weft {
namespace {

constexpr char kReport[] = "@group.report";
constexpr char kReportSignature[] =
    "(string,int,string,list(string),int,bytes,list(tensor))->gathered";

// A report: which gathering, who, and what.
struct Report {
  std::string set;       // the names, joined
  int64_t sequence = 0;  // of the reporter's calls for this set
  std::string name;
  std::vector<std::string> names;
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
  WEFT_ASSIGN_OR_RETURN(r.timeout_us, d.take<int64_t>());
  WEFT_ASSIGN_OR_RETURN(r.value.body, d.take_bytes());
  WEFT_ASSIGN_OR_RETURN(r.value.tensors, d.take<std::vector<at::Tensor>>());
  WEFT_RETURN_IF_ERROR(d.finish());
  return r;
}

class GroupService : public Service, public std::enable_shared_from_this<GroupService> {
 public:
  explicit GroupService(const ServiceContext& context)
      : runtime_(context.runtime), executor_(context.executor) {}

  std::vector<Method> methods() override {
    Method m;
    m.name = kReport;
    m.signature = kReportSignature;
    m.inline_ok = true;  // decodes and files; whoever comes last answers all
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

  int64_t next_sequence(const std::string& set) {
    MutexLock lock(&mutex_);
    return sequences_[set]++;
  }

  void on_worker_gone(const WorkerInfo& worker, const Status& why) override {
    fail_where(why, [&worker](const Gathering& g) {
      return std::binary_search(g.names.begin(), g.names.end(), worker.name);
    });
  }

  void on_shutdown(const Status& why) override {
    fail_where(why, [](const Gathering&) { return true; });
  }

 private:
  using Key = std::pair<std::string, int64_t>;
  struct Gathering {
    std::vector<std::string> names;
    std::map<std::string, Payload> values;
    std::vector<ReplyFn> replies;
    std::unique_ptr<Timer> timer;
  };

  void on_report(Report report, ReplyFn reply) {
    const Key key(report.set, report.sequence);
    Status refused;
    std::shared_ptr<Gathering> complete;
    {
      MutexLock lock(&mutex_);
      std::shared_ptr<Gathering>& g = open_[key];
      if (g == nullptr) {
        g = std::make_shared<Gathering>();
        g->names = report.names;
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
        refused = make_error(ErrorKind::kInvalidArgument,
                             absl::StrCat("'", report.name,
                                          "' is not a member, or has reported already, of "
                                          "gathering ",
                                          report.sequence, " of {", report.set, "}"));
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

  void expire(const Key& key) {
    std::vector<std::string> missing;
    {
      MutexLock lock(&mutex_);
      auto it = open_.find(key);
      if (it == open_.end()) return;
      for (const std::string& name : it->second->names) {
        if (it->second->values.count(name) == 0) missing.push_back(absl::StrCat("'", name, "'"));
      }
    }
    fail_where(make_error(ErrorKind::kDeadline,
                          absl::StrCat("gathering ", key.second, " of {", key.first,
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

  const std::shared_ptr<Runtime> runtime_;
  const std::shared_ptr<Executor> executor_;
  Mutex mutex_;
  std::map<std::string, int64_t> sequences_ ABSL_GUARDED_BY(mutex_);
  std::map<Key, std::shared_ptr<Gathering>> open_ ABSL_GUARDED_BY(mutex_);
};

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
  Report report;
  report.set = absl::StrJoin(names, ",");
  report.sequence = service->next_sequence(report.set);
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
  start_call(worker, names.front(), std::move(call),
             [p = std::make_shared<Promise<Payload>>(std::move(promise))](
                 StatusOr<Payload> result) { p->try_set(std::move(result)); });
  WEFT_ASSIGN_OR_RETURN(Payload all, future.try_wait());
  Decoder d(std::move(all));
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
