#include "weft/transport/internal/arena/channel.h"

#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"
#include "weft/transport/internal/memory_limit.h"

namespace weft::internal {
namespace {

// What is free waits so long for a frame with which it can travel.
constexpr absl::Duration kFreeDelay = absl::Milliseconds(10);

uint64_t quarter_of_memory(Files& files) {
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page = sysconf(_SC_PAGESIZE);
  if (pages <= 0 || page <= 0) return 0;
  return memory_limit(files, static_cast<uint64_t>(pages) * static_cast<uint64_t>(page)) / 4;
}

class ArenaChannel final : public Channel,
                           public ArenaLink::Host,
                           public std::enable_shared_from_this<ArenaChannel> {
 public:
  // `link` is null where no memory is shared.
  ArenaChannel(std::shared_ptr<ArenaBackend> backend, std::shared_ptr<ArenaLink> link)
      : backend_(std::move(backend)), link_(std::move(link)) {}

  std::string_view name() const override { return "arena"; }
  ChannelCapabilities capabilities() const override { return {.places = true}; }
  bool owns(FrameKind kind) const override {
    return link_ != nullptr && (kind == FrameKind::kArenaProbe || kind == FrameKind::kArenaFree);
  }

  void start(std::shared_ptr<ChannelHost> host) override {
    if (link_ == nullptr) return;
    {
      MutexLock lock(&mutex_);
      host_ = std::move(host);
    }
    link_->start(std::shared_ptr<ArenaLink::Host>(shared_from_this()));
  }
  Status on_own_frame(FrameKind kind, std::string_view header) override {
    return kind == FrameKind::kArenaFree ? link_->on_free(header) : link_->on_probe(header);
  }
  bool rider_waits() const override { return link_ != nullptr && link_->frees_wait(); }
  Frame take_rider() override {
    Frame out;
    out.kind = FrameKind::kArenaFree;
    out.header = link_->take_frees();
    return out;
  }

  std::optional<Placement> place(std::string_view bytes) override {
    std::optional<Placement> placed;
    if (link_ != nullptr) placed = link_->lend(bytes);
    ++(placed.has_value() ? hits_ : fallbacks_);
    (placed.has_value() ? hit_bytes_ : fallback_bytes_) += static_cast<int64_t>(bytes.size());
    return placed;
  }
  void unplace(const Placement& placement) override {
    if (link_ != nullptr) link_->take_back(placement);
  }
  StatusOr<Borrowed> borrow(const Placement& placement, uint64_t length) override {
    return link_ == nullptr ? Channel::borrow(placement, length) : link_->borrow(placement, length);
  }

  void close() override {
    if (link_ != nullptr) link_->close();
    std::shared_ptr<ChannelHost> host;
    MutexLock lock(&mutex_);
    host.swap(host_);
    lock.unlock();
  }
  void add_to(ConnectionStats* stats) const override {
    stats->arena_hits += hits_.load();
    stats->arena_hit_bytes += hit_bytes_.load();
    stats->arena_fallbacks += fallbacks_.load();
    stats->arena_fallback_bytes += fallback_bytes_.load();
    stats->arena =
        link_ != nullptr ? link_->describe() : "the peer is not on this host's local socket";
  }

  // More is free than went with other frames.
  void on_deadline() override {
    armed_.store(false, std::memory_order_relaxed);
    if (!link_->frees_wait()) return;
    const std::shared_ptr<ChannelHost> to = host();
    Frame frees = take_rider();
    if (to != nullptr && !frees.header.empty()) to->send_own(std::move(frees));
    // More than fits into one frame, or freed meanwhile.
    if (link_->frees_wait()) frees_waiting();
  }

  // ---- ArenaLink::Host -------------------------------------------------------------------------
  void send_arena_frame(FrameKind kind, std::string header) override {
    Frame frame;
    frame.kind = kind;
    frame.header = std::move(header);
    if (const std::shared_ptr<ChannelHost> to = host()) to->send_own(std::move(frame));
  }
  void frees_waiting() override {
    // Armed once while something waits, not at every free.
    if (armed_.exchange(true, std::memory_order_relaxed)) return;
    if (const std::shared_ptr<ChannelHost> to = host()) {
      to->set_deadline(backend_->runtime().now() + kFreeDelay, weak_from_this());
    }
  }
  void lending_settled(bool lends, std::string_view why_not) override {
    backend_->count_settled(lends);
    if (const std::shared_ptr<ChannelHost> to = host()) to->channel_settled(*this, lends, why_not);
  }

 private:
  std::shared_ptr<ChannelHost> host() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    return host_;
  }

  const std::shared_ptr<ArenaBackend> backend_;
  const std::shared_ptr<ArenaLink> link_;
  std::atomic<bool> armed_{false};
  std::atomic<int64_t> hits_{0};
  std::atomic<int64_t> hit_bytes_{0};
  std::atomic<int64_t> fallbacks_{0};
  std::atomic<int64_t> fallback_bytes_{0};
  Mutex mutex_;
  std::shared_ptr<ChannelHost> host_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::shared_ptr<SharedArena> ArenaBackend::arena(std::string* why_none) {
  MutexLock lock(&mutex_);
  if (!tried_) {
    tried_ = true;
    const uint64_t bytes = std::min(bytes_, quarter_of_memory(runtime_->files()));
    if (bytes == 0) {
      why_none_ = "it is switched off (arena_bytes is 0)";
    } else {
      StatusOr<std::shared_ptr<SharedArena>> made = SharedArena::make(bytes, runtime_);
      if (made.ok()) {
        arena_ = *std::move(made);
      } else {
        why_none_ = std::string(made.status().message());
      }
    }
  }
  if (why_none != nullptr) *why_none = why_none_;
  return arena_;
}

std::shared_ptr<Channel> ArenaBackend::make(const ChannelSite& site) {
  std::shared_ptr<ArenaLink> link;
  if (site.session != nullptr) {
    std::string why_none;
    std::shared_ptr<SharedArena> own = arena(&why_none);
    link = std::make_shared<ArenaLink>(std::move(own), std::move(why_none), site.session, gate_,
                                       runtime_->random());
  }
  return std::make_shared<ArenaChannel>(shared_from_this(), std::move(link));
}

std::shared_ptr<char> ArenaBackend::allocate_shared(size_t bytes) {
  const std::shared_ptr<SharedArena> own = arena(nullptr);
  return own == nullptr ? nullptr : own->allocate(bytes);
}

void ArenaBackend::sweep() {
  std::shared_ptr<SharedArena> own;
  {
    MutexLock lock(&mutex_);
    own = arena_;
  }
  if (own != nullptr) own->sweep();
}

void ArenaBackend::add_counters(std::vector<std::pair<std::string, int64_t>>* out) const {
  std::shared_ptr<SharedArena> own;
  {
    MutexLock lock(&mutex_);
    own = arena_;
  }
  const SharedArena::Counters arena = own == nullptr ? SharedArena::Counters() : own->counters();
  for (const auto& [name, value] : std::initializer_list<std::pair<const char*, uint64_t>>{
           {"arena_capacity", arena.capacity},
           {"arena_bytes", arena.used_bytes},
           {"arena_populated_bytes", arena.populated_bytes},
           {"arena_blocks", arena.blocks},
           {"arena_leases", arena.leases},
           {"arena_copies", arena.copied},
           {"arena_copied_bytes", arena.copied_bytes},
           {"arena_zero_copies", arena.shared},
           {"arena_full", arena.full},
           {"arena_ignored_frees", arena.ignored_frees}}) {
    out->emplace_back(name, static_cast<int64_t>(value));
  }
  out->emplace_back("arena_links_on", links_on_.load());
  out->emplace_back("arena_links_off", links_off_.load());
}

}  // namespace weft::internal
