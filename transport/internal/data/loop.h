#ifndef WEFT_TRANSPORT_INTERNAL_DATA_LOOP_H_
#define WEFT_TRANSPORT_INTERNAL_DATA_LOOP_H_

// DataLoop: the one thread that waits for all data connections of a transport ("weft-data"), or for all its prompt
// lanes ("weft-prompt"). It starts with the first of them, and sleeps while nothing happens. While bytes come in it looks
// again for a bounded time before it sleeps: of a large message the next are due before a sleeping
// core is awake.
//
// Threads: add(), watch_writing(), call() and stop() from anywhere; remove() on the loop.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/mutex.h"
#include "weft/common/posix.h"
#include "weft/common/runtime.h"
#include "weft/transport/internal/crowd.h"
#include "weft/transport/internal/data/turn.h"

struct epoll_event;

namespace weft::internal {

class WEFT_API DataLoop {
 public:
  class Client {
   public:
    virtual ~Client() = default;
    // The socket can be read, or written, or is broken; level-triggered. True: more is due at once.
    virtual bool on_ready(bool readable, bool writable) = 0;
    // A thread asked for it by call().
    virtual void on_called() = 0;
    // The loop has stopped, and lets go of the client: on the thread that stopped it.
    virtual void on_stopped() = 0;
  };

  // `max_spin`: how long it looks before it sleeps; 0: not at all.
  DataLoop(std::shared_ptr<Runtime> runtime, std::string name, absl::Duration max_spin)
      : runtime_(std::move(runtime)), name_(std::move(name)), max_spin_(max_spin) {}
  ~DataLoop() { stop(); }

  // Holds the client until remove(). `fd` stays the client's. `*number` is the client's, and is
  // there before the client is told anything. Error, kind resource: the system has no room; kind
  // state: stop() was called.
  Status add(std::shared_ptr<Client> client, int fd, bool writing, uint64_t* number)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether on_ready() is told that the socket can be written. REQUIRES: it is still there.
  void watch_writing(uint64_t number, int fd, bool on);
  void remove(uint64_t number, int fd) ABSL_LOCKS_EXCLUDED(mutex_);
  // on_called() follows, on the loop, unless the client was removed before.
  void call(uint64_t number) ABSL_LOCKS_EXCLUDED(mutex_);
  // The turn that all connections of this loop share, as they share the cores.
  DataTurn& turn() { return turn_; }
  // Joins, then tells the clients that are still there.
  void stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  Status open_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void run();
  // As epoll_wait(); `due`: before it sleeps, it spins.
  int wait(bool due, epoll_event* events);
  std::shared_ptr<Client> find(uint64_t number) ABSL_LOCKS_EXCLUDED(mutex_);
  void wake();

  const std::shared_ptr<Runtime> runtime_;
  const std::string name_;  // of the thread
  const absl::Duration max_spin_;
  CrowdWatch crowd_;  // the loop's
  DataTurn turn_;
  // Opened once, before the thread begins.
  UniqueFd epoll_;
  UniqueFd wake_;

  Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t last_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, std::shared_ptr<Client>> clients_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint64_t> called_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Thread> thread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_DATA_LOOP_H_
