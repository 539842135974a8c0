#include "weft/transport/internal/arena/shared_arena.h"

#include <iterator>
#include <utility>

#include "weft/transport/shared_writes.h"
#include "weft/transport/stream_copy.h"

namespace weft::internal {

// What a tensor holds: its block, and the arena around it.
class SharedArena::Holder {
 public:
  Holder(std::shared_ptr<SharedArena> arena, uint64_t block)
      : arena_(std::move(arena)), block_(block) {}
  ~Holder() { arena_->drop(block_); }
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;

 private:
  const std::shared_ptr<SharedArena> arena_;
  const uint64_t block_;
};

SharedArena::SharedArena(std::shared_ptr<MemoryFile> file, std::shared_ptr<Runtime> runtime)
    : file_(std::move(file)),
      runtime_(std::move(runtime)),
      heap_(file_->size()),
      pieces_(file_->size() / kPiece) {
  counters_.capacity = file_->size();
}

StatusOr<std::shared_ptr<SharedArena>> SharedArena::make(uint64_t capacity,
                                                         std::shared_ptr<Runtime> runtime) {
  if (capacity == 0 || capacity > MemoryFile::kMaxBytes) {
    return make_error(ErrorKind::kInvalidArgument, "an arena has between 1 byte and 2^40");
  }
  WEFT_ASSIGN_OR_RETURN(std::shared_ptr<MemoryFile> file,
                        MemoryFile::make((capacity + kPiece - 1) / kPiece * kPiece));
  return std::shared_ptr<SharedArena>(new SharedArena(std::move(file), std::move(runtime)));
}

std::optional<uint64_t> SharedArena::take(uint64_t bytes) {
  const uint64_t size = ArenaHeap::block_size(bytes);
  uint64_t offset = 0;
  uint64_t begin = 0;  // pieces without memory: [begin, end)
  uint64_t end = 0;
  {
    MutexLock lock(&mutex_);
    std::optional<uint64_t> found = heap_.allocate(bytes);
    if (!found.has_value() && !resting_.empty()) {
      wake_locked(0);
      found = heap_.allocate(bytes);
    }
    if (!found.has_value()) {
      ++counters_.full;
      return std::nullopt;
    }
    offset = *found;
    blocks_.emplace(offset, Block{size, 1});
    for (uint64_t i = offset / kPiece; i * kPiece < offset + size; ++i) {
      if (pieces_[i].populated) continue;
      if (end == 0) begin = i;
      end = i + 1;
    }
  }
  if (end == 0) return offset;
  // Without the lock, as it may take milliseconds; the block is ours, and getting memory for a
  // piece twice does no harm.
  const Status got = file_->populate(begin * kPiece, (end - begin) * kPiece);
  MutexLock lock(&mutex_);
  if (!got.ok()) {
    ++counters_.full;
    drop_locked(offset);
    return std::nullopt;
  }
  for (uint64_t i = begin; i < end; ++i) {
    if (!pieces_[i].populated) counters_.populated_bytes += kPiece;
    pieces_[i] = Piece{true, sweeps_};
  }
  return offset;
}

void SharedArena::drop(uint64_t block) {
  MutexLock lock(&mutex_);
  drop_locked(block);
}

void SharedArena::drop_locked(uint64_t offset) {
  const auto it = blocks_.find(offset);
  if (--it->second.users > 0) return;
  const uint64_t size = it->second.size;
  for (uint64_t i = offset / kPiece; i * kPiece < offset + size; ++i) {
    pieces_[i].last_used = sweeps_;
  }
  blocks_.erase(it);
  if (size > kSmallBlock) return heap_.free(offset, size);
  resting_.push_back(Resting{offset, size});
  resting_bytes_ += size;
  wake_locked(kRest);
}

void SharedArena::wake_locked(uint64_t bytes) {
  for (; resting_bytes_ > bytes; resting_.pop_front()) {
    heap_.free(resting_.front().offset, resting_.front().size);
    resting_bytes_ -= resting_.front().size;
  }
}

void SharedArena::write(uint64_t offset, std::string_view bytes) {
  char* const to = file_->data() + offset;
  if (bytes.size() >= kStreamAbove) return copy_streamed(to, bytes.data(), bytes.size());
  // Where several threads write, the one that ends last tells the next ones what is slow.
  SharedWrites writes;
  {
    MutexLock lock(&mutex_);
    writes = writes_;
  }
  writes.copy(runtime_->clock(), to, bytes.data(), bytes.size());
  MutexLock lock(&mutex_);
  writes_ = writes;
}

std::shared_ptr<char> SharedArena::allocate(uint64_t bytes) {
  const std::optional<uint64_t> offset = take(bytes);
  if (!offset.has_value()) return nullptr;
  const auto holder = std::make_shared<Holder>(shared_from_this(), *offset);
  return std::shared_ptr<char>(holder, file_->data() + *offset);
}

std::optional<SharedArena::Loan> SharedArena::lend(std::string_view bytes, uint64_t link) {
  const char* const base = file_->data();
  if (bytes.data() >= base && bytes.data() < base + file_->size()) {
    const auto offset = static_cast<uint64_t>(bytes.data() - base);
    MutexLock lock(&mutex_);
    const auto after = blocks_.upper_bound(offset);
    // Memory of ours that is no block would be a tensor that outlived its holder.
    if (after == blocks_.begin()) return std::nullopt;
    const auto block = std::prev(after);
    ++block->second.users;
    ++counters_.shared;
    leases_.emplace(++last_lease_, Lease{block->first, link});
    return Loan{offset, last_lease_, true};
  }
  const std::optional<uint64_t> offset = take(bytes.size());
  if (!offset.has_value()) return std::nullopt;
  write(*offset, bytes);
  MutexLock lock(&mutex_);
  // The use that take() gave becomes the lease's.
  leases_.emplace(++last_lease_, Lease{*offset, link});
  ++counters_.copied;
  counters_.copied_bytes += bytes.size();
  return Loan{*offset, last_lease_, false};
}

bool SharedArena::take_back(uint64_t lease, uint64_t link) {
  MutexLock lock(&mutex_);
  const auto it = leases_.find(lease);
  if (it == leases_.end() || it->second.link != link) {
    ++counters_.ignored_frees;
    return false;
  }
  drop_locked(it->second.block);
  leases_.erase(it);
  return true;
}

void SharedArena::forget(uint64_t link) {
  MutexLock lock(&mutex_);
  for (auto it = leases_.begin(); it != leases_.end();) {
    if (it->second.link != link) {
      ++it;
      continue;
    }
    drop_locked(it->second.block);
    it = leases_.erase(it);
  }
}

uint64_t SharedArena::new_link() {
  MutexLock lock(&mutex_);
  return ++last_link_;
}

void SharedArena::sweep() {
  MutexLock lock(&mutex_);
  ++sweeps_;
  wake_locked(0);
  for (const auto& [offset, length] : heap_.free_ranges()) {
    // Pieces that lie in the free range as a whole.
    const uint64_t first = (offset + kPiece - 1) / kPiece;
    const uint64_t last = (offset + length) / kPiece;
    for (uint64_t i = first; i < last; ++i) {
      if (!pieces_[i].populated || pieces_[i].last_used + 2 > sweeps_) continue;
      file_->discard(i * kPiece, kPiece);
      pieces_[i].populated = false;
      counters_.populated_bytes -= kPiece;
    }
  }
}

SharedArena::Counters SharedArena::counters() const {
  MutexLock lock(&mutex_);
  Counters out = counters_;
  out.used_bytes = heap_.used() - resting_bytes_;
  out.blocks = blocks_.size();
  out.leases = leases_.size();
  return out;
}

}  // namespace weft::internal
