#include "weft/collectives/internal/shm_file.h"

#include <algorithm>
#include <new>
#include <utility>

#include "weft/collectives/internal/text.h"

namespace weft::internal {
namespace {

constexpr uint64_t kPage = 4096;

uint64_t whole_pages(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

ShmLayout::ShmLayout(int size) {
  const auto streams = static_cast<uint64_t>(size * kRings);
  ends_begin = whole_pages(sizeof(ShmPage));
  slots_begin = ends_begin + whole_pages(streams * sizeof(ShmEnds));
  results_begin = slots_begin + kTurns * kSlot;
  rings_begin = results_begin + (size > 2 ? kTurns * kSlot : 0);
  heap_begin = rings_begin + streams * kRing;
  total = heap_begin + kHeap;
}

ShmHeap::ShmHeap(const ShmLayout& layout, std::shared_ptr<MemoryFile> file)
    : layout_(layout), file_(std::move(file)), heap_(ShmLayout::kHeap) {}

StatusOr<std::shared_ptr<char>> ShmHeap::allocate(uint64_t bytes) {
  const uint64_t block = bytes == 0 ? ArenaHeap::kGranule : ArenaHeap::block_size(bytes);
  std::optional<uint64_t> offset;
  {
    MutexLock lock(&mutex_);
    if (block != 0) offset = heap_.allocate(bytes);
  }
  if (!offset.has_value()) {
    return make_error(ErrorKind::kResource,
                      cat("the group's shared memory has no room for ", bytes, " bytes"));
  }
  if (Status s = file_->populate(layout_.heap_begin + *offset, block); !s.ok()) {
    MutexLock lock(&mutex_);
    heap_.free(*offset, block);
    return s;
  }
  char* const data = file_->data() + layout_.heap_begin + *offset;
  return std::shared_ptr<char>(data, [self = shared_from_this(), offset = *offset, block](char*) {
    self->file_->discard(self->layout_.heap_begin + offset, block);
    MutexLock lock(&self->mutex_);
    self->heap_.free(offset, block);
  });
}

uint64_t ShmHeap::place_of(const char* data, uint64_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(file_->data()) + layout_.heap_begin;
  const auto at = reinterpret_cast<uintptr_t>(data);
  if (bytes == 0 || at < begin || at + bytes > begin + ShmLayout::kHeap) return 0;
  return at - begin + layout_.heap_begin;
}

StatusOr<std::shared_ptr<MemoryFile>> make_shm_file(int size) {
  const ShmLayout layout(size);
  WEFT_ASSIGN_OR_RETURN(std::shared_ptr<MemoryFile> file,
                        MemoryFile::make_for_one_writer(layout.total));
  // Memory for all but the heap now: later its lack would be a signal.
  WEFT_RETURN_IF_ERROR(file->populate(0, layout.heap_begin));
  new (file->data()) ShmPage();
  for (int peer = 0; peer < size; ++peer) {
    for (int lane = 0; lane < ShmLayout::kRings; ++lane) {
      new (file->data() + layout.ends(peer, lane)) ShmEnds();
    }
  }
  return file;
}

}  // namespace weft::internal
