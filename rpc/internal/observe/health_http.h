#ifndef WEFT_RPC_INTERNAL_OBSERVE_HEALTH_HTTP_H_
#define WEFT_RPC_INTERNAL_OBSERVE_HEALTH_HTTP_H_

// HealthHttp: tells a supervisor such as Kubernetes whether one worker lives and whether it is
// ready, as GET /healthz and GET /readyz over HTTP. Nothing else is there, an answer has a status
// and no content, and it needs no credentials: it may listen where /metrics may not.
//
//   auto state = std::make_shared<HealthState>();
//   WEFT_ASSIGN_OR_RETURN(auto http, HealthHttp::start("0.0.0.0:8080", state, runtime));
//   state->ready = true;      // from now on 200 instead of 503 at /readyz
//
// Threads: one of its own from start() to the destructor, which waits for it. Outside of
// simulation: real sockets, a thread that blocks. At most kMostHealthClients connections are open;
// a client has kHealthClientTime and kMostHealthRequest bytes.

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/posix.h"
#include "weft/common/runtime.h"

namespace weft::internal {

// Set by the worker, read by the server; any thread.
struct HealthState {
  std::atomic<bool> live{true};    // false: the group has declared the worker dead
  std::atomic<bool> ready{false};  // it has joined and is not leaving
};

inline constexpr size_t kMostHealthClients = 32;
inline constexpr size_t kMostHealthRequest = 4096;
inline constexpr absl::Duration kHealthClientTime = absl::Seconds(5);

// The answer to the bytes of a request; "" while more are needed. A pure function.
WEFT_API std::string health_answer(std::string_view request, const HealthState& state);

class HealthHttp {
 public:
  // `address` is "host:port", port 0 for any free one. Errors name it: kind invalid_argument (not
  // such an address), resource (the port is taken).
  static StatusOr<std::unique_ptr<HealthHttp>> start(std::string_view address,
                                                     std::shared_ptr<const HealthState> state,
                                                     std::shared_ptr<Runtime> runtime);
  ~HealthHttp();
  HealthHttp(const HealthHttp&) = delete;
  HealthHttp& operator=(const HealthHttp&) = delete;

  const std::string& address() const { return address_; }
  int port() const { return port_; }

 private:
  struct Client {
    UniqueFd fd;
    absl::Time until;
    std::string request{};
    bool answered = false;  // what it still sends is dropped until it closes
  };

  HealthHttp(std::shared_ptr<const HealthState> state, std::shared_ptr<Runtime> runtime);
  void serve();
  void accept_clients(absl::Time now);
  // False: the connection is over.
  bool read_from(Client* client) const;

  const std::shared_ptr<const HealthState> state_;
  const std::shared_ptr<Runtime> runtime_;
  UniqueFd listener_;
  UniqueFd wake_;
  std::string address_;
  int port_ = 0;
  std::vector<Client> clients_;  // of the thread
  absl::Time accept_again_ = absl::InfinitePast();
  std::unique_ptr<Thread> thread_;
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_OBSERVE_HEALTH_HTTP_H_
