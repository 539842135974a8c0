#ifndef WEFT_TESTS_SIM_AUTOGRAD_AUDIT_H_
#define WEFT_TESTS_SIM_AUTOGRAD_AUDIT_H_

// What a pass should do, found without the engine, and what it does, seen from outside: LiveSet
// walks the graphs of all workers from the losses; RunCounter counts the runs of sends and recvs by
// hooks on them; Audit is an interceptor that reads every message of a pass. Together they check
// LIVE-2, LIVE-3, LIVE-6 and LIVE-8 (dist_autograd/internal/pass.h).
//
// For simulations only: one thing at a time moves there, so nothing here has a lock.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "torch/csrc/autograd/function.h"
#include "weft/dist_autograd/internal/service.h"
#include "weft/rpc/spi/service.h"
#include "weft/rpc/worker.h"

namespace weft::testing {

// The number of a worker in the test, and one that it gave to a message.
using MessageKey = std::pair<int, uint64_t>;

// The recorded graph of a context over all workers. Taken while nothing is being recorded.
struct Recorded {
  std::map<WorkerKey, int> numbers{};
  std::vector<std::map<uint64_t, internal::NodePtr>> sends{};  // by worker

  // Workers that have left, or do not know the context, have recorded nothing.
  Recorded(const std::vector<Worker>& workers, const AutogradContextId& context);
};

// The live messages of a pass.
struct LiveSet {
  struct Message {
    int receiver = 0;
    std::set<uint32_t> outputs{};
  };
  std::map<MessageKey, Message> messages{};
  std::set<int> participants{};

  LiveSet() = default;
  LiveSet(const Recorded& recorded, int root, const torch::autograd::edge_list& losses);
  // Every output of every send that the worker has recorded is live.
  bool all_live(const Recorded& recorded, int worker) const;
};

// Counts runs. `before` is told of each first.
class RunCounter {
 public:
  using Before = std::function<void(int worker, const internal::Node* node)>;
  explicit RunCounter(Before before) : state_(std::make_shared<State>()) {
    state_->before = std::move(before);
  }
  // Hooks on all sends, and on all recvs that they or `losses` (by worker) lead to. Once.
  void watch(const Recorded& recorded,
             const std::vector<std::pair<int, torch::autograd::Edge>>& losses);

  // LIVE-2: at least as often as `must` says, at most as often as `may` does: passes that failed
  // stopped somewhere.
  Status check(const std::vector<const LiveSet*>& must,
               const std::vector<const LiveSet*>& may) const;
  int64_t runs() const { return state_->runs; }

 private:
  struct State {
    Before before;
    int64_t runs = 0;
    std::map<MessageKey, int64_t> sends{};
    std::map<MessageKey, int64_t> recvs{};
  };
  class Hook;
  const std::shared_ptr<State> state_;
};

// Every message of every pass, in the order in which they were sent.
class Audit {
 public:
  struct Sent {
    std::string kind{};  // "advance"
    int from = 0;
    int to = 0;
    internal::PassId pass{};
    // Fields of an advance.
    internal::Messages named{};
    std::vector<uint64_t> gradients{};
    bool done = false;
    bool answers = false;
    std::optional<internal::Advanced> said{};  // of the answer
    int64_t arrivals = 0;
    int64_t ended = 0;
    Status answer{};
  };

  // For one worker, to be listed at its join. Names of workers end with their number.
  ServiceFactory service(int worker);
  const std::vector<Sent>& sent() const { return *sent_; }
  // Runs `fn` when the n-th message from now arrives.
  void on_arrival(int64_t n, std::function<void()> fn);
  std::set<internal::PassId> passes() const;

  // LIVE-6 and LIVE-8, for a pass that has succeeded. `slow`: so slowly that a worker may have
  // asked the root about what it did not know to have arrived.
  Status check(const internal::PassId& pass, const Recorded& recorded, const LiveSet& live,
               int root, bool slow) const;
  // LIVE-3: whether the counts of `node`, a send or recv at `worker`, may be final by now.
  bool may_be_final(const internal::PassId& pass, const Recorded& recorded, int root,
                    const torch::autograd::edge_list& losses, int worker,
                    const internal::Node* node) const;

 private:
  class Tap;
  struct Trigger {
    int64_t left = 0;
    std::function<void()> fn{};
  };

  const std::shared_ptr<std::vector<Sent>> sent_ = std::make_shared<std::vector<Sent>>();
  const std::shared_ptr<Trigger> trigger_ = std::make_shared<Trigger>();
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_SIM_AUTOGRAD_AUDIT_H_
