#include "weft/ps/internal/sparse_chunk.h"

#include <algorithm>
#include <utility>

namespace weft::ps::internal {
namespace {

constexpr size_t kColumnsBeforeBuffers = 3;

std::string_view piece_of(const void* data, size_t bytes) {
  return {static_cast<const char*>(data), bytes};
}

// Holds chunks that nothing writes to any more.
class FrozenChunks final : public FrozenData {
 public:
  FrozenChunks(std::vector<Chunk> chunks, size_t rows, const std::vector<std::string>& buffer_names)
      : chunks_(std::move(chunks)), rows_(rows) {
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
  std::vector<Column> columns_;
  std::vector<size_t> buffers_;  // of each column of a buffer: which of the rule's
};

}  // namespace

void Chunk::thaw() {
  if (!frozen) return;
  values = values.clone();
  first = static_cast<char*>(values.mutable_data_ptr());
  for (at::Tensor& buffer : buffers) {
    if (buffer.defined()) buffer = buffer.clone();
  }
  notes = std::make_shared<RowNotes>(*notes);
  frozen = false;
}

std::shared_ptr<const FrozenData> freeze_chunks(std::vector<Chunk>* chunks, size_t rows,
                                                const std::vector<std::string>& buffer_names) {
  for (Chunk& chunk : *chunks) chunk.frozen = true;
  return std::make_shared<FrozenChunks>(*chunks, rows, buffer_names);
}

}  // namespace weft::ps::internal
