#ifndef WEFT_DIST_AUTOGRAD_INTERNAL_GRAPH_H_
#define WEFT_DIST_AUTOGRAD_INTERNAL_GRAPH_H_

// PassGraph: the part of a pass's graph that lies at one worker. First it is found (root, name:
// walks from the roots and from the sends that others have reached, counting what each node waits
// for), then it is run (feed, run): a node as soon as nothing that may still be found can reach it
// (hold). LibTorch's engine cannot do this: it wants all roots at once, and here gradients come one
// by one, from others that wait for ours.
//
// The nodes are called one by one, in an order of our own (sum_order.h), inside a single node that
// LibTorch's engine runs: so hooks find its thread-locals as they expect them. What several nodes
// give to one is added up in the same order; what is there too early is kept apart until all that
// comes before it is there, and no longer.
//
// Not thread-safe: first the pass's mutex guards it, then the thread that runs it owns it.

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "torch/csrc/autograd/input_buffer.h"
#include "weft/common/error.h"
#include "weft/dist_autograd/internal/functions.h"
#include "weft/dist_autograd/internal/leaf_slots.h"
#include "weft/dist_autograd/internal/sum_order.h"
#include "weft/dist_autograd/internal/torch_compat.h"
#include "weft/dist_autograd/leaf_effect.h"
#include "weft/rpc/spi/device_order.h"

namespace weft::internal {

class PassTrace;

// A leaf and what a pass has added up for it.
struct LeafGradient {
  at::Tensor leaf{};
  at::Tensor gradient{};
  GuardRef after{};
};

// Adds `gradient` to `*sum`, which may be undefined yet, as LibTorch does for a leaf: its buffer is
// taken over when only `references`, which are ours, hold it, and cloned otherwise.
// REQUIRES: grad mode is off.
void add_gradient(const at::Tensor& leaf, at::Tensor* sum, const at::Tensor& gradient,
                  size_t references);

// Gradients of the tensors of a message that require grad; an undefined one: none.
struct MessageGradients {
  uint64_t message = 0;
  std::vector<at::Tensor> tensors{};
  std::vector<DeviceCode> devices{};  // where each belongs; empty: all on the CPU
  GuardRef after{};
};

// The longest deadline that a hook of a reducer names on a node of this worker which the losses
// reach, or a send of the context: whether a pass comes to that send is known only later
// (GradReadyHook::default_deadline()). `otherwise`: there is none.
absl::Duration default_deadline(const torch::autograd::edge_list& losses,
                                const std::map<uint64_t, NodePtr>& sends, absl::Duration otherwise);

class PassGraph {
 public:
  using Outputs = std::vector<uint32_t>;
  // What the walks have reached at others: by origin, by message, outputs that were not reached
  // before.
  using Reached = std::map<WorkerKey, std::map<uint64_t, Outputs>>;
  // For the origin of a message.
  struct Outgoing {
    WorkerKey origin;
    MessageGradients gradients;
  };
  // What this worker has sent, by message.
  using Sends = std::map<uint64_t, NodePtr>;
  // The send of a message of this worker; null when there is none.
  using FindSend = std::function<NodePtr(uint64_t message)>;

  // `time_left`: until the pass's deadline.
  PassGraph(const AutogradContextId& context, const WorkerKey& self, FindSend find_send,
            LeafSlots::TimeLeft time_left);
  ~PassGraph();
  PassGraph(const PassGraph&) = delete;
  PassGraph& operator=(const PassGraph&) = delete;

  // Before it runs. Default: no, a node frees what it has saved when it has run.
  void set_retain_graph(bool retain) { retain_graph_ = retain; }

  // ---- finding ----
  // A loss, and the gradient to begin with.
  Status root(const torch::autograd::Edge& edge, at::Tensor gradient, Reached* reached);
  // Another worker has reached these outputs of a message that this worker has sent. An error when
  // it has sent none, or one has been named before.
  Status name(uint64_t message, const Outputs& outputs, Reached* reached);
  // Outputs named so far, of all messages.
  size_t named() const { return named_; }
  bool is_named(uint64_t message) const { return sends_.contains(message); }
  // All outputs of all of these, whether a walk reaches them or not.
  Status name_all(const Sends& sends, Reached* reached);
  // From now on what an output of `sends` that is not named could still reach waits for release().
  void hold(const Sends& sends);
  // No more will be named.
  void release();

  // ---- running ----
  // Before it runs; null: none.
  void set_effect(std::unique_ptr<LeafEffect> effect) { effect_ = std::move(effect); }
  // Null: none. Outlives it.
  void set_trace(PassTrace* trace) { trace_ = trace; }
  // Nodes that have run since this was asked last.
  size_t take_ran() { return std::exchange(ran_, 0); }
  // Each of the shape and type of its tensor. False: that message is unnamed, or it was fed before.
  StatusOr<bool> feed(MessageGradients gradients);
  // Runs what can be run; appends what leaves. Throws what a node or hook throws, as an error that
  // names the node: nothing can be done with the graph then.
  void run(std::vector<Outgoing>* out);
  // Nothing more is to be run: the running thread stops at the end of one node. From any thread.
  void stop() { stopped_.store(true, std::memory_order_relaxed); }
  // Something can be run.
  bool ready() const { return !ready_.empty() || !roots_.empty(); }
  // Reducers have asked for something to be done at the end.
  bool has_at_end() const { return leaves_->has_at_end(); }
  // What reducers have asked for, when it is complete, and the end of the effect, if there is one,
  // with what that says. Throws what they throw.
  std::string run_at_end();
  // What the end waits for, or "". From any thread, while the graph lives.
  std::string end_waits_for() const { return leaves_->waits_for(); }
  // The type of the node that runs, or null. From any thread, while the graph lives.
  const std::type_info* running_node() const {
    return running_node_.load(std::memory_order_relaxed);
  }
  // All that was found has run.
  bool complete() const { return left_ == 0; }
  // Messages whose gradients are waited for, by the worker from which they are to come.
  std::map<WorkerKey, std::vector<uint64_t>> missing() const;

  // In the order in which they were found.
  std::vector<LeafGradient> take_leaves();

 private:
  enum class Kind : uint8_t { kInterior, kLeaf, kSend, kRecv };
  struct Entry {
    NodePtr node{};
    Kind kind = Kind::kInterior;
    uint32_t waits_for = 0;           // edges and messages that will still bring something
    uint32_t edges = 0;               // that lead to it
    bool placed = false;              // something has come
    Place place{};                    // of what has come
    std::vector<uint32_t> targets{};  // parallel to the node's edges; kDead: goes nowhere
    std::vector<bool> reached{};      // recv: by input
    std::optional<torch::autograd::InputBuffer> buffer{};
    bool fed = false;                // send
    at::Tensor* gradient = nullptr;  // leaf: its slot
  };
  struct Ready {
    Place place{};
    uint64_t order = 0;
    uint32_t index = 0;
    bool operator<(const Ready& other) const {
      if (comes_before(place, other.place)) return false;
      return comes_before(other.place, place) || order > other.order;
    }
  };
  class Driver;

  // What a walk has reached and not looked at yet. Calls of a worker to itself may follow each other
  // without end, so their messages wait here, too, and no walk recurses.
  struct ToWalk {
    std::vector<uint32_t> nodes{};
    std::vector<std::pair<uint64_t, uint32_t>> outputs{};  // of messages of this worker to itself
  };

  uint32_t add(const NodePtr& node, bool* is_new);
  Status touch(const torch::autograd::Edge& edge, ToWalk* to_walk, Reached* reached,
               uint32_t* target);
  Status open(uint64_t message, const Outputs& outputs, ToWalk* to_walk, Reached* reached);
  Status walk(ToWalk to_walk, Reached* reached);
  void arrived(uint32_t index);  // one of those that it waits for
  void run_ready(std::vector<Outgoing>* out);
  void run_node(uint32_t index, std::vector<Outgoing>* out);
  void put(Entry* to, uint32_t input, at::Tensor gradient, std::optional<c10::Stream> from);
  // The place of a node that has all that it waits for, or will have.
  Place place_of(const Entry& entry) const;
  void push_ready(uint32_t index);
  // A gradient of a node at `place`, now or in its turn.
  void bring(uint32_t index, uint32_t input, at::Tensor gradient, std::optional<c10::Stream> from,
             const Place& place);
  void keep_apart(uint32_t index, const Place& place, ApartGradient one);
  void put_apart(uint32_t index);
  // Nothing that is still to come comes before it; nothing: nothing is still to come.
  std::optional<Place> first_to_come();
  MessageGradients leaving(const RecvRpcBackward& recv,
                           torch::autograd::variable_list gradients) const;
  torch::autograd::variable_list call(Entry* entry, torch::autograd::variable_list in,
                                      std::vector<Outgoing>* out);
  void accumulate(Entry* entry, at::Tensor gradient, bool has_post_hooks);
  // What is done with a leaf's gradient when that is final: a hook of the leaf, then the effect.
  void on_final(Entry* entry);
  void take_effect(const at::Tensor& leaf, at::Tensor* gradient);
  std::string finish_leaves();

  static constexpr uint32_t kDead = ~0U;

  const AutogradContextId context_;
  const WorkerKey self_;
  bool retain_graph_ = false;
  const FindSend find_send_;
  std::vector<Entry> nodes_;
  absl::flat_hash_map<const Node*, uint32_t> index_;
  std::map<uint64_t, uint32_t> sends_;  // by message
  const std::shared_ptr<LeafSlots> leaves_;
  std::unique_ptr<LeafEffect> effect_;
  std::vector<uint32_t> reduced_;  // leaves whose gradients reducers may change until the end
  std::vector<std::pair<torch::autograd::Edge, at::Tensor>> roots_;
  std::priority_queue<Ready> ready_;
  absl::flat_hash_set<const Node*> held_;
  std::set<uint32_t> held_ready_;
  std::vector<uint32_t> held_interior_;  // of held_ready_, in this state or an earlier one
  bool no_more_named_ = false;
  std::optional<AwaitedSends> awaited_;                  // from the first time that it matters
  absl::flat_hash_map<uint32_t, ApartGradients> apart_;  // by node
  bool all_named_ = false;
  PassTrace* trace_ = nullptr;
  StreamsUsed streams_;
  GuardRef after_;  // of what has been run
  std::atomic<const std::type_info*> running_node_ = nullptr;
  std::atomic<bool> stopped_ = false;
  size_t ran_ = 0;
  uint64_t order_ = 0;
  size_t named_ = 0;
  size_t left_ = 0;
};

}  // namespace weft::internal

#endif  // WEFT_DIST_AUTOGRAD_INTERNAL_GRAPH_H_
