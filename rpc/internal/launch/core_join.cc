// How a worker joins: its options, its parts in their order, and what it checks about the others.

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/common/id.h"
#include "weft/common/launch_info.h"
#include "weft/rpc/c10d_store.h"
#include "weft/rpc/internal/device/cuda_library.h"
#include "weft/rpc/internal/device/device_backend.h"
#include "weft/rpc/internal/launch/core.h"
#include "weft/rpc/internal/observe/inspect_call.h"
#include "weft/store/hash_store.h"
#include "weft/store/rendezvous.h"
#include "weft/transport/checked_credentials.h"
#include "weft/transport/grpc_transport.h"

namespace weft::internal {
namespace {

constexpr size_t kMaxNameLength = 127;

Status check_name(std::string_view name) {
  const bool legal = !name.empty() && name.size() <= kMaxNameLength &&
                     std::all_of(name.begin(), name.end(), [](char c) {
                       return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') ||
                              (c >= 'a' && c <= 'z') || c == '-' || c == '_' || c == ':' ||
                              c == '.';
                     });
  if (legal) return absl::OkStatus();
  return make_error(
      ErrorKind::kInvalidArgument,
      absl::StrCat("worker name '", std::string(name.substr(0, 200)), "' (", name.size(),
                   " bytes) is not legal: 1 to 127 characters of A-Z a-z 0-9 - _ : ."));
}

// What is registered, sorted: "app.f(int)->int".
std::vector<std::string> signatures(const Library& library) {
  std::vector<std::string> out;
  for (const Method* method : library.methods()) out.push_back(method->name + method->signature);
  std::sort(out.begin(), out.end());
  return out;
}

std::string host_name() {
  char name[256] = {0};
  if (::gethostname(name, sizeof name - 1) != 0) return "";
  return name;
}

}  // namespace

StatusOr<std::shared_ptr<Core>> Core::join(JoinOptions options) {
  std::shared_ptr<Core> core(new Core());
  const Status status = core->init(std::move(options));
  if (!status.ok()) {
    // What was begun is undone; the store's host may be gone, so not for long.
    core->down_.store(true);
    const absl::Time end =
        core->runtime_ == nullptr ? absl::InfinitePast() : core->runtime_->now() + absl::Seconds(2);
    core->tear_down(status, end, end).IgnoreError();
    return status;
  }
  return core;
}

Status Core::read_options(JoinOptions* options, std::string* health_address) {
  const Environment environment =
      options->environment.has_value() ? *options->environment : process_environment();
  WEFT_ASSIGN_OR_RETURN(config_, Config::from_environment(environment));
  if (const auto it = environment.find("WEFT_HEALTH"); it != environment.end()) {
    *health_address = it->second;
  }
  const auto take = [](absl::Duration* to, const Timeout& from) {
    if (from.is_set()) *to = from.value_or(*to);
  };
  take(&config_.rpc_timeout, options->rpc_timeout);
  take(&config_.join_timeout, options->join_timeout);
  take(&config_.shutdown_timeout, options->shutdown_timeout);
  take(&config_.heartbeat_interval, options->heartbeat_interval);
  take(&config_.lease, options->lease);
  if (options->worker_threads != 0) config_.worker_threads = options->worker_threads;
  if (options->log_level.has_value()) config_.log_level = *options->log_level;
  if (options->listen.host.empty()) options->listen.host = config_.listen_address;
  if (options->listen.advertise.empty()) options->listen.advertise = config_.advertise_address;
  if (options->listen.port_first == 0 && config_.port != 0) {
    options->listen.port_first = options->listen.port_last = config_.port;
  }
  if (options->listen.port_first == 0 && !config_.port_range.empty()) {
    WEFT_ASSIGN_OR_RETURN(const auto range, parse_port_range(config_.port_range));
    options->listen.port_first = range.first;
    options->listen.port_last = range.second;
  }
  options->listen.allow_insecure = options->listen.allow_insecure || config_.allow_insecure;
  if (options->credentials.empty()) options->credentials = configured_credentials(config_);
  if (options->metrics_address.empty()) options->metrics_address = config_.metrics_address;
  if (options->trace_file.empty()) options->trace_file = config_.trace_file;

  // All that can be told about the options is told at once.
  std::vector<std::string> wrong;
  const auto check = [&wrong](bool ok, const std::string& what) {
    if (!ok) wrong.push_back(what);
  };
  Status launch_error;
  if (options->dynamic) {
    check(!options->rank.has_value() && !options->world_size.has_value(),
          "a dynamic group has neither rank nor world_size");
    if (options->name.empty()) options->name = config_.name;
    check(!options->name.empty(), "a worker of a dynamic group needs a name (or WEFT_NAME)");
  } else {
    int rank = 0;
    int world_size = 1;
    if (options->rank.has_value() || options->world_size.has_value()) {
      check(options->rank.has_value() && options->world_size.has_value(),
            "rank and world_size must be given together");
      rank = options->rank.value_or(0);
      world_size = options->world_size.value_or(1);
    } else {
      const StatusOr<LaunchInfo> launch = launch_info(config_, environment);
      if (!launch.ok()) return launch.status();
      rank = launch->rank;
      world_size = launch->world_size;
    }
    check(world_size > 0, absl::StrCat("world_size is ", world_size, ", must be at least 1"));
    check(rank >= 0 && rank < std::max(world_size, 1),
          absl::StrCat("rank is ", rank, ", must be from 0 to ", world_size - 1));
    rank_ = rank;
    world_size_ = world_size;
    if (options->name.empty()) options->name = config_.name;
    if (options->name.empty()) options->name = absl::StrCat("worker", rank);
  }
  check(options->worker_threads >= 0,
        absl::StrCat("worker_threads is ", options->worker_threads, ", must not be negative"));
  for (const auto& [what, value] : {std::pair{"rpc_timeout", config_.rpc_timeout},
                                    {"join_timeout", config_.join_timeout},
                                    {"shutdown_timeout", config_.shutdown_timeout},
                                    {"heartbeat_interval", config_.heartbeat_interval},
                                    {"lease", config_.lease}}) {
    check(value > absl::ZeroDuration(),
          absl::StrCat(what, " is ", absl::FormatDuration(value), ", must be positive"));
  }
  check(config_.lease > config_.heartbeat_interval,
        absl::StrCat("lease (", absl::FormatDuration(config_.lease),
                     ") must be longer than heartbeat_interval (",
                     absl::FormatDuration(config_.heartbeat_interval), ")"));
  if (const Status name = check_name(options->name); !name.ok()) {
    wrong.push_back(std::string(name.message()));
  }
  for (std::string& why : check_device_options(options->device_maps, options->devices)) {
    wrong.push_back(std::move(why));
  }
  if (!wrong.empty()) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("join: ", absl::StrJoin(wrong, "; ")));
  }
  return config_.validate();
}

Status Core::init(JoinOptions options) {
  std::string health_address;
  WEFT_RETURN_IF_ERROR(read_options(&options, &health_address));
  begin(&options);
  const absl::Time deadline = deadline_after(runtime_->now(), config_.join_timeout);

  // Before other workers learn of this one: a mistake, a port that is taken, or invalid credentials
  // cost no other worker anything.
  WEFT_RETURN_IF_ERROR(open_devices(options));
  WEFT_RETURN_IF_ERROR(open_pages(options, health_address));
  WEFT_RETURN_IF_ERROR(open_transport(options));

  WEFT_RETURN_IF_ERROR(annotate(open_rendezvous(options, deadline),
                                absl::StrCat("worker '", self_.name, "' cannot use its store")));
  WEFT_RETURN_IF_ERROR(annotate(find_job_id(deadline),
                                absl::StrCat("worker '", self_.name, "' cannot use its store")));
  make_pool();
  make_membership(options);
  AgentOptions agent = agent_options();
  WEFT_RETURN_IF_ERROR(make_services(options, &agent));

  WEFT_ASSIGN_OR_RETURN(self_.id, membership_->claim(deadline));
  log_.set_identity(self_.name, static_cast<int>(self_.id));
  if (!options.trace_file.empty()) {
    trace_ = std::make_shared<CallTrace>(runtime_, options.trace_file, self_.name, self_.id);
  }
  agent.trace = trace_;
  agent.self = self_;
  agent_ = std::make_shared<Agent>(std::move(agent));
  agent_->start(transport_);
  agent_ready_.store(true);

  WEFT_ASSIGN_OR_RETURN(address_, transport_->listen(options.listen, agent_));

  Member me;
  me.info = self_;
  me.address = address_;
  me.methods = signatures(*library_);
  me.host = host_name();
  me.pid = ::getpid();
  me.devices = devices_;
  WEFT_RETURN_IF_ERROR(membership_->publish(me, deadline));
  WEFT_RETURN_IF_ERROR(check_devices(deadline));
  agent_->set_members(membership_->list());
  agent_->open();
  log_library_differences(*membership_->list());
  health_->ready = true;
  WEFT_LOG(log_, kInfo) << "joined job " << job_id_ << " as id " << self_.id << " at " << address_
                        << ", store " << store_->describe() << ", "
                        << membership_->list()->by_id.size() << " workers";
  return absl::OkStatus();
}

void Core::begin(JoinOptions* options) {
  runtime_ = options->runtime != nullptr ? options->runtime : make_system_runtime();
  metrics_ = std::make_shared<Metrics>();
  log_ = Logger({.name = options->name,
                 .rank = rank_.value_or(-1),
                 .level = config_.log_level,
                 .sink = options->log_sink,
                 .now = nullptr});
  shutdown_done_ = std::make_unique<Condition>(runtime_.get());
  library_ = std::make_shared<const Library>(std::move(options->library));
  self_.name = options->name;
  do {
    self_.incarnation = runtime_->random().next();
  } while (self_.incarnation == 0);
}

Status Core::open_pages(const JoinOptions& options, const std::string& health_address) {
  if (!options.metrics_address.empty()) {
    WEFT_ASSIGN_OR_RETURN(metrics_http_,
                          MetricsHttp::start(options.metrics_address, options.listen.allow_insecure,
                                             metrics_, runtime_));
    metrics_address_ = metrics_http_->address();
    metrics_port_ = metrics_http_->port();
    WEFT_LOG(log_, kInfo) << "metrics at http://" << metrics_address_ << "/metrics";
  }
  // A simulation has no threads that wait for sockets.
  if (!health_address.empty() && !runtime_->simulated()) {
    WEFT_ASSIGN_OR_RETURN(health_http_, HealthHttp::start(health_address, health_, runtime_));
    health_port_ = health_http_->port();
    WEFT_LOG(log_, kInfo) << "health at http://" << health_http_->address()
                          << "/healthz and /readyz";
  }
  return absl::OkStatus();
}

Status Core::open_transport(const JoinOptions& options) {
  const TransportFactory factory = options.transport != nullptr
                                       ? options.transport
                                       : grpc_transport({.max_spin = config_.spin,
                                                         .same_user = config_.same_user,
                                                         .arena_bytes = config_.arena_bytes});
  TransportContext tc;
  tc.runtime = runtime_;
  tc.worker_name = self_.name;
  tc.log = log_;
  tc.max_frame_bytes = std::max(config_.chunk_bytes, kDataChunkBytes) + (256 << 10);
  tc.credentials = options.credentials;
  endpoint_ = {options.listen, options.credentials};
  WEFT_ASSIGN_OR_RETURN(transport_, factory(tc));
  wait_driver_ = transport_->wait_driver();
  return absl::OkStatus();
}

void Core::make_pool() {
  worker_threads_ = config_.worker_threads > 0
                        ? config_.worker_threads
                        : std::max(4, static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN)));
  pool_ = runtime_->make_pool({.name = absl::StrCat("weft-", self_.name),
                               .threads = worker_threads_,
                               .max_blocked = config_.max_blocked});
}

void Core::make_membership(const JoinOptions& options) {
  const std::weak_ptr<Core> weak = weak_from_this();
  MembershipOptions m;
  m.runtime = runtime_;
  m.store = store_;
  m.prefix = absl::StrCat("weft/", job_id_, "/");
  m.name = self_.name;
  m.incarnation = self_.incarnation;
  if (!options.dynamic) m.rank = static_cast<uint32_t>(*rank_);
  m.world_size = options.dynamic ? 0 : world_size_;
  m.heartbeat = config_.heartbeat_interval;
  m.lease = config_.lease;
  m.log = log_;
  m.on_list = [weak](MemberListRef list) {
    auto core = weak.lock();
    if (core != nullptr && core->agent_ready_.load()) core->agent_->set_members(std::move(list));
  };
  m.on_change = [weak](const MembershipChange& change) {
    if (auto core = weak.lock()) core->on_change(change);
  };
  m.on_store_health = [weak](bool healthy) {
    auto core = weak.lock();
    if (core != nullptr && core->agent_ready_.load()) core->agent_->set_store_healthy(healthy);
  };
  m.on_evicted = [weak](const Status& why) {
    auto core = weak.lock();
    if (core == nullptr) return;
    WEFT_LOG(core->log_, kError) << why;
    core->health_->live = false;
    core->close_services(why);
    if (core->agent_ready_.load()) core->agent_->close(why);
  };
  subscribers_ = std::make_unique<Subscribers>(runtime_, pool_, log_);
  membership_ = std::make_unique<Membership>(std::move(m));
}

AgentOptions Core::agent_options() {
  const std::weak_ptr<Core> weak = weak_from_this();
  AgentOptions a;
  a.job_id = job_id_;
  a.runtime = runtime_;
  a.pool = pool_;
  a.handle = Worker::make_handle(weak);
  a.library = library_;
  a.config = config_;
  a.device_backend = device_backend_;
  a.devices = devices_;
  a.log = log_;
  a.metrics = metrics_;
  a.on_reconnected = [weak](const WorkerInfo& worker) {
    auto core = weak.lock();
    if (core == nullptr) return;
    for (const auto& service : core->services_) service->on_reconnected(worker);
  };
  a.inspect = [weak](Inspection* out, bool counters) {
    auto core = weak.lock();
    if (core != nullptr && core->agent_ready_.load()) core->put_inspection(out, counters);
  };
  return a;
}

Status Core::make_services(const JoinOptions& options, AgentOptions* agent) {
  const ServiceContext context{runtime_, pool_, agent->handle, wait_driver_};
  for (const ServiceFactory& make : options.services) {
    std::shared_ptr<Service> service = make(context);
    for (Method& method : service->methods()) agent->services.push_back(std::move(method));
    if (auto interceptor = service->interceptor()) {
      agent->interceptors.push_back(std::move(interceptor));
    }
    services_.push_back(std::move(service));
  }
  std::vector<std::string> callable = library_->method_names();
  for (const Method& method : agent->services) callable.push_back(method.name);
  callable.emplace_back(kInspectMethod);
  WEFT_ASSIGN_OR_RETURN(agent->access, Access::make(options.access, callable));
  return absl::OkStatus();
}

Status Core::open_devices(const JoinOptions& options) {
  if (options.device_maps.empty() && options.devices.empty()) return absl::OkStatus();
  device_backend_ = options.device_backend;
  if (device_backend_ == nullptr) {
    StatusOr<std::shared_ptr<DeviceBackend>> opened = open_cuda_library(runtime_, log_);
    if (!opened.ok()) {
      return annotate(opened.status(), "join: device_maps or devices are given");
    }
    device_backend_ = *std::move(opened);
  }
  WEFT_ASSIGN_OR_RETURN(
      MemberDevices devices,
      make_member_devices(options.device_maps, options.devices, device_backend_->device_count()));
  WEFT_RETURN_IF_ERROR(annotate(device_backend_->prepare(devices_in_use(devices)), "join"));
  devices_ = std::make_shared<const MemberDevices>(std::move(devices));
  return absl::OkStatus();
}

Status Core::check_devices(absl::Time deadline) {
  const bool dynamic = membership_->dynamic();
  const MemberListRef members = membership_->list();
  if (!dynamic && members->by_id.size() < static_cast<size_t>(world_size_)) {
    // A worker that has joined and left again may have found a map wrong before this one.
    WEFT_RETURN_IF_ERROR(membership_->aborted(deadline));
  }
  Status right = check_device_maps(*members, dynamic ? &self_.name : nullptr, !dynamic);
  if (right.ok()) {
    if (devices_ == nullptr) return right;
    // What others map to here and no map of ours names.
    std::vector<c10::Device> named;
    for (const auto& [id, member] : members->by_id) {
      if (member.devices == nullptr) continue;
      const auto map = member.devices->maps.find(self_.name);
      if (map == member.devices->maps.end()) continue;
      for (const auto& [theirs, ours] : map->second) {
        const std::optional<c10::Device> device = device_of_code(ours);
        if (device.has_value() && !device->is_cpu()) named.push_back(*device);
      }
    }
    return annotate(device_backend_->prepare(named), "join");
  }
  const Status told = membership_->abort(std::string(right.message()), deadline);
  if (!told.ok()) WEFT_LOG(log_, kWarning) << "telling the others that the join failed: " << told;
  return right;
}

Status Core::open_rendezvous(const JoinOptions& options, absl::Time deadline) {
  if (options.store != nullptr) {
    store_ = options.store;
    return absl::OkStatus();
  }
  RendezvousOptions r;
  r.url = !options.rendezvous.empty() ? options.rendezvous : config_.store;
  r.config = config_;
  r.environment = options.environment.has_value() ? *options.environment : process_environment();
  r.is_first = rank_.value_or(1) == 0;
  r.alone = !options.dynamic && world_size_ == 1;
  r.timeout = deadline - runtime_->now();
  r.credentials = options.credentials;
  r.schemes.emplace("c10d", &open_c10d_store);
  WEFT_ASSIGN_OR_RETURN(store_, open_rendezvous_store(r, runtime_));
  return absl::OkStatus();
}

Status Core::find_job_id(absl::Time deadline) {
  if (!config_.job_id.empty()) {
    job_id_ = config_.job_id;
    return absl::OkStatus();
  }
  // The first worker at this store draws it.
  const std::string drawn = to_string(random_job_id(runtime_->random()));
  WEFT_ASSIGN_OR_RETURN(job_id_,
                        store_->compare_set("weft/job", "", drawn, deadline - runtime_->now()));
  return absl::OkStatus();
}

void Core::log_library_differences(const MemberList& members) const {
  const std::vector<std::string> mine = signatures(*library_);
  for (const auto& [id, member] : members.by_id) {
    if (member.info.incarnation == self_.incarnation) continue;
    std::vector<std::string> only_here;
    std::vector<std::string> only_there;
    std::set_difference(mine.begin(), mine.end(), member.methods.begin(), member.methods.end(),
                        std::back_inserter(only_here));
    std::set_difference(member.methods.begin(), member.methods.end(), mine.begin(), mine.end(),
                        std::back_inserter(only_there));
    if (only_here.empty() && only_there.empty()) continue;
    WEFT_LOG(log_, kDebug) << "library of '" << member.info.name << "' differs: only here ["
                           << absl::StrJoin(only_here, ", ") << "], only there ["
                           << absl::StrJoin(only_there, ", ") << "]";
  }
}

}  // namespace weft::internal
