#include "weft/rpc/internal/device/cuda/slots.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "c10/cuda/CUDAGuard.h"

namespace weft::internal {

StatusOr<std::unique_ptr<SlotPool>> SlotPool::make(int device) {
  // Without the guard the context of device 0 would be made, which no option named.
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  void* memory = nullptr;
  const cudaError_t error = cudaHostAlloc(&memory, kSlots * kSlotBytes, cudaHostAllocPortable);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return make_error(ErrorKind::kResource,
                      absl::StrCat("cannot pin ", kSlots * kSlotBytes,
                                   " bytes of host memory: ", cudaGetErrorString(error)));
  }
  return std::unique_ptr<SlotPool>(new SlotPool(device, static_cast<char*>(memory)));
}

SlotPool::SlotPool(int device, char* memory) : device_(device), memory_(memory) {
  for (size_t i = kSlots; i > 0; --i) free_.push_back(memory_ + (i - 1) * kSlotBytes);
}

SlotPool::~SlotPool() {
  const c10::cuda::OptionalCUDAGuard guard(
      c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device_)));
  // At the end of the process the driver may have gone first.
  (void)cudaFreeHost(memory_);
}

char* SlotPool::take() {
  if (free_.empty()) return nullptr;
  char* const slot = free_.back();
  free_.pop_back();
  return slot;
}

}  // namespace weft::internal
