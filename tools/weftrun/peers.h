// How the weftruns of several nodes hear of each other's end.
//
// Peers carries the first failure to all nodes, notices a node that falls silent, and at the end
// lets node 0 decide for all whether the job starts again. It has two threads of its own and is
// called from the main one.
//
//   Peers peers(store, watch_store, runtime, {.job_id = job->id, .node = 1, .nodes = job->nodes});
#ifndef WEFT_TOOLS_WEFTRUN_PEERS_H_
#define WEFT_TOOLS_WEFTRUN_PEERS_H_

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/store/internal/launch/plan.h"
#include "weft/store/internal/launch/supervisor.h"
#include "weft/store/internal/launch/system.h"
#include "weft/store/store.h"

namespace weft::launch {

// How the job ended, as one node sees it.
struct Ending {
  std::optional<Failure> other;  // of another node, if one came
  bool restart = false;          // all nodes start again
};

class Peers : public PeerLink {
 public:
  struct Options {
    std::string job_id;
    int node = 0;
    std::vector<Node> nodes;
    // A node that is silent for so long counts as dead.
    absl::Duration lease = absl::Seconds(15);
    // A restart may follow: then no node leaves before node 0 has decided.
    bool may_restart = false;
  };

  // `watch_store` is a client of the same data that may be interrupted apart from `store`.
  Peers(std::shared_ptr<Store> store, std::shared_ptr<Store> watch_store,
        std::shared_ptr<Runtime> runtime, Options options);
  ~Peers() override;

  int wake_fd() const override { return wake_.read.get(); }
  std::optional<Failure> failure() override;
  void report(const Failure& failure) override;

  // This node is done. Node 0, which may host the store, waits for the others as long as they live;
  // after a failure at most `bound`. Where a restart may follow, the others wait for the verdict of
  // node 0: the job starts again when a process has failed, no node is lost, and each node
  // `may_restart`.
  Ending finish(absl::Duration bound, bool may_restart);
  // After finish(), on node 0: every other node said goodbye, so no node uses the store any more.
  bool all_left() const { return all_left_; }

 private:
  void watch();
  // One look at the nodes that this one watches; the first that is newly silent becomes the
  // failure.
  void check_leases();
  void deliver(Failure failure);
  void deliver_published(const std::string& text);
  bool await_goodbyes(absl::Duration bound, bool* may_restart);
  void announce(std::string_view verdict);
  Ending await_verdict(absl::Duration bound);
  absl::Status publish(Store& store, const Failure& failure);
  void stop_watching();

  const std::shared_ptr<Store> store_;
  const std::shared_ptr<Store> watch_store_;
  const std::shared_ptr<Runtime> runtime_;
  const Options options_;
  Pipe wake_;

  struct Sign {
    std::optional<std::string> value;
    absl::Duration at;
    bool left = false;
  };
  std::map<int, Sign> signs_;  // of the watching thread alone

  bool all_left_ = false;

  Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<Failure> own_ ABSL_GUARDED_BY(mutex_);      // reported by this node
  std::optional<Failure> failure_ ABSL_GUARDED_BY(mutex_);  // of another node
  std::set<int> lost_ ABSL_GUARDED_BY(mutex_);              // silent longer than the lease

  std::shared_ptr<Executor> sender_;
  std::unique_ptr<Thread> watcher_;
};

}  // namespace weft::launch

#endif  // WEFT_TOOLS_WEFTRUN_PEERS_H_
