#include "weft/ps/internal/answer_memory.h"

#include "ATen/ops/empty.h"
#include "weft/rpc/arena.h"

namespace weft::ps::internal {
namespace {

// Shorter tensors travel in the message.
constexpr uint64_t kLeastShared = uint64_t{64} << 10;
constexpr uint64_t kMostRows = uint64_t{512} << 10;

}  // namespace

at::Tensor AnswerMemory::rows(int64_t count, int64_t length, c10::ScalarType dtype) const {
  const uint64_t bytes =
      static_cast<uint64_t>(count) * static_cast<uint64_t>(length) * c10::elementSize(dtype);
  if (worker_ != nullptr && bytes > kLeastShared && bytes <= kMostRows) {
    return arena_tensor(*worker_, {count, length}, dtype);
  }
  return at::empty({count, length}, at::TensorOptions().dtype(dtype));
}

at::Tensor AnswerMemory::copy_of(const at::Tensor& values) {
  if (worker_ == nullptr || values.nbytes() <= kLeastShared) return values.clone();
  at::Tensor out = arena_tensor(*worker_, values.sizes(), values.scalar_type());
  writes_.copy(runtime_->clock(), out.mutable_data_ptr(), values.const_data_ptr(), values.nbytes());
  return out;
}

}  // namespace weft::ps::internal
