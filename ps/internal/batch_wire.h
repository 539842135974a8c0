#ifndef WEFT_PS_INTERNAL_BATCH_WIRE_H_
#define WEFT_PS_INTERNAL_BATCH_WIRE_H_

// What kCallMethod takes and gives: requests that travel together, and what is said to each. Decoding is strict, as in wire.h.
// Pure functions; any thread.
//
// Small pushes of rows by one client to one part are one request with two tensors, a run: a message of a thousand of them
// has two tensors, and not two thousand.

#include <string>
#include <string_view>
#include <vector>

#include "weft/common/error.h"
#include "weft/ps/internal/wire.h"

namespace weft::ps::internal {

// A push of a run: what it does not share with the others.
struct RunPush {
  uint64_t number = 0;
  uint64_t floor = 0;
  uint32_t keys = 0;
};
struct BatchedRequest {
  Request request{};
  std::vector<at::Tensor> tensors{};
  // Not empty: the request stands for these pushes, the first of which is its own. The tensors are the keys of all,
  // contiguous, and as many rows.
  std::vector<RunPush> run{};
  size_t size() const { return run.empty() ? 1 : run.size(); }  // how many requests it is
};
using Batch = std::vector<BatchedRequest>;

struct BatchedResult {
  StatusOr<Reply> said{Reply{}};
  // It stands for so many answers after it, `version` and `behind` of each by one greater than of the one before.
  uint32_t more = 0;
};
using Results = std::vector<BatchedResult>;

// Neighbours that can be a run are one; everything else stays as it is. `batch`: no runs.
WEFT_API Batch in_runs(const std::vector<const BatchedRequest*>& batch);
// Puts what is said of the next request, or requests, into the last result if that can stand for it.
WEFT_API void add(BatchedResult result, Results* results);
// The answer that stands `after` places behind `first`, which stands for it.
WEFT_API Answer answer_after(const Answer& first, uint32_t after);

// The tensors travel beside it, in order.
WEFT_API std::string encode(const Batch& batch);
WEFT_API std::string encode(const Results& results);
// `tensors` are dealt out.
WEFT_API StatusOr<Batch> decode_batch(std::string_view bytes, std::vector<at::Tensor> tensors);
WEFT_API StatusOr<Results> decode_results(std::string_view bytes, std::vector<at::Tensor> tensors);

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_BATCH_WIRE_H_
