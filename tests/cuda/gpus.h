#ifndef WEFT_TESTS_CUDA_GPUS_H_
#define WEFT_TESTS_CUDA_GPUS_H_

// What the tests that need GPUs share. A delay is a long row of kernels; no test measures time.

#include <dlfcn.h>

#include <string>

#include "ATen/ops/full.h"
#include "ATen/ops/mm.h"
#include "c10/core/Event.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"

namespace weft::testing {

inline c10::Device gpu(int64_t index) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)}; }
inline at::TensorOptions on(int64_t index) {
  return at::TensorOptions().dtype(at::kFloat).device(gpu(index));
}

struct Gpus {
  int count = 0;
  std::string why;  // there are none
};

inline Gpus find_gpus() {
  if (::dlopen("libweft_cuda.so", RTLD_NOW | RTLD_LOCAL) == nullptr) {
    return {0, std::string("no GPU on this machine, or no weft::cuda: ") + ::dlerror()};
  }
  const int count = c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount();
  return {count, count == 0 ? "no GPU on this machine" : ""};
}

inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(device);
}
inline c10::Stream new_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(device);
}
// What comes later on `waiter` comes after what is on `stream` now.
inline void join_streams(const c10::Stream& waiter, const c10::Stream& stream) {
  c10::Event event(c10::kCUDA);
  event.record(stream);
  waiter.wait(event);
}

// Some hundred milliseconds of kernels on the current stream of `device`.
inline void delay(int64_t device) {
  const at::Tensor a = at::full({4096, 4096}, 1e-4, on(device));
  at::Tensor b = a;
  for (int i = 0; i < 100; ++i) b = at::mm(a, b);
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_CUDA_GPUS_H_
