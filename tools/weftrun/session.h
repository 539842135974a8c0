// Several nodes, seen from one: the store they meet in, the meeting, and the end.
//
// What blocks runs on a thread of its own while the main thread stays with the signals, so that
// Ctrl-C works at every moment. Used from the main thread alone.
//
//   Session session(options, lease, signals_fd);
//   for each life of the job:
//     absl::StatusOr<Job> job = session.meet(host, master_port, store_port, restart_count);
//     ... supervisor with session.peers() ...
//     SessionEnd end = session.finish(code, supervisor.may_restart());
#ifndef WEFT_TOOLS_WEFTRUN_SESSION_H_
#define WEFT_TOOLS_WEFTRUN_SESSION_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "weft/common/runtime.h"
#include "weft/store/internal/launch/output_queue.h"
#include "weft/store/internal/launch/plan.h"
#include "weft/store/prefix_store.h"
#include "weft/store/store.h"
#include "weft/store/tcp_store.h"
#include "weft/tools/weftrun/options.h"
#include "weft/tools/weftrun/peers.h"

namespace weft::launch {

struct SessionEnd {
  int code = 0;  // of the first failure, wherever it was
  bool restart = false;
};

class Session {
 public:
  // `signal_fd` reads the stop signals (SignalSetup::fd). A node that is silent for `lease` is
  // dead. `outputs` outlives the session.
  Session(const Options& options, absl::Duration lease, int signal_fd, Outputs* outputs);
  ~Session();

  // Blocks until all nodes have come. The ports are node 0's, held; programs find them as
  // MASTER_PORT and in WEFT_STORE. Errors: see launch::meet(); cancelled after a stop signal, whose
  // number stopped_by() then gives.
  // What an earlier life left there does not count.
  absl::StatusOr<Job> meet(const std::string& host, int master_port, int store_port,
                           int restart_count);
  int stopped_by() const { return stopped_by_; }

  // Valid after meet().
  PeerLink* peers() { return peers_.get(); }

  // Tells the others that this node is done and whether it `may_restart`; waits for them on node 0,
  // and for node 0 elsewhere where a restart may follow.
  SessionEnd finish(int code, bool may_restart);

 private:
  absl::Status open_store();
  // Ends the process while a thread of run_interruptibly() still runs.
  [[noreturn]] void leave(int code);
  // Runs `body` elsewhere; at a stop signal calls `interrupt` and waits on, at most for a second.
  // False when `body` is still running: the process must leave without waiting for it.
  bool run_interruptibly(std::function<void()> body, std::function<void(int signal)> interrupt);

  const Options options_;
  const absl::Duration lease_;
  const int signal_fd_;
  Outputs* const outputs_;
  int stopped_by_ = 0;
  std::shared_ptr<Runtime> runtime_;
  std::unique_ptr<TcpStoreServer> server_;
  std::shared_ptr<Store> base_;
  std::shared_ptr<PrefixStore> store_;  // of this life
  std::unique_ptr<Peers> peers_;
  std::string job_store_url_;
};

}  // namespace weft::launch

#endif  // WEFT_TOOLS_WEFTRUN_SESSION_H_
