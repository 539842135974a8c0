// Embedding and EmbeddingBag: rows of a sparse table by id.

#include <algorithm>
#include <cstring>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/core/ivalue.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/embedding.h"
#include "ATen/ops/embedding_bag.h"
#include "ATen/ops/embedding_dense_backward.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "torch/csrc/autograd/custom_function.h"
#include "weft/ps/internal/answer_memory.h"
#include "weft/ps/internal/backward_push.h"
#include "weft/ps/internal/key_places.h"
#include "weft/ps/internal/table_future.h"
#include "weft/ps/layers.h"

namespace weft::ps {
namespace {

constexpr size_t kMostLookups = 64;

at::Tensor tensor_of(const std::vector<int64_t>& numbers) {
  at::Tensor out = at::empty({static_cast<int64_t>(numbers.size())}, at::kLong);
  if (!numbers.empty()) {
    std::memcpy(out.mutable_data_ptr(), numbers.data(), numbers.size() * sizeof(int64_t));
  }
  return out;
}

// Sums of the rows of each place. Places are numbered in the order in which they come first, as distinct_of() does it,
// so that `out` needs no zeros.
template <class T>
void add_rows(const at::Tensor& from, const at::Tensor& places, at::Tensor* out) {
  const int64_t width = out->size(1);
  const T* row = from.const_data_ptr<T>();
  const int64_t* const place = places.const_data_ptr<int64_t>();
  T* const to = out->mutable_data_ptr<T>();
  int64_t seen = 0;
  for (int64_t i = 0; i < places.numel(); ++i, row += width) {
    T* const sum = to + place[i] * width;
    if (place[i] == seen) {
      std::copy_n(row, width, sum);
      ++seen;
    } else {
      for (int64_t c = 0; c < width; ++c) sum[c] += row[c];
    }
  }
}

// Where gradients lie: a server on this host reads them there, when they are pushed.
struct GradientMemory final : torch::CustomClassHolder {
  explicit GradientMemory(const ServiceContext& context)
      : memory(context.worker, context.runtime) {}
  const internal::AnswerMemory memory;
};
using GradientMemoryRef = c10::intrusive_ptr<torch::CustomClassHolder>;

// at::embedding, whose own backward on the CPU calls an operator for each row.
class TakeRows : public torch::autograd::Function<TakeRows> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& rows,
                            const at::Tensor& places, const GradientMemoryRef& memory) {
    context->save_for_backward({places});
    context->saved_data["count"] = rows.size(0);
    context->saved_data["memory"] = c10::IValue::make_capsule(memory);
    return at::embedding(rows, places);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const at::Tensor places = context->get_saved_variables()[0];
    const int64_t count = context->saved_data["count"].toInt();
    const at::Tensor& gradient = gradients[0];
    const auto type = gradient.scalar_type();
    const bool plain = gradient.device().is_cpu() && !at::GradMode::is_enabled() &&
                       (type == at::kFloat || type == at::kDouble);
    if (!plain) {  // a graph of the backward, or a device
      return {at::embedding_dense_backward(gradient, places, count, -1, false), {}, {}};
    }
    const GradientMemoryRef held = context->saved_data["memory"].toCapsule();
    const auto& memory = static_cast<const GradientMemory&>(*held).memory;
    at::Tensor out = memory.rows(count, gradient.size(-1), type);
    const at::Tensor from = gradient.contiguous();
    if (type == at::kFloat) add_rows<float>(from, places, &out);
    if (type == at::kDouble) add_rows<double>(from, places, &out);
    return {std::move(out), {}, {}};
  }
};

}  // namespace

RowLayer::RowLayer(Table table, const LayerOptions& options) : Layer(std::move(table), options) {
  if (table_.definition().kind == TableKind::kSparse) return;
  throw_error(make_error(ErrorKind::kInvalidArgument,
                         absl::StrCat("an embedding wants a sparse table, and table '",
                                      table_.name(), "' is ", to_string(table_.definition()))));
}

RowLayer::~RowLayer() { end_in_backward(); }

at::Tensor RowLayer::checked(const at::Tensor& ids) const {
  if (!ids.defined() || ids.layout() != at::kStrided ||
      (ids.scalar_type() != at::kLong && ids.scalar_type() != at::kInt)) {
    throw_error(make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("table '", table_.name(), "': ids must be a tensor of int64 or int32")));
  }
  return ids.to(at::kCPU, at::kLong).contiguous();
}

RowLayer::Distinct RowLayer::distinct_of(const at::Tensor& ids) {
  const int64_t* const from = ids.const_data_ptr<int64_t>();
  internal::KeyPlaces<int64_t> distinct(static_cast<size_t>(ids.numel()));
  at::Tensor places = at::empty(ids.sizes(), at::kLong);
  int64_t* const to = places.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < ids.numel(); ++i) {
    to[i] = static_cast<int64_t>(distinct.place_of(from[i]));
  }
  return {tensor_of(distinct.keys()), std::move(places)};
}

void RowLayer::prefetch(const at::Tensor& ids) {
  Lookup lookup;
  const at::Tensor plain = checked(ids);
  // The caller may write into its tensor.
  lookup.ids = plain.is_same(ids) || plain.is_alias_of(ids) ? plain.clone() : plain;
  lookup.distinct = distinct_of(lookup.ids);
  lookup.rows = table_.pull_rows(lookup.distinct.keys, options_.deadline);
  if (ahead_.size() == kMostLookups) ahead_.pop_front();
  ahead_.push_back(std::move(lookup));
}

at::Tensor RowLayer::rows_of(const Lookup& lookup) {
  at::Tensor rows = lookup.rows.wait(kInfinite);
  const at::AutoGradMode no_grad(false);
  if (!lookup.newer.empty()) rows = rows.clone();  // it may lie in memory of a server
  for (const Newer& newer : lookup.newer) {
    rows.index_copy_(0, newer.to, newer.rows.wait(kInfinite).index_select(0, newer.from));
  }
  return rows;
}

RowLayer::Found RowLayer::find(const at::Tensor& ids) {
  expect_computation();
  if (at::GradMode::is_enabled()) check_open();
  const at::Tensor plain = checked(ids);
  Lookup lookup;
  for (auto it = ahead_.begin(); it != ahead_.end(); ++it) {
    if (!at::equal(it->ids, plain)) continue;
    lookup = std::move(*it);
    ahead_.erase(it);
    break;
  }
  if (!lookup.ids.defined()) {
    lookup.distinct = distinct_of(plain);
    lookup.rows = table_.pull_rows(lookup.distinct.keys, options_.deadline);
  }
  at::Tensor rows = rows_of(lookup).to(options_.device).detach();
  if (at::GradMode::is_enabled()) {
    rows.requires_grad_(true);
    leaves_.push_back({lookup.distinct.keys, rows});
    watch(rows);
  }
  return {std::move(rows), lookup.distinct.places.to(options_.device)};
}

void RowLayer::forget() {
  ahead_.clear();
  leaves_.clear();
}

std::vector<at::Tensor> RowLayer::leaves() const {
  std::vector<at::Tensor> out;
  for (const Leaf& leaf : leaves_) out.push_back(leaf.rows);
  return out;
}

at::Tensor RowLayer::ahead(const at::Tensor& pushed, std::vector<Newer>* newer) const {
  absl::flat_hash_map<int64_t, int64_t> place_of;  // -1: no lookup waits with it
  const int64_t* const keys = pushed.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < pushed.numel(); ++i) place_of.emplace(keys[i], -1);
  std::vector<int64_t> again;
  for (const Lookup& lookup : ahead_) {
    std::vector<int64_t> from;
    std::vector<int64_t> to;
    const int64_t* const waiting = lookup.distinct.keys.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < lookup.distinct.keys.numel(); ++i) {
      const auto at = place_of.find(waiting[i]);
      if (at == place_of.end()) continue;
      if (at->second < 0) {
        at->second = static_cast<int64_t>(again.size());
        again.push_back(waiting[i]);
      }
      from.push_back(at->second);
      to.push_back(i);
    }
    newer->push_back({{}, tensor_of(from), tensor_of(to)});
  }
  return tensor_of(again);
}

Future<PushResult> RowLayer::push(const internal::LeafGradients& gradients_of,
                                  const StepOptions& options) {
  const at::AutoGradMode no_grad(false);
  internal::TableCore& core = internal::TableAccess::core(table_);
  const ServiceContext& here = core.service()->context();
  internal::AnswerMemory memory(here.worker, here.runtime);
  std::vector<at::Tensor> keys;
  std::vector<at::Tensor> gradients;
  for (const Leaf& leaf : std::exchange(leaves_, {})) {
    at::Tensor gradient = gradients_of.take(leaf.rows);
    if (!gradient.defined()) continue;
    // The server may read it where it lies.
    if (gradients_of.shared() && gradient.is_cpu()) {
      gradient = memory.copy_of(gradient.contiguous());
    }
    keys.push_back(leaf.keys);
    gradients.push_back(gradient);
  }
  internal::Ask ask{.what = "step"};
  if (!keys.empty()) {
    ask.push_keys = keys.size() == 1 ? keys[0] : at::cat(keys);
    ask.push = gradients.size() == 1 ? gradients[0] : at::cat(gradients);
  }
  ask.rate = options.rate;
  ask.max_norm = options.max_norm;
  ask.advance = options.advance;
  ask.position = options.position;
  std::vector<Newer> newer;
  if (options.refresh && !keys.empty()) ask.pull_keys = ahead(ask.push_keys, &newer);
  if (!ask.pull_keys.defined() || ask.pull_keys.numel() == 0) {
    ask.pull_keys = at::Tensor();
    return internal::start<PushResult, internal::push_of>(core, std::move(ask), options.deadline);
  }
  ask.pull = true;
  auto [pushed, values] = internal::start_both(core, std::move(ask), options.deadline);
  for (size_t i = 0; i < newer.size(); ++i) {
    if (newer[i].to.numel() == 0) continue;
    newer[i].rows = values;
    ahead_[i].newer.push_back(std::move(newer[i]));
  }
  return std::move(pushed);
}

// ---- the two -----------------------------------------------------------------------------------

Embedding::Embedding(Table table, const LayerOptions& options)
    : RowLayer(std::move(table), options) {}

at::Tensor Embedding::forward(const at::Tensor& ids) {
  const Found found = find(ids);
  const ServiceContext& context = internal::TableAccess::core(table_).service()->context();
  return TakeRows::apply(found.rows, found.places,
                         GradientMemoryRef(c10::make_intrusive<GradientMemory>(context)));
}

EmbeddingBag::EmbeddingBag(Table table, Reduce reduce, const LayerOptions& options)
    : RowLayer(std::move(table), options), reduce_(reduce) {}

at::Tensor EmbeddingBag::forward(const at::Tensor& ids) {
  if (!ids.defined() || ids.dim() != 2) {
    throw_error(make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("table '", table_.name(), "': ids without offsets must have two dimensions")));
  }
  const Found found = find(ids);
  const int64_t count = ids.size(1);
  const at::Tensor offsets = at::arange(ids.size(0), at::kLong).mul(count).to(options_.device);
  return std::get<0>(at::embedding_bag(found.rows, found.places.reshape({-1}), offsets, false,
                                       static_cast<int64_t>(reduce_)));
}

at::Tensor EmbeddingBag::forward(const at::Tensor& ids, const at::Tensor& offsets) {
  if (!ids.defined() || ids.dim() != 1) {
    throw_error(make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("table '", table_.name(), "': ids with offsets must have one dimension")));
  }
  const Found found = find(ids);
  return std::get<0>(at::embedding_bag(found.rows, found.places,
                                       offsets.to(options_.device, at::kLong), false,
                                       static_cast<int64_t>(reduce_)));
}

}  // namespace weft::ps
