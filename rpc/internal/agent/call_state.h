#ifndef WEFT_RPC_INTERNAL_AGENT_CALL_STATE_H_
#define WEFT_RPC_INTERNAL_AGENT_CALL_STATE_H_

// Where a call of ours is between its issue and its completion (CALL-1, CALL-4). Pure: the agent feeds it events under
// its mutex and does what the step says. The table below is the code. An answer, the deadline, a cancel, the peer's
// death and the agent's close complete the call from every state, and have no rows.

#include <cstdint>

namespace weft::internal {

enum class CallState : uint8_t {
  kNoRoomUnstaged,  // in the room queue; its buffers are on devices, and no copy of them has begun
  kNoRoom,          // in the room queue
  kUnstaged,        // its buffers are on devices, and no copy of them has begun
  kStaging,         // they are being copied to the host
  kWaiting,         // for a connection, or for its turn after its receiver had no room
  kSending,         // a thread writes its frames
  kSendingUnsent,   // likewise, but the connection was lost meanwhile, and nothing of it has left
  kSendingLost,     // likewise, and some of it may have left
  kSent,            // all frames are accepted
};
inline constexpr int kCallStates = 9;

enum class CallEvent : uint8_t {
  kRoom,         // the send budgets have room for it
  kTaken,        // it is its turn: the peer has a connection, or the copies begin
  kStaged,       // the copies are there
  kAccepted,     // the connection has taken all frames
  kRefused,      // the connection has taken none: it is lost
  kNeverFits,    // no connection will ever take it: too large, too many tensors
  kLostUnsent,   // its connection was lost, and nothing of it has left
  kLost,         // its connection was lost, and some of it may have left
  kNoRoomThere,  // its receiver had no room, and it is asked again later
};
inline constexpr int kCallEvents = 9;

enum class CallAction : uint8_t {
  kNothing,
  kSendAgain,      // nothing of it was delivered
  kSendNext,       // as the next attempt: its receiver's window decides (CALL-5)
  kMaybeExecuted,  // the call fails: it may have run, and must not run twice
  kFails,          // the call fails with the connection's error
  kImpossible,  // no row: the event is late or is that of another connection, and changes nothing
};

enum class CallGuard : uint8_t { kNone, kOnce, kElse };  // Retry::kAtMostOnce, and all others

struct CallRow {
  CallState from;
  CallEvent event;
  CallGuard guard;
  CallState to;
  CallAction action;
};

struct CallStep {
  CallState to;
  CallAction action;
};

namespace call_table {

using enum CallState;
using enum CallEvent;
using enum CallAction;
inline constexpr CallGuard kNone = CallGuard::kNone;
inline constexpr CallGuard kOnce = CallGuard::kOnce;
inline constexpr CallGuard kElse = CallGuard::kElse;

inline constexpr CallRow kRows[] = {
    {kNoRoomUnstaged, kRoom, kNone, kUnstaged, kNothing},
    {kNoRoom, kRoom, kNone, kWaiting, kNothing},
    {kUnstaged, kTaken, kNone, kStaging, kNothing},
    {kStaging, kStaged, kNone, kWaiting, kNothing},
    {kWaiting, kTaken, kNone, kSending, kNothing},
    {kSending, kAccepted, kNone, kSent, kNothing},
    {kSending, kRefused, kNone, kWaiting, kSendAgain},
    {kSending, kNeverFits, kNone, kWaiting, kFails},
    {kSending, kLostUnsent, kNone, kSendingUnsent, kNothing},
    {kSending, kLost, kNone, kSendingLost, kNothing},
    {kSending, kNoRoomThere, kNone, kWaiting, kNothing},
    {kSendingUnsent, kAccepted, kNone, kWaiting, kSendAgain},
    {kSendingUnsent, kRefused, kNone, kWaiting, kSendAgain},
    {kSendingUnsent, kNeverFits, kNone, kWaiting, kFails},
    {kSendingUnsent, kNoRoomThere, kNone, kWaiting, kNothing},
    {kSendingLost, kAccepted, kOnce, kWaiting, kSendNext},
    {kSendingLost, kAccepted, kElse, kSendingLost, kMaybeExecuted},
    {kSendingLost, kRefused, kNone, kWaiting, kSendAgain},
    {kSendingLost, kNeverFits, kNone, kWaiting, kFails},
    {kSendingLost, kNoRoomThere, kNone, kWaiting, kNothing},
    {kSent, kLostUnsent, kNone, kWaiting, kSendAgain},
    {kSent, kLost, kOnce, kWaiting, kSendNext},
    {kSent, kLost, kElse, kSent, kMaybeExecuted},
    {kSent, kNoRoomThere, kNone, kWaiting, kNothing},
};

}  // namespace call_table

constexpr CallStep call_step(CallState from, CallEvent event, bool at_most_once) {
  for (const CallRow& row : call_table::kRows) {
    if (row.from != from || row.event != event) continue;
    if (row.guard == (at_most_once ? CallGuard::kElse : CallGuard::kOnce)) continue;
    return {row.to, row.action};
  }
  return {from, CallAction::kImpossible};
}

constexpr bool waits_for_room(CallState state) {
  return state == CallState::kNoRoomUnstaged || state == CallState::kNoRoom;
}
constexpr bool is_being_sent(CallState state) {
  return state == CallState::kSending || state == CallState::kSendingUnsent ||
         state == CallState::kSendingLost;
}
// Not with any connection now.
constexpr bool is_here(CallState state) {
  return !is_being_sent(state) && state != CallState::kSent;
}

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_AGENT_CALL_STATE_H_
