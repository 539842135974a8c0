#include "weft/collectives/internal/ddp/model.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/collectives/ddp/sync_batch_norm.h"

namespace weft::internal {
namespace {

// The weights of embeddings that were made with sparse(true).
std::set<const void*> sparse_weights(torch::nn::Module& module) {
  std::set<const void*> out;
  const auto look = [&out](const torch::nn::Module& one) {
    if (const auto* bag = one.as<torch::nn::EmbeddingBagImpl>(); bag != nullptr) {
      if (bag->options.sparse()) out.insert(bag->weight.unsafeGetTensorImpl());
    } else if (const auto* table = one.as<torch::nn::EmbeddingImpl>(); table != nullptr) {
      if (table->options.sparse()) out.insert(table->weight.unsafeGetTensorImpl());
    }
  };
  look(module);
  for (const auto& one : module.modules(/*include_self=*/false)) look(*one);
  return out;
}

std::string describe(std::string_view what, const ModelTensor& one) {
  return absl::StrCat(std::string(what), " '", one.name, "', ", one.tensor.toString(), " of [",
                      absl::StrJoin(one.tensor.sizes(), ", "), "], strides [",
                      absl::StrJoin(one.tensor.strides(), ", "), "], ",
                      one.tensor.requires_grad() ? "requires grad" : "does not require grad",
                      one.sparse ? ", sparse gradient" : "");
}

}  // namespace

Model model_of(torch::nn::Module& module, const std::vector<std::string>& ignored) {
  Model out;
  std::set<std::string> unknown(ignored.begin(), ignored.end());
  std::set<const void*> seen;
  const std::set<const void*> sparse = sparse_weights(module);
  const auto is_new = [&](const std::string& name, const at::Tensor& tensor) {
    if (unknown.erase(name) > 0 ||
        std::find(ignored.begin(), ignored.end(), name) != ignored.end()) {
      return false;
    }
    return tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second;
  };
  for (const auto& item : module.named_parameters()) {
    if (!is_new(item.key(), item.value())) continue;
    const bool is_sparse = sparse.contains(item.value().unsafeGetTensorImpl());
    (item.value().requires_grad() ? out.parameters : out.frozen)
        .push_back(ModelTensor{item.key(), item.value(), is_sparse});
  }
  for (const auto& item : module.named_buffers()) {
    if (is_new(item.key(), item.value())) {
      out.buffers.push_back(ModelTensor{item.key(), item.value()});
    }
  }
  if (!unknown.empty()) {
    throw_error(make_error(ErrorKind::kInvalidArgument,
                           absl::StrCat("DistributedDataParallel: the module has no parameter or "
                                        "buffer '",
                                        absl::StrJoin(unknown, "', '"), "', which was ignored")));
  }
  if (out.parameters.empty()) {
    throw_error(make_error(ErrorKind::kInvalidArgument,
                           "DistributedDataParallel: the module has no parameter that requires "
                           "grad: there is nothing to reduce"));
  }
  return out;
}

std::vector<std::string> names_of_synced_norms(const torch::nn::Module& module) {
  std::vector<std::string> out;
  const auto look = [&out](const std::string& name, const torch::nn::Module& at) {
    const auto* const norm = at.as<SyncBatchNormImpl>();
    if (norm != nullptr && norm->is_synchronized()) out.push_back(name);
  };
  look(module.name(), module);
  for (const auto& item : module.named_modules(/*name_prefix=*/"", /*include_self=*/false)) {
    look(item.key(), *item.value());
  }
  return out;
}

std::vector<std::string> describe_model(const Model& model) {
  std::vector<std::string> out;
  for (const ModelTensor& one : model.parameters) out.push_back(describe("parameter", one));
  for (const ModelTensor& one : model.frozen) out.push_back(describe("parameter", one));
  for (const ModelTensor& one : model.buffers) out.push_back(describe("buffer", one));
  return out;
}

Status compare_models(const std::vector<std::vector<std::string>>& by_rank) {
  const std::vector<std::string>& first = by_rank.front();
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    const std::vector<std::string>& other = by_rank[rank];
    for (size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const std::string here = i < first.size() ? first[i] : "nothing more";
      const std::string there = i < other.size() ? other[i] : "nothing more";
      if (here == there) continue;
      return make_error(ErrorKind::kInvalidArgument,
                        absl::StrCat("DistributedDataParallel: models differ: rank 0 has ", here,
                                     "; rank ", rank, " has ", there, " (entry ", i, " of ",
                                     first.size(), " and ", other.size(), ")"));
    }
  }
  return absl::OkStatus();
}

}  // namespace weft::internal
