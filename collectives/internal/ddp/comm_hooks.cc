#include "weft/collectives/ddp/comm_hooks.h"

#include <utility>

#include "ATen/core/grad_mode.h"

namespace weft {
namespace {

Future<at::Tensor> compressed(ProcessGroup& group, const GradBucket& bucket, at::ScalarType type) {
  const c10::AutoGradMode no_grad(false);
  // Divided first: a sum of many would leave the range.
  const at::Tensor small = bucket.buffer.to(type).div_(group.size());
  return group.all_reduce_async(small).then([small, buffer = bucket.buffer] {
    const c10::AutoGradMode no_grad_there(false);
    return buffer.copy_(small);
  });
}

}  // namespace

Future<at::Tensor> allreduce_hook(ProcessGroup& group, const GradBucket& bucket) {
  const c10::AutoGradMode no_grad(false);
  const at::Tensor buffer = bucket.buffer.div_(group.size());
  return group.all_reduce_async(buffer).then([buffer] { return buffer; });
}

Future<at::Tensor> fp16_compress_hook(ProcessGroup& group, const GradBucket& bucket) {
  return compressed(group, bucket, at::kHalf);
}

Future<at::Tensor> bf16_compress_hook(ProcessGroup& group, const GradBucket& bucket) {
  return compressed(group, bucket, at::kBFloat16);
}

}  // namespace weft
