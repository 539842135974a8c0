#include "weft/collectives/internal/service.h"

#include <algorithm>
#include <utility>

#include "weft/collectives/internal/group_core.h"
#include "weft/collectives/internal/text.h"
#include "weft/collectives/service.h"
#include "weft/rpc/spi/service_worker.h"
#include "weft/rpc/spi/untyped_call.h"
#include "weft/store/delegating_store.h"

namespace weft::internal {
namespace {

constexpr std::string_view kWhat = "init_process_group(worker)";

Status bad_members(std::string_view why) {
  return make_error(ErrorKind::kInvalidArgument, cat(kWhat, ": ", why));
}

std::string_view state_text(const GroupState& state) {
  if (!state.failure.ok()) return "failed";
  return state.left ? "left" : "works";
}

std::string doing_text(const GroupState& state) {
  std::string out(state.op);
  if (state.op_sequence > 0) cat_to(&out, " #", state.op_sequence);
  if (!state.algorithm.empty()) cat_to(&out, " (", state.algorithm, ")");
  return out;
}

}  // namespace

std::shared_ptr<const GroupWorkers> workers_of_ranks(const std::shared_ptr<const GroupWorkers>& all,
                                                     const std::vector<int>& ranks) {
  if (all == nullptr) return nullptr;
  auto out = std::make_shared<GroupWorkers>();
  out->service = all->service;
  for (const int rank : ranks) out->by_rank.push_back(all->by_rank[static_cast<size_t>(rank)]);
  return out;
}

uint64_t members_hash(const GroupWorkers& workers) {
  std::vector<uint64_t> all;
  for (const WorkerInfo& one : workers.by_rank) all.push_back(one.incarnation);
  std::sort(all.begin(), all.end());
  uint64_t hash = all.size();
  for (const uint64_t one : all) hash = (hash ^ one) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 32);
}

void MakingWatch::end(int rank, const Status& why) {
  {
    MutexLock lock(&mutex_);
    if (!cause_.ok()) return;
    rank_ = rank;
    cause_ = why;
  }
  store_->interrupt();
}

Status MakingWatch::cause(int* rank) const {
  MutexLock lock(&mutex_);
  *rank = rank_;
  return cause_;
}

StatusOr<std::vector<WorkerInfo>> CollectivesService::members(
    const Worker& worker, const std::vector<std::string>& names) const {
  std::vector<WorkerInfo> out;
  if (names.empty()) {
    if (worker.world_size() == 0) {
      return bad_members(
          "the worker is of a dynamic group, whose members have to be listed by name");
    }
    for (int rank = 0; rank < worker.world_size(); ++rank) {
      auto info = worker.try_get_worker_info(static_cast<uint32_t>(rank));
      if (!info.ok()) return annotate(info.status(), cat(kWhat));
      out.push_back(*std::move(info));
    }
    return out;
  }
  for (const std::string& name : names) {
    if (std::count(names.begin(), names.end(), name) > 1) {
      return bad_members(cat("worker '", name, "' stands in the list twice"));
    }
    auto info = worker.try_get_worker_info(name);
    if (!info.ok()) return annotate(info.status(), cat(kWhat));
    out.push_back(*std::move(info));
  }
  return out;
}

StatusOr<ProcessGroupOptions> CollectivesService::complete(const Worker& worker,
                                                           const ProcessGroupOptions& options,
                                                           const std::vector<std::string>& names) {
  const std::pair<bool, std::string_view> given[] = {
      {!options.worker_name.empty(), "worker_name"},
      {options.job_rank.has_value(), "job_rank"},
      {options.store != nullptr, "store"},
      {!options.rendezvous.empty(), "rendezvous"},
      {options.rank.has_value(), "rank"},
      {options.size.has_value(), "size"},
      {options.runtime != nullptr, "runtime"},
      {options.executor != nullptr, "executor"},
  };
  for (const auto& [is_given, name] : given) {
    if (is_given)
      return bad_members(cat("the option ", name, " comes from the worker; leave it unset"));
  }
  {
    // A worker that has shut down may still stand in its own list, or stand there as one that left.
    MutexLock lock(&mutex_);
    if (!down_.ok()) return annotate(down_, cat(kWhat));
  }
  WEFT_ASSIGN_OR_RETURN(std::vector<WorkerInfo> all, members(worker, names));
  const auto own = std::find(all.begin(), all.end(), worker.info());
  if (own == all.end()) return bad_members(cat("worker '", worker.name(), "' is not in the list"));
  ProcessGroupOptions out = options;
  out.store = service_store(worker, "collectives");
  const std::optional<WorkerEndpoint> endpoint = endpoint_of(worker);
  if (out.store == nullptr || !endpoint.has_value()) {
    return make_error(ErrorKind::kState, cat(kWhat, ": the worker is gone"));
  }
  out.rank = static_cast<int>(own - all.begin());
  out.size = static_cast<int>(all.size());
  out.runtime = context_.runtime;
  out.executor = context_.executor;
  const ProcessGroupOptions defaults;
  if (out.listen_address == defaults.listen_address && !endpoint->listen.host.empty()) {
    out.listen_address = endpoint->listen.host;
  }
  out.allow_insecure = out.allow_insecure || endpoint->listen.allow_insecure;
  if (out.credentials.empty()) out.credentials = endpoint->credentials;
  out.worker_name = worker.name();
  out.job_rank = static_cast<int>(own->id);
  out.log = worker.log();
  if (out.metrics == nullptr) out.metrics = metrics_of(worker);
  if (out.trace == nullptr) out.trace = trace_of(worker);
  auto workers = std::make_shared<GroupWorkers>();
  workers->service = shared_from_this();
  workers->by_rank = std::move(all);
  out.workers = std::move(workers);
  return out;
}

StatusOr<std::shared_ptr<MakingWatch>> CollectivesService::watch(
    const std::vector<WorkerInfo>& members, const std::shared_ptr<Store>& store) {
  auto* const forkable = dynamic_cast<ForkableStore*>(store.get());
  auto out =
      std::make_shared<MakingWatch>(members, forkable == nullptr ? store : forkable->new_client());
  bool subscribed = false;
  {
    MutexLock lock(&mutex_);
    if (!down_.ok()) return down_;
    making_.erase(std::remove_if(making_.begin(), making_.end(),
                                 [](const auto& one) { return one.expired(); }),
                  making_.end());
    making_.push_back(out);
    subscribed = subscription_ != nullptr;
  }
  if (!subscribed) {
    Worker::Subscription mine;
    try {
      mine = context_.worker->subscribe([weak = weak_from_this()](const MembershipChange& change) {
        const auto self = weak.lock();
        if (self == nullptr || change.kind != MembershipChange::Kind::kDied) return;
        self->on_died(change.worker, change.reason);
      });
    } catch (...) {  // the worker is gone
      return status_from_current_exception();
    }
    MutexLock lock(&mutex_);
    // After a shutdown, or with one there already, it ends here.
    if (down_.ok() && subscription_ == nullptr) subscription_ = std::move(mine);
  }
  // From here on deaths are heard; those of before show in the list of members.
  for (const WorkerInfo& one : members) {
    WEFT_ASSIGN_OR_RETURN(const WorkerInfo now, context_.worker->try_get_worker_info(one.id));
    if (now.incarnation != one.incarnation) {
      return make_error(ErrorKind::kPeerLost, cat("worker '", one.name, "' was replaced"));
    }
  }
  return out;
}

void CollectivesService::add(const std::shared_ptr<GroupCore>& core, const MakingWatch& watch) {
  groups_.add(core);
  int rank = -1;
  const Status cause = watch.cause(&rank);
  if (cause.ok()) return;
  if (rank < 0) {
    core->close();
  } else {
    core->member_died(rank, cause);
  }
}

std::vector<std::shared_ptr<MakingWatch>> CollectivesService::watches() const {
  std::vector<std::shared_ptr<MakingWatch>> out;
  MutexLock lock(&mutex_);
  for (const auto& weak : making_) {
    if (auto one = weak.lock(); one != nullptr) out.push_back(std::move(one));
  }
  return out;
}

void CollectivesService::on_died(const WorkerInfo& worker, const std::string& reason) {
  const auto rank_in = [&](const std::vector<WorkerInfo>& members) {
    const auto at = std::find(members.begin(), members.end(), worker);
    return at == members.end() ? -1 : static_cast<int>(at - members.begin());
  };
  const Status why =
      make_error(ErrorKind::kPeerLost, cat("worker '", worker.name, "' is dead: ", reason));
  for (const auto& one : watches()) {
    if (const int rank = rank_in(one->members()); rank >= 0) one->end(rank, why);
  }
  for (const auto& core : groups_.groups()) {
    if (const int rank = rank_in(core->options().workers); rank >= 0) core->member_died(rank, why);
  }
}

void CollectivesService::on_shutdown(const Status& why) {
  Worker::Subscription ended;
  {
    MutexLock lock(&mutex_);
    down_ = why;
    ended = std::move(subscription_);
  }
  ended.reset();  // waits for a call that is running
  for (const auto& one : watches()) one->end(-1, why);
  for (const auto& core : groups_.groups()) core->close();
}

void CollectivesService::put_debug_info(std::map<std::string, int64_t>* out) const {
  int64_t living = 0;
  int64_t failed = 0;
  uint64_t begun = 0;
  uint64_t pending = 0;
  for (const auto& core : groups_.groups()) {
    const GroupState state = core->state();
    if (state.left) continue;
    ++living;
    failed += state.failure.ok() ? 0 : 1;
    begun += state.sequence;
    pending += state.failure.ok() ? state.pending : 0;
  }
  (*out)["collective_groups"] = living;
  (*out)["collective_groups_failed"] = failed;
  (*out)["collective_operations"] = static_cast<int64_t>(begun);
  (*out)["collective_operations_pending"] = static_cast<int64_t>(pending);
}

void CollectivesService::put_inspection(Inspection* out) const {
  Inspection::Table& table =
      out->table("groups", {"group", "generation", "rank", "size", "backend", "state", "operations",
                            "doing", "age_s", "waits_for"});
  for (const auto& core : groups_.groups()) {
    const GroupState state = core->state();
    const Membership& member = core->member();
    table.add({core->options().name, int64_t{member.generation}, int64_t{member.rank},
               int64_t{member.size}, std::string(core->options().backend),
               std::string(state_text(state)), static_cast<int64_t>(state.sequence),
               doing_text(state), absl::ToDoubleSeconds(state.op_age), awaited_text(*core, state)});
  }
  Inspection::Table& reductions = out->table(
      "ddp", {"module", "group", "reductions", "forward", "doing", "age_s", "waits_for"});
  for (const auto& core : groups_.groups()) {
    const GroupState state = core->state();
    for (const auto& user : core->users()) {
      const GroupUser::Row row = user->row();
      reductions.add({row.name, core->options().name, row.done, row.forward, row.waits_for,
                      absl::ToDoubleSeconds(row.age),
                      row.waits_for.empty() ? std::string() : awaited_text(*core, state)});
    }
  }
}

Service::Load CollectivesService::load() const {
  Load out;
  for (const auto& core : groups_.groups()) {
    const GroupState state = core->state();
    if (state.failure.ok() && !state.left) out.pending += state.pending;
  }
  return out;
}

}  // namespace weft::internal

namespace weft {

ServiceFactory collectives_service() {
  return [](const ServiceContext& context) {
    return std::make_shared<internal::CollectivesService>(context);
  };
}

StatusOr<ProcessGroup> try_init_process_group(const Worker& worker,
                                              const ProcessGroupOptions& options,
                                              const std::vector<std::string>& workers) {
  std::shared_ptr<internal::CollectivesService> service;
  try {
    service = worker.service<internal::CollectivesService>();
  } catch (...) {
    return annotate(status_from_current_exception(), "init_process_group(worker)");
  }
  if (service == nullptr) {
    return make_error(ErrorKind::kState,
                      internal::cat("init_process_group(worker): worker '", worker.name(),
                                    "' has no collectives_service(); list it at join, or use "
                                    "weft::join"));
  }
  WEFT_ASSIGN_OR_RETURN(const ProcessGroupOptions complete,
                        service->complete(worker, options, workers));
  return try_init_process_group(complete);
}

ProcessGroup init_process_group(const Worker& worker, const ProcessGroupOptions& options,
                                const std::vector<std::string>& workers) {
  return value_or_throw(try_init_process_group(worker, options, workers));
}

}  // namespace weft
