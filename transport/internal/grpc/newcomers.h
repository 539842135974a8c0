#ifndef WEFT_TRANSPORT_INTERNAL_GRPC_NEWCOMERS_H_
#define WEFT_TRANSPORT_INTERNAL_GRPC_NEWCOMERS_H_

// What a listener knows of connections over TCP before gRPC's parser may trust them: whose process is
// on the other end, and how much came from it before its hello was accepted.
//
// gRPC 1.51 keeps whatever a peer sends in the middle of a request's headers, and copies it again
// with each frame (CVE-2023-33953). So a connection that has not said a hello that was accepted is
// cut when more than kMaxBytes came from it, when its time is over, or when more than kMaxNewcomers
// others came after it (NEWCOMER-1). The kernel counts the bytes, so that gRPC reads its socket as
// before and nothing is copied.
//
// Threads: any.

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "weft/common/mutex.h"

namespace weft::internal {

enum class PeerOwner {
  kOwn,      // a process of this user, or of root
  kOther,    // of another user, or its process is gone
  kUnknown,  // the system does not tell
};
// The user that opened the other end of an accepted connection on loopback or a Unix socket.
PeerOwner owner_of_peer(int fd);

// "127.0.0.1:4711" of the other end, without the zone of an IPv6 address; empty when it is gone.
std::string remote_address(int fd);

class Newcomers final {
 public:
  // A hello and what HTTP/2 sends before it take less than 8 KiB.
  static constexpr uint64_t kMaxBytes = 128 << 10;
  static constexpr size_t kMaxNewcomers = 256;
  // How often bytes are counted while there is a newcomer.
  static constexpr absl::Duration kTick = absl::Milliseconds(10);

  // Watches the connection until `until`. It remains gRPC's, which may close it at any time: it is
  // known again by the kernel's cookie, and no descriptor is taken, of which there may be few.
  void add(int fd, absl::Time until) ABSL_LOCKS_EXCLUDED(mutex_);
  // Its hello was accepted. `address`: as gRPC names the peer.
  void accepted(std::string_view address) ABSL_LOCKS_EXCLUDED(mutex_);
  // Cuts those that NEWCOMER-1 speaks of; gives why, for the log, one for each.
  std::vector<std::string> cut(absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);
  bool empty() ABSL_LOCKS_EXCLUDED(mutex_);
  void clear() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Newcomer {
    int fd;
    uint64_t cookie;
    std::string address;
    absl::Time until;
  };
  Mutex mutex_;
  // The oldest is the first.
  std::vector<Newcomer> all_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_GRPC_NEWCOMERS_H_
