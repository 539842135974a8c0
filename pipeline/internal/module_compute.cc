#include "weft/pipeline/internal/module_compute.h"

#include <algorithm>
#include <utility>

#include <torch/nn/module.h>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Context.h"
#include "ATen/ops/mul.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "weft/pipeline/internal/module_call.h"
#include "weft/rpc/library.h"

namespace weft::pipeline::internal {
namespace {

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

namespace {

// LibTorch's default ones of the CPU and of these devices.
std::vector<at::Generator> generators_of(const std::vector<c10::Device>& devices) {
  std::vector<at::Generator> out = {at::detail::getDefaultCPUGenerator()};
  for (const c10::Device device : devices) {
    out.push_back(at::globalContext().defaultGenerator(device));
  }
  return out;
}

std::vector<c10::Device> devices_of(const torch::nn::Module& module) {
  std::vector<c10::Device> out;
  const auto add = [&out](const at::Tensor& t) {
    if (t.is_cpu() || std::find(out.begin(), out.end(), t.device()) != out.end()) return;
    out.push_back(t.device());
  };
  for (const at::Tensor& t : module.parameters()) add(t);
  for (const at::Tensor& t : module.buffers()) add(t);
  return out;
}

Tensors generator_states(const std::vector<c10::Device>& devices) {
  Tensors out;
  for (at::Generator& generator : generators_of(devices)) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    out.push_back(generator.get_state());
  }
  return out;
}
void set_generator_states(const std::vector<c10::Device>& devices, const Tensors& states) {
  size_t i = 0;
  for (at::Generator& generator : generators_of(devices)) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(states[i++]);
  }
}

// One of weft::optim.
class RuleOptimizer final : public StageOptimizer {
 public:
  explicit RuleOptimizer(std::unique_ptr<LocalOptimizer> inner) : inner_(std::move(inner)) {}
  Status step(const std::vector<at::Tensor>& gradients) override { return inner_->step(gradients); }
  Status set_options(const std::vector<double>& options) override {
    return inner_->set_options(options);
  }
  std::map<std::string, at::Tensor> state() const override { return inner_->state(); }
  Status load_state(const std::map<std::string, at::Tensor>& state) override {
    return inner_->load_state(state);
  }

 private:
  const std::unique_ptr<LocalOptimizer> inner_;
};

}  // namespace

void seed_generator(uint64_t seed, int64_t step, int stage, int micro_batch,
                    const std::vector<c10::Device>& devices) {
  for (at::Generator& generator : generators_of(devices)) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(seed_of(seed, step, stage, micro_batch));
  }
}

ModuleCompute::ModuleCompute(std::shared_ptr<const Worker> worker,
                             weft::internal::LocalModule module, ModuleComputeOptions options)
    : worker_(std::move(worker)),
      module_(std::move(module)),
      options_(std::move(options)),
      object_(module_.module, module_.object),
      parameters_(module_.module->parameters()),
      devices_(devices_of(*module_.module)) {}

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
    WEFT_ASSIGN_OR_RETURN(auto rule, LocalOptimizer::make(o.optimizer, o.optimizer_options,
                                                          made->parameters_, std::move(names)));
    made->optimizer_ = std::make_shared<RuleOptimizer>(std::move(rule));
  }
  if (o.make_optimizer != nullptr) {
    if (auto own = o.make_optimizer(made->parameters_); own != nullptr) {
      std::vector<std::pair<std::string, at::Tensor>> named;
      for (const auto& item : made->module_.module->named_parameters()) {
        named.emplace_back(item.key(), item.value());
      }
      own->set_names(named);
      made->optimizer_ = std::move(own);
    }
  }
  made->hooks_ = DataParallelHooks::of(made->parameters_);
  if (o.asynchronous) made->versions_ = std::make_unique<WeightVersions>(made->parameters_);
  const auto named = made->module_.module->named_parameters();  // a dictionary of its own
  for (const std::string& tied : o.tied) {
    const at::Tensor* const p = named.find(tied);
    if (p == nullptr) return cannot(absl::StrCat("tied: there is no parameter '", tied, "'"));
    made->tied_.push_back(*p);
  }
  if (o.reduces && !made->reduces() && o.tied.empty()) {
    return cannot(
        "the plan reduces its gradients, and nothing does: PipelineServiceOptions::make_reducer "
        "gives no reducer, and the module is no DistributedDataParallel");
  }
  return made;
}

Status ModuleCompute::run(Live* live) {
  const ForwardCall& call = live->call;
  if (options_.seed.has_value()) {
    seed_generator(*options_.seed, call.step, options_.stage, call.micro_batch, devices_);
  }
  WEFT_ASSIGN_OR_RETURN(live->outputs, invoke(*worker_, *forward_, object_, live->inputs));
  if (hooks_ != nullptr && c10::GradMode::is_enabled()) hooks_->unwrap(&live->outputs);
  if (call.forward_only) return absl::OkStatus();
  if (!call.is_last) return c10::GradMode::is_enabled() ? check_trains(*live) : absl::OkStatus();
  if (loss_ != nullptr) {
    if (live->outputs.size() != 1 || !call.target.defined()) {
      return cannot(absl::StrCat("the loss '", options_.loss,
                                 "' takes one output and a target; there "
                                 "are ",
                                 live->outputs.size(), " outputs and ",
                                 call.target.defined() ? "a" : "no", " target"));
    }
    WEFT_ASSIGN_OR_RETURN(live->outputs,
                          invoke(*worker_, *loss_, nullptr, {live->outputs[0], call.target}));
  }
  if (live->outputs.size() != 1 || !live->outputs[0].defined() || live->outputs[0].numel() != 1) {
    return cannot(absl::StrCat("the loss is no scalar: ", live->outputs.size(),
                               " tensors, the first ",
                               live->outputs.empty() ? "" : shape_text(live->outputs[0])));
  }
  if (!live->outputs[0].requires_grad()) {
    return cannot("the loss does not require a gradient");
  }
  live->loss = live->outputs[0].detach();
  live->outputs[0] = at::mul(live->outputs[0], call.scale);
  return absl::OkStatus();
}

// Else no gradient would come to the stage's parameters, or to the stages before it, and no error either.
Status ModuleCompute::check_trains(const Live& live) const {
  const auto wants = [](const at::Tensor& t) { return t.defined() && t.requires_grad(); };
  const auto any = [&wants](const Tensors& all) {
    return std::any_of(all.begin(), all.end(), wants);
  };
  if (any(live.outputs) || !(any(live.inputs) || any(parameters_))) return absl::OkStatus();
  return cannot(absl::StrCat(
      "no output has a gradient, and what it is made of has: ", live.outputs.size(),
      " tensors, the first ", live.outputs.empty() ? "" : shape_text(live.outputs[0])));
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
    const c10::AutoGradMode grad(!live.call.recompute && !live.call.forward_only);
    if (live.call.forward_only) {
      WEFT_RETURN_IF_ERROR(run(&live));
      return std::move(live.outputs);
    }
    if (versions_ != nullptr) versions_->forward(key);
    if (live.call.recompute && !options_.seed.has_value()) {
      live.generators = generator_states(devices_);
    }
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
    // What it draws is what it drew the first time.
    const Tensors states = std::move(live->second.generators);
    if (states.empty()) return run(&live->second);
    const Tensors now = generator_states(devices_);
    set_generator_states(devices_, states);
    const Status status = run(&live->second);
    set_generator_states(devices_, now);
    return status;
  } catch (...) {
    return status_from_current_exception();
  }
}

Status ModuleCompute::step(int64_t step) {
  (void)step;
  ended_ = 0;
  if (optimizer_ == nullptr) return absl::OkStatus();
  Tensors gradients;
  for (const at::Tensor& p : parameters_) gradients.push_back(p.grad());
  if (versions_ != nullptr) versions_->before_step();
  const Status status = optimizer_->step(gradients);
  if (versions_ != nullptr) versions_->after_step();
  WEFT_RETURN_IF_ERROR(status);
  zero_grad();
  return absl::OkStatus();
}

void ModuleCompute::cancel(const Status& why) {
  if (options_.reducer != nullptr) options_.reducer->cancel(why);
}

void ModuleCompute::drop(const Status& why) {
  live_.clear();
  ready_.clear();
  ended_ = 0;
  reduced_ = absl::OkStatus();
  if (options_.reducer != nullptr) options_.reducer->drop(why);
  if (hooks_ != nullptr) hooks_->drop();
  if (versions_ != nullptr) versions_->drop();
}

}  // namespace weft::pipeline::internal
