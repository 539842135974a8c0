#include "weft/rpc/internal/launch/core.h"
#include "weft/rpc/spi/device_order.h"

namespace weft {

void publish_here(const Worker& worker, c10::ArrayRef<at::Tensor> tensors) {
  if (!internal::any_on_device(tensors)) return;
  if (const auto core = lock_core(worker)) core->agent().copier().published().publish(tensors);
}

void follow_published(const Worker& worker) {
  if (const auto core = lock_core(worker)) core->agent().copier().published().follow();
}

internal::GuardRef internal::mark_all_here(const Worker& worker) {
  const auto core = lock_core(worker);
  return core == nullptr ? nullptr : core->agent().copier().mark_here();
}

}  // namespace weft
