// How the weftruns of several nodes find each other, and hear of each other's end.
//
// meet() exchanges the counts of all nodes through a store: node 0 collects a hello of every other
// node, proposes a plan that names the hello it has seen of each, waits until all agree, and says
// go. A hello carries a fresh number, so what a crashed run left in a store (a file, etcd) is
// neither taken for a node nor for a plan. Peers then carries the first failure to all nodes, and
// notices a node that falls silent.
//
// meet() blocks; interrupting the store ends it. Peers has two threads of its own and is called
// from the main one.
//
//   absl::StatusOr<Job> job = meet(*store, {.node = 1, .nnodes = 2, ...});
//   Peers peers(store, runtime, {.job_id = job->id, .node = 1, .nnodes = 2});
#ifndef WEFT_TOOLS_WEFTRUN_RENDEZVOUS_H_
#define WEFT_TOOLS_WEFTRUN_RENDEZVOUS_H_

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/store/store.h"
#include "weft/tools/weftrun/plan.h"
#include "weft/tools/weftrun/supervisor.h"
#include "weft/tools/weftrun/system.h"

namespace weft::launch {

struct MeetingOptions {
  int node = 0;
  int nnodes = 1;
  Node self;
  // What node 0 gives to all; the others' are not looked at.
  std::string master_addr;  // empty: node 0's host, or 127.0.0.1 when all nodes are one host
  int master_port = 0;
  absl::Duration timeout = absl::Seconds(300);
  // Of node 0: where the programs meet, made from the job's id and the address above.
  std::function<std::string(const Job&)> store_url = nullptr;
};

// All nodes agree on a Job. Errors: deadline_exceeded naming the nodes that have not come;
// failed_precondition when the nodes were started differently; what the store says.
absl::StatusOr<Job> meet(Store& store, const MeetingOptions& options);

class Peers : public PeerLink {
 public:
  struct Options {
    std::string job_id;
    int node = 0;
    std::vector<Node> nodes;
    // A node that is silent for so long counts as dead.
    absl::Duration lease = absl::Seconds(15);
  };

  // `watch_store` is a client of the same data that may be interrupted apart from `store`.
  Peers(std::shared_ptr<Store> store, std::shared_ptr<Store> watch_store,
        std::shared_ptr<Runtime> runtime, Options options);
  ~Peers() override;

  int wake_fd() const override { return wake_.read.get(); }
  std::optional<Failure> failure() override;
  void report(const Failure& failure) override;

  // This node is done. Node 0, which may host the store, waits for the others as long as they live;
  // after a failure at most `bound`. Returns the failure of another node if one came meanwhile.
  std::optional<Failure> finish(absl::Duration bound);
  // After finish(), on node 0: every other node said goodbye, so nobody uses the store any more.
  bool all_left() const { return all_left_; }

 private:
  void watch();
  // One look at the nodes that this one watches; the first that is newly silent becomes the
  // failure.
  void check_leases();
  void deliver(Failure failure);
  void deliver_published(const std::string& text);
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

#endif  // WEFT_TOOLS_WEFTRUN_RENDEZVOUS_H_
