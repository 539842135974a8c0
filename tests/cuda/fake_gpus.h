#ifndef WEFT_TESTS_CUDA_FAKE_GPUS_H_
#define WEFT_TESTS_CUDA_FAKE_GPUS_H_

// Tensors, streams and kernels of the GPUs of fake_runtime.h.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty_strided.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "weft/tests/cuda/fake_runtime.h"

namespace weft::testing {

inline c10::Device gpu(int index) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

inline at::Tensor alike(const at::Tensor& x, c10::Device device) {
  return at::empty_strided(x.sizes(), x.strides(),
                           at::TensorOptions().dtype(x.scalar_type()).device(device));
}
inline at::Tensor with_bytes(const at::Tensor& x, c10::Device device) {
  at::Tensor out = alike(x, device);
  if (x.nbytes() > 0) std::memcpy(out.mutable_data_ptr(), x.const_data_ptr(), x.nbytes());
  return out;
}
// What the memory holds when all is done, and what it holds now.
inline at::Tensor settled(const at::Tensor& x) {
  fake_cuda::run_all();
  return with_bytes(x, c10::kCPU);
}

inline c10::Stream current(c10::Device device = gpu(0)) {
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(device);
}
inline c10::Stream fresh() {
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(gpu(0));
}
inline void* native(const c10::Stream& stream) { return stream.native_handle(); }

// The place of a kernel: writes when its stream comes to it and the gate is open.
using OpenFlag = std::shared_ptr<std::atomic<bool>>;
inline void queue_fill(const at::Tensor& x, float value, const OpenFlag& gate) {
  auto* const data = static_cast<float*>(x.mutable_data_ptr());
  fake_cuda::queue(native(current(x.device())), [x, data, n = x.numel(), value, gate] {
    if (gate != nullptr && !gate->load()) return false;
    std::fill_n(data, n, value);
    return true;
  });
}
// A kernel of the consumer that reads.
inline std::shared_ptr<std::vector<float>> queue_read(const at::Tensor& x) {
  auto out = std::make_shared<std::vector<float>>();
  fake_cuda::queue(native(current(x.device())), [x, out] {
    const auto* const data = static_cast<const float*>(x.const_data_ptr());
    out->assign(data, data + x.numel());
    return true;
  });
  return out;
}

// What workers register.
inline int64_t one() { return 1; }
inline at::Tensor same(const at::Tensor& x) { return x; }
inline std::string where(const at::Tensor& x) { return x.device().str(); }

}  // namespace weft::testing

#endif  // WEFT_TESTS_CUDA_FAKE_GPUS_H_
