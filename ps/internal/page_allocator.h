#ifndef WEFT_PS_INTERNAL_PAGE_ALLOCATOR_H_
#define WEFT_PS_INTERNAL_PAGE_ALLOCATOR_H_

// PageAllocator: of a container that grows by becoming another one of twice the size. Large pieces are pages of their own,
// which go back to the system at once: in malloc()'s heap each would leave a hole that nothing of its size comes to fill,
// and a table would take a third more than it has. Threads: any.

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/hash/hash.h"

namespace weft::ps::internal {

template <class T>
class PageAllocator {
 public:
  using value_type = T;
  PageAllocator() = default;
  template <class U>
  PageAllocator(const PageAllocator<U>&) {}  // NOLINT(google-explicit-constructor)

  // Throws std::bad_alloc.
  T* allocate(size_t count) {
    if (!large(count)) return std::allocator<T>().allocate(count);
    void* const pages = ::mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    return static_cast<T*>(pages);
  }
  void deallocate(T* at, size_t count) {
    if (!large(count)) return std::allocator<T>().deallocate(at, count);
    ::munmap(at, count * sizeof(T));
  }
  template <class U>
  bool operator==(const PageAllocator<U>&) const {
    return true;
  }

 private:
  static constexpr size_t kLarge = size_t{256} << 10;  // bytes
  static bool large(size_t count) { return count >= kLarge / sizeof(T); }
};

// What a table has by key.
using KeyMap =
    absl::flat_hash_map<uint64_t, uint32_t, absl::Hash<uint64_t>, std::equal_to<uint64_t>,
                        PageAllocator<std::pair<const uint64_t, uint32_t>>>;

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_PAGE_ALLOCATOR_H_
