#ifndef WEFT_PS_INTERNAL_SPARSE_CHUNK_H_
#define WEFT_PS_INTERNAL_SPARSE_CHUNK_H_

// Chunk: 256 rows of a sparse part, which can be frozen without a copy. One thread at a time, but what
// is frozen may be read by others. The first pushes after a cut copy each chunk that they touch: with more rows in
// a chunk a push of keys from anywhere copies most of the part, and waits for that (row P11).

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/ps/internal/part_data.h"

namespace weft::ps::internal {

inline constexpr size_t kChunkRows = 256;
// So much of an image is made or taken up at a time: whole chunks.
inline constexpr size_t kPieceRows = 32 * kChunkRows;

// What a chunk's rows have beside their tensors.
struct RowNotes {
  std::array<uint64_t, kChunkRows> keys{};
  std::array<uint32_t, kChunkRows> steps{};
};

struct Chunk {
  at::Tensor values{};
  char* first = nullptr;              // byte of the values
  std::vector<at::Tensor> buffers{};  // undefined: the rule has no need of it
  std::shared_ptr<RowNotes> notes{};
  bool frozen = false;  // others have what it is made of

  // Before a change: what was frozen stays as it is.
  void thaw() {
    if (frozen) copy_frozen();
  }

 private:
  void copy_frozen();
};

// For tensors of equally long rows.
void copy_rows(const at::Tensor& from, size_t row, const at::Tensor& to, size_t to_row,
               size_t rows);

// What a row is: values, and of each of the rule's buffers as many; 0: the rule has no need of it.
struct RowShape {
  at::TensorOptions options{};
  int64_t length = 0;
  std::vector<int64_t> buffers{};
};

// The first `rows` rows. `buffer_names`: "" for one that the chunks do not have.
std::shared_ptr<const FrozenData> freeze_chunks(std::vector<Chunk>* chunks, size_t rows,
                                                const RowShape& shape,
                                                const std::vector<std::string>& buffer_names);

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_SPARSE_CHUNK_H_
