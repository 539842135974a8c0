#ifndef WEFT_TRANSPORT_LOCAL_SOCKET_H_
#define WEFT_TRANSPORT_LOCAL_SOCKET_H_

// Unix sockets for messages between processes of one user on one host: SOCK_SEQPACKET below names
// in the abstract namespace, so that nothing stays behind in a file system. A message may carry
// open files. Thin and strict; nothing here blocks.
//
// Threads: any; a socket's messages are read by one thread.

#include <sys/socket.h>
#include <sys/types.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/posix.h"
#include "weft/common/runtime.h"

namespace weft::internal {

inline std::string random_bytes(Random& random, size_t n) {
  std::string out;
  while (out.size() < n) {
    const uint64_t bits = random.next();
    out.append(reinterpret_cast<const char*>(&bits), std::min(n - out.size(), sizeof bits));
  }
  return out;
}

// The longest message that is sent or taken.
inline constexpr size_t kMaxLocalMessage = 4096;

// `type`: SOCK_SEQPACKET or SOCK_STREAM. Errors name the socket. A name that is taken is of kind
// resource.
WEFT_API StatusOr<UniqueFd> listen_local(std::string_view name, int type, int backlog);
// Errors: unavailable, no process listens; resource, the backlog is full, or no descriptor is left.
WEFT_API StatusOr<UniqueFd> connect_local(std::string_view name, int type = SOCK_SEQPACKET);
// An invalid descriptor when no connection is pending.
WEFT_API UniqueFd accept_local(int listener);
// Whether a process holds that name, in any kind of local socket.
WEFT_API bool local_name_is_taken(std::string_view name);
// The user of the process that made the other end, at the time when it did, as the kernel saw it.
WEFT_API StatusOr<uid_t> peer_user(int fd);

// Error, kind unavailable: the other end is gone, or reads nothing.
WEFT_API Status send_local(int fd, std::string_view bytes, absl::Span<const int> files);

struct LocalMessage {
  enum class What { kMessage, kNothingYet, kEnd };
  What what = What::kNothingYet;
  std::string bytes;
  std::vector<UniqueFd> files;
};
// Error, kind protocol: too long, or more files than were taken. kEnd: the peer sends no more, or
// is gone.
WEFT_API StatusOr<LocalMessage> receive_local(int fd);

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_LOCAL_SOCKET_H_
