// Running the part of the graph that was found.

#include <utility>

#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "c10/core/Event.h"
#include "c10/core/StreamGuard.h"
#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/autograd/functions/accumulate_grad.h"
#include "torch/csrc/autograd/input_metadata.h"
#include "torch/csrc/autograd/variable.h"
#include "weft/dist_autograd/internal/anomaly.h"
#include "weft/dist_autograd/internal/graph.h"
#include "weft/dist_autograd/internal/pass_trace.h"

namespace weft::internal {

using torch::autograd::AccumulateGrad;
using torch::autograd::variable_list;

namespace {

// Where a node's forward ran, and so its backward does, as in LibTorch's engine
// (torch/csrc/autograd/engine.cpp, evaluate_function); nothing for one of the CPU.
std::optional<c10::Stream> stream_of(const Node& node) {
  for (uint32_t i = 0; i < node.num_inputs(); ++i) {
    const auto& metadata = node.input_metadata(i);
    if (!metadata.device().is_cpu()) return metadata.stream();
  }
  return std::nullopt;
}

void wait_for_inputs(const torch::autograd::InputBuffer& inputs,
                     const std::optional<c10::Stream>& stream) {
  for (size_t i = 0; i < inputs.ready_events.size(); ++i) {
    if (!inputs.ready_events[i].has_value()) continue;
    const auto here = stream.has_value() ? stream : stream_here(inputs.buffer[i]);
    if (here.has_value() && inputs.ready_streams[i] != here) inputs.ready_events[i]->block(*here);
  }
}

// The hook is given the leaf's memory under a `.grad` of its own: several passes do not meet in the
// leaf's, and what it leaves there is this pass's gradient, also nothing.
void run_post_accumulate_hook(const at::Tensor& leaf, at::Tensor* gradient) {
  if (!gradient->defined() || !leaf.requires_grad()) return;
  const auto& hook = torch::autograd::impl::post_acc_grad_hooks(leaf);
  if (hook == nullptr) return;
  const at::Tensor alias = leaf.variable_data().set_requires_grad(true);
  alias.mutable_grad() = std::exchange(*gradient, at::Tensor());
  (*hook)(alias);
  *gradient = std::exchange(alias.mutable_grad(), at::Tensor());
}

}  // namespace

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

StatusOr<bool> PassGraph::feed(MessageGradients given) {
  const uint64_t message = given.message;
  std::vector<at::Tensor>& gradients = given.tensors;
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
      return make_error(ErrorKind::kProtocol,
                        absl::StrCat("gradient ", i, " for message ", message, " of ",
                                     to_string(self_), " is ", gradient.toString(), " of ",
                                     gradient.dim(), " dimensions on ", gradient.device().str(),
                                     ", which is not its tensor's shape, type or device"));
    }
  }
  entry.fed = true;
  if (any_on_device(gradients)) {
    use_here(given.after, gradients);
    for (uint32_t i = 0; i < gradients.size(); ++i) {
      const auto from = stream_here(gradients[i]);
      put(&entry, i, std::move(gradients[i]), from);
    }
  } else {
    entry.buffer.emplace(std::move(gradients));
  }
  arrived(at->second);
  return true;
}

void PassGraph::arrived(uint32_t index) {
  Entry& entry = nodes_[index];
  if (--entry.waits_for > 0) return;
  if (!held_.empty() && held_.contains(entry.node.get())) {
    held_ready_.insert(index);  // unless more is found that it is to wait for
    if (entry.kind == Kind::kInterior) held_interior_.push_back(index);
  } else {
    push_ready(index);
  }
}

void PassGraph::run(std::vector<Outgoing>* out) {
  if (!ready()) return;
  const auto driver = make_node<Driver>(this, out);
  torch::autograd::Engine::get_default_engine().execute(
      {torch::autograd::Edge(driver, 0)}, {at::zeros({})}, /*keep_graph=*/true,
      /*create_graph=*/false, /*accumulate_grad=*/true);
  throw_if_error(driver->status());
  after_ = streams_.mark();
  for (Outgoing& one : *out) one.gradients.after = after_;
}

void PassGraph::put(Entry* to, uint32_t input, at::Tensor gradient,
                    std::optional<c10::Stream> from) {
  if (!to->buffer.has_value()) to->buffer.emplace(to->node->num_inputs());
  if (!gradient.defined()) return;
  std::optional<c10::Stream> at;
  if (on_device(gradient)) {
    at = stream_of(*to->node);
    if (!from.has_value()) streams_.add(from = stream_here(gradient));
  }
  to->buffer->add(input, std::move(gradient), from, at, to->node.get());
}

void PassGraph::run_ready(std::vector<Outgoing>* out) {
  for (auto& [edge, gradient] : std::exchange(roots_, {})) {
    bring(index_.at(edge.function.get()), edge.input_nr, std::move(gradient), std::nullopt,
          Place{});
  }
  while (!ready_.empty() && !stopped_.load(std::memory_order_relaxed)) {
    const uint32_t index = ready_.top().index;
    ready_.pop();
    run_node(index, out);
  }
}

void PassGraph::run_node(uint32_t index, std::vector<Outgoing>* out) {
  if (!apart_.empty()) put_apart(index);
  Entry& entry = nodes_[index];
  const Place place = place_of(entry);
  variable_list results;
  const absl::Time start = trace_ == nullptr ? absl::InfinitePast() : trace_->now();
  const std::optional<c10::Stream> stream = stream_of(*entry.node);
  const c10::OptionalStreamGuard on_its_stream(stream);
  streams_.add(stream);
  const Node& node = *entry.node;
  running_node_.store(&typeid(node), std::memory_order_relaxed);
  try {
    std::optional<torch::autograd::InputBuffer> inputs = std::exchange(entry.buffer, std::nullopt);
    wait_for_inputs(*inputs, stream);
    results = call(&entry, std::move(inputs->buffer), out);
  } catch (...) {
    throw Error(annotate(with_forward_calls(entry.node.get(), status_from_current_exception()),
                         entry.node->name()));
  }
  running_node_.store(nullptr, std::memory_order_relaxed);
  if (trace_ != nullptr) trace_->node(node.name(), start);
  ++ran_;
  --left_;
  for (size_t i = 0; i < entry.targets.size(); ++i) {
    const uint32_t target = entry.targets[i];
    if (target == kDead) continue;
    bring(target, entry.node->next_edge(i).input_nr, std::move(results[i]), stream, place);
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
      MessageGradients gradients = leaving(recv, std::move(in));
      if (recv.origin == self_) {
        value_or_throw(feed(std::move(gradients)));
      } else {
        out->push_back(Outgoing{recv.origin, std::move(gradients)});
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
      check_nan(node, results);
      break;
  }
  bool reduced = false;
  for (const auto& hook : node.post_hooks()) {
    if (auto* const ready = dynamic_cast<GradReadyReceiver*>(hook.get())) {
      ready->on_grad_ready(leaves_);
      reduced = true;
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
  if (entry->kind == Kind::kLeaf && reduced) {
    reduced_.push_back(static_cast<uint32_t>(entry - nodes_.data()));
  } else if (entry->kind == Kind::kLeaf) {
    on_final(entry);
  }
  return results;
}

MessageGradients PassGraph::leaving(const RecvRpcBackward& recv, variable_list gradients) const {
  if (recv.origin == self_ && !recv.devices.empty()) {
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].defined()) gradients[i] = gradients[i].to(*device_of_code(recv.devices[i]));
    }
  }
  return MessageGradients{recv.message, std::move(gradients), recv.devices, {}};
}

void PassGraph::on_final(Entry* entry) {
  take_effect(static_cast<const AccumulateGrad&>(*entry->node).variable, entry->gradient);
}

void PassGraph::take_effect(const at::Tensor& leaf, at::Tensor* gradient) {
  if (!leaf.defined()) return;
  run_post_accumulate_hook(leaf, gradient);
  if (effect_ == nullptr || !gradient->defined()) return;
  if (effect_->on_final(leaf, *gradient)) *gradient = at::Tensor();
}

void PassGraph::accumulate(Entry* entry, at::Tensor gradient, bool has_post_hooks) {
  if (!gradient.defined()) return;
  const at::Tensor& leaf = static_cast<const AccumulateGrad&>(*entry->node).variable;
  if (!leaf.defined() || !leaf.requires_grad()) return;
  // A view of memory that a gradient which leaves, or another leaf's, holds as well.
  const bool shared = gradient.has_storage() && gradient.storage().use_count() > 1;
  add_gradient(leaf, entry->gradient, gradient, shared ? 0 : (has_post_hooks ? 2 : 1));
}

std::string PassGraph::run_at_end() {
  const c10::AutoGradMode no_grad(false);
  use_here(after_, {});
  std::string outcome = finish_leaves();
  if (after_ != nullptr) after_ = after_->derive();
  return outcome;
}

std::string PassGraph::finish_leaves() {
  for (auto todo = leaves_->take_at_end(); !todo.empty(); todo = leaves_->take_at_end()) {
    for (auto& one : todo) one();
  }
  for (const uint32_t index : std::exchange(reduced_, {})) on_final(&nodes_[index]);
  leaves_->visit_added(
      [this](const at::Tensor& leaf, at::Tensor& gradient) { take_effect(leaf, &gradient); });
  return effect_ == nullptr ? "" : effect_->finish();
}

std::vector<LeafGradient> PassGraph::take_leaves() {
  std::vector<LeafGradient> leaves;
  for (Entry& entry : nodes_) {
    if (entry.kind != Kind::kLeaf || !entry.gradient->defined()) continue;
    leaves.push_back(LeafGradient{static_cast<const AccumulateGrad&>(*entry.node).variable,
                                  *std::exchange(entry.gradient, nullptr), after_});
  }
  leaves_->visit_added([this, &leaves](const at::Tensor& leaf, at::Tensor& gradient) {
    leaves.push_back(LeafGradient{leaf, gradient, after_});
  });
  return leaves;
}

}  // namespace weft::internal
