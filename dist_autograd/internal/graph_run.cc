// Running the part of the graph that was found.

#include <utility>

#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/autograd/functions/accumulate_grad.h"
#include "torch/csrc/autograd/input_metadata.h"
#include "weft/dist_autograd/internal/graph.h"

namespace weft::internal {

using torch::autograd::AccumulateGrad;
using torch::autograd::variable_list;

void add_gradient(const at::Tensor& leaf, at::Tensor* sum, const at::Tensor& gradient,
                  size_t references) {
  AccumulateGrad::accumulateGrad(leaf, *sum, gradient, references,
                                 [sum](at::Tensor&& updated) { *sum = std::move(updated); });
}

// The node that LibTorch's engine runs: it runs ours.
class PassGraph::Driver final : public Node {
 public:
  Driver(PassGraph* graph, std::vector<Outgoing>* out) : Node(), graph_(graph), out_(out) {
    add_input_metadata(at::zeros({}));  // it wants real ones
  }
  variable_list apply(variable_list&&) override {
    try {
      graph_->run_ready(out_);
    } catch (...) {
      status_ = status_from_current_exception();
    }
    return {};
  }
  std::string name() const override { return "DistributedBackward"; }
  const Status& status() const { return status_; }

 private:
  PassGraph* const graph_;
  std::vector<Outgoing>* const out_;
  Status status_;
};

StatusOr<bool> PassGraph::feed(uint64_t message, std::vector<at::Tensor> gradients) {
  const auto at = sends_.find(message);
  if (at == sends_.end()) return false;
  Entry& entry = nodes_[at->second];
  if (entry.fed) return false;
  if (gradients.size() != entry.node->num_inputs()) {
    return make_error(ErrorKind::kProtocol,
                      absl::StrCat(gradients.size(), " gradients for message ", message, " of ",
                                   to_string(self_), ", which has ", entry.node->num_inputs()));
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    const at::Tensor& gradient = gradients[i];
    if (!gradient.defined()) continue;
    // The engine's own check would sum a larger one, or cast it, without a word.
    const auto& wanted = entry.node->input_metadata(i);
    if (!wanted.is_same_shape(gradient) || wanted.options().dtype() != gradient.dtype() ||
        wanted.device() != gradient.device()) {
      return make_error(
          ErrorKind::kProtocol,
          absl::StrCat("gradient ", i, " for message ", message, " of ", to_string(self_), " is ",
                       gradient.toString(), " of ", gradient.dim(),
                       " dimensions, which is not its tensor's shape or type"));
    }
  }
  entry.fed = true;
  entry.buffer.emplace(std::move(gradients));
  arrived(at->second);
  return true;
}

void PassGraph::arrived(uint32_t index) {
  Entry& entry = nodes_[index];
  if (--entry.waits_for > 0) return;
  if (!held_.empty() && held_.contains(entry.node.get())) {
    held_ready_.insert(index);  // unless more is found that it is to wait for
  } else {
    ready_.push(Ready{entry.node->sequence_nr(), order_++, index});
  }
}

void PassGraph::run(std::vector<Outgoing>* out) {
  if (!ready()) return;
  const auto driver = make_node<Driver>(this, out);
  torch::autograd::Engine::get_default_engine().execute(
      {torch::autograd::Edge(driver, 0)}, {at::zeros({})}, /*keep_graph=*/true,
      /*create_graph=*/false, /*accumulate_grad=*/true);
  throw_if_error(driver->status());
}

void PassGraph::run_ready(std::vector<Outgoing>* out) {
  for (auto& [edge, gradient] : std::exchange(roots_, {})) {
    const uint32_t index = index_.at(edge.function.get());
    Entry& entry = nodes_[index];
    if (!entry.buffer.has_value()) entry.buffer.emplace(entry.node->num_inputs());
    entry.buffer->add(edge.input_nr, std::move(gradient), std::nullopt, std::nullopt,
                      entry.node.get());
    arrived(index);
  }
  while (!ready_.empty()) {
    const uint32_t index = ready_.top().index;
    ready_.pop();
    run_node(index, out);
  }
}

void PassGraph::run_node(uint32_t index, std::vector<Outgoing>* out) {
  Entry& entry = nodes_[index];
  variable_list results;
  try {
    results = call(&entry, std::move(entry.buffer->buffer), out);
  } catch (...) {
    throw Error(annotate(status_from_current_exception(), entry.node->name()));
  }
  entry.buffer.reset();
  --left_;
  for (size_t i = 0; i < entry.targets.size(); ++i) {
    const uint32_t target = entry.targets[i];
    if (target == kDead) continue;
    Entry& next = nodes_[target];
    if (!next.buffer.has_value()) next.buffer.emplace(next.node->num_inputs());
    if (results[i].defined()) {
      next.buffer->add(entry.node->next_edge(i).input_nr, std::move(results[i]), std::nullopt,
                       std::nullopt, next.node.get());
    }
    arrived(target);
  }
}

variable_list PassGraph::call(Entry* entry, variable_list in, std::vector<Outgoing>* out) {
  Node& node = *entry->node;
  for (const auto& hook : node.tensor_pre_hooks()) in = (*hook)(in);
  for (const auto& [output, hook] : node.retains_grad_hooks()) in = (*hook)(in);
  for (const auto& hook : node.pre_hooks()) in = (*hook)(in);
  const bool has_post_hooks = !node.post_hooks().empty();
  variable_list results;
  const variable_list kept = has_post_hooks ? in : variable_list();
  switch (entry->kind) {
    case Kind::kLeaf: accumulate(entry, std::move(in[0]), has_post_hooks); break;
    case Kind::kRecv: {
      const auto& recv = static_cast<const RecvRpcBackward&>(node);
      if (recv.origin == self_) {
        value_or_throw(feed(recv.message, std::move(in)));
      } else {
        out->push_back(Outgoing{recv.origin, MessageGradients{recv.message, std::move(in)}});
      }
      break;
    }
    case Kind::kSend:
    case Kind::kInterior:
      if (!retain_graph_) node.will_release_variables();
      results = node(std::move(in));
      torch::autograd::validate_outputs(
          node.next_edges(), results,
          [&node](const std::string& text) { return absl::StrCat(node.name(), ": ", text); });
      break;
  }
  for (const auto& hook : node.post_hooks()) {
    if (auto* const ready = dynamic_cast<GradReadyHook*>(hook.get())) {
      ready->on_grad_ready(leaves_);
    } else {
      results = (*hook)(results, kept);
    }
  }
  if (results.size() != entry->targets.size()) {
    throw_error(make_error(ErrorKind::kUser,
                           absl::StrCat("gave ", results.size(), " gradients for ",
                                        entry->targets.size(), " inputs of its forward")));
  }
  if (!retain_graph_) node.release_variables();
  return results;
}

void PassGraph::accumulate(Entry* entry, at::Tensor gradient, bool has_post_hooks) {
  if (!gradient.defined()) return;
  const at::Tensor& leaf = static_cast<const AccumulateGrad&>(*entry->node).variable;
  if (!leaf.defined() || !leaf.requires_grad()) return;
  // A view of memory that a gradient which leaves, or another leaf's, holds as well.
  const bool shared = gradient.has_storage() && gradient.storage().use_count() > 1;
  add_gradient(leaf, entry->gradient, gradient, shared ? 0 : (has_post_hooks ? 2 : 1));
}

void PassGraph::run_at_end() {
  const c10::AutoGradMode no_grad(false);
  for (auto todo = leaves_->take_at_end(); !todo.empty(); todo = leaves_->take_at_end()) {
    for (auto& one : todo) one();
  }
}

std::vector<LeafGradient> PassGraph::take_leaves() {
  std::vector<LeafGradient> leaves;
  for (Entry& entry : nodes_) {
    if (entry.kind != Kind::kLeaf || !entry.gradient->defined()) continue;
    leaves.push_back(LeafGradient{static_cast<const AccumulateGrad&>(*entry.node).variable,
                                  *std::exchange(entry.gradient, nullptr)});
  }
  leaves_->visit_added([&leaves](const at::Tensor& leaf, const at::Tensor& gradient) {
    leaves.push_back(LeafGradient{leaf, gradient});
  });
  return leaves;
}

}  // namespace weft::internal
