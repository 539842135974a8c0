#ifndef WEFT_COMMON_CONFIG_H_
#define WEFT_COMMON_CONFIG_H_

// Config: every setting of weft, each declared once in the table below with its type, default,
// environment variable and help text.
//
//   WEFT_ASSIGN_OR_RETURN(Config config, Config::from_environment(process_environment()));
//   config.lease = absl::Seconds(30);                       // typed
//   WEFT_RETURN_IF_ERROR(config.set("chunk_bytes", "2MiB")); // by name, from text
//
// The environment is read once, by the code that makes the worker, and passed in; no other code of
// the library reads it. How values are written: durations "500ms", "15s", "2m", "inf"; bytes
// "65536", "64KiB", "1MiB", "2GiB"; booleans "1", "true", "yes", "0", "false", "no". An empty
// variable counts as unset. Errors (kind invalid_argument) name the key, the text, and what was
// expected.
//
// A value type; any thread reads, one writes.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/log.h"

namespace weft {

// Sorted, so that whatever is made from it comes in one order.
using Environment = std::map<std::string, std::string>;

// The variables of this process, now.
WEFT_API Environment process_environment();

using OptionalInt = std::optional<int>;  // a number that may be unset

// X(type, name, default, environment, help)
#define WEFT_CONFIG_KEYS(X)                                                                       \
  X(std::string, job_id, "", "WEFT_JOB_ID",                                                       \
    "id of the job, equal for all its workers: 1 to 32 hexadecimal digits; made by the launcher") \
  X(std::string, store, "", "WEFT_STORE",                                                         \
    "where workers meet: tcp://host:port, file:///path, etcd://host:port/prefix or env://")       \
  X(std::string, name, "", "WEFT_NAME", "name of this worker, unique in the job")                 \
  X(std::string, role, "", "WEFT_ROLE", "role of this worker, as given to weftrun --role")        \
  X(OptionalInt, rank, std::nullopt, "RANK", "number of this process in the job, from 0")         \
  X(OptionalInt, world_size, std::nullopt, "WORLD_SIZE", "number of processes of the job")        \
  X(OptionalInt, local_rank, std::nullopt, "LOCAL_RANK", "number of this process on its machine") \
  X(OptionalInt, local_world_size, std::nullopt, "LOCAL_WORLD_SIZE",                              \
    "number of processes of the job on this machine")                                             \
  X(OptionalInt, group_rank, std::nullopt, "GROUP_RANK", "number of this machine in the job")     \
  X(OptionalInt, group_world_size, std::nullopt, "GROUP_WORLD_SIZE", "number of machines")        \
  X(std::string, master_addr, "", "MASTER_ADDR", "host of rank 0, for env:// rendezvous")         \
  X(OptionalInt, master_port, std::nullopt, "MASTER_PORT", "port of env:// rendezvous")           \
  X(std::string, listen_address, "", "WEFT_LISTEN",                                               \
    "address to listen on; empty: loopback, or the one that reaches the store")                   \
  X(int, port, 0, "WEFT_PORT", "port to listen on; 0: any free one")                              \
  X(std::string, port_range, "", "WEFT_PORT_RANGE",                                               \
    "ports to try when no port is given, as first-last; empty: any free one")                     \
  X(std::string, advertise_address, "", "WEFT_ADVERTISE",                                         \
    "address given to the others; empty: the one that we listen on")                              \
  X(bool, allow_insecure, false, "WEFT_ALLOW_INSECURE",                                           \
    "allow listening beyond loopback without credentials")                                        \
  X(std::string, tls_ca, "", "WEFT_TLS_CA",                                                       \
    "PEM file: authorities whose certificates are believed")                                      \
  X(std::string, tls_cert, "", "WEFT_TLS_CERT", "PEM file: the certificate of this worker")       \
  X(std::string, tls_key, "", "WEFT_TLS_KEY", "PEM file: the key of that certificate")            \
  X(absl::Duration, tls_refresh, absl::Seconds(10), "WEFT_TLS_REFRESH",                           \
    "how often these files are looked at for a change")                                           \
  X(bool, tls_shared_certificate, false, "WEFT_TLS_SHARED_CERTIFICATE",                           \
    "all workers have the same certificate, which proves no name")                                \
  X(std::string, token_file, "", "WEFT_TOKEN_FILE",                                               \
    "file with the cluster token, a secret that all workers have; only with TLS")                 \
  X(int, worker_threads, 0, "WEFT_WORKER_THREADS",                                                \
    "threads that run handlers; 0: one per core, at least 4")                                     \
  X(int, max_blocked, 4096, "WEFT_MAX_BLOCKED",                                                   \
    "handlers that may wait at once; one more fails with resource_exhausted")                     \
  X(absl::Duration, rpc_timeout, absl::Seconds(60), "WEFT_RPC_TIMEOUT",                           \
    "deadline of a call that gives none")                                                         \
  X(absl::Duration, join_timeout, absl::Seconds(60), "WEFT_JOIN_TIMEOUT",                         \
    "how long to wait for the store and for all workers to arrive")                               \
  X(absl::Duration, shutdown_timeout, absl::Seconds(60), "WEFT_SHUTDOWN_TIMEOUT",                 \
    "bound on the later phases of shutdown")                                                      \
  X(absl::Duration, heartbeat_interval, absl::Seconds(1), "WEFT_HEARTBEAT_INTERVAL",              \
    "time between two signs of life")                                                             \
  X(absl::Duration, lease, absl::Seconds(15), "WEFT_LEASE",                                       \
    "silence after which a worker counts as dead")                                                \
  X(uint64_t, chunk_bytes, uint64_t{160} << 10, "WEFT_CHUNK_BYTES",                               \
    "size of the pieces that a large value travels in")                                           \
  X(uint64_t, inline_bytes, uint64_t{1} << 16, "WEFT_INLINE_BYTES",                               \
    "values up to this size travel inside the frame")                                             \
  X(uint64_t, max_message_bytes, uint64_t{4} << 30, "WEFT_MAX_MESSAGE_BYTES",                     \
    "largest message, tensors included, that is sent or accepted")                                \
  X(uint64_t, receive_budget, uint64_t{8} << 30, "WEFT_RECEIVE_BUDGET",                           \
    "bytes of messages being received that a worker holds at most")                               \
  X(uint64_t, peer_receive_budget, uint64_t{4} << 30, "WEFT_PEER_RECEIVE_BUDGET",                 \
    "the same, of one peer")                                                                      \
  X(uint64_t, receive_cache, uint64_t{1} << 30, "WEFT_RECEIVE_CACHE",                             \
    "bytes of memory that a worker keeps for the next large tensors to arrive")                   \
  X(bool, same_user, true, "WEFT_SAME_USER",                                                      \
    "on loopback without credentials: take only processes of this user")                          \
  X(uint64_t, arena_bytes, uint64_t{4} << 30, "WEFT_ARENA_BYTES",                                 \
    "memory shared with peers of this user on this host, at most; 0: none")                       \
  X(uint64_t, send_budget, uint64_t{8} << 30, "WEFT_SEND_BUDGET",                                 \
    "bytes of arguments and results on their way, at most; see CallOptions::backpressure")        \
  X(uint64_t, peer_send_budget, uint64_t{4} << 30, "WEFT_PEER_SEND_BUDGET",                       \
    "the same, to one peer")                                                                      \
  X(absl::Duration, spin, absl::Microseconds(50), "WEFT_SPIN",                                    \
    "how long a poller looks for news before it sleeps")                                          \
  X(Severity, log_level, Severity::kInfo, "WEFT_LOG_LEVEL",                                       \
    "least severity that is logged: debug, info, warning, error or off")                          \
  X(std::string, trace_file, "", "WEFT_TRACE_FILE",                                               \
    "write a Chrome trace here at the end; %r stands for the rank; empty: none")                  \
  X(std::string, metrics_address, "", "WEFT_METRICS",                                             \
    "host:port where Prometheus may ask for metrics; empty: none")

// One row of the table, as text.
struct ConfigKey {
  std::string name;
  std::string type;  // "text", "int", "bool", "bytes", "duration", "log level"
  std::string default_text;
  std::string environment;
  std::string help;
};

struct WEFT_API Config {
#define WEFT_DECLARE_KEY(type, key, value, environment, help) type key = value;
  WEFT_CONFIG_KEYS(WEFT_DECLARE_KEY)
#undef WEFT_DECLARE_KEY

  // The defaults, overlaid with the variables of `environment` that the table names; validated.
  static absl::StatusOr<Config> from_environment(const Environment& environment);

  // Sets the key `name` (not the variable) from text. not_found for an unknown name.
  absl::Status set(std::string_view name, std::string_view text);
  // The value of the key `name` as text that set() understands; "" for an optional one without
  // value.
  absl::StatusOr<std::string> get(std::string_view name) const;

  // What keys have to do with each other, and their ranges.
  absl::Status validate() const;

  // The table, in its order.
  static std::vector<ConfigKey> keys();
  // All keys with variable, default and help, for --help and the documentation.
  static std::string help_text();
};

// "first-last" as two ports, first <= last, both from 1 to 65535.
WEFT_API absl::StatusOr<std::pair<int, int>> parse_port_range(std::string_view text);

// Variables that begin with WEFT_ and that no key has: probably mistyped. `environment` as above.
WEFT_API std::vector<std::string> unknown_variables(const Environment& environment);

}  // namespace weft

#endif  // WEFT_COMMON_CONFIG_H_
