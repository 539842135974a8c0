// A snapshot's tables as one file for other programs.

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/index_select.h"
#include "ATen/ops/sort.h"
#include "absl/strings/str_cat.h"
#include "weft/ps/internal/cutter.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/internal/snapshot_files.h"
#include "weft/rpc/safetensors.h"

namespace weft::ps {
namespace {

using internal::LoadedPart;
using internal::TableReader;
using TensorsByName = std::map<std::string, at::Tensor>;

// As if one server had all of the table.
std::vector<std::string> one_server() { return {"all"}; }

Status add_dense(const TableReader& reader, const std::string& prefix,
                 const std::vector<std::string>& buffers, TensorsByName* out) {
  const TableDefinition& definition = reader.definition();
  const size_t parts = internal::part_count(definition, 1);
  std::vector<std::string> names = {"values", "steps"};
  names.insert(names.end(), buffers.begin(), buffers.end());
  std::vector<std::vector<at::Tensor>> columns(names.size());
  for (size_t i = 0; i < parts; ++i) {
    WEFT_ASSIGN_OR_RETURN(const LoadedPart part,
                          reader.load(one_server(), static_cast<uint32_t>(i), buffers));
    for (size_t c = 0; c < names.size(); ++c) columns[c].push_back(part.tensors[c]);
  }
  for (size_t c = 0; c < names.size(); ++c) {
    // Every part has made the same steps, or less.
    const at::Tensor all = at::cat(columns[c]);
    (*out)[prefix + names[c]] = names[c] == "steps" ? all.max() : all.reshape(definition.shape);
  }
  return absl::OkStatus();
}

Status add_sparse(const TableReader& reader, const std::string& prefix,
                  const std::vector<std::string>& buffers, TensorsByName* out) {
  WEFT_ASSIGN_OR_RETURN(const LoadedPart all, reader.load(one_server(), 0, buffers));
  if (all.tensors.size() < 3 + buffers.size()) {  // no row was ever touched
    (*out)[prefix + "keys"] = at::empty({0}, at::kLong);
    (*out)[prefix + "values"] =
        at::empty({0, reader.definition().shape[0]}, reader.definition().dtype);
    return absl::OkStatus();
  }
  std::vector<std::string> names = {"keys", "steps", "values"};
  names.insert(names.end(), buffers.begin(), buffers.end());
  const auto [keys, order] = at::sort(all.tensors[0]);
  for (size_t c = 0; c < names.size(); ++c) {
    (*out)[prefix + names[c]] = at::index_select(all.tensors[c], 0, order);
  }
  return absl::OkStatus();
}

StatusOr<SnapshotInfo> export_tables(Files& files, const std::string& folder, std::string_view path,
                                     const ExportOptions& options) {
  WEFT_ASSIGN_OR_RETURN(const internal::FoundSnapshot found,
                        internal::find_snapshot(files, folder));
  WEFT_RETURN_IF_ERROR(internal::check_tables(found.manifest, options.tables));
  WEFT_ASSIGN_OR_RETURN(SnapshotInfo info, internal::info_of(found, options.tables));
  TensorsByName out;
  for (const v1::PsSnapshot::Table& table : found.manifest.tables()) {
    const bool wanted = std::any_of(info.tables.begin(), info.tables.end(),
                                    [&](const auto& t) { return t.name == table.name(); });
    if (!wanted) continue;
    TableReader reader(files, folder, found.manifest, table);
    WEFT_RETURN_IF_ERROR(reader.open());
    const std::string prefix = table.name() + "/";
    const auto buffers = options.state ? reader.buffers() : std::vector<std::string>();
    const bool dense = reader.definition().kind == TableKind::kDense;
    WEFT_RETURN_IF_ERROR(dense ? add_dense(reader, prefix, buffers, &out)
                               : add_sparse(reader, prefix, buffers, &out));
    if (!options.state) out.erase(prefix + "steps");
  }
  WEFT_RETURN_IF_ERROR(
      replace_safetensors(files, path, out, {{"snapshot", absl::StrCat(info.number)}}));
  return info;
}

}  // namespace

SnapshotInfo export_snapshot(Files& files, std::string_view folder, std::string_view path,
                             const ExportOptions& options) {
  return value_or_throw(try_export_snapshot(files, folder, path, options));
}
StatusOr<SnapshotInfo> try_export_snapshot(Files& files, std::string_view folder,
                                           std::string_view path, const ExportOptions& options) {
  const at::AutoGradMode no_grad(false);
  try {
    return export_tables(files, std::string(folder), path, options);
  } catch (...) {  // of LibTorch, for want of memory
    return status_from_current_exception();
  }
}

}  // namespace weft::ps
