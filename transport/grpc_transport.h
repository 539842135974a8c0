#ifndef WEFT_TRANSPORT_GRPC_TRANSPORT_H_
#define WEFT_TRANSPORT_GRPC_TRANSPORT_H_

// grpc: workers in processes of their own, over TCP. One long-lived bidirectional gRPC stream per
// peer and lane, each with a connection of its own; raw bytes, no protobuf on the way of frames.
// docs/transport.md tells about lanes, chunks and budgets.
//
//   TransportFactory factory = grpc_transport();
//   JoinOptions options{.transport = grpc_transport({.max_spin = absl::ZeroDuration()})};
//
// Threads: one poller per transport, whatever the number of peers ("weft-poller").
// Addresses: "127.0.0.1:4711", "[::1]:4711", "host.name:4711". The same port answers gRPC's health
// check. listen() must come before the first connect(): both share the completion queues. Nothing
// here works under a simulated Runtime. Data connections have one thread more, "weft-data", with
// the first of them.
//
// Credentials: mutual TLS (transport/credentials.h), on every connection, those over a local socket
// included. Without them traffic is plain text, so listening beyond loopback must then be allowed
// explicitly (ListenOptions::allow_insecure).

#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/transport/credentials.h"
#include "weft/transport/transport.h"

namespace weft {

struct GrpcTransportOptions {  // how a transport over gRPC is made
  // A poller that waits looks again and again for so long before it sleeps, if there was traffic
  // just now, it paid lately, and the machine has cores for all who want to run. 0: it sleeps at
  // once.
  absl::Duration max_spin = absl::Microseconds(50);
  // The same while large tensors go through shared memory, where the next message is due only after
  // the peer has copied its own, 2 MiB in a quarter of a millisecond, or has computed with it: a step
  // of row P6 (docs/benchmarks.md) takes a fifth less time than with 300 us, because its server and its
  // trainer do not fall asleep in each.
  absl::Duration max_bulk_spin = absl::Milliseconds(1);
  // The same in the middle of a distributed backward and what it is made of, where the next message
  // is due after the peer's part of the computation.
  absl::Duration max_compute_spin = absl::Microseconds(300);
  // "Just now".
  absl::Duration spin_after_traffic = absl::Milliseconds(1);
  // Streams that may have begun and not yet completed their handshake; one more is turned away.
  int max_half_open_lanes = 256;
  absl::Duration handshake_timeout = absl::Seconds(10);
  // What close() has queued must be sent, and read by the peer, within this; what was not is lost, answers among it. As
  // long as a peer may be starved of processor time. At shutdown() it is a second.
  absl::Duration drain_timeout = absl::Seconds(60);
  // Second line behind our own heartbeats: the kernel gives a connection up on which sent bytes
  // stay unacknowledged for the timeout. Pings of HTTP/2 go out once in `keepalive_time`.
  absl::Duration keepalive_time = absl::Hours(1);
  absl::Duration keepalive_timeout = absl::Seconds(120);
  // Peers of one network namespace meet over an abstract Unix socket, which saves a third of a
  // small call's time; all other peers, and a dialler that uses a relay's address, over TCP.
  bool local_sockets = true;
  // A listener on loopback without credentials accepts only processes of its own user, which prove
  // it at a private socket beside the local one. False: it accepts every process that reaches the
  // port and knows the job, as a relay or a forwarded port in front of it requires. Has no effect
  // without local sockets, with credentials, or beyond loopback.
  bool same_user = true;
  // With such a peer, of the same user, large tensors travel through memory that both see instead
  // of a socket: at most so much of it is in use at a time, and never more than a quarter of the
  // machine's memory, or of its control group's; what does not fit goes by the socket. 0: none. See
  // docs/arena.md.
  uint64_t arena_bytes = uint64_t{4} << 30;
  // Lanes for large messages, each with a connection of its own, besides the one for control and
  // small messages: to peers over TCP, and to peers over a local socket. A large message travels on
  // the one that has the least to do. 1 to 7; the dialling side decides.
  int bulk_lanes = 2;
  int local_bulk_lanes = 1;
  // Over TCP large messages travel on connections without HTTP/2, as many as there are bulk lanes,
  // to the same port and as secure as the others (docs/transport.md). False: on the bulk lanes
  // themselves, as when such a connection cannot be had. Either side may say so.
  // They also stay away when more than a quarter of the process's descriptors is in use: the rest is
  // for sockets that every peer needs.
  bool data_connections = true;
  // A process may have few descriptors open at first (RLIMIT_NOFILE, often 1,024), and a peer over
  // TCP takes five. So a transport raises the limit to the hard one, to 65,536 at most, for the
  // whole process and the programs that it starts. False: it is left as it is, as a program with
  // select() needs, which supports no descriptor above 1,023.
  bool raise_descriptor_limit = true;
  // An Abseil that was built without NDEBUG, Debian's for one, checks at each lock of gRPC the
  // order in which mutexes were ever locked, and aborts the process at a cycle; that is an eighth
  // of a small call. So the first transport switches the check off, for the whole process, as
  // absl::SetMutexDeadlockDetectionMode does. True: it is left as it is.
  bool abseil_lock_checks = false;
  // Default: those of the worker (JoinOptions::credentials).
  Credentials credentials{};
};

WEFT_API TransportFactory grpc_transport(const GrpcTransportOptions& options = {});

}  // namespace weft

#endif  // WEFT_TRANSPORT_GRPC_TRANSPORT_H_
