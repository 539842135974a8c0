#ifndef WEFT_COLLECTIVES_INTERNAL_LINK_H_
#define WEFT_COLLECTIVES_INTERNAL_LINK_H_

// Link: how one member of a group reaches the others, in one generation. Messages of one sender
// arrive in the order sent. Those of operations and those of send() and recv() do not see each
// other.
//
// COLL-3: after fail(), here or at any other member, every exchange under way and to come ends
// with an error, in bounded time.
// COLL-6: a member that leaves fails no operation that it has finished. A failure caused by its
// leaving has the number of the first operation that it fails (since_of()), wherever it is told;
// exchanges of operations below that number go on.
//
// Threads: exchange(), send_point() and receive_point() by one thread at a time; fail(), leave()
// and traffic() by any. The owner calls leave() before it destroys the link.

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "weft/collectives/internal/header.h"
#include "weft/common/error.h"

namespace weft::internal {

// Which group, and who in it.
struct Membership {
  uint64_t group = 0;
  uint32_t generation = 1;
  int rank = 0;
  int size = 1;
};

struct Outgoing {
  int peer = 0;
  Header header;  // bytes: of the body
  const char* data = nullptr;
};

// Takes a body piece by piece, in order.
class PieceTaker {
 public:
  virtual void take(uint64_t begin, const char* piece, uint64_t bytes) = 0;

 protected:
  ~PieceTaker() = default;
};

struct Incoming {
  int peer = 0;
  Header expected;       // bytes: of the body
  char* data = nullptr;  // room for the body; with a taker, for one piece
  PieceTaker* taker = nullptr;
};
// Pieces of a body for a taker, but the last: small enough for the caches, a multiple of every
// type's size.
inline constexpr uint64_t kPieceBytes = 256 << 10;

struct PointMessage {
  int peer = 0;
  Header header;
  std::vector<char> body;
};

// Sent by this member so far.
struct Traffic {
  uint64_t messages = 0;
  uint64_t bytes = 0;  // without headers
};

class Link {
 public:
  virtual ~Link() = default;

  // Sends and receives all of them, in any order; returns when all are done, or at the first error.
  // `mine`: what this rank is in.
  virtual Status exchange(const Header& mine, absl::Span<const Outgoing> sends,
                          absl::Span<const Incoming> receives, absl::Time deadline) = 0;

  // Returns when the memory of the messages may be used again.
  virtual Status send_points(absl::Span<const Outgoing> sends, absl::Time deadline) = 0;
  // The next of a sender (-1: of any) with that tag.
  virtual StatusOr<PointMessage> receive_point(int peer, int32_t tag, absl::Time deadline) = 0;

  // The first cause counts. Tells every other member.
  virtual void fail(const Status& cause, uint64_t sequence) = 0;
  // Says goodbye. `finished`: number of the last operation that this member has finished. A member
  // that waits for this one in a later operation gets an error.
  virtual void leave(uint64_t finished) = 0;

  // OK, or what another member has told that concerns an operation of this number, or its end. Does
  // not wait. REQUIRES: no exchange is under way.
  virtual Status look(uint64_t position) = 0;

  // By rank: whose process is known to have ended, or which has left.
  virtual std::vector<bool> gone() = 0;

  virtual Traffic traffic() const = 0;

  // The ranks that the operation under way waited for when its thread last went to sleep. Any
  // thread.
  virtual std::vector<int> awaited() = 0;
};

// "waited for rank 2, whose last operation was all_reduce #11": for the errors of a deadline.
struct Awaited {
  int peer = 0;
  Header last;  // op kNone: nothing came yet
};
Status deadline_error(const Header& mine, const std::vector<Awaited>& awaited);
// What the other members are told, and what they make of it. `since`: see since_of().
Status fault_of(int peer, uint32_t kind, std::string_view text, uint64_t since);
// The error of an operation with the number `position` for which a peer is missing that has left
// after the operation `finished`. A send or a receive has the position kNoOperation.
Status peer_left(int peer, uint64_t finished, uint64_t position);
Status peer_lost(int peer, std::string_view how);

// The position of what has no place in the order of operations: every failure concerns it.
inline constexpr uint64_t kNoOperation = UINT64_MAX;
// Number of the first operation that a failure concerns. 0: all of them, the one under way included.
uint64_t since_of(const Status& cause);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_LINK_H_
