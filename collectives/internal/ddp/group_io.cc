#include "weft/collectives/internal/ddp/group_io.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "ATen/ops/_sparse_coo_tensor_unsafe.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace weft::internal {
namespace {

constexpr int64_t kNoteBytes = 1024;

at::Tensor bytes_of(std::string_view text, int64_t size) {
  at::Tensor out = at::zeros({size}, at::kByte);
  // Not memcpy(): an empty text, or a tensor of no bytes, may have no address.
  std::copy_n(text.data(), std::min(text.size(), static_cast<size_t>(size)),
              out.mutable_data_ptr<uint8_t>());
  return out;
}

std::string text_of(const at::Tensor& bytes, int64_t size) {
  const auto* const data = reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>());
  return {data, static_cast<size_t>(size)};
}

std::vector<at::Tensor> one_for_each(const ProcessGroup& group, at::IntArrayRef sizes,
                                     const at::TensorOptions& options) {
  std::vector<at::Tensor> out;
  for (int i = 0; i < group.size(); ++i) out.push_back(at::empty(sizes, options));
  return out;
}

// What everybody says, one number each.
std::vector<int64_t> all_gather_number(ProcessGroup& group, int64_t mine, Timeout timeout) {
  const at::Tensor all = at::empty({group.size()}, at::kLong);
  const at::Tensor own = at::zeros({1}, at::kLong);
  own.fill_(mine);
  group.all_gather_into_tensor(all, own, {.timeout = timeout});
  const auto* const data = all.const_data_ptr<int64_t>();
  return {data, data + all.numel()};
}

}  // namespace

void broadcast_all(ProcessGroup& group, const std::vector<at::Tensor>& tensors, int root,
                   int64_t limit, Timeout timeout) {
  constexpr size_t kUnderWay = 2;
  std::deque<Work> under_way;
  TensorList batch;
  int64_t bytes = 0;
  const auto send = [&] {
    if (batch.empty()) return;
    if (under_way.size() == kUnderWay) {
      under_way.front().wait();
      under_way.pop_front();
    }
    under_way.push_back(group.broadcast_coalesced_async(std::exchange(batch, {}),
                                                        {.root = root, .timeout = timeout}));
    bytes = 0;
  };
  for (const at::Tensor& one : tensors) {
    const bool other = !batch.empty() && (batch.back().scalar_type() != one.scalar_type() ||
                                          batch.back().device() != one.device());
    if (other || bytes + static_cast<int64_t>(one.nbytes()) > limit) send();
    batch.push_back(one);
    bytes += static_cast<int64_t>(one.nbytes());
  }
  send();
  for (const Work& one : under_way) one.wait();
}

std::vector<std::vector<std::string>> all_gather_lines(ProcessGroup& group,
                                                       const std::vector<std::string>& mine,
                                                       Timeout timeout) {
  const std::string text = absl::StrJoin(mine, "\n");
  const std::vector<int64_t> sizes =
      all_gather_number(group, static_cast<int64_t>(text.size()), timeout);
  TensorList all;
  for (const int64_t size : sizes) all.push_back(at::empty({size}, at::kByte));
  group.all_gather(all, bytes_of(text, static_cast<int64_t>(text.size())), {.timeout = timeout});
  std::vector<std::vector<std::string>> out;
  for (size_t i = 0; i < all.size(); ++i) {
    out.push_back(absl::StrSplit(text_of(all[i], sizes[i]), '\n'));
  }
  return out;
}

Notes begin_all_gather_notes(ProcessGroup& group, std::string_view mine, Timeout timeout) {
  Notes notes;
  notes.mine = bytes_of(mine, kNoteBytes);
  notes.all = one_for_each(group, {kNoteBytes}, notes.mine.options());
  notes.work = group.all_gather_async(notes.all, notes.mine, {.timeout = timeout});
  return notes;
}

std::vector<std::string> read_notes(const Notes& notes) {
  std::vector<std::string> out;
  for (const at::Tensor& one : notes.all) {
    std::string text = text_of(one, kNoteBytes);
    text.resize(std::min(text.size(), text.find('\0')));
    out.push_back(std::move(text));
  }
  return out;
}

at::Tensor all_reduce_sparse(ProcessGroup& group, const at::Tensor& mine, const at::Tensor& like,
                             Timeout timeout) {
  at::Tensor indices;
  at::Tensor values;
  if (mine.defined()) {
    const at::Tensor own = mine.coalesce();
    indices = own._indices().contiguous();
    values = own._values().contiguous();
  } else {
    std::vector<int64_t> sizes = like.sizes().vec();
    sizes[0] = 0;
    indices = at::empty({1, 0}, at::kLong);
    values = at::empty(sizes, like.options().requires_grad(std::optional<bool>(false)));
  }
  const std::vector<int64_t> counts = all_gather_number(group, values.size(0), timeout);
  TensorList all_indices;
  TensorList all_values;
  for (const int64_t count : counts) {
    all_indices.push_back(at::empty({indices.size(0), count}, indices.options()));
    std::vector<int64_t> sizes = values.sizes().vec();
    sizes[0] = count;
    all_values.push_back(at::empty(sizes, values.options()));
  }
  group.all_gather(all_indices, indices, {.timeout = timeout});
  group.all_gather(all_values, values, {.timeout = timeout});
  // Every rank adds up the same numbers in the same order.
  return at::_sparse_coo_tensor_unsafe(at::cat(all_indices, 1), at::cat(all_values, 0),
                                       like.sizes())
      .coalesce();
}

}  // namespace weft::internal
