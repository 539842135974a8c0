// Finding the part of the graph that a pass needs.

#include "weft/dist_autograd/internal/graph.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "torch/csrc/autograd/functions/accumulate_grad.h"

namespace weft::internal {

absl::Duration default_deadline(const torch::autograd::edge_list& losses,
                                const std::map<uint64_t, NodePtr>& sends,
                                absl::Duration otherwise) {
  std::optional<absl::Duration> longest;
  absl::flat_hash_set<const Node*> seen;
  std::vector<Node*> to_walk;
  const auto reach = [&](const NodePtr& node) {
    if (node != nullptr && seen.insert(node.get()).second) to_walk.push_back(node.get());
  };
  for (const torch::autograd::Edge& edge : losses) reach(edge.function);
  for (const auto& [id, send] : sends) reach(send);
  while (!to_walk.empty()) {
    const Node& node = *to_walk.back();
    to_walk.pop_back();
    for (const auto& hook : node.post_hooks()) {
      const auto* const reducer = dynamic_cast<const GradReadyReceiver*>(hook.get());
      const auto wanted = reducer == nullptr ? std::nullopt : reducer->default_deadline();
      if (wanted.has_value()) longest = std::max(longest.value_or(*wanted), *wanted);
    }
    for (const torch::autograd::Edge& edge : node.next_edges()) reach(edge.function);
  }
  return longest.value_or(otherwise);
}

PassGraph::PassGraph(const AutogradContextId& context, const WorkerKey& self, FindSend find_send,
                     LeafSlots::TimeLeft time_left)
    : context_(context),
      self_(self),
      find_send_(std::move(find_send)),
      leaves_(std::make_shared<LeafSlots>(context, std::move(time_left))) {}

PassGraph::~PassGraph() {
  // What has not run now never will; it often holds the accessor, which would hold it.
  leaves_->take_at_end();
  for (const Entry& entry : nodes_) {
    if (entry.kind == Kind::kSend || entry.kind == Kind::kRecv) last_use_of(entry.node.get());
  }
}

uint32_t PassGraph::add(const NodePtr& node, bool* is_new) {
  const auto [at, inserted] = index_.try_emplace(node.get(), static_cast<uint32_t>(nodes_.size()));
  *is_new = inserted;
  if (!inserted) return at->second;
  Entry& entry = nodes_.emplace_back();
  entry.node = node;
  if (dynamic_cast<const RecvRpcBackward*>(node.get()) != nullptr) {
    entry.kind = Kind::kRecv;
    entry.reached.resize(node->num_inputs());
  } else if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get())) {
    entry.kind = Kind::kLeaf;
    entry.gradient = leaves_->slot(leaf->variable);
  }
  ++left_;
  return at->second;
}

Status PassGraph::touch(const torch::autograd::Edge& edge, ToWalk* to_walk, Reached* reached,
                        uint32_t* target) {
  *target = kDead;
  if (!edge.is_valid()) return absl::OkStatus();
  bool is_new = false;
  const uint32_t index = add(edge.function, &is_new);
  *target = index;
  ++nodes_[index].waits_for;
  ++nodes_[index].edges;
  if (nodes_[index].kind == Kind::kInterior && is_new) to_walk->nodes.push_back(index);
  if (nodes_[index].kind != Kind::kRecv) return absl::OkStatus();
  const auto& recv = static_cast<const RecvRpcBackward&>(*edge.function);
  if (recv.context != context_) {
    return make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("a loss of ", to_string(context_),
                     " depends on a tensor that was received from ", to_string(recv.origin), " in ",
                     to_string(recv.context), ": detach it, or compute both in one context"));
  }
  if (nodes_[index].reached[edge.input_nr]) return absl::OkStatus();
  nodes_[index].reached[edge.input_nr] = true;
  if (recv.origin != self_) {
    (*reached)[recv.origin][recv.message].push_back(edge.input_nr);
  } else if (!all_named_) {
    to_walk->outputs.emplace_back(recv.message, edge.input_nr);
  }
  return absl::OkStatus();
}

Status PassGraph::open(uint64_t message, const Outputs& outputs, ToWalk* to_walk,
                       Reached* reached) {
  auto at = sends_.find(message);
  if (at == sends_.end()) {
    const NodePtr send = find_send_(message);
    if (send == nullptr) {
      return make_error(ErrorKind::kNotFound,
                        absl::StrCat("message ", message, " of ", to_string(self_), " in ",
                                     to_string(context_), " is not recorded"));
    }
    bool is_new = false;
    at = sends_.emplace(message, add(send, &is_new)).first;
    Entry& entry = nodes_[at->second];
    entry.kind = Kind::kSend;
    entry.waits_for = 1;
    const CallOrder* const order = static_cast<const SendRpcBackward&>(*send).order.get();
    entry.place.first = entry.place.last = order;
    entry.targets.assign(send->num_outputs(), kDead);
  }
  const uint32_t index = at->second;
  const NodePtr send = nodes_[index].node;
  for (const uint32_t output : outputs) {
    if (output >= nodes_[index].targets.size() || nodes_[index].targets[output] != kDead) {
      return make_error(
          ErrorKind::kProtocol,
          absl::StrCat("output ", output, " of message ", message, " of ", to_string(self_),
                       output < send->num_outputs() ? " was named twice" : " does not exist, of ",
                       output < send->num_outputs() ? "" : absl::StrCat(send->num_outputs())));
    }
    ++named_;
    uint32_t target = kDead;
    WEFT_RETURN_IF_ERROR(touch(send->next_edge(output), to_walk, reached, &target));
    nodes_[index].targets[output] = target;
  }
  return absl::OkStatus();
}

Status PassGraph::walk(ToWalk to_walk, Reached* reached) {
  while (!to_walk.nodes.empty() || !to_walk.outputs.empty()) {
    if (to_walk.nodes.empty()) {
      const auto [message, output] = to_walk.outputs.back();
      to_walk.outputs.pop_back();
      WEFT_RETURN_IF_ERROR(open(message, {output}, &to_walk, reached));
      continue;
    }
    const uint32_t index = to_walk.nodes.back();
    to_walk.nodes.pop_back();
    const NodePtr node = nodes_[index].node;
    std::vector<uint32_t> targets;
    targets.reserve(node->num_outputs());
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      targets.emplace_back();
      WEFT_RETURN_IF_ERROR(touch(edge, &to_walk, reached, &targets.back()));
    }
    nodes_[index].targets = std::move(targets);
  }
  return absl::OkStatus();
}

Status PassGraph::root(const torch::autograd::Edge& edge, at::Tensor gradient, Reached* reached) {
  ToWalk to_walk;
  uint32_t target = kDead;
  WEFT_RETURN_IF_ERROR(touch(edge, &to_walk, reached, &target));
  roots_.emplace_back(edge, std::move(gradient));
  return walk(std::move(to_walk), reached);
}

Status PassGraph::name(uint64_t message, const Outputs& outputs, Reached* reached) {
  ToWalk to_walk;
  WEFT_RETURN_IF_ERROR(open(message, outputs, &to_walk, reached));
  return walk(std::move(to_walk), reached);
}

Status PassGraph::name_all(const Sends& sends, Reached* reached) {
  all_named_ = true;
  for (const auto& [message, send] : sends) {
    Outputs all(send->num_outputs());
    std::iota(all.begin(), all.end(), 0U);
    WEFT_RETURN_IF_ERROR(name(message, all, reached));
  }
  return absl::OkStatus();
}

void PassGraph::hold(const Sends& sends) {
  std::vector<const Node*> to_walk;
  const auto reach = [this, &to_walk](const torch::autograd::Edge& edge) {
    if (edge.is_valid() && held_.insert(edge.function.get()).second) {
      to_walk.push_back(edge.function.get());
    }
  };
  awaited_.emplace();
  for (const auto& [message, send] : sends) {
    awaited_->add(message, send);
    const auto at = sends_.find(message);
    const Entry* entry = at == sends_.end() ? nullptr : &nodes_[at->second];
    bool partly = false;
    for (uint32_t i = 0; i < send->num_outputs(); ++i) {
      if (entry != nullptr && entry->targets[i] != kDead) continue;
      if (!send->next_edge(i).is_valid()) continue;
      partly = true;
      reach(send->next_edge(i));
    }
    if (partly) held_.insert(send.get());
  }
  awaited_->sort();
  // Beyond a recv there are only sends, which are among these.
  while (!to_walk.empty()) {
    const Node* node = to_walk.back();
    to_walk.pop_back();
    for (const torch::autograd::Edge& edge : node->next_edges()) reach(edge);
  }
}

void PassGraph::release() {
  no_more_named_ = true;
  held_.clear();
  held_interior_.clear();
  for (const uint32_t index : std::exchange(held_ready_, {})) {
    if (nodes_[index].waits_for == 0) push_ready(index);
  }
}

std::map<WorkerKey, std::vector<uint64_t>> PassGraph::missing() const {
  std::map<WorkerKey, std::vector<uint64_t>> out;
  for (const auto& [message, index] : sends_) {
    const Entry& send = nodes_[index];
    if (!send.fed) out[static_cast<const SendRpcBackward*>(send.node.get())->to].push_back(message);
  }
  return out;
}

}  // namespace weft::internal
