#ifndef WEFT_RPC_INTERNAL_AGENT_LINK_H_
#define WEFT_RPC_INTERNAL_AGENT_LINK_H_

// Link: one connection as the agent sees it: puts messages together, counts, and tells the agent.
// It outlives its connection for as long as calls name it. Frames come on the transport's threads.

#include <array>
#include <atomic>
#include <memory>
#include <string>

#include "weft/common/api.h"
#include "weft/common/metrics.h"
#include "weft/rpc/internal/agent/call_trace.h"
#include "weft/rpc/internal/agent/message.h"
#include "weft/transport/transport.h"

namespace weft::internal {

class Agent;

// What is under way on the lanes of one connection: from the moment that a large message is sent
// until the transport lets go of its last byte. Any thread.
class WEFT_API LaneLoads {
 public:
  static constexpr int kMaxLanes = 8;

  // The one of `lanes` with the least to do; of equals the one after the last choice, so that large
  // messages take turns. With none, the control lane.
  int choose(LaneRange lanes);
  void add(int lane, size_t bytes) { at(lane).fetch_add(bytes, std::memory_order_relaxed); }
  void remove(int lane, size_t bytes) { at(lane).fetch_sub(bytes, std::memory_order_relaxed); }
  size_t bytes(int lane) const {
    return bytes_[static_cast<size_t>(lane)].load(std::memory_order_relaxed);
  }

 private:
  std::atomic<size_t>& at(int lane) { return bytes_[static_cast<size_t>(lane)]; }

  std::array<std::atomic<size_t>, kMaxLanes> bytes_{};
  std::atomic<int> last_{0};
};

class Link : public ConnectionHandler, public std::enable_shared_from_this<Link> {
 public:
  // `budget`: of what it receives. `trace` may be null.
  Link(std::weak_ptr<Agent> agent, const MessageLimits& limits,
       const std::shared_ptr<ByteBudget>& budget, std::shared_ptr<ReceiveMemory> memory,
       std::shared_ptr<CallTrace> trace, absl::Time now)
      : agent_(std::move(agent)),
        trace_(std::move(trace)),
        budget_(budget),
        limits_(limits),
        assembler_(limits, budget, std::move(memory)),
        last_received_(absl::ToUnixNanos(now)),
        last_sent_(absl::ToUnixNanos(now)) {}

  void on_frame(const FrameView& frame, int lane) override;
  void on_lost(Lost lost) override;
  ChunkTarget chunk_target(std::string_view header, size_t bytes, int lane) override;
  void chunk_filled(std::string_view header, size_t bytes, int lane) override;

  // Set once, before anything is sent on it.
  void open(std::shared_ptr<Connection> connection) { connection_ = std::move(connection); }
  Connection* connection() const { return connection_.get(); }
  const Hello& peer() const { return connection_->peer(); }
  Assembler& assembler() { return assembler_; }
  const std::shared_ptr<ByteBudget>& budget() const { return budget_; }
  // Adds what happened since the last time.
  void publish(Metrics* metrics) ABSL_LOCKS_EXCLUDED(published_mutex_);

  // `held` is kept until the transport lets go of the last frame of a large message. `prompt`: a small one
  // goes by the prompt lane.
  template <class Header>
  Status send(FrameKind kind, Header* header, const OutMessageRef& message, uint64_t cookie,
              absl::Time now, std::shared_ptr<const void> held = nullptr, bool prompt = false) {
    last_sent_.store(absl::ToUnixNanos(now), std::memory_order_relaxed);
    const int small_lane = prompt ? prompt_lane() : kControlLane;
    if (!message->large(limits_)) {
      last_small_.store(absl::ToUnixNanos(now), std::memory_order_relaxed);
      return send_message(connection_.get(), kind, header, message, limits_, cookie, &transfers_,
                          kBulkLane, small_lane);
    }
    const LaneRange bulk = connection_->bulk_lanes();
    const int lane = loads_->choose(bulk);
    MessageLimits limits = limits_;
    limits.chunk_bytes = chunk_bytes(now, bulk);
    return send_message(connection_.get(), kind, header, on_lane(message, lane, std::move(held)),
                        limits, cookie, &transfers_, lane, small_lane);
  }
  // On which requests may be under way: those that the hello says, and data connections.
  std::vector<int> lanes() const;
  Status send_control(FrameKind kind, std::string header, int lane, absl::Time now);

  absl::Time last_received() const {
    return absl::FromUnixNanos(last_received_.load(std::memory_order_relaxed));
  }
  // Whether a frame has come: the connection has opened, and it works.
  bool heard() const { return heard_.load(std::memory_order_relaxed); }
  absl::Time last_sent() const {
    return absl::FromUnixNanos(last_sent_.load(std::memory_order_relaxed));
  }

  // Guarded by the agent's mutex: the end of a connection that both sides dialled at once.
  bool retiring = false;      // we send nothing new on it
  bool goodbye_sent = false;  // the peer was told, after the last request
  int sending = 0;            // requests that are being written to it now
  int goodbyes = 0;           // lanes on which the peer said the same
  int goodbyes_due = 0;       // of so many, as it said
  int pending = 0;            // our calls that were sent on it
  int serving = 0;            // its calls that run here
  bool closing = false;
  bool lost = false;
  bool failed = false;  // it was lost, or refused what was sent, and dials have been paced for it

 private:
  // The same message; while this reference is held it counts as load of the lane.
  OutMessageRef on_lane(const OutMessageRef& message, int lane,
                        std::shared_ptr<const void> held) const;
  void received(absl::Time now) {
    last_received_.store(absl::ToUnixNanos(now), std::memory_order_relaxed);
    heard_.store(true, std::memory_order_relaxed);
  }
  Status handle(const FrameView& frame, int lane, Agent* agent);
  Status begin_wide(const FrameView& frame, std::shared_ptr<const v1::CallHeader> brief,
                    absl::Time arrived);
  Status begin_wide(const FrameView& frame, const v1::ResponseHeader& brief);
  int prompt_lane() {
    if (!wants_prompt_.exchange(true, std::memory_order_relaxed)) connection_->want_prompt_lane();
    return connection_->prompt_lane();
  }
  // Chunk size of a message sent now: larger while nothing small would have to wait for a chunk.
  size_t chunk_bytes(absl::Time now, LaneRange bulk) const;

  const std::weak_ptr<Agent> agent_;  // weak: the agent holds links, links must not hold it
  const std::shared_ptr<CallTrace> trace_;
  const std::shared_ptr<ByteBudget> budget_;
  const MessageLimits limits_;
  std::shared_ptr<Connection> connection_;
  Assembler assembler_;
  std::atomic<uint64_t> transfers_{0};
  // Shared with the messages under way, which may outlive the link.
  const std::shared_ptr<LaneLoads> loads_ = std::make_shared<LaneLoads>();
  std::atomic<int64_t> last_received_;  // nanoseconds on the runtime's clock
  std::atomic<bool> heard_{false};
  std::atomic<bool> wants_prompt_{false};
  std::atomic<int64_t> last_sent_;
  std::atomic<int64_t> last_small_{0};  // a call or an answer that was one frame
  Mutex published_mutex_;
  ConnectionStats published_ ABSL_GUARDED_BY(published_mutex_);
  int64_t published_traffic_ ABSL_GUARDED_BY(published_mutex_) = 0;  // when it was last seen
  int looks_without_traffic_ ABSL_GUARDED_BY(published_mutex_) = 0;
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_AGENT_LINK_H_
