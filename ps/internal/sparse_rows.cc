#include "weft/ps/internal/sparse_rows.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "absl/strings/str_cat.h"

namespace weft::ps::internal {
namespace {

// Bytes of a row besides its values and the rule's: key and place in the index at its usual load, steps.
constexpr int64_t kRowOverhead = 40;

}  // namespace

SparseRows::SparseRows(const TableDefinition& definition, const UpdateRule& rule,
                       const std::string& table, bool ordered)
    : first_(definition.init, table),
      length_(definition.shape[0]),
      options_(at::TensorOptions().dtype(definition.dtype)),
      item_(static_cast<int64_t>(c10::elementSize(definition.dtype))),
      ordered_(ordered) {
  row_bytes_ = length_ * item_ + kRowOverhead + (ordered_ ? RowOrder::kRowBytes : 0);
  for (size_t b = 0; b < rule.buffer_names().size(); ++b) {
    const auto first = rule.first_value(definition.rule.options, b);
    lengths_.push_back(!first.has_value() ? 0 : rule.by_row(b) ? 1 : length_);
    firsts_.push_back(first.value_or(0));
    row_bytes_ += lengths_.back() * item_;
  }
}

void SparseRows::fill_first(uint64_t key, char* to) const {
  if (is_double()) {
    fill_row(key, reinterpret_cast<double*>(to));
  } else {
    fill_row(key, reinterpret_cast<float*>(to));
  }
}

Status SparseRows::reserve(size_t more) {
  if (size_ + more >= kNone) {
    return make_error(ErrorKind::kResource, "a part holds less than 2^32 rows");
  }
  try {
    while (chunks_.size() * kChunkRows < size_ + more) add_chunk();
    index_.reserve(size_ + more);
    if (ordered_) order_.reserve(size_ + more);
  } catch (const std::exception&) {
    return make_error(ErrorKind::kResource, absl::StrCat("no memory for ", more, " new rows"));
  }
  return absl::OkStatus();
}

void SparseRows::add_chunk() {
  Chunk chunk;
  const auto rows = static_cast<int64_t>(kChunkRows);
  chunk.values = at::empty({rows, length_}, options_);
  chunk.first = static_cast<char*>(chunk.values.mutable_data_ptr());
  for (size_t b = 0; b < lengths_.size(); ++b) {
    chunk.buffers.push_back(lengths_[b] == 0 ? at::Tensor()
                                             : at::full({rows, lengths_[b]}, firsts_[b], options_));
  }
  chunk.notes = std::make_shared<RowNotes>();
  chunks_.push_back(std::move(chunk));
}

uint32_t SparseRows::add(uint64_t key, int64_t now) {
  const auto row = static_cast<uint32_t>(size_++);
  index_.emplace(key, row);
  thaw(row);
  if (ordered_) {
    order_.add(now);
    clean(row);
  }
  fill_first(key, value_of(row));
  key_of(row) = key;
  return row;
}

// Another row may have been in its place.
void SparseRows::clean(uint32_t row) {
  steps_of(row) = 0;
  for (size_t b = 0; b < lengths_.size(); ++b) {
    const auto fill = [&]<class T>(T first) {
      std::fill_n(reinterpret_cast<T*>(buffer_of(b, row)), lengths_[b], first);
    };
    if (lengths_[b] == 0) continue;
    if (is_double()) {
      fill(firsts_[b]);
    } else {
      fill(static_cast<float>(firsts_[b]));
    }
  }
}

void SparseRows::drop(uint32_t row) {
  ++places_;
  const auto last = static_cast<uint32_t>(size_ - 1);
  index_.erase(key_of(row));
  if (row != last) {
    thaw(row);
    std::memcpy(value_of(row), value_of(last), bytes_of(length_));
    for (size_t b = 0; b < lengths_.size(); ++b) {
      if (lengths_[b] == 0) continue;
      std::memcpy(buffer_of(b, row), buffer_of(b, last), bytes_of(lengths_[b]));
    }
    key_of(row) = key_of(last);
    steps_of(row) = steps_of(last);
    index_[key_of(row)] = row;
  }
  if (ordered_) order_.remove(row);
  --size_;
  // One empty chunk stays, for those that come in the place of others.
  while (chunks_.size() * kChunkRows >= size_ + 2 * kChunkRows) chunks_.pop_back();
}

void SparseRows::clear() {
  ++places_;
  index_.clear();
  chunks_.clear();
  order_.clear();
  size_ = 0;
}

// A piece of an image; its first row is the first of a chunk.
void SparseRows::load_chunk(const std::vector<at::Tensor>& from, size_t first, size_t rows) {
  const Chunk& chunk = chunks_[first / kChunkRows];
  std::copy_n(from[1].const_data_ptr<int64_t>() + first, rows, chunk.notes->steps.begin());
  copy_rows(from[2], first, chunk.values, 0, rows);
  for (size_t b = 0; b < lengths_.size(); ++b) {
    if (lengths_[b] != 0) copy_rows(from[b + 3], first, chunk.buffers[b], 0, rows);
  }
}

Status SparseRows::load(const std::vector<uint64_t>& keys, const std::vector<at::Tensor>& image,
                        int64_t now, const std::function<void()>& between) {
  clear();
  try {
    index_.reserve(keys.size());
  } catch (const std::exception&) {
    return make_error(ErrorKind::kResource, absl::StrCat("no memory for ", keys.size(), " rows"));
  }
  for (size_t first = 0; first < keys.size(); first += kPieceRows) {
    const size_t end = std::min(first + kPieceRows, keys.size());
    WEFT_RETURN_IF_ERROR(reserve(end - first));
    for (size_t i = first; i < end; ++i) {
      const auto row = static_cast<uint32_t>(i);
      if (!index_.emplace(keys[i], row).second) {
        return make_error(ErrorKind::kProtocol, "image with a key that comes twice");
      }
      ++size_;
      key_of(row) = keys[i];
      if (ordered_) order_.add(now);
    }
    for (size_t at = first; at < end; at += kChunkRows) {
      load_chunk(image, at, std::min(kChunkRows, end - at));
    }
    if (between != nullptr && end != keys.size()) between();
  }
  return absl::OkStatus();
}

}  // namespace weft::ps::internal
