// Arbitrary bytes as a tensor's descriptor, and then as its contents. A descriptor that is accepted
// is spelled in one way only; a tensor that comes to be can be used.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/rpc/internal/agent/tensor_meta.h"
#include "weft/tests/fuzz/target.h"

// A size of one byte becomes eight, and lists grow by doubling.
const size_t kMostBytesPerByte = 32;

weft::Status fuzz_one(std::string_view whole) {
  namespace in = weft::internal;
  std::string_view rest = whole;
  in::TensorMeta meta;
  if (weft::Status s = decoded(whole.size(), [&] { return in::take_meta(&rest, &meta); });
      !s.ok()) {
    require(weft::error_kind(s) == weft::ErrorKind::kProtocol);
    return s;
  }
  std::string again;
  in::append_meta(meta, &again);
  require(again == whole.substr(0, whole.size() - rest.size()));

  // What the byte budget would do.
  constexpr uint64_t kBudget = 64 * 1024;
  if (in::total_bytes(meta) > kBudget) {
    return weft::make_error(weft::ErrorKind::kResource, "more than the budget");
  }
  auto buffers = in::allocate_buffers(meta);
  require(buffers.ok());
  const in::BufferSpecs specs = in::buffer_specs(meta);
  for (size_t i = 0; i < buffers->size(); ++i) {
    at::Tensor& buffer = (*buffers)[i];
    require(buffer.nbytes() == specs[i].nbytes);
    if (buffer.nbytes() == 0) continue;
    auto* bytes = static_cast<char*>(buffer.mutable_data_ptr());
    std::memset(bytes, 0, buffer.nbytes());
    const size_t n = std::min<size_t>(buffer.nbytes(), rest.size());
    std::memcpy(bytes, rest.data(), n);
    rest.remove_prefix(n);
  }
  auto tensor = decoded(0, [&] { return in::join_from_wire(meta, *buffers); });
  if (!tensor.ok()) {
    require(meta.layout == in::TensorLayout::kSparseCoo);
    require(weft::error_kind(tensor.status()) == weft::ErrorKind::kProtocol);
    return tensor.status();
  }
  in::restore_requires_grad(meta, &*tensor);
  require(tensor->sizes() == at::IntArrayRef(meta.sizes));
  require(tensor->requires_grad() == meta.requires_grad);
  // Indices that were accepted lie inside.
  if (meta.layout == in::TensorLayout::kSparseCoo && meta.dtype == at::kFloat && meta.nnz < 64 &&
      tensor->numel() < 4096) {
    require(tensor->detach().to_dense().sizes() == tensor->sizes());
  }
  auto parts = in::split_for_wire(*tensor, false);
  require(parts.ok() && parts->meta.nbytes == meta.nbytes);
  return absl::OkStatus();
}
