#include "weft/pipeline/internal/module_compute.h"

#include <algorithm>
#include <utility>

#include <torch/nn/module.h>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Context.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/mul.h"
#include "ATen/ops/ones_like.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "torch/csrc/autograd/engine.h"
#include "weft/rpc/library.h"
#include "weft/rpc/value.h"

namespace weft::pipeline::internal {
namespace {

constexpr std::string_view kKept = "optimizer/";

Status cannot(std::string_view what) { return make_error(ErrorKind::kInvalidArgument, what); }

std::string shape(const at::Tensor& t) {
  return t.defined() ? absl::StrCat("[", absl::StrJoin(t.sizes(), ", "), "]") : "undefined";
}

// "(tensor,tensor)->...": how many tensors; -1: a list of them; nothing: something else.
std::optional<int> tensors_taken(std::string_view signature) {
  const size_t end = signature.find(")->");
  if (end == std::string_view::npos || signature.empty() || signature[0] != '(') return {};
  std::string_view list = signature.substr(1, end - 1);
  if (list == "list<tensor>") return -1;
  int n = 0;
  while (!list.empty()) {
    constexpr std::string_view kTensor = "tensor";
    if (list.substr(0, kTensor.size()) != kTensor) return {};
    list.remove_prefix(kTensor.size());
    if (!list.empty() && list[0] == ',') list.remove_prefix(1);
    ++n;
  }
  return n;
}

StatusOr<Tensors> take_tensors(Payload result) {
  Decoder in(std::move(result));
  Tensors out;
  if (in.next() == ValueKind::kList) {
    WEFT_ASSIGN_OR_RETURN(out, in.take<Tensors>());
  } else if (in.next() == ValueKind::kTuple) {
    // Its size is found by trying: a tuple converts only to a tuple of the same size.
    return cannot("it gives a tuple with something else than 2 to 4 tensors");
  } else {
    WEFT_ASSIGN_OR_RETURN(out.emplace_back(), in.take<at::Tensor>());
  }
  WEFT_RETURN_IF_ERROR(in.finish());
  return out;
}

template <size_t N>
StatusOr<Tensors> take_tuple(const Payload& result) {
  Decoder in{Payload(result)};
  WEFT_RETURN_IF_ERROR(in.begin_tuple(N));
  Tensors out;
  for (size_t i = 0; i < N; ++i) {
    WEFT_ASSIGN_OR_RETURN(out.emplace_back(), in.take<at::Tensor>());
  }
  in.end();
  WEFT_RETURN_IF_ERROR(in.finish());
  return out;
}

StatusOr<Tensors> tensors_of(Payload result) {
  for (const auto& taken : {take_tuple<2>(result), take_tuple<3>(result), take_tuple<4>(result)}) {
    if (taken.ok()) return taken;
  }
  return take_tensors(std::move(result));
}

// A different one for each micro-batch of each stage of each step.
uint64_t seed_of(uint64_t seed, int64_t step, int stage, int micro_batch) {
  uint64_t x = seed;
  for (const uint64_t part : {static_cast<uint64_t>(step), static_cast<uint64_t>(stage),
                              static_cast<uint64_t>(micro_batch)}) {
    x = (x ^ (part + 0x9E3779B97F4A7C15u + (x << 6) + (x >> 2))) * 0xD6E8FEB86659FD93u;
    x ^= x >> 32;
  }
  return x;
}

}  // namespace

void seed_generator(uint64_t seed, int64_t step, int stage, int micro_batch) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed_of(seed, step, stage, micro_batch));
}

ModuleCompute::ModuleCompute(std::shared_ptr<const Worker> worker,
                             weft::internal::LocalModule module, ModuleComputeOptions options)
    : worker_(std::move(worker)),
      module_(std::move(module)),
      options_(std::move(options)),
      object_(module_.module, module_.object),
      parameters_(module_.module->parameters()) {}

StatusOr<std::shared_ptr<ModuleCompute>> ModuleCompute::make(std::shared_ptr<const Worker> worker,
                                                             weft::internal::LocalModule module,
                                                             ModuleComputeOptions options) {
  const Library* const library = library_of(*worker);
  if (library == nullptr) return make_error(ErrorKind::kState, "the worker has shut down");
  WEFT_ASSIGN_OR_RETURN(const std::string name, library->class_name_of(*module.type));
  std::shared_ptr<ModuleCompute> made(
      new ModuleCompute(std::move(worker), std::move(module), std::move(options)));
  made->forward_ = library->find(name + ".forward");
  if (made->forward_ == nullptr) return cannot(absl::StrCat("'", name, "' registers no 'forward'"));
  if (!tensors_taken(made->forward_->signature).has_value()) {
    return cannot(absl::StrCat("'", name, ".forward' is ", made->forward_->signature,
                               ": a stage takes tensors, or a list of them"));
  }
  const ModuleComputeOptions& o = made->options_;
  if (!o.loss.empty()) {
    made->loss_ = library->find(o.loss);
    if (made->loss_ == nullptr)
      return cannot(absl::StrCat("no loss is registered as '", o.loss, "'"));
    if (made->loss_->signature != "(tensor,tensor)->tensor") {
      return cannot(absl::StrCat("the loss '", o.loss, "' is ", made->loss_->signature,
                                 " and must be (tensor,tensor)->tensor"));
    }
  }
  if (!o.optimizer.empty()) {
    std::vector<std::string> names;
    for (const auto& item : made->module_.module->named_parameters()) names.push_back(item.key());
    WEFT_ASSIGN_OR_RETURN(made->optimizer_,
                          LocalOptimizer::make(o.optimizer, o.optimizer_options, made->parameters_,
                                               std::move(names)));
  }
  return made;
}

StatusOr<Tensors> ModuleCompute::invoke(const Method& method, const std::shared_ptr<void>& object,
                                        const Tensors& arguments) const {
  const int taken = *tensors_taken(method.signature);
  if (taken >= 0 && taken != static_cast<int>(arguments.size())) {
    return cannot(
        absl::StrCat(method.name, method.signature, " is given ", arguments.size(), " tensors"));
  }
  Payload payload;
  Encoder out(&payload);
  out.begin_tuple(taken < 0 ? 1 : arguments.size());
  if (taken < 0) {
    out.put(arguments);
  } else {
    for (const at::Tensor& t : arguments) out.put(t);
  }
  out.end();
  WEFT_RETURN_IF_ERROR(out.status());
  CallContext context(*worker_, worker_->info(), 0, std::make_shared<CallScope>(),
                      absl::InfiniteDuration());
  // Kept by both: a handler that answers later finds it, and is refused.
  const auto answer = std::make_shared<std::optional<StatusOr<Payload>>>();
  method.invoke(context, object, std::move(payload),
                [answer](StatusOr<Payload> result) { answer->emplace(std::move(result)); });
  if (!answer->has_value()) {
    return cannot(absl::StrCat(method.name, " gives a future: a stage gives its tensors at once"));
  }
  WEFT_RETURN_IF_ERROR((*answer)->status());
  auto tensors = tensors_of(std::move(***answer));
  if (!tensors.ok()) return annotate(tensors.status(), "the result of " + method.name);
  return tensors;
}

Status ModuleCompute::run(Live* live) {
  const ForwardCall& call = live->call;
  if (options_.seed.has_value()) {
    seed_generator(*options_.seed, call.step, options_.stage, call.micro_batch);
  }
  WEFT_ASSIGN_OR_RETURN(live->outputs, invoke(*forward_, object_, live->inputs));
  if (!call.is_last) return absl::OkStatus();
  if (loss_ != nullptr) {
    if (live->outputs.size() != 1 || !call.target.defined()) {
      return cannot(absl::StrCat("the loss '", options_.loss,
                                 "' takes one output and a target; there "
                                 "are ",
                                 live->outputs.size(), " outputs and ",
                                 call.target.defined() ? "a" : "no", " target"));
    }
    WEFT_ASSIGN_OR_RETURN(live->outputs, invoke(*loss_, nullptr, {live->outputs[0], call.target}));
  }
  if (live->outputs.size() != 1 || !live->outputs[0].defined() || live->outputs[0].numel() != 1) {
    return cannot(absl::StrCat("the loss is no scalar: ", live->outputs.size(),
                               " tensors, the first ",
                               live->outputs.empty() ? "" : shape(live->outputs[0])));
  }
  if (!live->outputs[0].requires_grad()) {
    return cannot("the loss does not require a gradient");
  }
  live->loss = live->outputs[0].detach();
  live->outputs[0] = at::mul(live->outputs[0], call.scale);
  return absl::OkStatus();
}

StatusOr<Tensors> ModuleCompute::forward(ForwardCall call) {
  try {
    Live live;
    for (const at::Tensor& t : call.inputs) {
      // A leaf of its own: what the stage before has made stays as it is.
      at::Tensor leaf = t.defined() ? t.detach() : t;
      if (leaf.defined() && !call.inputs.empty() && leaf.is_floating_point() && t.requires_grad()) {
        leaf.set_requires_grad(true);
      }
      live.inputs.push_back(std::move(leaf));
    }
    const Key key{call.step, call.micro_batch};
    call.inputs.clear();
    live.call = std::move(call);
    const c10::AutoGradMode grad(!live.call.recompute);
    if (live.call.recompute) live.call.recompute = false;
    const bool again = !c10::GradMode::is_enabled();
    if (again && live.call.is_last) {
      return cannot("the last stage is not run again: its backward follows at once");
    }
    WEFT_RETURN_IF_ERROR(run(&live));
    Tensors out;
    if (live.call.is_last) {
      out.push_back(live.loss);
    } else {
      for (const at::Tensor& t : live.outputs) {
        out.push_back(t.defined() ? t.detach() : t);
        // What travels says whether it wants a gradient.
        if (out.back().defined() && (again ? t.is_floating_point() : t.requires_grad())) {
          out.back().set_requires_grad(true);
        }
      }
    }
    if (again) live.outputs.clear();
    live_.insert_or_assign(key, std::move(live));
    return out;
  } catch (...) {
    return status_from_current_exception();
  }
}

Status ModuleCompute::recompute(int64_t step, int micro_batch) {
  try {
    const auto live = live_.find({step, micro_batch});
    if (live == live_.end()) return make_error(ErrorKind::kInternal, "its forward is not kept");
    const c10::AutoGradMode grad(true);
    return run(&live->second);
  } catch (...) {
    return status_from_current_exception();
  }
}

StatusOr<Tensors> ModuleCompute::roots(const Live& live, Tensors gradients) const {
  if (live.call.is_last) return Tensors{at::ones_like(live.outputs[0])};
  if (gradients.size() != live.outputs.size()) {
    return cannot(
        absl::StrCat(gradients.size(), " gradients for ", live.outputs.size(), " outputs"));
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined() && gradients[i].sizes() != live.outputs[i].sizes()) {
      return cannot(absl::StrCat("the gradient of output ", i, " is ", shape(gradients[i]),
                                 " and the output ", shape(live.outputs[i])));
    }
  }
  return gradients;
}

StatusOr<Tensors> ModuleCompute::backward(int64_t step, int micro_batch, Tensors gradients) {
  try {
    auto node = live_.extract({step, micro_batch});
    if (node.empty()) return make_error(ErrorKind::kInternal, "its forward is not kept");
    Live& live = node.mapped();
    WEFT_ASSIGN_OR_RETURN(const Tensors grads, roots(live, std::move(gradients)));
    torch::autograd::edge_list edges;
    Tensors incoming;
    for (size_t i = 0; i < live.outputs.size(); ++i) {
      if (!grads[i].defined() || !live.outputs[i].requires_grad()) continue;
      edges.push_back(torch::autograd::impl::gradient_edge(live.outputs[i]));
      incoming.push_back(grads[i]);
    }
    if (!edges.empty()) {
      torch::autograd::Engine::get_default_engine().execute(
          edges, incoming, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true);
    }
    Tensors out;
    for (const at::Tensor& t : live.inputs) out.push_back(t.defined() ? t.grad() : at::Tensor());
    return out;
  } catch (...) {
    return status_from_current_exception();
  }
}

StatusOr<Tensors> ModuleCompute::input_grad(int64_t step, int micro_batch, Tensors gradients) {
  try {
    const auto it = live_.find({step, micro_batch});
    if (it == live_.end()) return make_error(ErrorKind::kInternal, "its forward is not kept");
    Live& live = it->second;
    WEFT_ASSIGN_OR_RETURN(const Tensors grads, roots(live, std::move(gradients)));
    live.split = std::make_unique<SplitBackward>(live.outputs, live.inputs);
    return live.split->input_grads(grads);
  } catch (...) {
    return status_from_current_exception();
  }
}

Status ModuleCompute::weight_grad(int64_t step, int micro_batch) {
  try {
    auto node = live_.extract({step, micro_batch});
    if (node.empty() || node.mapped().split == nullptr) {
      return make_error(ErrorKind::kInternal, "its input gradient is not kept");
    }
    node.mapped().split->weight_grads();
    return absl::OkStatus();
  } catch (...) {
    return status_from_current_exception();
  }
}

Status ModuleCompute::step(int64_t step) {
  (void)step;
  if (optimizer_ == nullptr) return absl::OkStatus();
  Tensors gradients;
  for (const at::Tensor& p : parameters_) gradients.push_back(p.grad());
  WEFT_RETURN_IF_ERROR(optimizer_->step(gradients));
  zero_grad();
  return absl::OkStatus();
}

std::map<std::string, at::Tensor> ModuleCompute::gradients() const {
  std::map<std::string, at::Tensor> out;
  for (const auto& item : module_.module->named_parameters()) {
    if (item.value().grad().defined()) out.emplace(item.key(), item.value().grad().detach());
  }
  return out;
}

void ModuleCompute::zero_grad() {
  for (const at::Tensor& p : parameters_) p.mutable_grad() = at::Tensor();
}

std::map<std::string, at::Tensor> ModuleCompute::state() const {
  std::map<std::string, at::Tensor> out;
  for (const auto& [name, tensor] : weft::internal::state_dict_of(*module_.module)) {
    out.emplace(name, tensor.detach().clone());
  }
  if (optimizer_ == nullptr) return out;
  for (auto& [name, tensor] : optimizer_->state()) out.emplace(std::string(kKept) + name, tensor);
  return out;
}

std::map<std::string, at::Tensor> ModuleCompute::shapes() const {
  std::map<std::string, at::Tensor> out;
  for (const auto& [name, tensor] : weft::internal::state_dict_of(*module_.module)) {
    at::Tensor sizes = at::empty({tensor.dim()}, at::kLong);
    std::copy(tensor.sizes().begin(), tensor.sizes().end(), sizes.mutable_data_ptr<int64_t>());
    out.emplace(name, std::move(sizes));
  }
  return out;
}

Status ModuleCompute::load_state(const std::map<std::string, at::Tensor>& state) {
  StateDict of_module;
  std::map<std::string, at::Tensor> of_optimizer;
  for (const auto& [name, tensor] : state) {
    if (name.compare(0, kKept.size(), kKept) == 0) {
      of_optimizer.emplace(name.substr(kKept.size()), tensor);
    } else {
      of_module.emplace(name, tensor);
    }
  }
  if (optimizer_ == nullptr && !of_optimizer.empty()) {
    return cannot("a state with an optimizer's part for a stage without an optimizer");
  }
  try {
    // The optimizer's part last: it changes nothing when it fails, and the module's is put back.
    const StateDict before = weft::internal::state_dict_of(*module_.module);
    StateDict kept;
    for (const auto& [name, tensor] : before) kept.emplace(name, tensor.detach().clone());
    weft::internal::load_state_dict_into(*module_.module, of_module, /*strict=*/true);
    const Status status =
        optimizer_ == nullptr ? absl::OkStatus() : optimizer_->load_state(of_optimizer);
    if (!status.ok()) weft::internal::load_state_dict_into(*module_.module, kept, /*strict=*/true);
    // A step that was broken off has left gradients of some of its micro-batches.
    if (status.ok()) zero_grad();
    return status;
  } catch (...) {
    return status_from_current_exception();
  }
}

}  // namespace weft::pipeline::internal
