#include "weft/collectives/internal/shm_streams.h"

#include <sys/socket.h>

#include <algorithm>

namespace weft::internal {
namespace {

void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace

ShmStreams::ShmStreams(const Membership& member, ShmMesh mesh, std::shared_ptr<Runtime> runtime)
    : member_(member),
      files_(std::move(mesh.files)),
      sockets_(std::move(mesh.sockets)),
      runtime_(std::move(runtime)),
      rung_(static_cast<size_t>(member.size), 0) {}

void ShmStreams::relax(int look) {
  if (look < kSpins) {
    pause_core();
  } else {
    sched_yield();
  }
}

void ShmStreams::begin_sleep() {
  of(member_.rank).page().nap.fetch_add(1, std::memory_order_seq_cst);
}

void ShmStreams::end_sleep() {
  of(member_.rank).page().nap.fetch_add(1, std::memory_order_seq_cst);
}

void ShmStreams::ring(int peer) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const uint32_t nap = of(peer).page().nap.load(std::memory_order_seq_cst);
  uint32_t& rung = rung_[static_cast<size_t>(peer)];
  if ((nap & 1) == 0 || nap == rung) return;
  rung = nap;
  const uint32_t nothing = 0;
  (void)!::send(control(peer), &nothing, sizeof nothing, MSG_NOSIGNAL | MSG_DONTWAIT);
}

Moved ShmStreams::read(int peer, int lane, char* to, size_t bytes, size_t* got) {
  ShmFile& from = of(peer);
  ShmEnds& mine = of(member_.rank).ends(peer, lane);
  const uint64_t taken = mine.taken.load(std::memory_order_relaxed);
  const uint64_t written = from.ends(member_.rank, lane).written.load(std::memory_order_acquire);
  const uint64_t there = written - taken;
  if (there == 0) return Moved::kNothing;
  if (there > ShmLayout::kRing) return Moved::kEnd;  // no correct member says so
  const uint64_t n = std::min<uint64_t>(there, bytes);
  const uint64_t at = taken % ShmLayout::kRing;
  const uint64_t first = std::min(n, ShmLayout::kRing - at);
  const char* const ring_memory = from.ring(member_.rank, lane);
  std::memcpy(to, ring_memory + at, first);
  std::memcpy(to + first, ring_memory, n - first);
  mine.taken.store(taken + n, std::memory_order_seq_cst);
  ring(peer);
  *got = n;
  return Moved::kBytes;
}

Moved ShmStreams::write(int peer, int lane, const iovec* parts, size_t count, size_t* sent) {
  ShmFile& own = of(member_.rank);
  ShmEnds& mine = own.ends(peer, lane);
  uint64_t written = mine.written.load(std::memory_order_relaxed);
  const uint64_t taken = of(peer).ends(member_.rank, lane).taken.load(std::memory_order_acquire);
  if (written - taken > ShmLayout::kRing) return Moved::kEnd;
  uint64_t room = ShmLayout::kRing - (written - taken);
  if (room == 0) return Moved::kNothing;
  char* const ring_memory = own.ring(peer, lane);
  size_t total = 0;
  for (size_t i = 0; i < count && room > 0; ++i) {
    const uint64_t n = std::min<uint64_t>(room, parts[i].iov_len);
    const uint64_t at = written % ShmLayout::kRing;
    const uint64_t first = std::min(n, ShmLayout::kRing - at);
    const char* const from = static_cast<const char*>(parts[i].iov_base);
    writes_.copy(runtime_->clock(), ring_memory + at, from, first);
    writes_.copy(runtime_->clock(), ring_memory, from + first, n - first);
    written += n;
    room -= n;
    total += n;
  }
  mine.written.store(written, std::memory_order_seq_cst);
  ring(peer);
  *sent = total;
  return Moved::kBytes;
}

}  // namespace weft::internal
