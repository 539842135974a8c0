#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/div.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "weft/ps/internal/part_data.h"
#include "weft/ps/internal/sparse_chunk.h"

namespace weft::ps::internal {
namespace {

// For a read: how many keys before it is needed a place of the index, and a row, is fetched.
constexpr size_t kIndexAhead = 16;
constexpr size_t kRowsAhead = 8;
constexpr size_t kLineBytes = 64;
constexpr size_t kFetchedBytes = 1024;  // of a row; what is longer streams by itself
// Of a row besides its values and the rule's: key and place in the index at its usual load, steps.
constexpr int64_t kRowOverhead = 40;

// Rows by key. They lie in chunks in the order in which they were made; the index is never walked.
class SparseData final : public PartData {
 public:
  SparseData(const TableDefinition& definition, const std::string& table, uint64_t most_bytes)
      : definition_(definition),
        most_bytes_(most_bytes),
        rule_(make_update_rule(definition.rule.name)),
        first_(definition.init, table),
        length_(definition.shape[0]),
        tensor_(at::TensorOptions().dtype(definition.dtype)),
        item_(static_cast<int64_t>(c10::elementSize(definition.dtype))) {
    row_bytes_ = length_ * item_ + kRowOverhead;
    for (size_t b = 0; b < rule_->buffer_names().size(); ++b) {
      const auto first = rule_->first_value(definition.rule.options, b);
      lengths_.push_back(!first.has_value() ? 0 : rule_->by_row(b) ? 1 : length_);
      firsts_.push_back(first.value_or(0));
      row_bytes_ += lengths_.back() * item_;
    }
  }

  size_t push_tensors() const override { return 2; }
  size_t pull_tensors() const override { return 1; }

  StatusOr<Push> accept(const PushHeader& header, std::vector<at::Tensor> tensors) override {
    WEFT_ASSIGN_OR_RETURN(const std::vector<uint64_t> keys, keys_of(tensors[0]));
    const auto count = static_cast<int64_t>(keys.size());
    WEFT_RETURN_IF_ERROR(
        check_tensor(tensors[1], definition_.dtype, {count, length_}, "a push of rows that"));
    const at::Tensor values = tensors[1].contiguous();
    WEFT_RETURN_IF_ERROR(check_finite(values, length_));
    Push push{header.kind, header.rate, {}, {}};
    gather({{&keys, &values}}, header.kind == PushKind::kAssign, &push);
    WEFT_RETURN_IF_ERROR(make_rows(push.keys));
    return push;
  }

  void apply(std::vector<Push> pushes, uint64_t divisor) override {
    if (pushes.empty()) return;
    Push all{pushes.back().kind, pushes.back().rate, {}, {}};
    if (pushes.size() == 1) {
      all = std::move(pushes[0]);
    } else {
      std::vector<Part> parts;
      for (const Push& push : pushes) parts.push_back({&push.keys, &push.values});
      gather(parts, false, &all);
    }
    if (all.keys.empty()) return;
    if (all.kind == PushKind::kAssign) {
      const char* const from = static_cast<const char*>(all.values.const_data_ptr());
      for (size_t i = 0; i < all.keys.size(); ++i) {
        const uint32_t row = index_.at(all.keys[i]);
        thaw(row);
        std::memcpy(value_of(row), from + i * bytes_of(length_), bytes_of(length_));
      }
      return;
    }
    // Not in place: they may be the client's.
    if (divisor > 1) all.values = all.values.div(static_cast<double>(divisor));
    const PackedOptions options = options_with_rate(*rule_, definition_.rule.options, all.rate);
    if (all.keys.size() == 1) return update(all, steps_of(index_.at(all.keys[0])), {0}, options);
    // Rows that have seen equally many steps are one parameter of the rule.
    std::map<uint32_t, std::vector<size_t>> by_steps;
    for (size_t i = 0; i < all.keys.size(); ++i) {
      by_steps[steps_of(index_.at(all.keys[i]))].push_back(i);
    }
    for (const auto& [steps, places] : by_steps) update(all, steps, places, options);
  }

  std::vector<at::Tensor> pack(const Push& push) const override {
    at::Tensor keys = at::empty({static_cast<int64_t>(push.keys.size())}, at::kLong);
    std::memcpy(keys.mutable_data_ptr(), push.keys.data(), push.keys.size() * sizeof(uint64_t));
    return {keys, push.values};
  }

  StatusOr<at::Tensor> read(const std::vector<at::Tensor>& tensors) const override {
    WEFT_ASSIGN_OR_RETURN(const std::vector<uint64_t> keys, keys_of(tensors[0]));
    at::Tensor out = at::empty({static_cast<int64_t>(keys.size()), length_}, tensor_);
    char* const data = static_cast<char*>(out.mutable_data_ptr());
    const size_t bytes = bytes_of(length_);
    // Rows lie anywhere: those of the next keys are fetched while these are copied.
    std::vector<const char*> rows(keys.size());
    const auto find = [&](size_t i) {
      const auto at = index_.find(keys[i]);
      if (at == index_.end()) return;
      rows[i] = value_of(at->second);
      for (size_t b = 0; b < std::min(bytes, kFetchedBytes); b += kLineBytes) {
        __builtin_prefetch(rows[i] + b);
      }
    };
    for (size_t i = 0; i < std::min(keys.size(), kIndexAhead); ++i) index_.prefetch(keys[i]);
    for (size_t i = 0; i < keys.size() + kRowsAhead; ++i) {
      if (i + kIndexAhead < keys.size()) index_.prefetch(keys[i + kIndexAhead]);
      if (i < keys.size()) find(i);
      if (i < kRowsAhead) continue;
      char* const to = data + (i - kRowsAhead) * bytes;
      if (const char* const row = rows[i - kRowsAhead]; row != nullptr) {
        std::memcpy(to, row, bytes);
      } else {
        fill_first(keys[i - kRowsAhead], to);  // a pull makes no row
      }
    }
    return out;
  }

  int64_t rows() const override { return static_cast<int64_t>(rows_); }
  int64_t bytes() const override { return static_cast<int64_t>(rows_) * row_bytes_; }
  void follow(bool follows) override { follows_ = follows; }

  std::shared_ptr<const FrozenData> freeze() override {
    return freeze_chunks(&chunks_, rows_, {tensor_, length_, lengths_}, buffer_names());
  }
  std::vector<std::string> buffer_names() const override {
    std::vector<std::string> out = rule_->buffer_names();
    for (size_t b = 0; b < out.size(); ++b) {
      if (lengths_[b] == 0) out[b].clear();
    }
    return out;
  }

  Status load(const std::vector<at::Tensor>& image, const std::function<void()>& between) override {
    if (image.size() != 3 + lengths_.size()) {
      return make_error(ErrorKind::kProtocol,
                        absl::StrCat("image of ", image.size(), " tensors, and a part has ",
                                     3 + lengths_.size()));
    }
    WEFT_ASSIGN_OR_RETURN(const std::vector<uint64_t> keys, keys_of(image[0]));
    const auto count = static_cast<int64_t>(keys.size());
    WEFT_RETURN_IF_ERROR(check_tensor(image[1], c10::ScalarType::Long, {count}, "steps that"));
    WEFT_RETURN_IF_ERROR(check_tensor(image[2], definition_.dtype, {count, length_}, "rows that"));
    for (size_t b = 0; b < lengths_.size(); ++b) {
      if (lengths_[b] == 0) continue;
      WEFT_RETURN_IF_ERROR(
          check_tensor(image[b + 3], definition_.dtype, {count, lengths_[b]}, "state that"));
    }
    std::vector<at::Tensor> from;
    for (const at::Tensor& t : image) from.push_back(t.defined() ? t.contiguous() : t);
    index_.clear();
    chunks_.clear();
    rows_ = 0;
    follows_ = true;
    try {
      index_.reserve(keys.size());
    } catch (const std::exception&) {
      return make_error(ErrorKind::kResource, absl::StrCat("no memory for ", count, " rows"));
    }
    for (size_t first = 0; first < keys.size(); first += kPieceRows) {
      const size_t end = std::min(first + kPieceRows, keys.size());
      WEFT_RETURN_IF_ERROR(make_rows(
          {keys.begin() + static_cast<int64_t>(first), keys.begin() + static_cast<int64_t>(end)},
          false));
      if (rows_ != end) {
        return make_error(ErrorKind::kProtocol, "image with a key that comes twice");
      }
      for (size_t at = first; at < end; at += kChunkRows) {
        load_chunk(from, at, std::min(kChunkRows, end - at));
      }
      if (between != nullptr && end != keys.size()) between();
    }
    return absl::OkStatus();
  }

 private:
  struct Part {
    const std::vector<uint64_t>* keys;
    const at::Tensor* values;
  };

  size_t bytes_of(int64_t elements) const { return static_cast<size_t>(elements * item_); }
  char* value_of(uint32_t row) const {
    return chunks_[row / kChunkRows].first + row % kChunkRows * bytes_of(length_);
  }
  char* buffer_of(size_t buffer, uint32_t row) const {
    return static_cast<char*>(chunks_[row / kChunkRows].buffers[buffer].data_ptr()) +
           row % kChunkRows * bytes_of(lengths_[buffer]);
  }
  // A piece of an image; its first row is the first of a chunk.
  void load_chunk(const std::vector<at::Tensor>& from, size_t first, size_t rows) {
    const Chunk& chunk = chunks_[first / kChunkRows];
    std::copy_n(from[1].const_data_ptr<int64_t>() + first, rows, chunk.notes->steps.begin());
    copy_rows(from[2], first, chunk.values, 0, rows);
    for (size_t b = 0; b < lengths_.size(); ++b) {
      if (lengths_[b] != 0) copy_rows(from[b + 3], first, chunk.buffers[b], 0, rows);
    }
  }
  uint32_t& steps_of(uint32_t row) {
    return chunks_[row / kChunkRows].notes->steps[row % kChunkRows];
  }
  void thaw(uint32_t row) { chunks_[row / kChunkRows].thaw(); }

  static StatusOr<std::vector<uint64_t>> keys_of(const at::Tensor& keys) {
    if (!keys.defined() || keys.dim() != 1) {
      return make_error(ErrorKind::kInvalidArgument, "keys that are not a tensor of one dimension");
    }
    WEFT_RETURN_IF_ERROR(check_tensor(keys, c10::ScalarType::Long, {keys.size(0)}, "keys that"));
    const at::Tensor flat = keys.contiguous();
    const auto* const data = reinterpret_cast<const uint64_t*>(flat.const_data_ptr<int64_t>());
    return std::vector<uint64_t>(data, data + flat.numel());
  }

  // Each key once, in the order in which they first come, with the sum of its rows in their order;
  // `last`: with its last row.
  void gather(const std::vector<Part>& parts, bool last, Push* out) const {
    if (parts.size() == 1 && parts[0].keys->size() == 1) {  // many pushes are of one row
      out->keys = *parts[0].keys;
      out->values = *parts[0].values;
      return;
    }
    absl::flat_hash_map<uint64_t, size_t> place;
    size_t count = 0;
    for (const Part& part : parts) count += part.keys->size();
    place.reserve(count);
    for (const Part& part : parts) {
      for (const uint64_t key : *part.keys) {
        if (place.emplace(key, out->keys.size()).second) out->keys.push_back(key);
      }
    }
    if (parts.size() == 1 && out->keys.size() == count) {  // each key comes once
      out->values = *parts[0].values;
      return;
    }
    out->values = at::full({static_cast<int64_t>(out->keys.size()), length_}, 0, tensor_);
    for (const Part& part : parts) {
      const auto add = [&]<class T>(const T* from, T* to) {
        for (size_t i = 0; i < part.keys->size(); ++i) {
          T* const row = to + static_cast<int64_t>(place.at((*part.keys)[i])) * length_;
          const T* const given = from + static_cast<int64_t>(i) * length_;
          for (int64_t c = 0; c < length_; ++c) row[c] = last ? given[c] : row[c] + given[c];
        }
      };
      if (definition_.dtype == c10::ScalarType::Double) {
        add(part.values->const_data_ptr<double>(), out->values.mutable_data_ptr<double>());
      } else {
        add(part.values->const_data_ptr<float>(), out->values.mutable_data_ptr<float>());
      }
    }
  }

  template <class T>
  void fill_row(uint64_t key, T* to) const {
    for (int64_t c = 0; c < length_; ++c) {
      to[c] = static_cast<T>(first_.at(key, static_cast<uint64_t>(c)));
    }
  }
  void fill_first(uint64_t key, char* to) const {
    if (definition_.dtype == c10::ScalarType::Double) {
      fill_row(key, reinterpret_cast<double*>(to));
    } else {
      fill_row(key, reinterpret_cast<float*>(to));
    }
  }

  // `fill`: with their first values.
  Status make_rows(const std::vector<uint64_t>& keys, bool fill = true) {
    size_t fresh = 0;
    for (const uint64_t key : keys) fresh += index_.contains(key) ? 0 : 1;
    if (fresh == 0) return absl::OkStatus();
    const auto after = static_cast<uint64_t>(rows_ + fresh) * static_cast<uint64_t>(row_bytes_);
    if (after > most_bytes_ && !follows_) {
      return make_error(
          ErrorKind::kResource,
          absl::StrCat("push with ", fresh, " new rows of ", row_bytes_, " bytes would make ",
                       after, " bytes of ", rows_ + fresh, " rows, and the most are ", most_bytes_,
                       " (max_bytes of the table, table_bytes of its server); nothing of the push "
                       "was applied"));
    }
    if (rows_ + fresh > UINT32_MAX) {
      return make_error(ErrorKind::kResource, "a part holds at most 2^32 rows");
    }
    try {
      while (chunks_.size() * kChunkRows < rows_ + fresh) add_chunk();
      index_.reserve(rows_ + fresh);
    } catch (const std::exception&) {
      return make_error(ErrorKind::kResource, absl::StrCat("no memory for ", fresh, " new rows"));
    }
    for (const uint64_t key : keys) {
      const auto row = static_cast<uint32_t>(rows_);
      if (!index_.emplace(key, row).second) continue;
      thaw(row);
      if (fill) fill_first(key, value_of(row));
      chunks_[row / kChunkRows].notes->keys[row % kChunkRows] = key;
      ++rows_;
    }
    return absl::OkStatus();
  }

  void add_chunk() {
    Chunk chunk;
    const auto rows = static_cast<int64_t>(kChunkRows);
    chunk.values = at::empty({rows, length_}, tensor_);
    chunk.first = static_cast<char*>(chunk.values.mutable_data_ptr());
    for (size_t b = 0; b < lengths_.size(); ++b) {
      chunk.buffers.push_back(
          lengths_[b] == 0 ? at::Tensor() : at::full({rows, lengths_[b]}, firsts_[b], tensor_));
    }
    chunk.notes = std::make_shared<RowNotes>();
    chunks_.push_back(std::move(chunk));
  }

  void update(const Push& push, uint32_t steps, const std::vector<size_t>& places,
              const PackedOptions& options) {
    const auto count = static_cast<int64_t>(places.size());
    std::vector<uint32_t> rows;
    for (const size_t place : places) rows.push_back(index_.at(push.keys[place]));
    for (const uint32_t row : rows) thaw(row);
    const auto collect = [&](int64_t length, const auto& from) {
      at::Tensor out = at::empty({count, length}, tensor_);
      char* const data = static_cast<char*>(out.mutable_data_ptr());
      for (size_t i = 0; i < places.size(); ++i) {
        std::memcpy(data + i * bytes_of(length), from(i), bytes_of(length));
      }
      return out;
    };
    const char* const given = static_cast<const char*>(push.values.const_data_ptr());
    at::Tensor values = collect(length_, [&](size_t i) { return value_of(rows[i]); });
    const at::Tensor gradient =
        places.size() == push.keys.size()
            ? push.values
            : collect(length_, [&](size_t i) { return given + places[i] * bytes_of(length_); });
    ParameterState state;
    state.steps.store(steps);
    for (size_t b = 0; b < lengths_.size(); ++b) {
      at::Tensor buffer;
      if (lengths_[b] != 0) {
        buffer = collect(lengths_[b], [&](size_t i) { return buffer_of(b, rows[i]); });
        if (rule_->by_row(b)) buffer = buffer.view({count});
      }
      state.buffers.push_back(std::move(buffer));
    }
    rule_->update(options, values, gradient, &state);
    const auto scatter = [&](const at::Tensor& from, int64_t length, const auto& to) {
      const at::Tensor flat = from.contiguous();
      const char* const data = static_cast<const char*>(flat.const_data_ptr());
      for (size_t i = 0; i < rows.size(); ++i) {
        std::memcpy(to(i), data + i * bytes_of(length), bytes_of(length));
      }
    };
    scatter(values, length_, [&](size_t i) { return value_of(rows[i]); });
    for (size_t b = 0; b < lengths_.size(); ++b) {
      if (lengths_[b] == 0) continue;
      scatter(state.buffers[b], lengths_[b], [&](size_t i) { return buffer_of(b, rows[i]); });
    }
    for (const uint32_t row : rows) ++steps_of(row);
  }

  const TableDefinition definition_;
  const uint64_t most_bytes_;
  const std::shared_ptr<const UpdateRule> rule_;
  const FirstValues first_;
  const int64_t length_;
  const at::TensorOptions tensor_;
  const int64_t item_;
  int64_t row_bytes_ = 0;
  std::vector<int64_t> lengths_;  // of a row in each buffer; 0: none
  std::vector<double> firsts_;
  absl::flat_hash_map<uint64_t, uint32_t> index_;
  std::vector<Chunk> chunks_;
  size_t rows_ = 0;
  bool follows_ = false;
};

}  // namespace

StatusOr<std::unique_ptr<PartData>> make_sparse_data(const TableDefinition& definition,
                                                     const std::string& table,
                                                     int64_t table_bytes) {
  auto most = static_cast<uint64_t>(table_bytes);
  if (definition.max_bytes != 0) most = std::min(most, definition.max_bytes);
  return std::make_unique<SparseData>(definition, table, most);
}

}  // namespace weft::ps::internal
