#include "weft/collectives/ddp/data_parallel.h"

#include <algorithm>
#include <exception>
#include <string>

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/nn/module.h>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/core/grad_mode.h"
#include "ATen/detail/CUDAHooksInterface.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/tensor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/collectives/internal/ddp/replicas_backward.h"
#include "weft/common/error.h"

namespace weft {
namespace {

[[noreturn]] void refuse(const std::string& text) {
  throw_error(make_error(ErrorKind::kInvalidArgument, absl::StrCat("DataParallel: ", text)));
}

}  // namespace

std::vector<int64_t> even_chunks(int64_t batch, int64_t devices) {
  if (batch < 0 || devices < 1) {
    refuse(absl::StrCat("a batch of ", batch, " over ", devices, " devices"));
  }
  const int64_t most = (batch + devices - 1) / devices;
  std::vector<int64_t> out;
  for (int64_t left = batch; left > 0; left -= most) out.push_back(std::min(left, most));
  if (out.empty()) out.push_back(0);
  return out;
}

std::vector<int64_t> balanced_chunks(int64_t batch, int64_t first, int64_t devices) {
  if (first < 0) refuse(absl::StrCat("a first chunk of ", first));
  if (devices < 2) return even_chunks(batch, devices);
  if (first == 0) {
    std::vector<int64_t> out = {0};
    for (const int64_t one : even_chunks(batch, devices - 1)) out.push_back(one);
    return out;
  }
  const int64_t unit = (batch - first) / (devices - 1);
  if (first >= unit) return even_chunks(batch, devices);
  std::vector<int64_t> out(static_cast<size_t>(devices), unit);
  out[0] = first;
  int64_t left = batch - first - unit * (devices - 1);
  for (size_t i = 1; left > 0; ++i, --left) ++out[i];
  return out;
}

namespace internal {

class Replicas::Core {
 public:
  Core(std::shared_ptr<torch::nn::Module> module, const DataParallelOptions& options,
       std::optional<int64_t> first_chunk)
      : devices_(devices_of(options)),
        dim_(options.dim),
        first_chunk_(first_chunk),
        threads_(std::make_shared<ReplicaThreads>(
            options.runtime != nullptr ? options.runtime : make_system_runtime(), devices_)) {
    output_ = options.output_device.value_or(devices_[0]);
    for (size_t i = 0; i < devices_.size(); ++i) {
      const bool twice = std::count(devices_.begin(), devices_.end(), devices_[i]) > 1;
      if (twice && !devices_[i].is_cpu())
        refuse(absl::StrCat(devices_[i].str(), " is given twice"));
    }
    if (dim_ < 0) refuse(absl::StrCat("dim ", dim_, ": it counts from the front"));
    if (first_chunk_.has_value() && *first_chunk_ < 0) {
      refuse(absl::StrCat("a first chunk of ", *first_chunk_));
    }
    for (const auto& one : module->named_parameters()) check_place("parameter", one);
    for (const auto& one : module->named_buffers()) check_place("buffer", one);
    modules_.push_back(std::move(module));
  }

  size_t devices() const { return devices_.size(); }

  std::vector<Chunk> divide(const Tensors& inputs) const {
    std::vector<int64_t> lengths = {0};
    if (!inputs.empty()) {
      const int64_t batch = length_of(inputs, 0);
      for (size_t i = 1; i < inputs.size(); ++i) {
        const int64_t other = length_of(inputs, i);
        if (other == batch) continue;
        refuse(absl::StrCat("tensor 0 of the arguments has ", batch, " along dim ", dim_,
                            ", tensor ", i, " has ", other));
      }
      const auto k = static_cast<int64_t>(devices_.size());
      lengths = first_chunk_.has_value() ? balanced_chunks(batch, *first_chunk_, k)
                                         : even_chunks(batch, k);
    }
    std::vector<Chunk> out;
    int64_t begin = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
      // The first of a balanced batch may have none; an empty batch is the first one's.
      const bool run = lengths[i] > 0 || (begin == 0 && i + 1 == lengths.size());
      if (run) out.push_back({i, begin, lengths[i]});
      begin += lengths[i];
    }
    return out;
  }

  void scatter(const std::vector<Chunk>& chunks, const Tensors& inputs,
               const std::vector<Tensors>& parts) const {
    for (size_t c = 0; c < chunks.size(); ++c) {
      // To the CPU the call alone says when the values are there.
      const at::Device to = devices_[chunks[c].replica];
      for (size_t i = 0; i < inputs.size(); ++i) {
        *parts[c][i] = inputs[i]
                           ->narrow(dim_, chunks[c].begin, chunks[c].length)
                           .to(to, /*non_blocking=*/!to.is_cpu());
      }
    }
  }

  void apply(const std::vector<Chunk>& chunks, const std::vector<Tensors>& parts,
             std::vector<Tensors>* outputs,
             absl::FunctionRef<void(size_t, torch::nn::Module&)> forward) {
    replicate(chunks);
    const std::vector<size_t> on = replicas_of(chunks);
    if (!c10::GradMode::is_enabled()) {
      threads_->run(on, [&](size_t c) { forward(c, *modules_[on[c]]); });
      return;
    }
    std::vector<at::Tensor> outer = trained(*modules_[0]);
    std::vector<ReplicaGraph> graphs(chunks.size());
    for (size_t c = 0; c < chunks.size(); ++c) {
      graphs[c].parameters = trained(*modules_[chunks[c].replica]);
      for (at::Tensor* part : parts[c]) {
        if (!part->requires_grad()) continue;
        outer.push_back(*part);
        *part = part->detach().requires_grad_();
        graphs[c].inputs.push_back(*part);
      }
    }
    threads_->run(on, [&](size_t c) { forward(c, *modules_[on[c]]); });
    const auto node = std::make_shared<ReplicasBackward>(threads_, on);
    node->set_next_edges(torch::autograd::collect_next_edges(outer));
    for (size_t c = 0; c < chunks.size(); ++c) {
      for (at::Tensor* one : (*outputs)[c]) {
        if (!one->defined() || !one->requires_grad()) continue;
        at::Tensor inner = std::exchange(*one, one->detach());
        graphs[c].output_numbers.push_back(node->num_inputs());
        graphs[c].outputs.push_back(std::move(inner));
        torch::autograd::set_history(*one, node);
      }
    }
    node->graphs() = std::move(graphs);
  }

  void gather(const std::vector<Tensors>& outputs) const {
    for (size_t c = 1; c < outputs.size(); ++c) {
      if (outputs[c].size() == outputs[0].size()) continue;
      refuse(absl::StrCat("the first chunk's forward returned ", outputs[0].size(),
                          " tensors, that of chunk ", c, " ", outputs[c].size()));
    }
    for (size_t i = 0; i < outputs[0].size(); ++i) {
      std::vector<at::Tensor> parts;
      for (const Tensors& one : outputs) {
        if (!one[i]->defined()) continue;
        const at::Tensor here = one[i]->to(output_);
        parts.push_back(here.dim() == 0 ? here.unsqueeze(0) : here);
      }
      if (parts.empty()) continue;
      if (parts.size() != outputs.size()) {
        refuse(absl::StrCat("tensor ", i, " of the results is undefined at some replicas"));
      }
      const bool values = outputs[0][i]->dim() == 0;
      if (!values && parts[0].dim() <= dim_) {
        refuse(absl::StrCat("tensor ", i, " of the results has ", parts[0].dim(),
                            " dimensions and is joined along dim ", dim_));
      }
      *outputs[0][i] = parts.size() == 1 ? parts[0] : at::cat(parts, values ? 0 : dim_);
    }
  }

  at::Tensor weighted(const std::vector<Chunk>& chunks, const at::Tensor& losses) const {
    if (losses.dim() != 1 || losses.size(0) != static_cast<int64_t>(chunks.size())) {
      refuse("a loss for each replica has no dimensions");
    }
    std::vector<double> shares;
    double batch = 0;
    for (const Chunk& one : chunks) batch += static_cast<double>(one.length);
    for (const Chunk& one : chunks) {
      shares.push_back(batch > 0 ? static_cast<double>(one.length) / batch : 1);
    }
    return losses.mul(at::tensor(shares, losses.options().requires_grad(false))).sum();
  }

 private:
  static std::vector<at::Device> devices_of(const DataParallelOptions& options) {
    std::vector<at::Device> out = options.device_ids;
    if (!out.empty()) return out;
    for (int i = 0; i < at::detail::getCUDAHooks().deviceCount(); ++i) {
      out.emplace_back(at::kCUDA, static_cast<c10::DeviceIndex>(i));
    }
    if (out.empty()) out.emplace_back(at::kCPU);
    return out;
  }

  template <class Item>
  void check_place(const char* what, const Item& item) const {
    if (!item.value().defined() || item.value().device() == devices_[0]) return;
    refuse(absl::StrCat(what, " '", item.key(), "' is on ", item.value().device().str(),
                        ", the first device is ", devices_[0].str()));
  }

  int64_t length_of(const Tensors& inputs, size_t i) const {
    if (inputs[i]->defined() && inputs[i]->dim() > dim_) return inputs[i]->size(dim_);
    refuse(
        absl::StrCat("tensor ", i, " of the arguments has no dim ", dim_, " to divide it along"));
  }

  static std::vector<at::Tensor> trained(torch::nn::Module& module) {
    std::vector<at::Tensor> out;
    for (const at::Tensor& one : module.parameters()) {
      if (one.requires_grad()) out.push_back(one);
    }
    return out;
  }

  // clone() initialises what it then overwrites: the program's random numbers stay as they were.
  std::shared_ptr<torch::nn::Module> clone(const torch::nn::Module& module,
                                           at::Device device) const {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const at::Generator before = [&] {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      return generator.clone();
    }();
    std::shared_ptr<torch::nn::Module> out;
    std::string failed;
    try {
      out = device == devices_[0] ? module.clone() : module.clone(device);
    } catch (const std::exception& e) {
      failed = exception_text(e);
    }
    {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(before.get_state());
    }
    if (out == nullptr)
      refuse(absl::StrCat("replicas are made by the module's clone(), which failed (", failed,
                          "); derive the module from torch::nn::Cloneable"));
    return out;
  }

  // Parameters, buffers and modes of the module, at every replica that has a chunk. Without versions:
  // an earlier forward whose backward is still to come finds what it has saved.
  void replicate(const std::vector<Chunk>& chunks) {
    const c10::AutoGradMode no_grad(false);
    while (modules_.size() <= chunks.back().replica) {
      modules_.push_back(clone(*modules_[0], devices_[modules_.size()]));
    }
    const std::vector<at::Tensor> parameters = modules_[0]->parameters();
    const std::vector<at::Tensor> buffers = modules_[0]->buffers();
    const auto parts = modules_[0]->modules();
    for (const Chunk& chunk : chunks) {
      if (chunk.replica == 0) continue;
      torch::nn::Module& replica = *modules_[chunk.replica];
      const std::vector<at::Tensor> own = replica.parameters();
      const std::vector<at::Tensor> own_buffers = replica.buffers();
      const auto own_parts = replica.modules();
      if (own.size() != parameters.size() || own_buffers.size() != buffers.size() ||
          own_parts.size() != parts.size()) {
        refuse(absl::StrCat("the module has ", parameters.size(), " parameters and ",
                            buffers.size(), " buffers, its clone ", own.size(), " and ",
                            own_buffers.size(), ": has it changed since the first forward?"));
      }
      const bool shares = devices_[chunk.replica] == devices_[0];
      for (size_t i = 0; i < own.size(); ++i) {
        at::Tensor one = own[i];
        if (shares) {
          one.set_data(parameters[i].detach());
        } else {
          one.data().copy_(parameters[i], /*non_blocking=*/!own[i].is_cpu());
        }
        one.set_requires_grad(parameters[i].requires_grad());
      }
      for (size_t i = 0; i < own_buffers.size(); ++i) own_buffers[i].data().copy_(buffers[i]);
      for (size_t i = 0; i < own_parts.size(); ++i) own_parts[i]->train(parts[i]->is_training());
    }
  }

  // On which replica each chunk runs.
  static std::vector<size_t> replicas_of(const std::vector<Chunk>& chunks) {
    std::vector<size_t> out;
    for (const Chunk& one : chunks) out.push_back(one.replica);
    return out;
  }

  const std::vector<at::Device> devices_;
  at::Device output_ = at::kCPU;
  const int64_t dim_;
  const std::optional<int64_t> first_chunk_;
  const std::shared_ptr<ReplicaThreads> threads_;
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;  // 0: the user's; others when needed
};

Replicas::Replicas(std::shared_ptr<torch::nn::Module> module, const DataParallelOptions& options,
                   std::optional<int64_t> first_chunk)
    : core_(std::make_unique<Core>(std::move(module), options, first_chunk)) {}
Replicas::Replicas(Replicas&&) noexcept = default;
Replicas& Replicas::operator=(Replicas&&) noexcept = default;
Replicas::~Replicas() = default;

size_t Replicas::devices() const { return core_->devices(); }
std::vector<Replicas::Chunk> Replicas::divide(const Tensors& inputs) const {
  return core_->divide(inputs);
}
void Replicas::scatter(const std::vector<Chunk>& chunks, const Tensors& inputs,
                       const std::vector<Tensors>& parts) const {
  core_->scatter(chunks, inputs, parts);
}
void Replicas::apply(const std::vector<Chunk>& chunks, const std::vector<Tensors>& parts,
                     std::vector<Tensors>* outputs,
                     absl::FunctionRef<void(size_t, torch::nn::Module&)> forward) {
  core_->apply(chunks, parts, outputs, forward);
}
void Replicas::gather(const std::vector<Tensors>& outputs) const { core_->gather(outputs); }
at::Tensor Replicas::weighted(const std::vector<Chunk>& chunks, const at::Tensor& losses) const {
  return core_->weighted(chunks, losses);
}

}  // namespace internal
}  // namespace weft
