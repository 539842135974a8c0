#include "weft/collectives/ddp/reduce_value.h"

#include <cmath>
#include <limits>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "absl/strings/str_cat.h"

namespace weft {

double reduce_value(ProcessGroup& group, double value, double weight) {
  return reduce_value(group, at::full({1}, value, at::kDouble), weight).item<double>();
}

at::Tensor reduce_value(ProcessGroup& group, const at::Tensor& value, double weight) {
  const c10::AutoGradMode no_grad(false);
  // A weight that is none makes the sum none, so that all ranks see it.
  const bool valid = std::isfinite(weight) && weight >= 0;
  const double own = valid ? weight : std::numeric_limits<double>::quiet_NaN();
  at::Tensor sum = value.to(at::kDouble).contiguous().clone();
  if (own == 0) {
    sum.zero_();  // whatever it is
  } else {
    sum.mul_(own);
  }
  const at::Tensor weights = at::full({1}, own, sum.options());
  group.all_reduce_coalesced({sum, weights});
  const double total = weights.item<double>();
  if (!(total > 0)) {
    throw_error(make_error(ErrorKind::kInvalidArgument,
                           absl::StrCat("reduce_value: the weights of all ranks add up to ", total,
                                        ", this one's is ", weight)));
  }
  sum.div_(total);
  return value.is_floating_point() ? sum.to(value.scalar_type()) : sum;
}

at::Tensor all_gather_rows(ProcessGroup& group, const at::Tensor& rows) {
  const c10::AutoGradMode no_grad(false);
  if (rows.dim() == 0) {
    throw_error(make_error(ErrorKind::kInvalidArgument,
                           "all_gather_rows: a tensor of no dimension has no rows"));
  }
  const at::Tensor counts = at::empty({group.size()}, at::kLong);
  group.all_gather_into_tensor(counts, at::full({1}, rows.size(0), at::kLong));
  TensorList all;
  std::vector<int64_t> sizes = rows.sizes().vec();
  for (int rank = 0; rank < group.size(); ++rank) {
    sizes[0] = counts.const_data_ptr<int64_t>()[rank];
    all.push_back(at::empty(sizes, rows.options().requires_grad(std::optional<bool>(false))));
  }
  group.all_gather(all, rows.detach().contiguous());
  return at::cat(all, 0);
}

}  // namespace weft
