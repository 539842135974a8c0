#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/div.h"
#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "weft/ps/internal/add_scaled.h"
#include "weft/ps/internal/key_places.h"
#include "weft/ps/internal/part_data.h"
#include "weft/ps/internal/row_order.h"
#include "weft/ps/internal/sparse_rows.h"

namespace weft::ps::internal {
namespace {

// Rows lie anywhere: a place in the index, and a row, are prefetched so many keys before they are read.
constexpr size_t kIndexAhead = 16;
constexpr size_t kRowsAhead = 8;
constexpr size_t kLineBytes = 64;
constexpr size_t kFetchedBytes = 1024;  // of a row; what is longer streams by itself
// Keys that are counted before they have a row, where nothing else bounds them; else so much of max_bytes.
constexpr size_t kMostSeen = size_t{1} << 20;
constexpr uint64_t kShareOfSeen = 8;
// Rows of which the time is over that go with a push, besides two for each of its own.
constexpr size_t kExpireMore = 16;

void fetch(const char* row, size_t bytes) {
  for (size_t b = 0; b < std::min(bytes, kFetchedBytes); b += kLineBytes) {
    __builtin_prefetch(row + b);
  }
}

bool rows_go(const TableDefinition& d) {
  return d.eviction != Eviction::kNone || d.ttl > absl::ZeroDuration();
}

// How pushes and pulls use the rows, by the table's rule, and which of them are there.
class SparseData final : public PartData {
 public:
  SparseData(const TableDefinition& definition, const std::string& table, uint64_t most_bytes,
             std::shared_ptr<Runtime> clock, AnswerMemory memory, RuleRef rule)
      : definition_(definition),
        most_bytes_(most_bytes),
        rule_(std::move(rule)),
        length_(definition.shape[0]),
        tensor_(at::TensorOptions().dtype(definition.dtype)),
        ordered_(rows_go(definition)),
        rows_(definition, *rule_, table, ordered_),
        clock_(std::move(clock)),
        memory_(std::move(memory)),
        admits_all_(definition.admit_after <= 1),
        seen_(definition.admit_after, definition.max_bytes == 0
                                          ? kMostSeen
                                          : definition.max_bytes / kShareOfSeen /
                                                static_cast<uint64_t>(Sightings::kKeyBytes)) {}

  size_t push_tensors() const override { return 2; }
  size_t pull_tensors() const override { return 1; }
  // What goes depends on where a push ends, and so may which keys are counted.
  bool joins() const override { return !ordered_ && admits_all_; }

  StatusOr<Push> accept(const PushHeader& header, std::vector<at::Tensor> tensors) override {
    WEFT_ASSIGN_OR_RETURN(const std::vector<uint64_t> keys, keys_of(tensors[0]));
    const auto count = static_cast<int64_t>(keys.size());
    WEFT_RETURN_IF_ERROR(
        check_tensor(tensors[1], definition_.dtype, {count, length_}, "a push of rows that"));
    WEFT_RETURN_IF_ERROR(check_rate(*rule_, definition_.rule.options, header.rate));
    const at::Tensor values = tensors[1].contiguous();
    WEFT_RETURN_IF_ERROR(check_finite(values, length_));
    Push push{header.kind, header.rate, {}, {}};
    add_by_key({{&keys, &values}}, header.kind == PushKind::kAssign, &push);
    if (!admits_all_ && !follows_ && header.kind == PushKind::kGradient) admit(&push);
    if (ordered_ && !follows_) WEFT_RETURN_IF_ERROR(make_room(push.keys));
    WEFT_RETURN_IF_ERROR(make_rows(&push));
    return push;
  }

  std::vector<uint64_t> take_evicted() override { return std::exchange(evicted_, {}); }

  Status evict(const std::vector<uint64_t>& keys) override {
    for (const uint64_t key : keys) {
      const uint32_t row = rows_.find(key);
      if (row == SparseRows::kNone) {
        return make_error(ErrorKind::kProtocol, absl::StrCat("there is no row of key ", key));
      }
      rows_.drop(row);
    }
    return absl::OkStatus();
  }

  void apply(std::vector<Push> pushes, uint64_t divisor) override {
    if (pushes.empty()) return;
    Push all{pushes.back().kind, pushes.back().rate, {}, {}};
    if (pushes.size() == 1) {
      all = std::move(pushes[0]);
    } else {
      std::vector<KeyedRows> parts;
      for (const Push& push : pushes) parts.push_back({&push.keys, &push.values});
      add_by_key(parts, false, &all);
    }
    if (all.keys.empty()) return;
    const bool same_places = !all.rows.empty() && all.places == rows_.places();
    const std::vector<uint32_t> rows = same_places ? std::move(all.rows) : find_all(all.keys);
    if (all.kind == PushKind::kAssign) {
      const char* const from = static_cast<const char*>(all.values.const_data_ptr());
      for (size_t i = 0; i < rows.size(); ++i) {
        rows_.thaw(rows[i]);
        std::memcpy(rows_.value_of(rows[i]), from + i * bytes_of(length_), bytes_of(length_));
      }
      return;
    }
    // Not in place: they may be the client's.
    if (divisor > 1) all.values = all.values.div(static_cast<double>(divisor));
    const PackedOptions options = options_with_rate(*rule_, definition_.rule.options, all.rate);
    if (const auto by = rule_->plain_step(options); by.has_value()) {
      return add_to_rows(rows, all.values, *by);
    }
    // Rows that have seen equally many steps are one parameter of the rule.
    const uint32_t steps = rows_.steps_of(rows[0]);
    bool same = true;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (i + kRowsAhead < rows.size()) __builtin_prefetch(&rows_.steps_of(rows[i + kRowsAhead]));
      same = same && rows_.steps_of(rows[i]) == steps;
    }
    if (same) return update(rows, all.values, options);
    std::map<uint32_t, std::vector<size_t>> by_steps;
    for (size_t i = 0; i < rows.size(); ++i) by_steps[rows_.steps_of(rows[i])].push_back(i);
    for (const auto& [seen, places] : by_steps) {
      std::vector<uint32_t> some;
      at::Tensor gradient = at::empty({static_cast<int64_t>(places.size()), length_}, tensor_);
      for (const size_t place : places) {
        copy_rows(all.values, place, gradient, some.size(), 1);
        some.push_back(rows[place]);
      }
      update(some, gradient, options);
    }
  }

  std::vector<at::Tensor> pack(const Push& push) const override {
    at::Tensor keys = at::empty({static_cast<int64_t>(push.keys.size())}, at::kLong);
    std::copy(push.keys.begin(), push.keys.end(),
              reinterpret_cast<uint64_t*>(keys.mutable_data_ptr<int64_t>()));
    return {keys, push.values};
  }

  StatusOr<at::Tensor> read(const std::vector<at::Tensor>& tensors) override {
    WEFT_ASSIGN_OR_RETURN(const std::vector<uint64_t> keys, keys_of(tensors[0]));
    at::Tensor out = memory_.rows(static_cast<int64_t>(keys.size()), length_, definition_.dtype);
    char* const data = static_cast<char*>(out.mutable_data_ptr());
    const size_t bytes = bytes_of(length_);
    std::vector<const char*> rows(keys.size());
    const int64_t now = now_ms();
    const auto find = [&](size_t i) {
      const uint32_t row = rows_.find(keys[i]);
      if (row == SparseRows::kNone) return;
      rows[i] = rows_.value_of(row);
      rows_.use(row, now);
      fetch(rows[i], bytes);
    };
    for (size_t i = 0; i < std::min(keys.size(), kIndexAhead); ++i) rows_.prefetch(keys[i]);
    for (size_t i = 0; i < keys.size() + kRowsAhead; ++i) {
      if (i + kIndexAhead < keys.size()) rows_.prefetch(keys[i + kIndexAhead]);
      if (i < keys.size()) find(i);
      if (i < kRowsAhead) continue;
      char* const to = data + (i - kRowsAhead) * bytes;
      if (const char* const row = rows[i - kRowsAhead]; row != nullptr) {
        std::memcpy(to, row, bytes);
      } else {
        rows_.fill_first(keys[i - kRowsAhead], to);  // a pull makes no row
      }
    }
    return out;
  }

  int64_t rows() const override { return static_cast<int64_t>(rows_.size()); }
  int64_t bytes() const override { return rows() * rows_.row_bytes() + seen_.bytes(); }
  void follow(bool follows) override { follows_ = follows; }

  std::shared_ptr<const FrozenData> freeze() override { return rows_.freeze(buffer_names()); }
  std::vector<std::string> buffer_names() const override {
    std::vector<std::string> out = rule_->buffer_names();
    for (size_t b = 0; b < out.size(); ++b) {
      if (rows_.buffer_lengths()[b] == 0) out[b].clear();
    }
    return out;
  }

  Status load(const std::vector<at::Tensor>& image, const std::function<void()>& between) override {
    const std::vector<int64_t>& lengths = rows_.buffer_lengths();
    if (image.size() != 3 + lengths.size()) {
      return make_error(
          ErrorKind::kProtocol,
          absl::StrCat("image of ", image.size(), " tensors, and a part has ", 3 + lengths.size()));
    }
    WEFT_ASSIGN_OR_RETURN(const std::vector<uint64_t> keys, keys_of(image[0]));
    const auto count = static_cast<int64_t>(keys.size());
    WEFT_RETURN_IF_ERROR(check_tensor(image[1], c10::ScalarType::Long, {count}, "steps that"));
    WEFT_RETURN_IF_ERROR(check_tensor(image[2], definition_.dtype, {count, length_}, "rows that"));
    for (size_t b = 0; b < lengths.size(); ++b) {
      if (lengths[b] == 0) continue;
      WEFT_RETURN_IF_ERROR(
          check_tensor(image[b + 3], definition_.dtype, {count, lengths[b]}, "state that"));
    }
    std::vector<at::Tensor> from;
    for (const at::Tensor& t : image) from.push_back(t.defined() ? t.contiguous() : t);
    seen_.clear();
    follows_ = true;
    return rows_.load(keys, from, now_ms(), between);
  }

 private:
  size_t bytes_of(int64_t elements) const { return rows_.bytes_of(elements); }

  static StatusOr<std::vector<uint64_t>> keys_of(const at::Tensor& keys) {
    if (!keys.defined() || keys.dim() != 1) {
      return make_error(ErrorKind::kInvalidArgument, "keys that are not a tensor of one dimension");
    }
    WEFT_RETURN_IF_ERROR(check_tensor(keys, c10::ScalarType::Long, {keys.size(0)}, "keys that"));
    const at::Tensor flat = keys.contiguous();
    const auto* const data = reinterpret_cast<const uint64_t*>(flat.const_data_ptr<int64_t>());
    return std::vector<uint64_t>(data, data + flat.numel());
  }

  int64_t now_ms() const { return ordered_ ? absl::ToUnixMillis(clock_->now()) : 0; }

  // Drops the keys that are not admitted yet.
  void admit(Push* push) {
    std::vector<size_t> places;
    for (size_t i = 0; i < push->keys.size(); ++i) {
      if (rows_.contains(push->keys[i]) || seen_.see(push->keys[i])) places.push_back(i);
    }
    push->not_admitted = push->keys.size() - places.size();
    if (push->not_admitted == 0) return;
    at::Tensor values = at::empty({static_cast<int64_t>(places.size()), length_}, tensor_);
    std::vector<uint64_t> keys;
    keys.reserve(places.size());
    for (const size_t place : places) {
      copy_rows(push->values, place, values, keys.size(), 1);
      keys.push_back(push->keys[place]);
    }
    push->keys = std::move(keys);
    push->values = std::move(values);
  }

  // Rows go, the oldest first, until those of a push have room, and then some of which the time is over.
  Status make_room(const std::vector<uint64_t>& keys) {
    const int64_t now = now_ms();
    size_t there = 0;
    for (const uint64_t key : keys) {
      if (const uint32_t row = rows_.find(key); row != SparseRows::kNone) {
        rows_.use(row, now);
        ++there;
      }
    }
    size_t over = 0;
    if (definition_.eviction == Eviction::kLru) {
      const size_t most = most_bytes_ / static_cast<uint64_t>(rows_.row_bytes());
      if (keys.size() > most) {
        return make_error(
            ErrorKind::kResource,
            absl::StrCat("push of ", keys.size(), " rows of ", rows_.row_bytes(),
                         " bytes, and the table has room for ", most, " in ", most_bytes_,
                         " bytes (max_bytes of the table, table_bytes of its server): no row of a "
                         "push makes room for another one of it; nothing of the push was applied"));
      }
      const size_t after = rows_.size() + keys.size() - there;
      over = after - std::min(after, most);
    }
    const int64_t gone_before = definition_.ttl > absl::ZeroDuration()
                                    ? now - absl::ToInt64Milliseconds(definition_.ttl)
                                    : INT64_MIN;
    const size_t expire = over + 2 * keys.size() + kExpireMore;
    const size_t first = evicted_.size();
    const RowOrder& order = rows_.order();
    for (uint32_t row = order.oldest(); row != RowOrder::kNone; row = order.newer_than(row)) {
      const size_t taken = evicted_.size() - first;
      const bool expired = order.used_at(row) < gone_before && taken < expire;
      if (taken >= over && !expired) break;
      evicted_.push_back(rows_.key_of(row));
    }
    for (size_t i = first; i < evicted_.size(); ++i) rows_.drop(rows_.find(evicted_[i]));
    return absl::OkStatus();
  }

  // With their first values; those that are there are used.
  Status make_rows(Push* push) {
    push->rows = find_all(push->keys);
    std::vector<uint32_t>& rows = push->rows;
    const auto fresh = static_cast<size_t>(std::count(rows.begin(), rows.end(), SparseRows::kNone));
    if (fresh != 0) WEFT_RETURN_IF_ERROR(check_cap(fresh));
    if (fresh != 0) WEFT_RETURN_IF_ERROR(rows_.reserve(fresh));
    push->places = rows_.places();
    if (fresh == 0 && !ordered_) return absl::OkStatus();
    const int64_t now = now_ms();
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i] != SparseRows::kNone) {
        rows_.use(rows[i], now);
      } else {
        rows[i] = rows_.add(push->keys[i], now);
      }
    }
    return absl::OkStatus();
  }

  Status check_cap(size_t fresh) const {
    const size_t rows = rows_.size() + fresh;
    const auto after = static_cast<uint64_t>(rows) * static_cast<uint64_t>(rows_.row_bytes());
    if (after <= most_bytes_ || follows_) return absl::OkStatus();
    return make_error(
        ErrorKind::kResource,
        absl::StrCat("push with ", fresh, " new rows of ", rows_.row_bytes(), " bytes would make ",
                     after, " bytes of ", rows, " rows, and the most are ", most_bytes_,
                     " (max_bytes of the table, table_bytes of its server); nothing of the push "
                     "was applied"));
  }

  // Returns the row of each key; SparseRows::kNone for a key without one.
  std::vector<uint32_t> find_all(const std::vector<uint64_t>& keys) const {
    std::vector<uint32_t> rows(keys.size());
    for (size_t i = 0; i < std::min(keys.size(), kIndexAhead); ++i) rows_.prefetch(keys[i]);
    for (size_t i = 0; i < keys.size(); ++i) {
      if (i + kIndexAhead < keys.size()) rows_.prefetch(keys[i + kIndexAhead]);
      rows[i] = rows_.find(keys[i]);
    }
    return rows;
  }

  // Where that is all that the rule does.
  void add_to_rows(const std::vector<uint32_t>& rows, const at::Tensor& gradient, double by) {
    const auto add = [&]<class T>(const T* from) {
      for (size_t i = 0; i < rows.size(); ++i, from += length_) {
        if (i + kRowsAhead < rows.size()) {
          rows_.thaw(rows[i + kRowsAhead]);
          fetch(rows_.value_of(rows[i + kRowsAhead]), bytes_of(length_));
        }
        if (i < kRowsAhead) rows_.thaw(rows[i]);
        add_scaled_(reinterpret_cast<T*>(rows_.value_of(rows[i])), from, static_cast<T>(by),
                    static_cast<size_t>(length_));
        ++rows_.steps_of(rows[i]);
      }
    };
    if (definition_.dtype == c10::ScalarType::Double) {
      add(gradient.const_data_ptr<double>());
    } else {
      add(gradient.const_data_ptr<float>());
    }
  }

  // Updates rows that have the same step count; `gradient` has one row for each of them.
  void update(const std::vector<uint32_t>& rows, const at::Tensor& gradient,
              const PackedOptions& options) {
    const auto count = static_cast<int64_t>(rows.size());
    for (const uint32_t row : rows) rows_.thaw(row);
    const auto collect = [&](int64_t length, const auto& from) {
      at::Tensor out = at::empty({count, length}, tensor_);
      char* const data = static_cast<char*>(out.mutable_data_ptr());
      const size_t bytes = bytes_of(length);
      for (size_t i = 0; i < rows.size(); ++i) {
        if (i + kRowsAhead < rows.size()) fetch(from(i + kRowsAhead), bytes);
        std::memcpy(data + i * bytes, from(i), bytes);
      }
      return out;
    };
    at::Tensor values = collect(length_, [&](size_t i) { return rows_.value_of(rows[i]); });
    const std::vector<int64_t>& lengths = rows_.buffer_lengths();
    ParameterState state;
    state.steps.store(rows_.steps_of(rows[0]));
    for (size_t b = 0; b < lengths.size(); ++b) {
      at::Tensor buffer;
      if (lengths[b] != 0) {
        buffer = collect(lengths[b], [&](size_t i) { return rows_.buffer_of(b, rows[i]); });
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
    scatter(values, length_, [&](size_t i) { return rows_.value_of(rows[i]); });
    for (size_t b = 0; b < lengths.size(); ++b) {
      if (lengths[b] == 0) continue;
      scatter(state.buffers[b], lengths[b], [&](size_t i) { return rows_.buffer_of(b, rows[i]); });
    }
    for (const uint32_t row : rows) ++rows_.steps_of(row);
  }

  const TableDefinition definition_;
  const uint64_t most_bytes_;
  const std::shared_ptr<const UpdateRule> rule_;
  const int64_t length_;
  const at::TensorOptions tensor_;
  const bool ordered_;
  const AddScaled add_scaled_{};
  SparseRows rows_;
  bool follows_ = false;
  // ---- rows that go, and keys that have none yet ----
  const std::shared_ptr<Runtime> clock_;
  const AnswerMemory memory_;
  const bool admits_all_;
  Sightings seen_;
  std::vector<uint64_t> evicted_;
};

}  // namespace

StatusOr<std::unique_ptr<PartData>> make_sparse_data(const TableDefinition& definition,
                                                     const std::string& table, int64_t table_bytes,
                                                     std::shared_ptr<Runtime> clock,
                                                     AnswerMemory memory, RuleRef rule) {
  if (rule == nullptr) rule = make_update_rule(definition.rule.name);
  auto most = static_cast<uint64_t>(table_bytes);
  if (definition.max_bytes != 0) most = std::min(most, definition.max_bytes);
  return std::make_unique<SparseData>(definition, table, most, std::move(clock), std::move(memory),
                                      std::move(rule));
}

}  // namespace weft::ps::internal
