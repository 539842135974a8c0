#ifndef WEFT_RPC_INTERNAL_LOCAL_SOCKET_H_
#define WEFT_RPC_INTERNAL_LOCAL_SOCKET_H_

// Unix sockets for messages between processes of one user on one host: SOCK_SEQPACKET below names
// in the abstract namespace, so that nothing stays behind in a file system. A message may carry
// open files. Thin and strict; nothing here blocks.
//
// Threads: any; a socket's messages are read by one thread.

#include <sys/types.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/runtime.h"

namespace weft::internal {

inline std::string system_error(int code) { return std::strerror(code); }

inline std::string random_bytes(Random& random, size_t n) {
  std::string out;
  while (out.size() < n) {
    const uint64_t bits = random.next();
    out.append(reinterpret_cast<const char*>(&bits), std::min(n - out.size(), sizeof bits));
  }
  return out;
}

// Closes what it owns.
class WEFT_API UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  ~UniqueFd() { reset(); }
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

// The longest message that is sent or taken.
inline constexpr size_t kMaxLocalMessage = 4096;

// Errors name the socket. A name that is taken is of kind resource.
WEFT_API StatusOr<UniqueFd> listen_local(std::string_view name);
// Errors: unavailable, nobody listens; resource, too many wait there, or no descriptor is left.
WEFT_API StatusOr<UniqueFd> connect_local(std::string_view name);
// Invalid: nobody waits.
WEFT_API UniqueFd accept_local(int listener);
// Of whoever made the other end when it did, as the kernel saw it.
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

#endif  // WEFT_RPC_INTERNAL_LOCAL_SOCKET_H_
