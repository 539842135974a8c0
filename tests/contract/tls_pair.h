#ifndef WEFT_TESTS_CONTRACT_TLS_PAIR_H_
#define WEFT_TESTS_CONTRACT_TLS_PAIR_H_

// Two ends of a stream socket, and of TLS on it.

#include <sys/socket.h>

#include <memory>
#include <utility>

#include "gtest/gtest.h"
#include "weft/common/posix.h"
#include "weft/transport/tls_stream.h"

namespace weft::testing {

struct SocketPair {
  SocketPair() {
    int fds[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
    client.reset(fds[0]);
    server.reset(fds[1]);
  }

  internal::UniqueFd client, server;
};

// One side's handshake, until it is done or has failed.
struct Handshake {
  internal::TlsStream* tls;
  Status status{};
  bool done = false;
  // True: it has not ended.
  bool step() {
    const StatusOr<internal::TlsState> state = tls->handshake();
    status = state.status();
    done = state.ok() && *state == internal::TlsState::kDone;
    return status.ok() && !done;
  }
};

// By turns, as long as both have something to do. Bounded: a handshake has few messages.
inline void shake_hands(Handshake* client, Handshake* server) {
  bool c = true;
  bool s = true;
  for (int i = 0; i < 20 && (c || s); ++i) {
    if (c) c = client->step();
    if (s) s = server->step();
  }
}

using TlsEnds =
    std::pair<std::shared_ptr<internal::TlsStream>, std::shared_ptr<internal::TlsStream>>;

// Client and server with one key, up.
inline TlsEnds tls_pair(const SocketPair& sockets,
                        uint64_t key_bytes = internal::kTlsKeyUpdateBytes) {
  const std::string key = *internal::random_tls_key();
  using internal::TlsRole;
  using internal::TlsStream;
  TlsEnds out(*TlsStream::with_key(sockets.client.get(), TlsRole::kClient, key, key_bytes),
              *TlsStream::with_key(sockets.server.get(), TlsRole::kServer, key, key_bytes));
  Handshake client{out.first.get()};
  Handshake server{out.second.get()};
  shake_hands(&client, &server);
  EXPECT_TRUE(client.done) << client.status;
  EXPECT_TRUE(server.done) << server.status;
  return out;
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_CONTRACT_TLS_PAIR_H_
