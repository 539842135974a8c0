#ifndef WEFT_RREF_INTERNAL_MESSAGE_H_
#define WEFT_RREF_INTERNAL_MESSAGE_H_

// What RRefProtocol says and hears, in memory; proto/rref.proto is the same on the wire. Value
// types.

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "weft/common/error.h"
#include "weft/rref/id.h"

namespace weft::internal {

// A way to the object. At the owner `fork` is zero; anywhere else it is what the owner counts.
struct Handle {
  RRefId rref;
  ForkId fork;
  WorkerKey owner;

  friend bool operator==(const Handle&, const Handle&) = default;
};

// What its sender is done with: it will never need anything below again, and a copy that arrives
// later is to be ignored. Both numbers are per pair of workers and direction, and only grow.
struct Floors {
  uint64_t control = 1;   // numbers of control items and creations
  uint64_t carriers = 1;  // numbers of carriers

  friend bool operator==(const Floors&, const Floors&) = default;
};

// Rides on the call of `remote`.
struct Creation {
  RRefId rref;
  ForkId fork;
  uint64_t seq = 0;
  Floors floors;
};

// Rides on every user message (request or answer) that has RRefs inside: the *carrier*. `forks` are
// those RRefs, as the receiver will hold them.
struct Carrier {
  uint64_t number = 0;
  bool is_answer = false;
  Floors floors;
  std::vector<Handle> forks;
};

// Rides on a fetch, and on a call that is to wait for the value at the owner.
struct Use {
  RRefId rref;
  ForkId fork;                 // zero when the owner itself uses the object
  uint64_t introduced_by = 0;  // as Message::introduced_by

  friend bool operator==(const Use&, const Use&) = default;
};

enum class MessageKind : uint8_t {
  kCreate = 0,   // never a message of its own: holds the number of the call of `remote`
  kKnown = 1,    // owner -> creator: the object is known here, its function still runs
  kAbandon = 2,  // creator -> owner: the creation failed at its creator
  kFork = 3,     // holder -> owner: I have this fork
  kDelete = 4,   // holder -> owner: I have dropped it
  kAccept = 5,   // receiver of a carrier -> its sender: every fork in it is confirmed or refused
  kAudit = 6,    // sender of a carrier -> its receiver: which of these do you have?
};

// A control item. Fields that a kind does not name are empty.
struct Message {
  MessageKind kind = MessageKind::kCreate;
  uint64_t seq = 0;
  Floors floors;
  RRefId rref;                 // known, abandon, fork, delete
  ForkId fork;                 // known, abandon, fork, delete
  WorkerKey parent;            // fork: who made it
  uint64_t introduced_by = 0;  // abandon, delete: number of the creation or fork; 0: owner-made
  uint64_t carrier = 0;        // accept, audit
  std::vector<ForkId> forks;   // audit
  Status status;               // abandon: why the creation failed
};

// What an audited holder says of one fork.
enum class Holds : uint8_t {
  kNotHeld = 0,  // never arrived, or dropped since; if it arrives later it is refused
  kPending = 1,  // here, not confirmed yet: an accept will follow
  kHeld = 2,
};

// The acknowledgement of a control item.
struct Reply {
  Status status;             // fork: not OK = refused. Of other kinds only counted
  std::vector<Holds> holds;  // audit: one for each of `forks`
};

// How a call ended for the protocol.
enum class CallEnd : uint8_t {
  kDelivered,     // answered by its handler, so everything in it was confirmed before
  kNotDelivered,  // proven that it never arrives
  kUnknown,       // given up; it may have arrived, or arrive later
};

// What the owner is to do with a creation that arrived.
enum class CreateVerdict : uint8_t {
  kStart,     // start the function; function_ended() must follow
  kRepeated,  // it was started before, or its creator has abandoned it: do not start it
  kRefused,   // from a dead worker, settled long ago, or nonsense: do not start it
};

// --- Effects: what the caller performs after the call that appended them, in any order.

struct SendMessage {
  WorkerKey to;
  Message message;  // until acknowledged(), or the peer's death
};
struct HandleConfirmed {
  Handle handle;  // the creator's: the owner knows the object
};
struct HandleFailed {
  Handle handle;  // every use, begun or to come, fails with `status`
  Status status;
};
struct ArrivalReady {
  WorkerKey from;
  uint64_t carrier;  // its RRefs are confirmed and are the user's now: the handler may start
};
struct ArrivalFailed {
  WorkerKey from;
  uint64_t carrier;  // its RRefs are gone: the call fails with `status`
  Status status;
};
struct UseDone {
  uint64_t token;
  RRefId rref;
  Status status;  // OK: the value is there. Else the error to answer with
};
struct ReleaseValue {
  RRefId rref;  // of create_local() or a started function: no worker can reach it any more
};
using Effect = std::variant<SendMessage, HandleConfirmed, HandleFailed, ArrivalReady, ArrivalFailed,
                            UseDone, ReleaseValue>;
using Effects = std::vector<Effect>;

WEFT_API const char* name(MessageKind kind);
// "fork #3 RRef 0/a/1 fork 1/b/2 ...": for traces of tests and logs.
WEFT_API std::string to_string(const Message& message);
WEFT_API std::string to_string(const Effect& effect);

}  // namespace weft::internal

#endif  // WEFT_RREF_INTERNAL_MESSAGE_H_
