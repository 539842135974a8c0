// What a user asks of a table, cut into what its servers are asked, and put together again.

#include <algorithm>
#include <cstring>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/internal/part_data.h"
#include "weft/ps/internal/table_core.h"

namespace weft::ps::internal {

Status TableCore::check(const Ask& ask) const {
  const TableDefinition& d = setup_.definition;
  const auto wrong = [&](std::string_view why) {
    return make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("table '", setup_.name, "': ", std::string(ask.what), ": ", std::string(why)));
  };
  if (setup_.observer && (ask.push.has_value() || ask.advance)) {
    return make_error(ErrorKind::kState,
                      absl::StrCat("table '", setup_.name, "': ", std::string(ask.what),
                                   " of an observer, which only pulls"));
  }
  const auto check_keys = [&](const at::Tensor& keys) -> Status {
    if (keys.defined() && keys.dim() == 1 && keys.scalar_type() == c10::ScalarType::Long) {
      return absl::OkStatus();
    }
    return wrong("keys must be a tensor of int64 of one dimension");
  };
  if (d.kind == TableKind::kDense) {
    if (ask.push_keys.defined() || ask.pull_keys.defined()) {
      return wrong("the table is dense, and has no rows with keys");
    }
    if (ask.push.has_value()) {
      if (Status s = check_tensor(*ask.push, d.dtype, d.shape, "a tensor that"); !s.ok()) {
        return wrong(std::string(s.message()));
      }
    }
    return absl::OkStatus();
  }
  if (ask.push.has_value()) {
    if (!ask.push_keys.defined()) return wrong("the table is sparse: it needs keys");
    WEFT_RETURN_IF_ERROR(check_keys(ask.push_keys));
    const std::vector<int64_t> shape = {ask.push_keys.size(0), d.shape[0]};
    if (Status s = check_tensor(*ask.push, d.dtype, shape, "a tensor of rows that"); !s.ok()) {
      return wrong(std::string(s.message()));
    }
  }
  if (ask.pull) {
    if (!ask.pull_keys.defined()) return wrong("the table is sparse: it needs keys");
    WEFT_RETURN_IF_ERROR(check_keys(ask.pull_keys));
  }
  return absl::OkStatus();
}

// Every part hears of a step, of a client that comes or goes, and of what concerns it.
void TableCore::cut_dense(Op* op) const {
  const Ask& ask = op->ask;
  const bool all = ask.advance || ask.leave || ask.enter.has_value();
  const at::Tensor flat = ask.push.has_value() ? ask.push->reshape({-1}) : at::Tensor();
  for (size_t p = 0; p < setup_.parts.size(); ++p) {
    const ElementRange range = element_range(elements_, setup_.parts.size(), p);
    if (range.size() == 0 && !all) continue;
    Piece piece;
    piece.part = p;
    if (flat.defined()) piece.push.push_back(flat.narrow(0, range.begin, range.size()));
    if (ask.pull) piece.request.pull.emplace();
    op->pieces.push_back(std::move(piece));
  }
  if (ask.pull && setup_.parts.size() > 1) {
    op->values = at::empty({elements_}, at::TensorOptions().dtype(setup_.definition.dtype));
  }
}

void TableCore::cut_sparse(Op* op) const {
  const Ask& ask = op->ask;
  const bool all = ask.advance || ask.leave || ask.enter.has_value();
  const auto slices = [&](const at::Tensor& keys) {
    if (!keys.defined()) return std::vector<std::vector<int64_t>>(setup_.parts.size());
    return slice_keys(*ring_, reinterpret_cast<const uint64_t*>(keys.const_data_ptr<int64_t>()),
                      static_cast<size_t>(keys.numel()));
  };
  const auto pick_keys = [](const at::Tensor& keys, const std::vector<int64_t>& places) {
    at::Tensor out = at::empty({static_cast<int64_t>(places.size())}, keys.options());
    const int64_t* const from = keys.const_data_ptr<int64_t>();
    int64_t* const to = out.mutable_data_ptr<int64_t>();
    for (size_t i = 0; i < places.size(); ++i) to[i] = from[places[i]];
    return out;
  };
  const auto pushed = slices(ask.push.has_value() ? ask.push_keys : at::Tensor());
  auto pulled = slices(ask.pull ? ask.pull_keys : at::Tensor());
  for (size_t p = 0; p < setup_.parts.size(); ++p) {
    if (!all && pushed[p].empty() && pulled[p].empty()) continue;
    Piece piece;
    piece.part = p;
    if (!pushed[p].empty()) {
      const at::Tensor& rows = *ask.push;
      const size_t bytes = static_cast<size_t>(rows.size(1)) * rows.element_size();
      at::Tensor part =
          at::empty({static_cast<int64_t>(pushed[p].size()), rows.size(1)}, rows.options());
      const char* const from = static_cast<const char*>(rows.const_data_ptr());
      char* const to = static_cast<char*>(part.mutable_data_ptr());
      for (size_t i = 0; i < pushed[p].size(); ++i) {
        std::memcpy(to + i * bytes, from + static_cast<size_t>(pushed[p][i]) * bytes, bytes);
      }
      piece.push = {pick_keys(ask.push_keys, pushed[p]), std::move(part)};
    }
    if (!pulled[p].empty()) {
      piece.request.pull.emplace();
      piece.pull_keys = pick_keys(ask.pull_keys, pulled[p]);
      piece.places = std::move(pulled[p]);
    }
    op->pieces.push_back(std::move(piece));
  }
}

OpResult TableCore::result_of(Op* op) const {
  OpResult out;
  for (const Piece& piece : op->pieces) {
    out.clock = std::max(out.clock, piece.answer.clock);
    if (!piece.request.push.has_value()) continue;
    out.push.dropped |= piece.answer.dropped;
    out.push.behind = std::max(out.push.behind, piece.answer.behind);
  }
  if (!op->ask.pull) return out;
  const TableDefinition& d = setup_.definition;
  if (d.kind == TableKind::kDense) {
    out.values = (op->values.defined() ? op->values : op->pieces[0].values).reshape(d.shape);
    return out;
  }
  const int64_t count = op->ask.pull_keys.numel();
  out.values = at::empty({count, d.shape[0]}, at::TensorOptions().dtype(d.dtype));
  const size_t bytes = static_cast<size_t>(d.shape[0]) * out.values.element_size();
  char* const to = static_cast<char*>(out.values.mutable_data_ptr());
  for (const Piece& piece : op->pieces) {
    if (!piece.values.defined()) continue;
    const char* const from = static_cast<const char*>(piece.values.const_data_ptr());
    for (size_t i = 0; i < piece.places.size(); ++i) {
      std::memcpy(to + static_cast<size_t>(piece.places[i]) * bytes, from + i * bytes, bytes);
    }
  }
  return out;
}

}  // namespace weft::ps::internal
