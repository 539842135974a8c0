#ifndef WEFT_TESTS_TESTING_CLUSTER_H_
#define WEFT_TESTS_TESTING_CLUSTER_H_

// Cluster: several workers of one job in this process, over inproc or over gRPC on loopback, met in
// a HashStore. Joins and leaves in parallel, as real workers do; ends with "nothing left": its
// shutdown expects every worker drained and no call, handler or connection left over.
//
//   Cluster c({.size = 3, .net = Net::kGrpc, .library = library()});
//   rpc_sync(c[0], "worker1", &add, x, y);
//   c.shutdown();                      // the destructor does it if the test did not

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "weft/rpc/worker.h"
#include "weft/store/hash_store.h"
#include "weft/transport/inproc_transport.h"

namespace weft::testing {

enum class Net { kInproc, kGrpc };

// Both; inproc alone under ThreadSanitizer, which cannot see into a packaged gRPC. For
// INSTANTIATE_TEST_SUITE_P, as is the name: "inproc", "grpc".
std::vector<Net> nets();
std::string net_name(const ::testing::TestParamInfo<Net>& info);

struct ClusterOptions {
  int size = 2;
  Net net = Net::kInproc;
  Library library{};
  std::vector<std::string> names{};  // default: worker0, worker1, ...
  bool dynamic = false;
  int worker_threads = 4;
  Timeout rpc_timeout{};
  Timeout heartbeat = std::chrono::milliseconds(100);
  Timeout lease = std::chrono::seconds(5);
  Timeout join_timeout = std::chrono::seconds(30);
  Timeout shutdown_timeout = std::chrono::seconds(20);
  std::shared_ptr<Runtime> runtime{};  // one for all; default: the system
  // Applied last, for what is not listed here. `index` is the worker's.
  std::function<void(int index, JoinOptions*)> adjust{};
};

class Cluster {
 public:
  explicit Cluster(ClusterOptions options);
  ~Cluster();

  Worker& operator[](size_t i) { return workers_[i]; }
  size_t size() const { return workers_.size(); }
  const std::shared_ptr<InprocNetwork>& network() const { return network_; }
  const std::shared_ptr<HashStore>& store() const { return store_; }

  // What worker `index` would join with; for tests that join one by one.
  JoinOptions join_options(int index, const std::string& name) const;
  // Joins one more (dynamic groups), or again (after a shutdown).
  Worker& add(const std::string& name);

  // All at once; expects success. Idempotent.
  void shutdown();
  // All at once, giving the results.
  std::vector<ShutdownResult> shutdown_all(ShutdownOptions options = {});
  // For tests that ended workers in their own way.
  void forget() { ended_ = true; }

 private:
  ClusterOptions options_;
  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<InprocNetwork> network_;
  std::shared_ptr<HashStore> store_;
  std::vector<Worker> workers_;
  bool ended_ = false;
};

// A counter of debug_info(). A number that is not there, as that of a lane that is not used, is 0.
int64_t counter(const Worker& worker, const std::string& name);

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_CLUSTER_H_
