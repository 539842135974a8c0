#include "weft/pipeline/internal/split.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "c10/core/GradMode.h"
#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/function_hook.h"
#include "torch/csrc/autograd/functions/accumulate_grad.h"
#include "torch/csrc/autograd/variable.h"

namespace weft::pipeline::internal {

using torch::autograd::AccumulateGrad;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

void add_to_grad(const at::Tensor& parameter, const at::Tensor& gradient) {
  if (!gradient.defined()) return;
  const c10::AutoGradMode off(false);
  at::Tensor& sum = parameter.mutable_grad();
  if (sum.defined()) {
    sum.add_(gradient);
  } else {
    sum = gradient.detach().clone();  // it may share memory with what others hold
  }
}

// Hooks save in the first part only: they run again when the second begins at their node.
struct SplitBackward::Phase {
  bool saving = false;
  std::vector<Intermediate*> met;
};

struct SplitBackward::Intermediate {
  std::shared_ptr<Node> node;
  edge_list parameters;
  variable_list saved;
};

struct SplitBackward::Hook final : torch::autograd::FunctionPreHook {
  Hook(std::shared_ptr<Phase> phase, Intermediate* at) : phase(std::move(phase)), at(at) {}
  variable_list operator()(const variable_list& gradients) override {
    if (phase->saving) {
      at->saved = gradients;
      phase->met.push_back(at);
    }
    return gradients;
  }
  const std::shared_ptr<Phase> phase;
  Intermediate* const at;  // lives until the phase has ended
};

namespace {

const AccumulateGrad* as_parameter(Node* node) { return dynamic_cast<AccumulateGrad*>(node); }

// For every node below `roots`: whether it is on a path to one of `goals`. `order`: as met.
class Marks {
 public:
  Marks(const std::vector<std::shared_ptr<Node>>& roots, const std::unordered_set<Node*>& goals)
      : goals_(goals) {
    for (const auto& root : roots) visit(root);
  }
  bool marked(Node* node) const { return marks_.at(node); }
  const std::vector<std::shared_ptr<Node>>& order() const { return order_; }

 private:
  // With a stack of its own: graphs get deep.
  void visit(const std::shared_ptr<Node>& root) {
    if (root == nullptr || !marks_.emplace(root.get(), goals_.count(root.get()) > 0).second) return;
    order_.push_back(root);
    std::vector<std::pair<Node*, size_t>> stack{{root.get(), 0}};
    while (!stack.empty()) {
      auto& [node, next] = stack.back();
      if (next == node->next_edges().size()) {
        const bool mark = marks_[node];
        stack.pop_back();
        if (mark && !stack.empty()) marks_[stack.back().first] = true;
        continue;
      }
      const auto& child = node->next_edges()[next++].function;
      if (child == nullptr) continue;
      const auto [it, is_new] = marks_.emplace(child.get(), goals_.count(child.get()) > 0);
      if (is_new) {
        order_.push_back(child);
        stack.emplace_back(child.get(), 0);
      } else if (it->second) {
        marks_[node] = true;
      }
    }
  }

  const std::unordered_set<Node*>& goals_;
  std::unordered_map<Node*, bool> marks_;
  std::vector<std::shared_ptr<Node>> order_;
};

// Parameters below the unmarked children of `node`, in the order met.
std::vector<std::shared_ptr<Node>> parameters_below(Node* node, const Marks& marks) {
  std::vector<std::shared_ptr<Node>> found;
  std::unordered_set<Node*> seen;
  std::vector<std::shared_ptr<Node>> todo;
  const auto children = [&](Node* of) {
    for (const auto& edge : of->next_edges()) {
      if (edge.function != nullptr && !marks.marked(edge.function.get()) &&
          seen.insert(edge.function.get()).second) {
        todo.push_back(edge.function);
      }
    }
  };
  children(node);
  while (!todo.empty()) {
    const std::shared_ptr<Node> next = std::move(todo.back());
    todo.pop_back();
    if (as_parameter(next.get()) != nullptr) {
      found.push_back(next);
    } else {
      children(next.get());
    }
  }
  return found;
}

const at::Tensor& parameter_of(const torch::autograd::Edge& edge) {
  return as_parameter(edge.function.get())->variable;
}
void accumulate(const edge_list& edges, const variable_list& gradients, size_t from = 0) {
  for (size_t i = 0; i < edges.size(); ++i)
    add_to_grad(parameter_of(edges[i]), gradients[from + i]);
}

void tell(const edge_list& parameters, const SplitBackward::OnReady& on_ready) {
  if (on_ready == nullptr) return;
  for (const auto& edge : parameters) on_ready(parameter_of(edge));
}

// While it lives, accumulators of parameters on the CPU tell when they have run. LibTorch runs those of a
// graph on the thread that asked for it; others it runs on a thread of their device.
class Telling {
 public:
  Telling(const edge_list& parameters, const SplitBackward::OnReady& on_ready) {
    for (const auto& edge : parameters) {
      if (!parameter_of(edge).is_cpu()) continue;
      told_.emplace_back(edge.function.get(),
                         edge.function->add_post_hook(std::make_unique<Told>(edge, on_ready)));
    }
  }
  ~Telling() {
    for (const auto& [node, key] : told_) node->del_post_hook(key);
  }
  Telling(const Telling&) = delete;
  Telling& operator=(const Telling&) = delete;

 private:
  struct Told final : torch::autograd::FunctionPostHook {
    Told(const torch::autograd::Edge& edge, const SplitBackward::OnReady& on_ready)
        : edge(edge), on_ready(on_ready) {}
    variable_list operator()(const variable_list& outputs, const variable_list&) override {
      on_ready(parameter_of(edge));
      return outputs;
    }
    const torch::autograd::Edge& edge;  // of the parameters given
    const SplitBackward::OnReady& on_ready;
  };
  std::vector<std::pair<Node*, uintptr_t>> told_;
};

// The engine over the outputs that have a gradient.
variable_list run(const std::vector<at::Tensor>& outputs, const variable_list& gradients,
                  const edge_list& wanted, bool keep, bool accumulate) {
  edge_list roots;
  variable_list incoming;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!gradients[i].defined() || !outputs[i].requires_grad()) continue;
    roots.push_back(torch::autograd::impl::gradient_edge(outputs[i]));
    incoming.push_back(gradients[i]);
  }
  if (roots.empty() || (wanted.empty() && !accumulate)) return variable_list(wanted.size());
  return torch::autograd::Engine::get_default_engine().execute(
      roots, incoming, keep, /*create_graph=*/false, accumulate, wanted);
}
variable_list execute(const std::vector<at::Tensor>& outputs, const variable_list& gradients,
                      const edge_list& wanted, bool keep) {
  return run(outputs, gradients, wanted, keep, /*accumulate=*/false);
}

}  // namespace

std::vector<at::Tensor> whole_backward(const std::vector<at::Tensor>& outputs,
                                       const std::vector<at::Tensor>& inputs,
                                       const std::vector<at::Tensor>& gradients,
                                       const std::vector<at::Tensor>& parameters) {
  edge_list wanted;
  std::vector<at::Tensor> into;
  std::vector<at::Tensor> result(inputs.size());
  for (const auto* of : {&inputs, &parameters}) {
    for (const at::Tensor& t : *of) {
      if (!t.defined() || !t.requires_grad()) continue;
      wanted.push_back(torch::autograd::impl::gradient_edge(t));
      into.push_back(t);
    }
  }
  const variable_list got = execute(outputs, gradients, wanted, /*keep=*/false);
  size_t next = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].defined() && inputs[i].requires_grad()) result[i] = got[next++];
  }
  for (; next < got.size(); ++next) add_to_grad(into[next], got[next]);
  return result;
}

SplitBackward::SplitBackward(const std::vector<at::Tensor>& outputs,
                             const std::vector<at::Tensor>& inputs)
    : outputs_(outputs), inputs_(inputs), phase_(std::make_shared<Phase>()) {
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (!inputs_[i].defined() || !inputs_[i].requires_grad()) continue;
    input_edges_.push_back(torch::autograd::impl::gradient_edge(inputs_[i]));
    input_of_edge_.push_back(i);
  }
  find_intermediates();
}
SplitBackward::~SplitBackward() = default;

void SplitBackward::find_intermediates() {
  std::unordered_set<Node*> goals;
  for (const auto& edge : input_edges_) goals.insert(edge.function.get());
  std::vector<std::shared_ptr<Node>> roots;
  for (const at::Tensor& output : outputs_) {
    if (output.requires_grad()) {
      roots.push_back(torch::autograd::impl::gradient_edge(output).function);
    }
  }
  const Marks marks(roots, goals);
  std::unordered_map<Node*, int> uses;
  std::vector<std::pair<std::shared_ptr<Node>, std::vector<std::shared_ptr<Node>>>> found;
  std::vector<std::shared_ptr<Node>> apart;  // below outputs that no input reaches
  for (const auto& root : roots) {
    if (marks.marked(root.get())) continue;
    if (as_parameter(root.get()) != nullptr) apart.push_back(root);
    for (const auto& p : parameters_below(root.get(), marks)) apart.push_back(p);
  }
  for (const auto& node : marks.order()) {
    if (!marks.marked(node.get()) || goals.count(node.get()) > 0) continue;
    auto parameters = parameters_below(node.get(), marks);
    if (parameters.empty()) continue;
    for (const auto& p : parameters) ++uses[p.get()];
    found.emplace_back(node, std::move(parameters));
  }
  std::unordered_set<Node*> taken;
  const auto take_shared = [&](const std::shared_ptr<Node>& p) {
    if (taken.insert(p.get()).second) shared_.emplace_back(p, 0);
  };
  if (input_edges_.empty()) {  // all of it is the second part
    for (const auto& p : apart) {
      if (taken.insert(p.get()).second) unmarked_.emplace_back(p, 0);
    }
    return;
  }
  // What only outputs apart from the inputs reach is found at once, in the first part.
  for (const auto& p : apart) take_shared(p);
  for (auto& [node, parameters] : found) {
    auto one = std::make_unique<Intermediate>();
    one->node = node;
    for (const auto& p : parameters) {
      if (uses[p.get()] > 1 || taken.count(p.get()) > 0) {
        take_shared(p);
      } else {
        one->parameters.emplace_back(p, 0);
      }
    }
    if (one->parameters.empty()) continue;
    node->add_pre_hook(std::make_unique<Hook>(phase_, one.get()));
    intermediates_.push_back(std::move(one));
  }
}

std::vector<at::Tensor> SplitBackward::input_grads(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> result(inputs_.size());
  if (input_edges_.empty()) {
    gradients_ = gradients;
    return result;
  }
  edge_list wanted = input_edges_;
  wanted.insert(wanted.end(), shared_.begin(), shared_.end());
  phase_->saving = true;
  variable_list got;
  try {
    got = execute(outputs_, gradients, wanted, /*keep=*/true);
  } catch (...) {
    phase_->saving = false;
    throw;
  }
  phase_->saving = false;
  for (size_t i = 0; i < input_edges_.size(); ++i) result[input_of_edge_[i]] = got[i];
  accumulate(shared_, got, input_edges_.size());
  return result;
}

void SplitBackward::all_weight_grads(const OnReady& on_ready) {
  const bool has_hooks = std::any_of(unmarked_.begin(), unmarked_.end(), [](const auto& edge) {
    return !edge.function->post_hooks().empty() ||
           edge.function->tensor_post_acc_grad_hooks() != nullptr;
  });
  if (on_ready == nullptr || has_hooks) {
    accumulate(unmarked_, execute(outputs_, gradients_, unmarked_, /*keep=*/false));
    return tell(unmarked_, on_ready);
  }
  const Telling telling(unmarked_, on_ready);
  run(outputs_, gradients_, {}, /*keep=*/false, /*accumulate=*/true);
  for (const auto& edge : unmarked_) {
    if (!parameter_of(edge).is_cpu()) on_ready(parameter_of(edge));
  }
}

void SplitBackward::weight_grads_of(Intermediate* one) {
  edge_list roots;
  variable_list incoming;
  for (size_t i = 0; i < one->saved.size(); ++i) {
    if (!one->saved[i].defined()) continue;
    roots.emplace_back(one->node, static_cast<uint32_t>(i));
    incoming.push_back(one->saved[i]);
  }
  if (!roots.empty()) {
    accumulate(one->parameters,
               torch::autograd::Engine::get_default_engine().execute(
                   roots, incoming, /*keep_graph=*/true,
                   /*create_graph=*/false, /*accumulate_grad=*/false, one->parameters));
  }
  one->saved.clear();
}

void SplitBackward::weight_grads(const OnReady& on_ready) {
  if (input_edges_.empty()) return all_weight_grads(on_ready);
  tell(shared_, on_ready);  // of the first part
  for (Intermediate* one : phase_->met) {
    weight_grads_of(one);
    tell(one->parameters, on_ready);
  }
  phase_->met.clear();
}

bool SplitBackward::has_parts_of(const SplitBackward& other) const {
  const auto same = [](const edge_list& a, const edge_list& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
      return parameter_of(x).is_same(parameter_of(y));
    });
  };
  return !input_edges_.empty() && !other.input_edges_.empty() && same(shared_, other.shared_) &&
         std::equal(phase_->met.begin(), phase_->met.end(), other.phase_->met.begin(),
                    other.phase_->met.end(), [&same](const auto* x, const auto* y) {
                      return same(x->parameters, y->parameters);
                    });
}

Status SplitBackward::weight_grads(const std::vector<SplitBackward*>& graphs,
                                   const OnReady& on_ready, absl::FunctionRef<Status(size_t)> at) {
  const SplitBackward& last = *graphs.back();
  for (const SplitBackward* graph : graphs) {
    if (graph->has_parts_of(last)) continue;
    for (size_t k = 0; k < graphs.size(); ++k) {
      WEFT_RETURN_IF_ERROR(at(k));
      graphs[k]->weight_grads(graphs[k] == &last ? on_ready : nullptr);
    }
    return absl::OkStatus();
  }
  tell(last.shared_, on_ready);
  for (size_t part = 0; part < last.phase_->met.size(); ++part) {
    for (size_t k = 0; k < graphs.size(); ++k) {
      WEFT_RETURN_IF_ERROR(at(k));
      graphs[k]->weight_grads_of(graphs[k]->phase_->met[part]);
    }
    tell(last.phase_->met[part]->parameters, on_ready);
  }
  for (SplitBackward* graph : graphs) graph->phase_->met.clear();
  return absl::OkStatus();
}

}  // namespace weft::pipeline::internal
