#ifndef WEFT_PS_INTERNAL_BATCH_WIRE_H_
#define WEFT_PS_INTERNAL_BATCH_WIRE_H_

// What kCallMethod takes and gives: requests that travel together, and what is said to each. Decoding is strict, as in wire.h.
// Pure functions; any thread.

#include <string>
#include <string_view>
#include <vector>

#include "weft/common/error.h"
#include "weft/ps/internal/wire.h"

namespace weft::ps::internal {

struct BatchedRequest {
  Request request{};
  std::vector<at::Tensor> tensors{};
};
using Batch = std::vector<BatchedRequest>;
using Results = std::vector<StatusOr<Reply>>;

// The tensors travel beside it, in order.
WEFT_API std::string encode(const Batch& batch);
// The same of requests that lie elsewhere.
WEFT_API std::string encode(const std::vector<const BatchedRequest*>& batch);
WEFT_API std::string encode(const Results& results);
// `tensors` are dealt out.
WEFT_API StatusOr<Batch> decode_batch(std::string_view bytes, std::vector<at::Tensor> tensors);
WEFT_API StatusOr<Results> decode_results(std::string_view bytes, std::vector<at::Tensor> tensors);

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_BATCH_WIRE_H_
