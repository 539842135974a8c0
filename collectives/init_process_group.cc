#include <optional>
#include <utility>

#include "weft/collectives/flight_recorder.h"
#include "weft/collectives/internal/backend_connector.h"
#include "weft/collectives/internal/group_handle.h"
#include "weft/collectives/internal/making.h"
#include "weft/collectives/internal/service.h"
#include "weft/collectives/internal/text.h"
#include "weft/collectives/process_group.h"
#include "weft/common/id.h"
#include "weft/common/launch_info.h"
#include "weft/proto/collectives.pb.h"
#include "weft/rpc/c10d_store.h"

namespace weft {
namespace {

Status invalid(std::string_view why) {
  return make_error(ErrorKind::kInvalidArgument, internal::cat("init_process_group: ", why));
}

// One group on its way.
class Initializer {
 public:
  Initializer(const ProcessGroupOptions& options, uint32_t generation, std::vector<int> previous)
      : options_(options), previous_(std::move(previous)) {
    member_.generation = generation;
  }

  StatusOr<std::shared_ptr<internal::GroupHandle>> run() {
    runtime_ = options_.runtime != nullptr ? options_.runtime : make_system_runtime();
    deadline_ = deadline_after(runtime_->now(), options_.init_timeout.value_or(absl::Minutes(10)));
    WEFT_RETURN_IF_ERROR(find_place());
    connector_.emplace(options_, config_, environment_, job_rank_, runtime_);
    WEFT_RETURN_IF_ERROR(annotate(connector_->offer(member_), "init_process_group"));
    WEFT_RETURN_IF_ERROR(find_store());
    WEFT_RETURN_IF_ERROR(connect());
    internal::GroupCoreOptions core;
    core.name = options_.name;
    core.timeout = options_.timeout.value_or(absl::Minutes(10));
    core.runtime = runtime_;
    core.executor = options_.executor;
    core.log = options_.log;
    core.backend = connector_->name();
    core.metrics = options_.metrics;
    core.trace = options_.trace;
    core.recorder = options_.flight_recorder;
    if (options_.workers != nullptr) core.workers = options_.workers->by_rank;
    ProcessGroupOptions complete = options_;
    complete.store = store_;
    complete.runtime = runtime_;
    complete.job_rank = job_rank_;
    auto made = std::make_shared<internal::GroupCore>(std::move(core), std::move(engine_),
                                                      connector_->take_device());
    auto handle =
        std::make_shared<internal::GroupHandle>(made, std::move(complete), std::move(previous_));
    if (options_.flight_recorder != nullptr) options_.flight_recorder->add(made);
    if (watch_ != nullptr) options_.workers->service->add(made, *watch_);
    return handle;
  }

 private:
  Status find_place() {
    environment_ = options_.environment.has_value() ? *options_.environment : process_environment();
    WEFT_ASSIGN_OR_RETURN(config_, Config::from_environment(environment_));
    if (options_.rank.has_value() != options_.size.has_value()) {
      return invalid("one of rank and size is given without the other");
    }
    // A program that says its place itself needs no launcher, not even one whose variables fit.
    const StatusOr<LaunchInfo> launch = launch_info(config_, environment_);
    if (options_.rank.has_value()) {
      member_.rank = *options_.rank;
      member_.size = *options_.size;
    } else {
      WEFT_RETURN_IF_ERROR(launch.status());
      member_.rank = launch->rank;
      member_.size = launch->world_size;
    }
    const bool launched = launch.ok() && launch->launcher != Launcher::kNone;
    job_rank_ = options_.job_rank.value_or(launched ? launch->rank : member_.rank);
    if (options_.name.empty()) return invalid("the name is empty");
    if (member_.size < 1 || member_.rank < 0 || member_.rank >= member_.size) {
      return invalid(internal::cat("rank ", member_.rank, " of ", member_.size));
    }
    return absl::OkStatus();
  }

  Status find_store() {
    store_ = options_.store;
    if (store_ != nullptr) return absl::OkStatus();
    RendezvousOptions meet;
    meet.url = !options_.rendezvous.empty() ? options_.rendezvous : config_.store;
    meet.config = config_;
    meet.environment = environment_;
    meet.is_first = member_.rank == 0;
    meet.alone = member_.size == 1;
    meet.timeout = deadline_ - runtime_->now();
    meet.credentials = internal::group_credentials(options_, config_);
    meet.schemes = options_.schemes;
    meet.schemes.emplace("c10d", &open_c10d_store);  // torchrun's
    auto opened = open_rendezvous_store(meet, runtime_);
    if (!opened.ok()) return annotate(opened.status(), "init_process_group");
    store_ = *std::move(opened);
    return absl::OkStatus();
  }

  Status connect() {
    internal::Making making;
    making.store = store_.get();
    if (options_.workers != nullptr) {
      auto watch = options_.workers->service->watch(options_.workers->by_rank, store_);
      if (!watch.ok()) return annotate(watch.status(), "init_process_group");
      watch_ = *std::move(watch);
      making.store = &watch_->store();
    }
    making.runtime = runtime_.get();
    making.name = options_.name;
    making.prefix = internal::generation_prefix(options_, member_.generation);
    making.deadline = deadline_;
    wire::GroupMember mine;
    mine.set_version(internal::kGroupVersion);
    mine.set_rank(static_cast<uint32_t>(member_.rank));
    mine.set_size(static_cast<uint32_t>(member_.size));
    mine.set_old_rank(static_cast<uint32_t>(member_.rank));
    mine.set_identity(random_incarnation(runtime_->random()).value());
    connector_->describe(&mine);
    const Status made = internal::make_group(
        making, mine,
        [this](uint64_t id, const std::vector<wire::GroupMember>& members,
               absl::FunctionRef<Status()> given_up) -> Status {
          member_.group = id;
          WEFT_ASSIGN_OR_RETURN(engine_,
                                connector_->connect(member_, members, given_up, deadline_));
          return absl::OkStatus();
        });
    connector_->withdraw();
    return made.ok() || watch_ == nullptr ? made : explain(made, making.prefix);
  }

  // Why a group of workers was not made: the death of a member counts before what it led to. Its
  // client of the store is interrupted then, so the keys of this rank and the dead one go by
  // another.
  Status explain(const Status& made, const std::string& prefix) {
    int died = -1;
    const Status cause = watch_->cause(&died);
    if (cause.ok()) return made;
    for (const int rank : {member_.rank, died}) {
      if (rank < 0) continue;
      (void)store_->delete_key(internal::member_key(prefix, rank), absl::Seconds(1));
    }
    return annotate(cause, internal::cat("init_process_group: group '", options_.name, "'"));
  }

  const ProcessGroupOptions& options_;
  std::vector<int> previous_;
  std::shared_ptr<Runtime> runtime_;
  absl::Time deadline_;
  Environment environment_;
  Config config_;
  internal::Membership member_;
  int job_rank_ = 0;
  std::shared_ptr<Store> store_;
  std::optional<internal::BackendConnector> connector_;
  std::unique_ptr<internal::Engine> engine_;
  std::shared_ptr<internal::MakingWatch> watch_;  // null: no workers
};

}  // namespace

namespace internal {

StatusOr<std::shared_ptr<GroupHandle>> make_generation(const ProcessGroupOptions& options,
                                                       uint32_t generation,
                                                       std::vector<int> previous) {
  return Initializer(options, generation, std::move(previous)).run();
}

std::string generation_prefix(const ProcessGroupOptions& options, uint32_t generation) {
  const Environment environment =
      options.environment.has_value() ? *options.environment : process_environment();
  const auto job = environment.find("WEFT_JOB_ID");
  const std::string id = job == environment.end() ? std::string() : job->second;
  std::string group = cat("weft/", id, "/collectives/", options.name, "/");
  // Groups of one name and different workers do not meet: a new one may be made while a member of
  // the other has not heard yet that a worker of it is dead.
  if (options.workers != nullptr) cat_to(&group, absl::Hex(members_hash(*options.workers)), "/");
  return generation == 1 ? group : cat(group, "g", generation, "/");
}

}  // namespace internal

StatusOr<ProcessGroup> try_init_process_group(const ProcessGroupOptions& options) {
  WEFT_ASSIGN_OR_RETURN(auto handle, internal::make_generation(options, 1, {}));
  return ProcessGroup(std::move(handle));
}

ProcessGroup init_process_group(const ProcessGroupOptions& options) {
  return value_or_throw(try_init_process_group(options));
}

}  // namespace weft
