#ifndef WEFT_RPC_INTERNAL_DEVICE_CUDA_SLOTS_H_
#define WEFT_RPC_INTERNAL_DEVICE_CUDA_SLOTS_H_

// SlotPool: pinned host memory in slots of one size, through which bytes go to and from devices. It
// is allocated once: making and freeing pinned memory stops the device. A slot is taken for as long
// as one copy needs it, and only copies that can run at once may take one, so there is always one
// soon. A slot whose copy has failed is retired: the device may still use it.
//
// Threads: the copier's only, but for make().

#include <cstddef>
#include <memory>
#include <vector>

#include "weft/common/error.h"

namespace weft::internal {

class SlotPool {
 public:
  static constexpr size_t kSlotBytes = size_t{1} << 20;
  static constexpr size_t kSlots = 32;  // half for each direction

  // Pinned for all devices, by way of the context of `device`. Kind resource: there is no memory.
  static StatusOr<std::unique_ptr<SlotPool>> make(int device);
  ~SlotPool();
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  // Null when none is free.
  char* take();
  void give_back(char* slot) { free_.push_back(slot); }
  // Instead of give_back(): it is never taken again.
  void retire() { --usable_; }
  // Those that are not retired.
  size_t usable() const { return usable_; }

 private:
  SlotPool(int device, char* memory);

  const int device_;
  char* const memory_;
  std::vector<char*> free_;
  size_t usable_ = kSlots;
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_DEVICE_CUDA_SLOTS_H_
