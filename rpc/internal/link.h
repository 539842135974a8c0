#ifndef WEFT_RPC_INTERNAL_LINK_H_
#define WEFT_RPC_INTERNAL_LINK_H_

// Link: one connection as the agent sees it: puts messages together, counts, and tells the agent.
// It outlives its connection for as long as calls name it. Frames come on the transport's threads.

#include <atomic>
#include <memory>
#include <string>

#include "weft/rpc/internal/message.h"
#include "weft/rpc/transport.h"

namespace weft::internal {

class Agent;

class Link : public ConnectionHandler, public std::enable_shared_from_this<Link> {
 public:
  // The budgets that an assembler charges live as long as what is in flight: `keep` holds them.
  Link(std::weak_ptr<Agent> agent, const MessageLimits& limits, ByteBudget* budget,
       std::shared_ptr<const void> keep, std::shared_ptr<ReceiveMemory> memory, absl::Time now)
      : agent_(std::move(agent)),
        keep_(std::move(keep)),
        limits_(limits),
        assembler_(limits, budget, std::move(memory)),
        last_received_(absl::ToUnixNanos(now)),
        last_sent_(absl::ToUnixNanos(now)) {}

  void on_frame(const FrameView& frame, int lane) override;
  void on_lost(Lost lost) override;

  // Set once, before anyone sends on it.
  void open(std::shared_ptr<Connection> connection) { connection_ = std::move(connection); }
  Connection* connection() const { return connection_.get(); }
  const Hello& peer() const { return connection_->peer(); }
  Assembler& assembler() { return assembler_; }

  template <class Header>
  Status send(FrameKind kind, Header* header, const OutMessageRef& message, uint64_t cookie,
              absl::Time now) {
    last_sent_.store(absl::ToUnixNanos(now), std::memory_order_relaxed);
    return send_message(connection_.get(), kind, header, message, limits_, cookie, &transfers_);
  }
  Status send_control(FrameKind kind, std::string header, int lane, absl::Time now);

  absl::Time last_received() const {
    return absl::FromUnixNanos(last_received_.load(std::memory_order_relaxed));
  }
  absl::Time last_sent() const {
    return absl::FromUnixNanos(last_sent_.load(std::memory_order_relaxed));
  }

  // Guarded by the agent's mutex: the end of a connection that both sides dialled at once.
  bool retiring = false;      // we send nothing new on it
  bool goodbye_sent = false;  // the peer was told, after the last request
  int sending = 0;            // requests that are being written to it now
  int goodbyes = 0;           // lanes on which the peer said the same
  int pending = 0;            // our calls that were sent on it
  int serving = 0;            // its calls that run here
  bool closing = false;
  bool lost = false;

 private:
  Status handle(const FrameView& frame, int lane, Agent* agent);

  const std::weak_ptr<Agent> agent_;  // weak: the agent holds links, links must not hold it
  const std::shared_ptr<const void> keep_;
  const MessageLimits limits_;
  std::shared_ptr<Connection> connection_;
  Assembler assembler_;
  std::atomic<uint64_t> transfers_{0};
  std::atomic<int64_t> last_received_;  // nanoseconds on the runtime's clock
  std::atomic<int64_t> last_sent_;
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_LINK_H_
