#include "weft/ps/internal/sparse_chunk.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ATen/ops/empty.h"

namespace weft::ps::internal {
namespace {

constexpr size_t kColumnsBeforeBuffers = 3;

std::string_view piece_of(const void* data, size_t bytes) {
  return {static_cast<const char*>(data), bytes};
}

// Holds chunks that nothing writes to any more.
class FrozenChunks final : public FrozenData {
 public:
  FrozenChunks(std::vector<Chunk> chunks, size_t rows, RowShape shape,
               const std::vector<std::string>& buffer_names)
      : chunks_(std::move(chunks)), rows_(rows), shape_(std::move(shape)) {
    const auto count = static_cast<int64_t>(rows);
    columns_.push_back({"keys", at::kLong, {count}});
    columns_.push_back({"steps", at::kLong, {count}});
    if (chunks_.empty()) return;  // without rows there is no type of their values
    const at::Tensor& values = chunks_[0].values;
    columns_.push_back({"values", values.scalar_type(), {count, values.size(1)}});
    for (size_t b = 0; b < buffer_names.size(); ++b) {
      if (buffer_names[b].empty()) continue;
      const at::Tensor& buffer = chunks_[0].buffers[b];
      columns_.push_back({buffer_names[b], buffer.scalar_type(), {count, buffer.size(1)}});
      buffers_.push_back(b);
    }
  }

  // Keys and steps, values and buffers, row by row in the order in which they were made.
  bool copy_image(std::vector<at::Tensor>* image, size_t* done) const override {
    if (image->empty()) *image = empty_image();
    const size_t end = std::min(*done + kPieceRows, rows_);
    for (size_t first = *done; first < end; first += kChunkRows) {
      const Chunk& chunk = chunks_[first / kChunkRows];
      const size_t rows = std::min(kChunkRows, rows_ - first);
      const RowNotes& notes = *chunk.notes;
      std::copy_n(notes.keys.begin(), rows, (*image)[0].mutable_data_ptr<int64_t>() + first);
      std::copy_n(notes.steps.begin(), rows, (*image)[1].mutable_data_ptr<int64_t>() + first);
      copy_rows(chunk.values, 0, (*image)[2], first, rows);
      for (const size_t b : buffers_) copy_rows(chunk.buffers[b], 0, (*image)[b + 3], first, rows);
    }
    *done = end;
    return end < rows_;
  }

  const std::vector<Column>& columns() const override { return columns_; }

  Status write(size_t column, const std::function<Status(std::string_view)>& put) const override {
    size_t left = rows_;
    for (const Chunk& chunk : chunks_) {
      const size_t rows = std::min(left, kChunkRows);
      left -= rows;
      if (rows == 0) break;
      WEFT_RETURN_IF_ERROR(write_rows(chunk, column, rows, put));
    }
    return absl::OkStatus();
  }

 private:
  std::vector<at::Tensor> empty_image() const {
    const auto count = static_cast<int64_t>(rows_);
    std::vector<at::Tensor> out = {at::empty({count}, at::kLong), at::empty({count}, at::kLong),
                                   at::empty({count, shape_.length}, shape_.options)};
    for (const int64_t length : shape_.buffers) {
      out.push_back(length == 0 ? at::Tensor() : at::empty({count, length}, shape_.options));
    }
    return out;
  }
  Status write_rows(const Chunk& chunk, size_t column, size_t rows,
                    const std::function<Status(std::string_view)>& put) const {
    if (column == 0) return put(piece_of(chunk.notes->keys.data(), rows * sizeof(uint64_t)));
    if (column == 1) {
      std::array<int64_t, kChunkRows> steps{};
      std::copy_n(chunk.notes->steps.begin(), rows, steps.begin());
      return put(piece_of(steps.data(), rows * sizeof(int64_t)));
    }
    const at::Tensor& from = column < kColumnsBeforeBuffers
                                 ? chunk.values
                                 : chunk.buffers[buffers_[column - kColumnsBeforeBuffers]];
    return put(piece_of(from.const_data_ptr(), from.nbytes() / kChunkRows * rows));
  }

  const std::vector<Chunk> chunks_;
  const size_t rows_;
  const RowShape shape_;
  std::vector<Column> columns_;
  std::vector<size_t> buffers_;  // of each column of a buffer: which of the rule's
};

}  // namespace

void Chunk::copy_frozen() {
  values = values.clone();
  first = static_cast<char*>(values.mutable_data_ptr());
  for (at::Tensor& buffer : buffers) {
    if (buffer.defined()) buffer = buffer.clone();
  }
  notes = std::make_shared<RowNotes>(*notes);
  frozen = false;
}

void copy_rows(const at::Tensor& from, size_t row, const at::Tensor& to, size_t to_row,
               size_t rows) {
  const size_t bytes = static_cast<size_t>(from.size(1)) * from.element_size();
  std::memcpy(static_cast<char*>(to.data_ptr()) + to_row * bytes,
              static_cast<const char*>(from.const_data_ptr()) + row * bytes, rows * bytes);
}

std::shared_ptr<const FrozenData> freeze_chunks(std::vector<Chunk>* chunks, size_t rows,
                                                const RowShape& shape,
                                                const std::vector<std::string>& buffer_names) {
  for (Chunk& chunk : *chunks) chunk.frozen = true;
  return std::make_shared<FrozenChunks>(*chunks, rows, shape, buffer_names);
}

}  // namespace weft::ps::internal
