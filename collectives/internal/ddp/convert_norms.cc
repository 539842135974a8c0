// convert_sync_batchnorm(): what of a module tree can be exchanged, and for what.

#include <functional>
#include <map>
#include <memory>
#include <utility>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/collectives/ddp/sync_batch_norm.h"
#include "weft/common/error.h"

namespace weft {
namespace internal {

class NormConversion {
 public:
  // Finds all, and throws when one of them cannot be converted.
  NormConversion(torch::nn::Module& root, torch::nn::AnyModule* held, const ProcessGroup& group)
      : group_(group) {
    if (!group.valid()) refuse("there is no process group");
    Put put = nullptr;
    if (held != nullptr) {
      put = [held](const SyncBatchNorm& made) { *held = torch::nn::AnyModule(made); };
    }
    if (!visit(&root, root.name(), std::move(put))) walk(root, "");
    if (unreachable_.empty()) return;
    refuse(absl::StrCat("BatchNorm '", absl::StrJoin(unreachable_, "', '"),
                        "' is a member of a module, which cannot be exchanged from outside: make "
                        "it a weft::SyncBatchNorm without a group, or put it into a "
                        "torch::nn::Sequential"));
  }

  std::vector<std::string> convert() {
    std::vector<std::string> names;
    std::map<const torch::nn::Module*, SyncBatchNorm> made;  // one that is in two places stays one
    for (const Place& place : places_) {
      names.push_back(place.name);
      if (auto* const ours = place.old->as<SyncBatchNormImpl>()) {
        ours->synchronize(group_);
        continue;
      }
      auto& norm = made.try_emplace(place.old, nullptr).first->second;
      if (norm.is_empty()) norm = converted(*place.old);
      place.put(norm);
    }
    return names;
  }

 private:
  // Puts it where the old one was; null: that cannot be done.
  using Put = std::function<void(const SyncBatchNorm&)>;
  struct Place {
    std::string name;
    torch::nn::Module* old;
    Put put;
  };

  [[noreturn]] static void refuse(const std::string& why) {
    throw_error(make_error(ErrorKind::kInvalidArgument, "convert_sync_batchnorm: " + why));
  }
  static bool is_batch_norm(const torch::nn::Module& module) {
    return module.as<torch::nn::BatchNorm1dImpl>() != nullptr ||
           module.as<torch::nn::BatchNorm2dImpl>() != nullptr ||
           module.as<torch::nn::BatchNorm3dImpl>() != nullptr;
  }

  // True: it is a normalization, and has no children to be visited.
  bool visit(torch::nn::Module* module, const std::string& name, Put put) {
    if (const auto* const ours = module->as<SyncBatchNormImpl>()) {
      if (!ours->is_synchronized()) places_.push_back({name, module, nullptr});
      return true;
    }
    if (!is_batch_norm(*module)) return false;
    if (put == nullptr) {
      unreachable_.push_back(name);
    } else {
      places_.push_back({name, module, std::move(put)});
    }
    return true;
  }

  void walk(torch::nn::Module& module, const std::string& prefix) {
    auto* const sequence = module.as<torch::nn::SequentialImpl>();
    std::ptrdiff_t index = 0;
    for (const auto& item : module.named_children()) {
      const std::string& key = item.key();
      const std::string name = prefix.empty() ? key : absl::StrCat(prefix, ".", key);
      Put put = nullptr;
      if (sequence != nullptr) {
        put = [sequence, index, key](const SyncBatchNorm& made) {
          sequence->begin()[index] = torch::nn::AnyModule(made);
          sequence->replace_module(key, made);
        };
      }
      if (!visit(item.value().get(), name, std::move(put))) walk(*item.value(), name);
      ++index;
    }
  }

  template <class From>
  SyncBatchNorm converted_from(const From& from) const {
    const auto& options = from.options;
    SyncBatchNorm to(group_, options.num_features(),
                     SyncBatchNormOptions{.eps = options.eps(),
                                          .momentum = options.momentum(),
                                          .affine = options.affine(),
                                          .track_running_stats = options.track_running_stats()});
    // The parameters themselves, which an optimizer may have, and the memory of the statistics.
    if (from.weight.defined()) {
      to->weight = to->parameters_["weight"] = from.weight;
      to->bias = to->parameters_["bias"] = from.bias;
    }
    if (from.running_mean.defined()) {
      to->running_mean.set_data(from.running_mean);
      to->running_var.set_data(from.running_var);
      to->num_batches_tracked.set_data(from.num_batches_tracked);
    }
    to->train(from.is_training());
    return to;
  }
  SyncBatchNorm converted(const torch::nn::Module& from) const {
    if (const auto* const one = from.as<torch::nn::BatchNorm1dImpl>()) return converted_from(*one);
    if (const auto* const two = from.as<torch::nn::BatchNorm2dImpl>()) return converted_from(*two);
    return converted_from(*from.as<torch::nn::BatchNorm3dImpl>());
  }

  const ProcessGroup group_;
  std::vector<Place> places_;
  std::vector<std::string> unreachable_;
};

}  // namespace internal

std::vector<std::string> convert_sync_batchnorm(torch::nn::Module& module,
                                                const ProcessGroup& group) {
  return internal::NormConversion(module, nullptr, group).convert();
}

std::vector<std::string> convert_sync_batchnorm(torch::nn::AnyModule& module,
                                                const ProcessGroup& group) {
  return internal::NormConversion(*module.ptr(), &module, group).convert();
}

}  // namespace weft
