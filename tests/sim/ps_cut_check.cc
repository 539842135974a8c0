#include "weft/tests/sim/ps_cut_check.h"

#include <vector>

#include "ATen/ops/cat.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "weft/proto/ps_snapshot.pb.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/internal/part_data.h"
#include "weft/ps/internal/snapshot_files.h"

namespace weft::testing {
namespace {

// The rows of `from`, which belong to `keys`, added to those of the same keys in `wanted`.
void add_rows(const at::Tensor& keys, const at::Tensor& from, const at::Tensor& wanted,
              const at::Tensor& to) {
  for (int64_t i = 0; i < keys.numel(); ++i) {
    for (int64_t k = 0; k < wanted.numel(); ++k) {
      if (keys[i].item<int64_t>() == wanted[k].item<int64_t>()) to[k] += from[i];
    }
  }
}

StatusOr<CutTable> read_table(const ps::internal::TableReader& reader, const at::Tensor& keys) {
  const ps::TableDefinition& d = reader.definition();
  const bool sparse = d.kind == ps::TableKind::kSparse;
  const at::TensorOptions type = at::TensorOptions().dtype(d.dtype);
  const std::vector<std::string> one = {"all"};
  CutTable out;
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> held;
  if (sparse) {
    out.values = at::zeros({keys.numel(), d.shape[0]}, type);
    out.held = at::zeros({keys.numel(), d.shape[0]}, type);
  }
  for (size_t p = 0; p < ps::internal::part_count(d, 1); ++p) {
    WEFT_ASSIGN_OR_RETURN(const ps::internal::LoadedPart part,
                          reader.load(one, static_cast<uint32_t>(p), {""}));
    size_t at = 0;
    if (sparse) {
      for (size_t i = 0; i < part.image.pushes.size(); ++i, at += 2) {
        add_rows(part.tensors[at], part.tensors[at + 1], keys, out.held);
      }
      if (at < part.tensors.size()) {
        add_rows(part.tensors[at], part.tensors[at + 2], keys, out.values);
      }
      continue;
    }
    at::Tensor waits;
    for (size_t i = 0; i < part.image.pushes.size(); ++i, ++at) {
      waits = waits.defined() ? waits + part.tensors[at] : part.tensors[at];
    }
    values.push_back(part.tensors[at]);
    held.push_back(waits.defined() ? waits : at::zeros_like(values.back()));
  }
  if (!sparse) {
    out.values = at::cat(values).reshape(d.shape);
    out.held = at::cat(held).reshape(d.shape);
  }
  return out;
}

}  // namespace

StatusOr<CutTable> read_cut(Files& files, const std::string& folder, const std::string& table,
                            const at::Tensor& keys) {
  v1::PsSnapshot manifest;
  uint64_t hash = 0;
  WEFT_RETURN_IF_ERROR(
      ps::internal::read_manifest(files, absl::StrCat(folder, "/snapshot"), &manifest, &hash));
  for (const v1::PsSnapshot::Table& one : manifest.tables()) {
    if (one.name() != table) continue;
    ps::internal::TableReader reader(files, folder, manifest, one);
    WEFT_RETURN_IF_ERROR(reader.open());
    WEFT_ASSIGN_OR_RETURN(CutTable out, read_table(reader, keys));
    out.number = manifest.number();
    for (const auto& client : one.clients()) out.pushes[client.worker()] = client.pushes();
    return out;
  }
  return make_error(ErrorKind::kNotFound, absl::StrCat("no table '", table, "' in the snapshot"));
}

}  // namespace weft::testing
