#ifndef WEFT_PS_INTERNAL_ANSWER_MEMORY_H_
#define WEFT_PS_INTERNAL_ANSWER_MEMORY_H_

// AnswerMemory: where the answer to a pull lies. A worker of the same host reads a large one in the
// arena of the server's worker (rpc/arena.h). What is read from a part is written there at once, and
// not copied there when it is sent.
//
// One thread at a time.

#include <memory>
#include <utility>

#include "ATen/core/Tensor.h"
#include "weft/common/runtime.h"
#include "weft/rpc/worker.h"
#include "weft/transport/shared_writes.h"

namespace weft::ps::internal {

class AnswerMemory {
 public:
  AnswerMemory() = default;  // ordinary memory for all
  AnswerMemory(std::shared_ptr<const Worker> worker, std::shared_ptr<Runtime> runtime)
      : worker_(std::move(worker)), runtime_(std::move(runtime)) {}

  // Uninitialised, for rows that are written one by one, plainly. Blocks of up to 512 KiB rest before they are
  // used again, so that such writes are cheap (docs/arena.md); longer answers lie in ordinary memory.
  at::Tensor rows(int64_t count, int64_t length, c10::ScalarType dtype) const;
  // A copy of a contiguous tensor.
  at::Tensor copy_of(const at::Tensor& values);

 private:
  std::shared_ptr<const Worker> worker_;
  std::shared_ptr<Runtime> runtime_;
  weft::internal::SharedWrites writes_;
};

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_ANSWER_MEMORY_H_
