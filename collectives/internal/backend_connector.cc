#include "weft/collectives/internal/backend_connector.h"

#include <algorithm>
#include <utility>

#include "weft/collectives/internal/inproc_link.h"
#include "weft/collectives/internal/mixed_streams.h"
#include "weft/collectives/internal/nccl_library.h"
#include "weft/collectives/internal/service.h"
#include "weft/collectives/internal/shm_engine.h"
#include "weft/collectives/internal/tcp_link.h"
#include "weft/collectives/internal/text.h"
#include "weft/common/files.h"
#include "weft/proto/collectives.pb.h"
#include "weft/transport/checked_credentials.h"

namespace weft::internal {
namespace {

Status invalid(std::string_view why) { return make_error(ErrorKind::kInvalidArgument, why); }

// Whether two members may try shared memory.
bool may_share(const wire::GroupMember& a, const wire::GroupMember& b) {
  return !a.local_name().empty() && !b.local_name().empty() && !a.host().empty() &&
         a.host() == b.host();
}

Topology topology_of(const std::vector<wire::GroupMember>& members) {
  std::vector<std::string> hosts;
  for (const wire::GroupMember& one : members) hosts.push_back(one.host());
  return Topology::of(hosts);
}

// By rank, whether that member is reached by shared memory from `rank`; a member reaches itself.
std::vector<bool> shared_with(const std::vector<wire::GroupMember>& members, int rank) {
  const wire::GroupMember& own = members[static_cast<size_t>(rank)];
  std::vector<bool> out;
  for (const wire::GroupMember& one : members) out.push_back(&one == &own || may_share(own, one));
  return out;
}

// By what a group is connected; all members come to the same, from the same records.
std::string_view choose(std::string_view asked, const std::vector<wire::GroupMember>& members) {
  if (asked != "auto") return asked;
  bool all = true;
  bool some = false;
  for (size_t a = 0; a < members.size(); ++a) {
    for (size_t b = a + 1; b < members.size(); ++b) {
      const bool pair = may_share(members[a], members[b]);
      all = all && pair;
      some = some || pair;
    }
  }
  if (members.size() == 1) all = may_share(members[0], members[0]);
  return all ? "shm" : some ? "shm+tcp" : "tcp";
}

// Whether NCCL takes these ranks, which all members find out alike.
Status check_devices(const std::vector<wire::GroupMember>& members) {
  for (size_t a = 0; a < members.size(); ++a) {
    if (members[a].device().empty()) {
      return make_error(ErrorKind::kUnavailable, cat("rank ", a, " has no GPU for NCCL"));
    }
    for (size_t b = 0; b < a; ++b) {
      const bool same = !members[a].host().empty() && members[a].device() == members[b].device() &&
                        members[a].host() == members[b].host();
      if (!same || (members[a].device_shared() && members[b].device_shared())) continue;
      return invalid(cat("ranks ", b, " and ", a, " are both on the GPU ", members[a].device(),
                         " of one host, and ", members[a].device_library(),
                         " takes one rank per GPU; NCCL 2.30.3 and newer take more with "
                         "NCCL_MULTI_RANK_GPU_ENABLE=1"));
    }
  }
  return absl::OkStatus();
}

// A communicator is of one MPI.
Status check_host_libraries(const std::vector<wire::GroupMember>& members) {
  for (size_t i = 1; i < members.size(); ++i) {
    if (members[i].host_library() == members[0].host_library()) continue;
    return invalid(cat("rank 0 has the library '", members[0].host_library(), "', rank ", i, " '",
                       members[i].host_library(), "'"));
  }
  return absl::OkStatus();
}

}  // namespace

std::string_view backend_name(Backend backend) {
  switch (backend) {
    case Backend::kAuto: return "auto";
    case Backend::kInproc: return "inproc";
    case Backend::kShm: return "shm";
    case Backend::kTcp: return "tcp";
    case Backend::kNccl: return "nccl";
    case Backend::kMpi: return "mpi";
  }
  return "unknown";
}

Credentials group_credentials(const ProcessGroupOptions& options, const Config& config) {
  return options.credentials.empty() ? configured_credentials(config) : options.credentials;
}

BackendConnector::BackendConnector(const ProcessGroupOptions& options, const Config& config,
                                   const Environment& environment, int job_rank,
                                   std::shared_ptr<Runtime> runtime)
    : options_(options),
      config_(config),
      environment_(environment),
      job_rank_(job_rank),
      runtime_(std::move(runtime)) {
  const bool by_library = options.backend == Backend::kNccl || options.backend == Backend::kMpi;
  const bool chooses = options.backend == Backend::kAuto || by_library;
  const bool fabric = chooses && options.fabric != nullptr;
  host_name_ = backend_name(fabric ? Backend::kInproc : chooses ? Backend::kAuto : options.backend);
  name_ = by_library ? backend_name(options.backend) : host_name_;
}

Status BackendConnector::offer(const Membership& member) {
  if (member.rank == 0) WEFT_RETURN_IF_ERROR(read_table());
  WEFT_RETURN_IF_ERROR(offer_device(member));
  WEFT_RETURN_IF_ERROR(offer_host_library());
  if (host_name_ == "inproc") {
    return options_.fabric != nullptr ? absl::OkStatus() : invalid("backend inproc needs a fabric");
  }
  if (host_name_ != "tcp") WEFT_RETURN_IF_ERROR(offer_memory(member.size));
  if (host_name_ == "shm") return absl::OkStatus();
  WEFT_RETURN_IF_ERROR(load_credentials());
  return offer_port();
}

Status BackendConnector::read_table() {
  table_ = options_.algorithms;
  const auto file = environment_.find("WEFT_COLLECTIVES_TABLE");
  if (file != environment_.end() && !file->second.empty()) {
    const auto text = runtime_->files().read(file->second);
    if (!text.ok()) return annotate(text.status(), "WEFT_COLLECTIVES_TABLE");
    // What the program says comes first.
    cat_to(&table_, "\n", *text);
  }
  return AlgorithmTable::parse(table_).status();
}

Status BackendConnector::offer_device(const Membership& member) {
  const bool named = options_.backend == Backend::kNccl;
  if (!named && (options_.backend != Backend::kAuto || !options_.device.has_value())) {
    return absl::OkStatus();
  }
  const auto variable = [&](const char* name, const std::string& otherwise) {
    const auto found = environment_.find(name);
    return found == environment_.end() || found->second.empty() ? otherwise : found->second;
  };
  DeviceLibraryOptions options;
  options.runtime = runtime_;
  options.file = variable("WEFT_NCCL_LIBRARY", "libnccl.so.2");
  options.device = options_.device;
  options.shares_devices = variable("NCCL_MULTI_RANK_GPU_ENABLE", "0") == "1";
  options.group = options_.name;
  options.log = options_.log;
  const Status offered = [&]() -> Status {
    WEFT_ASSIGN_OR_RETURN(library_, open_nccl_library(options));
    WEFT_ASSIGN_OR_RETURN(offer_, library_->offer(member.rank == 0));
    return absl::OkStatus();
  }();
  if (offered.ok() || named) return offered;
  library_ = nullptr;
  WEFT_LOG(options_.log, kInfo) << "process group '" << options_.name
                                << "' goes without NCCL: " << offered;
  return absl::OkStatus();
}

Status BackendConnector::offer_host_library() {
  if (options_.backend != Backend::kMpi) return absl::OkStatus();
  if (options_.host_library == nullptr) {
    return invalid(
        "backend mpi needs host_library, that of the program's weft::Mpi "
        "(collectives/mpi.h, library weft::mpi)");
  }
  WEFT_ASSIGN_OR_RETURN(host_offer_, options_.host_library->offer());
  return absl::OkStatus();
}

Status BackendConnector::load_credentials() {
  const Credentials credentials = group_credentials(options_, config_);
  if (credentials.empty()) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(const CheckedCredentials checked,
                        check_credentials(credentials, *runtime_));
  worker_ = !options_.worker_name.empty() ? options_.worker_name : config_.name;
  if (worker_.empty() && !checked.identities.empty()) worker_ = checked.identities[0].name;
  security_.shared_certificate = credentials.shared_certificate;
  security_.token = checked.token;
  if (!security_.shared_certificate &&
      !matches(checked.identities, worker_, static_cast<uint32_t>(job_rank_))) {
    return make_error(
        ErrorKind::kPermission,
        cat("the certificate '", credentials.cert_file, "' is that of ",
            internal::describe(checked.identities), ", and this is '", worker_, "' with rank ",
            job_rank_,
            " in its job: set worker_name (WEFT_NAME), or take this worker's certificate"));
  }
  WEFT_ASSIGN_OR_RETURN(security_.certificates, TlsCertificates::load(credentials, *runtime_));
  return absl::OkStatus();
}

Status BackendConnector::offer_memory(int size) {
  auto made = ShmListener::make(size, *runtime_);
  if (made.ok()) {
    shm_ = *std::move(made);
    return absl::OkStatus();
  }
  if (host_name_ == "shm") return made.status();
  WEFT_LOG(options_.log, kInfo) << "process group '" << options_.name
                                << "' goes without shared memory: " << made.status();
  return absl::OkStatus();
}

Status BackendConnector::offer_port() {
  const bool beyond = options_.allow_insecure || config_.allow_insecure || security_.on();
  WEFT_ASSIGN_OR_RETURN(listener_, TcpListener::make(options_.listen_address, beyond));
  return absl::OkStatus();
}

void BackendConnector::withdraw() {
  listener_.reset();
  shm_.reset();
}

void BackendConnector::describe(wire::GroupMember* mine) const {
  mine->set_backend(std::string(name_));
  if (listener_.has_value()) mine->set_address(listener_->address());
  if (shm_.has_value()) mine->set_local_name(shm_->name);
  // Ranks of a fabric are in one process, and need no kernel to say so.
  const std::string probed = host_name_ == "inproc" ? std::string("inproc") : shm_host();
  if (!probed.empty()) mine->set_host(cat(options_.host, " ", probed));
  mine->set_table(table_);
  mine->set_device(offer_.address);
  mine->set_device_library(offer_.library);
  mine->set_device_shared(offer_.shared);
  mine->set_device_id(offer_.id);
  mine->set_host_library(host_offer_.library);
  mine->set_host_place(host_offer_.place);
  mine->set_secure(security_.on());
  mine->set_worker(worker_);
  mine->set_job_rank(static_cast<uint32_t>(job_rank_));
}

StatusOr<ShmMesh> BackendConnector::connect_memory(const Membership& member,
                                                   const std::vector<wire::GroupMember>& members,
                                                   const std::vector<bool>& apart,
                                                   absl::FunctionRef<Status()> given_up,
                                                   absl::Time deadline) {
  std::vector<ShmMember> all;
  for (const wire::GroupMember& one : members) all.push_back({one.local_name(), one.identity()});
  return connect_shm(member, *shm_, all, apart, given_up, *runtime_, deadline);
}

StatusOr<std::vector<TcpPeer>> BackendConnector::connect_ports(
    const Membership& member, const std::vector<wire::GroupMember>& members,
    const std::vector<bool>& apart, absl::FunctionRef<Status()> given_up, absl::Time deadline) {
  std::vector<TcpMember> all;
  for (const wire::GroupMember& one : members) {
    all.push_back({one.address(), one.identity(), one.worker(), one.job_rank()});
    if (options_.workers == nullptr) continue;
    // Who the members are is known then, whatever stands at the store.
    const WorkerInfo& known = options_.workers->by_rank[all.size() - 1];
    all.back().worker = known.name;
    all.back().job_rank = known.id;
  }
  return connect_mesh(member, *listener_, all, security_, apart, given_up, *runtime_, deadline);
}

StatusOr<std::unique_ptr<Engine>> BackendConnector::connect(
    const Membership& member, const std::vector<wire::GroupMember>& members,
    absl::FunctionRef<Status()> given_up, absl::Time deadline) {
  const Status devices = check_devices(members);
  if (name_ == "nccl") WEFT_RETURN_IF_ERROR(devices);
  WEFT_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                        connect_host(member, members, given_up, deadline));
  const bool by_nccl = devices.ok() && library_ != nullptr;
  if (!by_nccl) {
    if (name_ != "mpi") name_ = host_name_;
    if (library_ != nullptr) {
      WEFT_LOG(options_.log, kInfo)
          << "process group '" << options_.name << "' goes without NCCL: " << devices;
    }
    return engine;
  }
  name_ = "nccl";
  WEFT_ASSIGN_OR_RETURN(engine_of_device_,
                        library_->connect(member, members[0].device_id(), given_up, deadline));
  return engine;
}

StatusOr<std::unique_ptr<Engine>> BackendConnector::connect_host(
    const Membership& member, const std::vector<wire::GroupMember>& members,
    absl::FunctionRef<Status()> given_up, absl::Time deadline) {
  host_name_ = choose(host_name_, members);
  WEFT_ASSIGN_OR_RETURN(AlgorithmTable table,
                        AlgorithmTable::parse(members[0].table(), host_name_));
  AlgorithmChoice choice{topology_of(members), std::move(table)};
  const bool by_library = options_.backend == Backend::kMpi;
  if (by_library) WEFT_RETURN_IF_ERROR(check_host_libraries(members));
  const std::vector<bool> inside = shared_with(members, member.rank);
  if (host_name_ == "shm") {
    if (!std::all_of(inside.begin(), inside.end(), [](bool one) { return one; })) {
      return invalid("backend shm among processes of several hosts or users");
    }
    if (!by_library) {
      WEFT_ASSIGN_OR_RETURN(ShmMesh mesh, connect_memory(member, members, {}, given_up, deadline));
      return ShmEngine::make(member, std::move(mesh), std::move(choice), runtime_);
    }
  }
  WEFT_ASSIGN_OR_RETURN(std::unique_ptr<Link> link,
                        connect_link(member, members, inside, given_up, deadline));
  if (!by_library) return std::make_unique<Engine>(member, std::move(link), std::move(choice));
  HostConnection connection;
  connection.member = member;
  for (const wire::GroupMember& one : members) connection.places.push_back(one.host_place());
  connection.link = std::move(link);
  connection.choice = std::move(choice);
  connection.compares = options_.compare_operations;
  connection.runtime = runtime_;
  connection.deadline = deadline;
  return options_.host_library->connect(std::move(connection));
}

StatusOr<std::unique_ptr<Link>> BackendConnector::connect_link(
    const Membership& member, const std::vector<wire::GroupMember>& members,
    const std::vector<bool>& inside, absl::FunctionRef<Status()> given_up, absl::Time deadline) {
  if (host_name_ == "inproc") return options_.fabric->core()->join(member);
  std::unique_ptr<ShmStreams> near;
  if (host_name_ != "tcp") {
    std::vector<bool> outside = inside;
    outside.flip();
    WEFT_ASSIGN_OR_RETURN(ShmMesh mesh,
                          connect_memory(member, members, outside, given_up, deadline));
    near = std::make_unique<ShmStreams>(member, std::move(mesh), runtime_);
    if (host_name_ == "shm") return make_stream_link(member, std::move(near), runtime_);
  }
  const bool mixed = near != nullptr;
  WEFT_ASSIGN_OR_RETURN(
      std::vector<TcpPeer> peers,
      connect_ports(member, members, mixed ? inside : std::vector<bool>(), given_up, deadline));
  std::unique_ptr<Streams> streams = make_tcp_streams(std::move(peers));
  if (mixed) streams = make_mixed_streams(std::move(near), std::move(streams), inside);
  return make_stream_link(member, std::move(streams), runtime_);
}

}  // namespace weft::internal
