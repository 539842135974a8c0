#ifndef WEFT_PS_INTERNAL_SPARSE_ROWS_H_
#define WEFT_PS_INTERNAL_SPARSE_ROWS_H_

// SparseRows: the rows of a sparse part by key, where they lie and in which order they were used. One thread at a time.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/error.h"
#include "weft/dist_optim/update_rule.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/internal/page_allocator.h"
#include "weft/ps/internal/part_data.h"
#include "weft/ps/internal/row_order.h"
#include "weft/ps/internal/sparse_chunk.h"

namespace weft::ps::internal {

// They lie in chunks in the order in which they were made, but that the last takes the place of one that goes; the index is never
// walked.
class SparseRows {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  // `ordered`: the order in which they are used is kept, and rows may go.
  SparseRows(const TableDefinition& definition, const UpdateRule& rule, const std::string& table,
             bool ordered);

  size_t size() const { return size_; }
  int64_t row_bytes() const { return row_bytes_; }
  int64_t length() const { return length_; }
  const at::TensorOptions& options() const { return options_; }
  // Elements of a row in each buffer of the rule; 0: the rule has no need of it.
  const std::vector<int64_t>& buffer_lengths() const { return lengths_; }
  size_t bytes_of(int64_t elements) const { return static_cast<size_t>(elements * item_); }

  uint32_t find(uint64_t key) const {
    const auto at = index_.find(key);
    return at == index_.end() ? kNone : at->second;
  }
  bool contains(uint64_t key) const { return index_.contains(key); }
  void prefetch(uint64_t key) const { index_.prefetch(key); }
  char* value_of(uint32_t row) const {
    return chunks_[row / kChunkRows].first + row % kChunkRows * bytes_of(length_);
  }
  char* buffer_of(size_t buffer, uint32_t row) const {
    return static_cast<char*>(chunks_[row / kChunkRows].buffers[buffer].data_ptr()) +
           row % kChunkRows * bytes_of(lengths_[buffer]);
  }
  uint32_t& steps_of(uint32_t row) {
    return chunks_[row / kChunkRows].notes->steps[row % kChunkRows];
  }
  uint64_t& key_of(uint32_t row) { return chunks_[row / kChunkRows].notes->keys[row % kChunkRows]; }
  // Before a change of the row.
  void thaw(uint32_t row) { chunks_[row / kChunkRows].thaw(); }
  // A key's values before the first push.
  void fill_first(uint64_t key, char* to) const;

  // ---- order of use ----
  const RowOrder& order() const { return order_; }
  void use(uint32_t row, int64_t now) {
    if (ordered_) order_.touch(row, now);
  }

  // Memory for so many more rows, or kind resource: add() then needs none.
  Status reserve(size_t more);
  // A row with its first values; where it lies. REQUIRES: it is not there.
  uint32_t add(uint64_t key, int64_t now);
  // The last row takes its place.
  void drop(uint32_t row);
  void clear();
  // Another number when a row may lie elsewhere than before.
  uint64_t places() const { return places_; }

  std::shared_ptr<const FrozenData> freeze(const std::vector<std::string>& buffer_names) {
    return freeze_chunks(&chunks_, size_, {options_, length_, lengths_}, buffer_names);
  }
  // Replaces everything. `image`: keys, steps, values and buffers, contiguous, checked. `between`: after each piece but the last.
  Status load(const std::vector<uint64_t>& keys, const std::vector<at::Tensor>& image, int64_t now,
              const std::function<void()>& between);

 private:
  template <class T>
  void fill_row(uint64_t key, T* to) const {
    for (int64_t c = 0; c < length_; ++c) {
      to[c] = static_cast<T>(first_.at(key, static_cast<uint64_t>(c)));
    }
  }
  bool is_double() const { return item_ == sizeof(double); }
  void add_chunk();
  void clean(uint32_t row);
  void load_chunk(const std::vector<at::Tensor>& from, size_t first, size_t rows);

  const FirstValues first_;
  const int64_t length_;
  const at::TensorOptions options_;
  const int64_t item_;
  const bool ordered_;
  int64_t row_bytes_ = 0;
  std::vector<int64_t> lengths_;
  std::vector<double> firsts_;  // of each buffer
  KeyMap index_;
  std::vector<Chunk> chunks_;
  size_t size_ = 0;
  uint64_t places_ = 0;
  RowOrder order_;  // empty unless ordered_
};

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_SPARSE_ROWS_H_
