#ifndef WEFT_TRANSPORT_INTERNAL_ARENA_CHANNEL_H_
#define WEFT_TRANSPORT_INTERNAL_ARENA_CHANNEL_H_

// The channel "arena": memory that both sides see (link.h), where the two have a private socket.

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/transport/channel.h"
#include "weft/transport/internal/arena/link.h"
#include "weft/transport/internal/arena/shared_arena.h"
#include "weft/transport/internal/local/gate.h"

namespace weft::internal {

class WEFT_API ArenaBackend final : public ChannelBackend,
                                    public std::enable_shared_from_this<ArenaBackend> {
 public:
  // `bytes`: at most so much is in use at a time, 0: none. The file is made at the first need.
  ArenaBackend(std::shared_ptr<Runtime> runtime, std::shared_ptr<LocalGate> gate, uint64_t bytes)
      : runtime_(std::move(runtime)), gate_(std::move(gate)), bytes_(bytes) {}

  std::string_view name() const override { return "arena"; }
  ChannelCapabilities capabilities() const override { return {.places = true}; }
  std::shared_ptr<Channel> make(const ChannelSite& site) override ABSL_LOCKS_EXCLUDED(mutex_);
  std::shared_ptr<char> allocate_shared(size_t bytes) override ABSL_LOCKS_EXCLUDED(mutex_);
  void add_counters(std::vector<std::pair<std::string, int64_t>>* out) const override
      ABSL_LOCKS_EXCLUDED(mutex_);
  void sweep() override ABSL_LOCKS_EXCLUDED(mutex_);

  void count_settled(bool lends) { ++(lends ? links_on_ : links_off_); }
  Runtime& runtime() { return *runtime_; }

 private:
  std::shared_ptr<SharedArena> arena(std::string* why_none) ABSL_LOCKS_EXCLUDED(mutex_);

  const std::shared_ptr<Runtime> runtime_;
  const std::shared_ptr<LocalGate> gate_;
  const uint64_t bytes_;
  // Connections to whose peers large tensors went through shared memory, and those to which not.
  std::atomic<int64_t> links_on_{0};
  std::atomic<int64_t> links_off_{0};

  mutable Mutex mutex_;
  bool tried_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<SharedArena> arena_ ABSL_GUARDED_BY(mutex_);  // at the first need
  std::string why_none_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_ARENA_CHANNEL_H_
