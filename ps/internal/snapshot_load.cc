// What a part is on a list of servers, put together from the files of a snapshot of any other list.

#include <algorithm>
#include <cstring>
#include <set>
#include <tuple>
#include <utility>

#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "ATen/ops/index_select.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "weft/proto/ps_snapshot.pb.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/internal/snapshot_files.h"

namespace weft::ps::internal {
namespace {

// For a push that waits for its step, whose pieces lie in several parts.
using HeldName = std::tuple<uint64_t, ClientKey, uint64_t>;  // step, client, number
struct HeldPieces {
  PartImage::HeldPush push{};
  std::vector<at::Tensor> tensors{};
};

ElementRange overlap(const ElementRange& a, const ElementRange& b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

// Places of the keys that are of this server.
at::Tensor places_of(const at::Tensor& keys, const HashRing& ring, size_t server) {
  const int64_t* const data = keys.const_data_ptr<int64_t>();
  std::vector<int64_t> places;
  for (int64_t i = 0; i < keys.numel(); ++i) {
    if (ring.owner(static_cast<uint64_t>(data[i])) == server) places.push_back(i);
  }
  at::Tensor out = at::empty({static_cast<int64_t>(places.size())}, at::kLong);
  std::copy(places.begin(), places.end(), out.mutable_data_ptr<int64_t>());
  return out;
}

void put_held(const std::map<HeldName, HeldPieces>& held, LoadedPart* out) {
  uint64_t token = 0;
  for (const auto& [name, pieces] : held) {
    const auto& [step, client, number] = name;
    out->image.protocol.held.push_back({client, number, step, ++token});
    out->image.pushes.push_back(pieces.push);
    out->tensors.insert(out->tensors.end(), pieces.tensors.begin(), pieces.tensors.end());
  }
}

}  // namespace

TableReader::TableReader(Files& files, std::string folder, const v1::PsSnapshot& manifest,
                         const v1::PsSnapshot_Table& table)
    : files_(files), folder_(std::move(folder)), manifest_(manifest), table_(table) {}

Status TableReader::open() {
  WEFT_ASSIGN_OR_RETURN(definition_, get(table_.definition()));
  for (int part = 0; part < table_.files_size(); ++part) {
    const uint32_t file = table_.files(part);
    if (!opened_.contains(file)) {
      const v1::PsSnapshot::File& known = manifest_.files(static_cast<int>(file));
      const std::string path = path_in(folder_, known.name());
      WEFT_RETURN_IF_ERROR(check_file(files_, path, {known.bytes(), known.hash()}));
      WEFT_ASSIGN_OR_RETURN(SafetensorsFile opened, SafetensorsFile::open(files_, path));
      opened_.emplace(file, std::move(opened));
    }
    WEFT_ASSIGN_OR_RETURN(const at::Tensor state, read(static_cast<size_t>(part), "state"));
    WEFT_ASSIGN_OR_RETURN(PartImage image,
                          decode_image({static_cast<const char*>(state.const_data_ptr()),
                                        static_cast<size_t>(state.nbytes())}));
    images_.push_back(std::move(image));
  }
  return absl::OkStatus();
}

StatusOr<at::Tensor> TableReader::read(size_t part, std::string_view what) const {
  const SafetensorsFile& file = opened_.at(table_.files(static_cast<int>(part)));
  return file.read(absl::StrCat(table_.name(), "/", part, "/", std::string(what)));
}

std::vector<std::string> TableReader::buffers() const {
  std::set<std::string> out;  // a part without rows has none
  for (int part = 0; part < table_.files_size(); ++part) {
    const std::string prefix = absl::StrCat(table_.name(), "/", part, "/");
    for (const auto& [name, entry] : opened_.at(table_.files(part)).header().tensors) {
      if (!absl::StartsWith(name, prefix)) continue;
      const std::string what = name.substr(prefix.size());
      const bool own = what == "keys" || what == "values" || what == "steps" || what == "state";
      if (!own && !absl::StartsWith(what, "held/")) out.insert(what);
    }
  }
  return {out.begin(), out.end()};
}

StatusOr<LoadedPart> TableReader::load(const std::vector<std::string>& servers, uint32_t index,
                                       const std::vector<std::string>& buffers) const {
  LoadedPart out;
  out.image.definition = definition_;
  out.image.servers = servers;
  ProtocolImage& protocol = out.image.protocol;
  for (const PartImage& image : images_) {
    protocol.version = std::max(protocol.version, image.protocol.version);
    protocol.step = std::max(protocol.step, image.protocol.step);
  }
  const size_t parts = part_count(definition_, servers.size());
  const Status loaded = definition_.kind == TableKind::kDense
                            ? load_dense(index, parts, buffers, &out)
                            : load_sparse(servers, index, buffers, &out);
  WEFT_RETURN_IF_ERROR(loaded);
  return out;
}

Status TableReader::load_dense(uint32_t index, size_t parts,
                               const std::vector<std::string>& buffers, LoadedPart* out) const {
  const int64_t elements = element_count(definition_);
  const ElementRange mine = element_range(elements, parts, index);
  const at::TensorOptions type = at::TensorOptions().dtype(definition_.dtype);
  std::vector<std::pair<std::string, at::Tensor>> columns = {
      {"values", at::empty({mine.size()}, type)}};
  for (const std::string& name : buffers) {
    columns.emplace_back(name, name.empty() ? at::Tensor() : at::empty({mine.size()}, type));
  }
  std::map<HeldName, HeldPieces> held;
  int64_t steps = 0;
  for (size_t p = 0; p < images_.size(); ++p) {
    const ElementRange theirs = element_range(elements, images_.size(), p);
    const ElementRange both = overlap(mine, theirs);
    if (both.size() <= 0) continue;
    const auto copy = [&](const at::Tensor& from, const at::Tensor& to) -> Status {
      WEFT_RETURN_IF_ERROR(check_tensor(from, definition_.dtype, {theirs.size()}, "a column that"));
      to.narrow(0, both.begin - mine.begin, both.size())
          .copy_(from.narrow(0, both.begin - theirs.begin, both.size()));
      return absl::OkStatus();
    };
    for (const auto& [name, to] : columns) {
      if (!to.defined()) continue;
      WEFT_ASSIGN_OR_RETURN(const at::Tensor from, read(p, name));
      WEFT_RETURN_IF_ERROR(copy(from, to));
    }
    WEFT_ASSIGN_OR_RETURN(const at::Tensor seen, read(p, "steps"));
    WEFT_RETURN_IF_ERROR(check_tensor(seen, at::kLong, {1}, "steps that"));
    steps = std::max(steps, *seen.const_data_ptr<int64_t>());
    const PartImage& image = images_[p];
    for (size_t i = 0; i < image.pushes.size(); ++i) {
      const ProtocolImage::Held& h = image.protocol.held[i];
      const uint64_t step = std::max(h.step, out->image.protocol.step);
      HeldPieces& pieces = held[{step, h.client, h.number}];
      if (pieces.tensors.empty()) {
        pieces.push = image.pushes[i];
        pieces.tensors = {at::zeros({mine.size()}, type)};
      }
      WEFT_ASSIGN_OR_RETURN(const at::Tensor from, read(p, absl::StrCat("held/", i)));
      WEFT_RETURN_IF_ERROR(copy(from, pieces.tensors[0]));
    }
  }
  put_held(held, out);
  out->tensors.push_back(columns[0].second);
  out->tensors.push_back(at::full({1}, steps, at::kLong));
  for (size_t b = 1; b < columns.size(); ++b) out->tensors.push_back(columns[b].second);
  return absl::OkStatus();
}

Status TableReader::load_sparse(const std::vector<std::string>& servers, uint32_t index,
                                const std::vector<std::string>& buffers, LoadedPart* out) const {
  const HashRing ring(servers);
  const int64_t length = definition_.shape[0];
  std::vector<std::string> names = {"keys", "steps", "values"};
  names.insert(names.end(), buffers.begin(), buffers.end());
  std::vector<std::vector<at::Tensor>> columns(names.size());
  std::map<HeldName, HeldPieces> held;
  for (size_t p = 0; p < images_.size(); ++p) {
    WEFT_ASSIGN_OR_RETURN(const at::Tensor keys, read(p, "keys"));
    WEFT_RETURN_IF_ERROR(check_tensor(keys, at::kLong, {keys.numel()}, "keys that"));
    const at::Tensor places = places_of(keys, ring, index);
    for (size_t c = 0; c < names.size() && places.numel() > 0; ++c) {
      if (names[c].empty()) continue;
      WEFT_ASSIGN_OR_RETURN(const at::Tensor column, read(p, names[c]));
      if (column.dim() == 0 || column.size(0) != keys.numel()) {
        return make_error(ErrorKind::kInvalidArgument,
                          absl::StrCat("column '", names[c], "' has not a row for each key"));
      }
      columns[c].push_back(at::index_select(column, 0, places));
    }
    const PartImage& image = images_[p];
    int64_t tensor = 0;
    for (size_t i = 0; i < image.pushes.size(); ++i) {
      WEFT_ASSIGN_OR_RETURN(const at::Tensor of, read(p, absl::StrCat("held/", tensor++)));
      WEFT_ASSIGN_OR_RETURN(const at::Tensor rows, read(p, absl::StrCat("held/", tensor++)));
      WEFT_RETURN_IF_ERROR(check_tensor(of, at::kLong, {of.numel()}, "keys that"));
      WEFT_RETURN_IF_ERROR(
          check_tensor(rows, definition_.dtype, {of.numel(), length}, "rows that"));
      const at::Tensor own = places_of(of, ring, index);
      if (own.numel() == 0) continue;
      const ProtocolImage::Held& h = image.protocol.held[i];
      const uint64_t step = std::max(h.step, out->image.protocol.step);
      HeldPieces& pieces = held[{step, h.client, h.number}];
      const at::Tensor keys_here = at::index_select(of, 0, own);
      const at::Tensor rows_here = at::index_select(rows, 0, own);
      if (pieces.tensors.empty()) {
        pieces.push = image.pushes[i];
        pieces.tensors = {keys_here, rows_here};
      } else {
        pieces.tensors = {at::cat({pieces.tensors[0], keys_here}),
                          at::cat({pieces.tensors[1], rows_here})};
      }
    }
  }
  put_held(held, out);
  if (columns[0].empty()) return absl::OkStatus();  // no row is here
  for (const std::vector<at::Tensor>& pieces : columns) {
    out->tensors.push_back(pieces.empty() ? at::Tensor() : at::cat(pieces));
  }
  return absl::OkStatus();
}

}  // namespace weft::ps::internal
