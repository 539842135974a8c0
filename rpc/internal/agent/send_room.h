#ifndef WEFT_RPC_INTERNAL_AGENT_SEND_ROOM_H_
#define WEFT_RPC_INTERNAL_AGENT_SEND_ROOM_H_

// SendRoom: the bytes that a worker may have on their way, to one peer or to all. A SendCharge
// takes some and gives them back when it goes: with the last frame of its message, on whatever
// thread the transport drops that, or with the call, whichever is later. So a peer that reads
// nothing cannot make a sender grow, whether its calls wait or give up.
//
// Threads: all methods from anywhere. give_back() takes no lock that is held while a transport is
// called; the bell only says that it is worth to look again.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "weft/common/byte_budget.h"
#include "weft/common/error.h"

namespace weft::internal {

// Shared by the rooms of one worker: rings when bytes come back and a call waits for some.
class RoomBell {
 public:
  // `ring` posts work and returns. REQUIRES: called before any call waits.
  void set(std::function<void()> ring) { ring_ = std::move(ring); }
  // After begin_waiting() the caller looks once more: what came back before did not ring.
  void begin_waiting() { waiting_.fetch_add(1); }
  void end_waiting() { waiting_.fetch_sub(1); }
  void bytes_came_back() {
    // Orders the budget's release before this load, as begin_waiting() does for a waiting call.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (waiting_.load() > 0 && ring_ != nullptr) ring_();
  }

 private:
  std::atomic<int> waiting_{0};
  std::function<void()> ring_;
};

class SendRoom {
 public:
  SendRoom(uint64_t limit, std::string name, std::shared_ptr<RoomBell> bell)
      : budget_(limit, std::move(name)), bell_(std::move(bell)) {}

  Status take(uint64_t bytes) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return budget_.charge(bytes);
  }
  void give_back(uint64_t bytes) {
    budget_.release(bytes);
    bell_->bytes_came_back();
  }
  // Undoes a charge that was not used: no call gained room, so none is told.
  void undo(uint64_t bytes) { budget_.release(bytes); }
  const ByteBudget& budget() const { return budget_; }

 private:
  ByteBudget budget_;
  const std::shared_ptr<RoomBell> bell_;
};

class SendCharge {
 public:
  SendCharge() = default;
  // REQUIRES: `bytes` were taken from `room`.
  SendCharge(std::shared_ptr<SendRoom> room, uint64_t bytes)
      : room_(std::move(room)), bytes_(bytes) {}
  SendCharge(SendCharge&& other) noexcept
      : room_(std::move(other.room_)), bytes_(std::exchange(other.bytes_, 0)) {}
  SendCharge& operator=(SendCharge&& other) noexcept {
    reset();
    room_ = std::move(other.room_);
    bytes_ = std::exchange(other.bytes_, 0);
    return *this;
  }
  ~SendCharge() { reset(); }

  bool charged() const { return room_ != nullptr; }
  void reset() {
    if (const std::shared_ptr<SendRoom> room = std::move(room_)) room->give_back(bytes_);
    room_ = nullptr;
    bytes_ = 0;
  }

 private:
  std::shared_ptr<SendRoom> room_;
  uint64_t bytes_ = 0;
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_AGENT_SEND_ROOM_H_
