#ifndef WEFT_TRANSPORT_INTERNAL_GRPC_LISTENER_H_
#define WEFT_TRANSPORT_INTERNAL_GRPC_LISTENER_H_

// GrpcListener: the port and the local socket of a grpc transport, and the loop that accepts. Each
// connection is handed to the gRPC server, which speaks TLS with it if it has credentials.
//
// gRPC's own loop ends for good at the first accept() that finds no descriptor. Here a new
// connection then stays in the kernel's queue, none is turned away, and it is tried again
// (ACCEPT-1: after 10 ms at first and 1 s at most) until there are descriptors. The dialler's
// deadline bounds its patience. When that has lasted for kTellAfter, one descriptor that was kept
// for it lets them in one by one, to be told why: is_short() is true during that, and a peer that
// says hello then is refused and may try again (ACCEPT-2).
//
// A connection over TCP that begins with kSocketMagic is a channel's (transport/channel.h), not
// gRPC's. Its first byte shows which it is, so a peer gets no further before it has sent
// something: it has the time of a handshake for it.
//
// Before gRPC's parser stand two guards: a listener for its own user alone closes the connections of
// others' processes (OWNER-1), and a connection over TCP has to say a hello that is accepted within
// the same time (newcomers.h).
//
// Threads: open(), add_to(), start() and stop() from one at a time; accepted_hello() from any;
// accepting has a thread of its own ("weft-accept"), which sleeps while no connection arrives.

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <grpcpp/server_builder.h>

#include "absl/time/time.h"
#include "weft/common/log.h"
#include "weft/common/posix.h"
#include "weft/common/runtime.h"
#include "weft/transport/address.h"
#include "weft/transport/channel.h"
#include "weft/transport/internal/grpc/newcomers.h"

namespace weft::internal {

struct ListenerCounters {
  std::atomic<int64_t> accepted{0};
  // Times that a connection could not be accepted, mostly for want of descriptors; it waits.
  std::atomic<int64_t> stalls{0};
  // Hellos that were refused for want of descriptors.
  std::atomic<int64_t> refused{0};
  // Connections of another user's process, and those that were cut before their hello.
  std::atomic<int64_t> turned_away{0};
};

class GrpcListener final {
 public:
  // `counters` outlive it.
  GrpcListener(std::shared_ptr<Runtime> runtime, Logger log, ListenerCounters* counters)
      : runtime_(std::move(runtime)), log_(std::move(log)), counters_(counters) {}
  ~GrpcListener() { stop(); }

  // Binds the port, and the Unix socket `local` if that is not empty; connections that arrive wait
  // until start(). The kernel drops an accepted TCP connection on which bytes stay unacknowledged
  // for `user_timeout`. Returns the port.
  StatusOr<int> open(const BindHost& host, int port, std::string_view local,
                     absl::Duration user_timeout);
  // REQUIRES: open().
  void add_to(grpc::ServerBuilder* builder, std::shared_ptr<grpc::ServerCredentials> credentials);
  // Channels' sockets, with the ticket that they showed, go to `on_socket`, on the thread that
  // accepts; `patience`: for their first bytes. REQUIRES: before start().
  void take_sockets(absl::Duration patience,
                    std::function<void(std::string ticket, UniqueFd fd)> on_socket) {
    patience_ = patience;
    on_socket_ = std::move(on_socket);
  }
  // No descriptor is left but the one by which a dialler was let in to be told. Any thread.
  bool is_short() const { return short_.load(); }
  // OWNER-1. REQUIRES: before start().
  void only_own_user() { own_user_only_ = true; }
  // How long a connection may take to its hello. REQUIRES: before start().
  void set_hello_timeout(absl::Duration timeout) { hello_timeout_ = timeout; }
  // The peer at this address, as gRPC names it, may go on.
  void accepted_hello(std::string_view address) { newcomers_.accepted(address); }
  // REQUIRES: the server that was built runs.
  void start();
  // REQUIRES: the server runs still. Nothing is accepted any more, the port is free.
  void stop();

 private:
  void run();
  struct Unsorted {
    size_t which = 0;  // of the listeners
    UniqueFd fd;
    absl::Time until;
  };

  // False when a connection waits that cannot be accepted.
  bool accept_from(size_t which);
  void take_in(size_t which, UniqueFd fd);
  // By the descriptor that was kept.
  void accept_to_tell(size_t which);
  void keep_spare();
  bool is_own(size_t which, int fd);
  void cut_newcomers();
  void turned_away(std::string_view why);
  void hand_over(int listener, UniqueFd fd);
  // True when it has gone its way, or is closed.
  bool sort(Unsorted* one, short events);

  const std::shared_ptr<Runtime> runtime_;
  const Logger log_;
  ListenerCounters* const counters_;
  UniqueFd wake_;                      // readable: the end
  std::array<UniqueFd, 2> listeners_;  // the port; the local socket or nothing
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  absl::Duration patience_ = absl::ZeroDuration();
  std::function<void(std::string, UniqueFd)> on_socket_;
  absl::Duration hello_timeout_ = absl::InfiniteDuration();
  bool own_user_only_ = false;
  Newcomers newcomers_;
  // The loop's.
  std::vector<Unsorted> unsorted_;
  absl::Time next_warning_ = absl::InfinitePast();
  absl::Time next_turned_away_ = absl::InfinitePast();
  bool owner_unknown_told_ = false;
  absl::Time stalled_since_ = absl::InfiniteFuture();
  UniqueFd spare_;
  std::atomic<bool> short_{false};  // spare_ is in use for another purpose
  std::unique_ptr<Thread> thread_;
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_GRPC_LISTENER_H_
