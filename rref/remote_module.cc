#include "weft/rref/remote_module.h"

#include <algorithm>

#include <torch/nn/module.h>

#include "ATen/core/grad_mode.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/rpc/worker.h"

namespace weft::internal {
namespace {

constexpr std::string_view kRank = "rank:";

std::string text(std::string_view s) { return std::string(s); }

std::string shape(const at::Tensor& tensor) {
  return absl::StrCat("[", absl::StrJoin(tensor.sizes(), ", "), "]");
}

// Parameters and buffers, the module's own tensors.
StateDict tensors_of(const torch::nn::Module& module) {
  StateDict out;
  for (const auto& item : module.named_parameters()) out.emplace(item.key(), item.value());
  for (const auto& item : module.named_buffers()) out.emplace(item.key(), item.value());
  return out;
}

}  // namespace

StatusOr<RemotePlacement> parse_placement(std::string_view placement) {
  const auto bad = [&](std::string_view why) {
    return make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("'", text(placement), "' does not say where a module lives: ", text(why),
                     ". It is worker/device, as \"ps0/cpu\" or "
                     "\"rank:1/cuda:0\""));
  };
  RemotePlacement out;
  const size_t slash = placement.find('/');
  const std::string_view worker = placement.substr(0, slash);
  out.device = slash == std::string_view::npos ? "cpu" : text(placement.substr(slash + 1));
  if (worker.empty()) return bad("the worker is missing");
  if (worker.substr(0, kRank.size()) == kRank) {
    if (!absl::SimpleAtoi(text(worker.substr(kRank.size())), &out.rank) || out.rank < 0) {
      return bad("its rank is no number");
    }
  } else {
    out.worker = text(worker);
  }
  try {
    // LibTorch knows the names of devices; whether the worker has it, the worker finds.
    (void)c10::Device(out.device);
  } catch (const c10::Error& e) {
    return bad(absl::StrCat("'", out.device, "' is no device"));
  }
  return out;
}

StateDict state_dict_of(const torch::nn::Module& module) {
  StateDict out = tensors_of(module);
  for (auto& [name, tensor] : out) tensor = tensor.detach();
  return out;
}

void load_state_dict_into(torch::nn::Module& module, const StateDict& state, bool strict) {
  const StateDict own = tensors_of(module);
  std::vector<std::string> wrong;
  for (const auto& [name, tensor] : own) {
    const auto given = state.find(name);
    if (given == state.end()) {
      if (strict) wrong.push_back(absl::StrCat(name, " is missing"));
    } else if (given->second.sizes() != tensor.sizes()) {
      wrong.push_back(
          absl::StrCat(name, " is ", shape(given->second), " and must be ", shape(tensor)));
    }
  }
  for (const auto& [name, tensor] : state) {
    if (strict && own.count(name) == 0) wrong.push_back(absl::StrCat(name, " is unknown"));
  }
  if (!wrong.empty()) {
    throw_if_error(make_error(ErrorKind::kInvalidArgument,
                              absl::StrCat("load_state_dict into ", module.name(), " with ",
                                           own.size(), " tensors: ", absl::StrJoin(wrong, "; "))));
  }
  const at::NoGradGuard guard;
  for (const auto& [name, tensor] : own) {
    const auto given = state.find(name);
    if (given != state.end()) tensor.copy_(given->second);
  }
}

void move_module(torch::nn::Module& module, const std::string& device) {
  module.to(c10::Device(device));
}

void hand_to_host(const CallContext& context, int64_t key, LocalModule module) {
  const auto host = context.worker().service<ModuleHost>();
  if (host == nullptr) {
    throw_error(make_error(ErrorKind::kUnimplemented,
                           absl::StrCat("worker '", context.worker().name(),
                                        "' lists no service that takes modules, such as "
                                        "pipeline_service()")));
  }
  host->host(key, std::move(module));
}

}  // namespace weft::internal
