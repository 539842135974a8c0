#ifndef WEFT_COLLECTIVES_INTERNAL_SHM_MESH_H_
#define WEFT_COLLECTIVES_INTERNAL_SHM_MESH_H_

// ShmMesh: a private socket between each two members of a group on one host, over which each hands
// the other its file. The socket stays: it carries faults, and it ends with the peer's process.
//
// Threads: one.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "weft/collectives/internal/link.h"
#include "weft/collectives/internal/shm_file.h"
#include "weft/common/error.h"
#include "weft/common/posix.h"
#include "weft/common/runtime.h"

namespace weft::internal {

// Equal for two processes that may share memory: one boot, one user, one network namespace, in
// which names of private sockets mean the same.
std::string shm_host();

struct ShmListener {
  UniqueFd fd;
  std::string name;
  std::shared_ptr<MemoryFile> file;

  // Errors, kind resource: there are no such files or sockets here.
  static StatusOr<ShmListener> make(int size, Runtime& runtime);
};

struct ShmMember {
  std::string name;  // of its socket
  uint64_t identity = 0;
};

struct ShmMesh {
  std::shared_ptr<ShmFiles> files;
  std::vector<UniqueFd> sockets;  // by rank
};

// `apart`: by rank, the members that are reached in another way; they have no file and no socket
// here. Empty: none. `given_up`: see making.h. Errors name the rank: unavailable, deadline;
// permission, its socket is another user's.
StatusOr<ShmMesh> connect_shm(const Membership& member, const ShmListener& listener,
                              const std::vector<ShmMember>& members, const std::vector<bool>& apart,
                              absl::FunctionRef<Status()> given_up, Runtime& runtime,
                              absl::Time deadline);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_SHM_MESH_H_
