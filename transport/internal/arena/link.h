#ifndef WEFT_TRANSPORT_INTERNAL_ARENA_LINK_H_
#define WEFT_TRANSPORT_INTERNAL_ARENA_LINK_H_

// ArenaLink: what one connection does with shared memory: hands our file to the peer, checks and
// maps the peer's, lends and borrows, and says what is free again. The protocol is specified in
// proto/transport.proto. Whatever fails leaves the connection as it is, without shared memory in
// that direction, and the reason in describe().
//
//   start() --offer by the private socket--> peer maps, reads the probe
//           <--arena_probe by the connection-- lend() works from here on
//
// What was borrowed outlives the link: it holds the peer's file and the private socket. The peer
// keeps what it lent until it is told that it is free, or until the socket ends; a broken
// connection alone says nothing, because this process may go on using the memory (ARENA-3).
//
// Threads: any.

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/common/mutex.h"
#include "weft/transport/internal/arena/shared_arena.h"
#include "weft/transport/internal/local/gate.h"
#include "weft/transport/transport.h"

namespace weft::internal {

class WEFT_API ArenaLink final : public LocalHandler,
                                 public std::enable_shared_from_this<ArenaLink> {
 public:
  // The connection's side of it. Called without locks of the link.
  class Host {
   public:
    virtual void send_arena_frame(FrameKind kind, std::string header) = 0;
    // Something is free again: take_frees() within a few milliseconds.
    virtual void frees_waiting() = 0;
    // Known now, and for good: whether we put large tensors there for this peer, and what is in the
    // way otherwise. Once.
    virtual void lending_settled(bool lends, std::string_view why_not) = 0;

   protected:
    ~Host() = default;
  };

  // `arena` may be null, with `why_none`: then the peer is lent nothing.
  ArenaLink(std::shared_ptr<SharedArena> arena, std::string why_none,
            std::shared_ptr<LocalSession> session, std::shared_ptr<LocalGate> gate, Random& random);

  // The connection is open. `host` is not used after close().
  void start(std::shared_ptr<Host> host) ABSL_LOCKS_EXCLUDED(mutex_);
  // The connection is lost.
  void close() ABSL_LOCKS_EXCLUDED(mutex_);

  std::optional<Placement> lend(std::string_view bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  void take_back(const Placement& placement) ABSL_LOCKS_EXCLUDED(mutex_);
  StatusOr<Borrowed> borrow(const Placement& placement, uint64_t length)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Headers of frames from the peer. Errors, kind protocol: no correct peer sends them.
  Status on_probe(std::string_view header) ABSL_LOCKS_EXCLUDED(mutex_);
  Status on_free(std::string_view header) ABSL_LOCKS_EXCLUDED(mutex_);
  // The header of an arena_free frame; empty when nothing waits.
  std::string take_frees() ABSL_LOCKS_EXCLUDED(mutex_);
  bool frees_wait() const { return frees_wait_->load(std::memory_order_relaxed); }

  bool lends() const { return lends_.load(std::memory_order_acquire); }
  // "lends, borrows", or what is in the way.
  std::string describe() const ABSL_LOCKS_EXCLUDED(mutex_);

  // The peer's offer, which is its only message: a second one is an error, and not answered.
  Status on_local_message(LocalMessage message) override ABSL_LOCKS_EXCLUDED(mutex_);
  void on_local_end() override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  class Use;
  class Loan;

  StatusOr<std::string> map_offer(LocalMessage message) ABSL_LOCKS_EXCLUDED(mutex_);
  void no_lending(std::string why) ABSL_LOCKS_EXCLUDED(mutex_);
  void settle(bool lends, std::string_view why_not) ABSL_LOCKS_EXCLUDED(mutex_);

  const std::shared_ptr<SharedArena> arena_;
  const uint64_t link_;
  const std::shared_ptr<LocalSession> session_;
  const std::shared_ptr<LocalGate> gate_;
  const std::string nonce_;
  // Outlives the link with what was borrowed.
  const std::shared_ptr<std::atomic<bool>> frees_wait_;
  std::atomic<bool> lends_{false};

  mutable Mutex mutex_;
  std::shared_ptr<Host> host_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<char> probe_ ABSL_GUARDED_BY(mutex_);  // until it was answered
  std::shared_ptr<Use> use_ ABSL_GUARDED_BY(mutex_);     // of the peer's memory
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool settled_ ABSL_GUARDED_BY(mutex_) = false;
  bool offered_ ABSL_GUARDED_BY(mutex_) = false;  // the peer has said what it has to say
  std::string why_ended_ ABSL_GUARDED_BY(mutex_) = "the peer uses our memory no more";
  std::string why_not_lending_ ABSL_GUARDED_BY(mutex_);
  std::string why_not_borrowing_ ABSL_GUARDED_BY(mutex_) = "the peer has offered nothing yet";
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_ARENA_LINK_H_
