#include "weft/collectives/internal/ddp/buckets.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace weft::internal {
namespace {

// Tensors that can lie in one buffer.
struct Kind {
  c10::ScalarType dtype;
  c10::Device device;
  size_t limit = 0;  // of the bucket that is being filled
  int64_t bytes = 0;
  std::vector<size_t> bucket{};
};

void sort_by_first(BucketAssignment* out) {
  std::vector<size_t> at(out->buckets.size());
  std::iota(at.begin(), at.end(), size_t{0});
  std::sort(at.begin(), at.end(), [out](size_t a, size_t b) {
    return *std::min_element(out->buckets[a].begin(), out->buckets[a].end()) <
           *std::min_element(out->buckets[b].begin(), out->buckets[b].end());
  });
  BucketAssignment sorted;
  for (const size_t i : at) {
    sorted.buckets.push_back(std::move(out->buckets[i]));
    sorted.limits.push_back(out->limits[i]);
  }
  *out = std::move(sorted);
}

}  // namespace

BucketAssignment compute_bucket_assignment_by_size(const std::vector<at::Tensor>& tensors,
                                                   const std::vector<int64_t>& limits,
                                                   const std::vector<bool>& sparse,
                                                   const std::vector<int64_t>& order) {
  BucketAssignment out;
  std::vector<Kind> kinds;  // in the order in which they came up: no hash decides
  const auto close = [&out](std::vector<size_t> bucket, int64_t limit) {
    out.buckets.push_back(std::move(bucket));
    out.limits.push_back(limit);
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    const size_t index = order.empty() ? i : static_cast<size_t>(order[i]);
    const at::Tensor& tensor = tensors[index];
    if (!sparse.empty() && sparse[index]) {
      close({index}, 0);
      continue;
    }
    auto kind = std::find_if(kinds.begin(), kinds.end(), [&tensor](const Kind& one) {
      return one.dtype == tensor.scalar_type() && one.device == tensor.device();
    });
    if (kind == kinds.end()) {
      kind = kinds.insert(kinds.end(), Kind{tensor.scalar_type(), tensor.device()});
    }
    kind->bucket.push_back(index);
    kind->bytes += static_cast<int64_t>(tensor.nbytes());
    const int64_t limit = limits[kind->limit];
    if (kind->bytes < limit) continue;
    close(std::exchange(kind->bucket, {}), limit);
    kind->bytes = 0;
    if (kind->limit + 1 < limits.size()) ++kind->limit;
  }
  for (Kind& kind : kinds) {
    if (!kind.bucket.empty()) close(std::move(kind.bucket), limits[kind.limit]);
  }
  if (order.empty()) sort_by_first(&out);
  return out;
}

}  // namespace weft::internal
