// What a user asks of a table, cut into what its servers are asked, and put together again.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/internal/part_data.h"
#include "weft/ps/internal/table_core.h"
#include "weft/rpc/arena.h"

namespace weft::ps::internal {
namespace {
constexpr size_t kMostPositionBytes = 64 << 10;
}

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
  if (ask.position.size() > kMostPositionBytes) {
    return wrong(absl::StrCat("position has ", ask.position.size(), " bytes, ", kMostPositionBytes,
                              " are the most"));
  }
  if (ask.max_norm.has_value() && !(*ask.max_norm > 0 && std::isfinite(*ask.max_norm))) {
    return wrong(absl::StrCat("max_norm is ", *ask.max_norm, ", it must be above 0 and finite"));
  }
  if (ask.max_norm.has_value() && ask.kind == PushKind::kAssign) {
    return wrong("max_norm is of gradients, and these are values");
  }
  if (ask.then.defined() && !compensates_) {
    return wrong(absl::StrCat(
        "computed_with is of rules that compensate a delay, and the table has ", d.rule.name));
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
    if (ask.then.defined()) {
      if (Status s = check_tensor(ask.then, d.dtype, d.shape, "computed_with, which"); !s.ok()) {
        return wrong(std::string(s.message()));
      }
    }
    return absl::OkStatus();
  }
  if (ask.push.has_value()) {
    if (!ask.push_keys.defined()) return wrong("the table is sparse: it needs keys");
    WEFT_RETURN_IF_ERROR(check_keys(ask.push_keys));
    const std::array<int64_t, 2> shape = {ask.push_keys.size(0), d.shape[0]};
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

Status TableCore::check_values(const Op& op) const {
  const auto pushing = std::count_if(op.pieces.begin(), op.pieces.end(),
                                     [](const Piece& piece) { return !piece.tensors.empty(); });
  if (pushing < 2) return absl::OkStatus();
  const bool is_dense = setup_.definition.kind == TableKind::kDense;
  const int64_t row_length = is_dense ? 1 : setup_.definition.shape[0];
  Status finite = check_finite(*op.ask.push, row_length);
  if (finite.ok() && op.ask.then.defined()) finite = check_finite(op.ask.then.contiguous(), 1);
  if (finite.ok()) return finite;
  return annotate(finite, absl::StrCat("table '", setup_.name, "': ", std::string(op.ask.what)));
}

// Every part hears of a step, of a client that comes or goes, and of what concerns it.
void TableCore::cut_dense(Op* op) {
  Ask& ask = op->ask;
  if (compensates_ && ask.push.has_value() && !ask.then.defined()) {
    MutexLock lock(&mutex_);
    const bool known = pulled_.defined() && ask.kind == PushKind::kGradient;
    ask.then = known ? pulled_ : at::empty({0}, ask.push->options());
  }
  const at::Tensor then = ask.then.defined() ? ask.then.reshape({-1}) : at::Tensor();
  const bool all = ask.advance || ask.leave || ask.enter.has_value();
  const at::Tensor flat = ask.push.has_value() ? ask.push->reshape({-1}) : at::Tensor();
  for (size_t p = 0; p < setup_.parts.size(); ++p) {
    const ElementRange range = element_range(elements_, setup_.parts.size(), p);
    if (range.size() == 0 && !all) continue;
    Piece piece;
    piece.part = p;
    if (flat.defined()) piece.tensors.push_back(flat.narrow(0, range.begin, range.size()));
    if (flat.defined() && then.defined()) {
      const bool known = then.numel() == flat.numel();
      piece.tensors.push_back(known ? then.narrow(0, range.begin, range.size()) : then);
    }
    if (ask.pull) piece.request.pull.emplace();
    op->pieces.push_back(std::move(piece));
  }
  if (ask.pull && setup_.parts.size() > 1) {
    // The arena's pages are there already: of ordinary memory each pull would have new ones.
    op->values = arena_tensor(service_->worker(), {elements_}, setup_.definition.dtype);
  }
}

TableCore::Slices TableCore::slice(const at::Tensor& keys) const {
  Slices out;
  if (!keys.defined() || keys.numel() == 0) return out;
  const auto* const data = reinterpret_cast<const uint64_t*>(keys.const_data_ptr<int64_t>());
  const auto count = static_cast<size_t>(keys.numel());
  if (setup_.parts.size() == 1 || count == 1) {
    out.whole = setup_.parts.size() == 1 ? 0 : ring_->owner(data[0]);
    return out;
  }
  out.places = slice_keys(*ring_, data, count);
  for (size_t p = 0; p < out.places.size(); ++p) {
    if (out.places[p].size() == count) out.whole = p;
  }
  return out;
}

// What goes to one part alone is not copied.
void TableCore::cut_sparse(Op* op) const {
  const Ask& ask = op->ask;
  const bool all = ask.advance || ask.leave || ask.enter.has_value();
  const auto pick_keys = [](const at::Tensor& keys, const std::vector<int64_t>& places) {
    at::Tensor out = at::empty({static_cast<int64_t>(places.size())}, keys.options());
    const int64_t* const from = keys.const_data_ptr<int64_t>();
    int64_t* const to = out.mutable_data_ptr<int64_t>();
    for (size_t i = 0; i < places.size(); ++i) to[i] = from[places[i]];
    return out;
  };
  const auto pick_rows = [](const at::Tensor& rows, const std::vector<int64_t>& places) {
    const size_t bytes = static_cast<size_t>(rows.size(1)) * rows.element_size();
    at::Tensor out = at::empty({static_cast<int64_t>(places.size()), rows.size(1)}, rows.options());
    const char* const from = static_cast<const char*>(rows.const_data_ptr());
    char* const to = static_cast<char*>(out.mutable_data_ptr());
    for (size_t i = 0; i < places.size(); ++i) {
      std::memcpy(to + i * bytes, from + static_cast<size_t>(places[i]) * bytes, bytes);
    }
    return out;
  };
  const Slices pushed = slice(ask.push.has_value() ? ask.push_keys : at::Tensor());
  Slices pulled = slice(ask.pull ? ask.pull_keys : at::Tensor());
  for (size_t p = 0; p < setup_.parts.size(); ++p) {
    const bool pushes = pushed.has(p);
    const bool pulls = pulled.has(p);
    if (!all && !pushes && !pulls) continue;
    Piece piece;
    piece.part = p;
    if (pushes && pushed.whole == p) {
      piece.tensors = {ask.push_keys, *ask.push};
    } else if (pushes) {
      piece.tensors = {pick_keys(ask.push_keys, pushed.places[p]),
                       pick_rows(*ask.push, pushed.places[p])};
    }
    if (pulls) piece.request.pull.emplace();
    if (pulls && pulled.whole == p) {
      piece.pull_keys = ask.pull_keys;
    } else if (pulls) {
      piece.pull_keys = pick_keys(ask.pull_keys, pulled.places[p]);
      piece.places = std::move(pulled.places[p]);
    }
    op->pieces.push_back(std::move(piece));
  }
}

OpResult TableCore::result_of(Op* op) {
  OpResult out;
  for (const Piece& piece : op->pieces) {
    out.clock = std::max(out.clock, piece.clock);
    if (!piece.request.push.has_value()) continue;
    out.push.dropped |= piece.push.dropped;
    out.push.behind = std::max(out.push.behind, piece.push.behind);
  }
  if (!op->ask.pull) return out;
  const TableDefinition& d = setup_.definition;
  if (d.kind == TableKind::kDense) {
    out.values = (op->values.defined() ? op->values : op->pieces[0].values).reshape(d.shape);
    if (compensates_) {
      MutexLock lock(&mutex_);
      pulled_ = out.values;
    }
    return out;
  }
  const int64_t count = op->ask.pull_keys.numel();
  for (const Piece& piece : op->pieces) {
    if (!piece.values.defined() || !piece.places.empty()) continue;
    out.values = piece.values;  // all of them
    return out;
  }
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
