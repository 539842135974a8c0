#include "weft/rpc/internal/agent/receive_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "c10/core/CPUAllocator.h"
#include "c10/core/Storage.h"
#include "c10/core/TensorImpl.h"
#include "c10/util/Exception.h"

namespace weft::internal {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

// `size` bytes, a multiple of kHugePage and aligned to it; null when there are none.
void* map_block(size_t size) {
  const size_t more = size + kHugePage;
  void* const raw = mmap(nullptr, more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned > begin) munmap(raw, aligned - begin);
  const uintptr_t end = begin + more;
  if (end > aligned + size) munmap(reinterpret_cast<void*>(aligned + size), end - aligned - size);
  void* const data = reinterpret_cast<void*>(aligned);
  // Only advice: without huge pages the first message is slower.
  (void)madvise(data, size, MADV_HUGEPAGE);
  return data;
}

}  // namespace

// Ties a block in use to where it goes afterwards.
struct ReceiveMemory::Lease {
  std::shared_ptr<ReceiveMemory> from;
  void* data = nullptr;
  size_t size = 0;
};

ReceiveMemory::~ReceiveMemory() {
  for (const auto& [size, blocks] : free_) {
    for (const Free& block : blocks) munmap(block.data, size);
  }
}

size_t ReceiveMemory::block_size(size_t bytes) {
  const size_t step = std::max(kHugePage, std::bit_floor(bytes) / 8);
  return (bytes + step - 1) / step * step;
}

at::Tensor ReceiveMemory::empty(at::IntArrayRef sizes, at::ScalarType dtype, size_t nbytes) {
  const size_t size = block_size(nbytes);
  auto lease = std::make_unique<Lease>(Lease{shared_from_this(), take(size), size});
  TORCH_CHECK_WITH(OutOfMemoryError, lease->data != nullptr, "cannot map ", size, " bytes");
  void* const data = lease->data;
  c10::DataPtr pointer(data, lease.release(), &ReceiveMemory::release, c10::Device(c10::kCPU));
  // Resized, the tensor moves to LibTorch's own allocator: this one may be gone by then.
  c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, std::move(pointer),
                       c10::GetDefaultCPUAllocator(), /*resizable=*/true);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

void* ReceiveMemory::take(size_t size) {
  {
    MutexLock lock(&mutex_);
    auto it = free_.find(size);
    if (it != free_.end()) {
      void* const data = it->second.back().data;
      it->second.pop_back();
      if (it->second.empty()) free_.erase(it);
      counters_.kept_bytes -= size;
      ++counters_.reused;
      return data;
    }
    ++counters_.mapped;
  }
  return map_block(size);
}

void ReceiveMemory::give_back(void* data, size_t size) {
  {
    MutexLock lock(&mutex_);
    if (counters_.kept_bytes + size <= max_kept_) {
      free_[size].push_back({data, sweeps_});
      counters_.kept_bytes += size;
      return;
    }
  }
  munmap(data, size);
}

void ReceiveMemory::release(void* lease) {
  const std::unique_ptr<Lease> owned(static_cast<Lease*>(lease));
  if (owned->data != nullptr) owned->from->give_back(owned->data, owned->size);
}

void ReceiveMemory::sweep() {
  std::vector<std::pair<void*, size_t>> old;
  {
    MutexLock lock(&mutex_);
    const uint64_t sweep = sweeps_++;
    for (auto it = free_.begin(); it != free_.end();) {
      std::vector<Free>& blocks = it->second;
      // Given back before the last sweep, and the youngest are taken first.
      const auto young = std::find_if(blocks.begin(), blocks.end(),
                                      [sweep](const Free& b) { return b.since == sweep; });
      for (auto block = blocks.begin(); block != young; ++block) {
        old.emplace_back(block->data, it->first);
        counters_.kept_bytes -= it->first;
      }
      blocks.erase(blocks.begin(), young);
      it = blocks.empty() ? free_.erase(it) : std::next(it);
    }
  }
  for (const auto& [data, size] : old) munmap(data, size);
}

ReceiveMemory::Counters ReceiveMemory::counters() const {
  MutexLock lock(&mutex_);
  return counters_;
}

}  // namespace weft::internal
