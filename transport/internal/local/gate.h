#ifndef WEFT_TRANSPORT_INTERNAL_LOCAL_GATE_H_
#define WEFT_TRANSPORT_INTERNAL_LOCAL_GATE_H_

// LocalGate: where processes of one user on one host prove to each other who they are, and what
// they keep to hand over memory. Beside its port a listener has a private socket. A dialler
// connects to it, leaves a random ticket there, and repeats the ticket in its hello: so the
// listener knows that the hello comes from a process of its own user (the kernel says whose socket
// it is), and the two have a socket between them. Neither side waits: by the time that a hello
// arrives its ticket lies in the socket.
//
// A session is that socket. Each side says done() when it uses nothing of the other's memory any
// more, and its handler is told the end when the other side has said so, or has died.
//
// Threads: any. Handlers are called on the gate's own thread ("weft-local"), which sleeps while
// nothing happens.

#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "weft/common/api.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/transport/local_socket.h"

namespace weft::internal {

class LocalHandler {
 public:
  virtual ~LocalHandler() = default;
  // An error ends the session: nothing more is read.
  virtual Status on_local_message(LocalMessage message) = 0;
  // Once; nothing follows.
  virtual void on_local_end() = 0;
};

class WEFT_API LocalSession {
 public:
  LocalSession(UniqueFd fd, std::string ticket) : fd_(std::move(fd)), ticket_(std::move(ticket)) {}

  const std::string& ticket() const { return ticket_; }
  Status send(std::string_view bytes, absl::Span<const int> files) {
    return send_local(fd_.get(), bytes, files);
  }
  // The peer gets the end. It closes with the last reference to the session in any case.
  void done();

 private:
  friend class LocalGate;
  const UniqueFd fd_;
  const std::string ticket_;
};

class WEFT_API LocalGate : public std::enable_shared_from_this<LocalGate> {
 public:
  static constexpr size_t kTicketBytes = 16;
  // Visitors that have not been claimed by a hello yet; one more turns the oldest away.
  static constexpr size_t kMaxVisitors = 256;

  explicit LocalGate(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}
  ~LocalGate();

  // Once, before the first visitor. `name`: of the socket, unguessable by its randomness.
  Status listen(std::string_view name) ABSL_LOCKS_EXCLUDED(mutex_);
  // Errors: unavailable; permission when the socket belongs to another user.
  StatusOr<std::shared_ptr<LocalSession>> visit(std::string_view name);

  // Whether a visitor has left this ticket and it is not claimed yet.
  bool knows(std::string_view ticket) ABSL_LOCKS_EXCLUDED(mutex_);
  // The visitor's session; null when knows() would say no.
  std::shared_ptr<LocalSession> claim(std::string_view ticket) ABSL_LOCKS_EXCLUDED(mutex_);

  // Messages and the end go to `handler`, from now on and from what has come already; the gate
  // holds it until the end. Error: the gate is closed, or there is no thread to be had.
  Status attach(const std::shared_ptr<LocalSession>& session, std::shared_ptr<LocalHandler> handler)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Releases visitors that went away before they were claimed, as their end and the next visit do:
  // for a system that could not watch one.
  void sweep() ABSL_LOCKS_EXCLUDED(mutex_);
  // No handler is called after it. Sessions live on while they are referred to.
  void stop() ABSL_LOCKS_EXCLUDED(mutex_);

  size_t visitors_for_test() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Visitor {
    UniqueFd fd;
    std::string ticket;  // empty: it has not said it yet
  };
  struct Attached {
    std::shared_ptr<LocalSession> session;
    std::shared_ptr<LocalHandler> handler;
  };

  Status start_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void welcome_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void run();
  void read(uint64_t id);

  const std::shared_ptr<Runtime> runtime_;
  Mutex mutex_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  UniqueFd epoll_;  // with wake_ and thread_: set once, under mutex_
  UniqueFd wake_;
  std::unique_ptr<Thread> thread_;
  UniqueFd listener_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, Visitor> visitors_ ABSL_GUARDED_BY(mutex_);  // by age
  std::map<uint64_t, Attached> attached_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_LOCAL_GATE_H_
