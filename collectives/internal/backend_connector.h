#ifndef WEFT_COLLECTIVES_INTERNAL_BACKEND_CONNECTOR_H_
#define WEFT_COLLECTIVES_INTERNAL_BACKEND_CONNECTOR_H_

// BackendConnector: one member's side of connecting a group: what it offers to the others (shared
// memory, a port, credentials), and the engine of the backend that all members choose from the
// records of all.
//
// Threads: one.

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "weft/collectives/internal/device_engine.h"
#include "weft/collectives/internal/engine.h"
#include "weft/collectives/internal/host_library.h"
#include "weft/collectives/internal/shm_mesh.h"
#include "weft/collectives/internal/tcp_mesh.h"
#include "weft/collectives/process_group.h"
#include "weft/common/config.h"

namespace weft::wire {
class GroupMember;
}

namespace weft::internal {

class BackendConnector {
 public:
  // `options`, `config` and `environment` outlive it.
  BackendConnector(const ProcessGroupOptions& options, const Config& config,
                   const Environment& environment, int job_rank, std::shared_ptr<Runtime> runtime);

  // Makes the memory file and the listener. What cannot be made is an error only where the user
  // asked for it. Errors, kind permission: a port for other machines without credentials, or with
  // those of another worker.
  Status offer(const Membership& member);
  // Writes into this member's record what the others need to connect.
  void describe(wire::GroupMember* mine) const;
  // REQUIRES: offer(). `given_up`: see make_group().
  StatusOr<std::unique_ptr<Engine>> connect(const Membership& member,
                                            const std::vector<wire::GroupMember>& members,
                                            absl::FunctionRef<Status()> given_up,
                                            absl::Time deadline);
  // After connect(): what performs the operations; null where that is the engine.
  std::unique_ptr<DeviceEngine> take_device() { return std::move(engine_of_device_); }
  // Closes what nothing will use from now on.
  void withdraw();

  // "inproc", "shm", "tcp", "nccl", "mpi", or "shm+tcp": shared memory inside hosts and sockets
  // between them.
  // Before connect(): what the options say, "auto" included.
  std::string_view name() const { return name_; }

 private:
  // Rank 0's, for all members.
  Status read_table();
  Status load_credentials();
  Status offer_device(const Membership& member);
  Status offer_host_library();
  Status offer_memory(int size);
  // The engine of a backend for the CPU.
  StatusOr<std::unique_ptr<Engine>> connect_host(const Membership& member,
                                                 const std::vector<wire::GroupMember>& members,
                                                 absl::FunctionRef<Status()> given_up,
                                                 absl::Time deadline);
  // `inside`: the ranks that share this one's memory.
  StatusOr<std::unique_ptr<Link>> connect_link(const Membership& member,
                                               const std::vector<wire::GroupMember>& members,
                                               const std::vector<bool>& inside,
                                               absl::FunctionRef<Status()> given_up,
                                               absl::Time deadline);
  Status offer_port();
  StatusOr<ShmMesh> connect_memory(const Membership& member,
                                   const std::vector<wire::GroupMember>& members,
                                   const std::vector<bool>& apart,
                                   absl::FunctionRef<Status()> given_up, absl::Time deadline);
  StatusOr<std::vector<TcpPeer>> connect_ports(const Membership& member,
                                               const std::vector<wire::GroupMember>& members,
                                               const std::vector<bool>& apart,
                                               absl::FunctionRef<Status()> given_up,
                                               absl::Time deadline);

  const ProcessGroupOptions& options_;
  const Config& config_;
  const Environment& environment_;
  const int job_rank_;
  const std::shared_ptr<Runtime> runtime_;
  std::string_view name_;
  std::string_view host_name_;  // of the link; differs from name_ for nccl and mpi
  HostOffer host_offer_;
  std::unique_ptr<DeviceLibrary> library_;
  DeviceOffer offer_;
  std::unique_ptr<DeviceEngine> engine_of_device_;
  std::string table_;  // of algorithms
  std::string worker_;
  TcpSecurity security_;
  std::optional<TcpListener> listener_;
  std::optional<ShmListener> shm_;
};

// Those of the options, else those of the variables; empty() if there are none.
Credentials group_credentials(const ProcessGroupOptions& options, const Config& config);

// What the user said: "auto", "inproc", "shm", "tcp", "nccl" or "mpi".
std::string_view backend_name(Backend backend);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_BACKEND_CONNECTOR_H_
