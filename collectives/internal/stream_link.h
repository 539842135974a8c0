#ifndef WEFT_COLLECTIVES_INTERNAL_STREAM_LINK_H_
#define WEFT_COLLECTIVES_INTERNAL_STREAM_LINK_H_

// The link over streams of bytes, sockets or rings in shared memory. A thread that waits in an
// operation moves the bytes itself: the link has none. Tensors are read straight to where they
// belong.
//
// Threads: see link.h.

#include <poll.h>
#include <sys/uio.h>

#include <memory>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "weft/collectives/internal/link.h"
#include "weft/common/api.h"
#include "weft/common/runtime.h"

namespace weft::internal {

inline constexpr int kLanes = 3;
inline constexpr int kDataLane = 0;
inline constexpr int kPointLane = 1;
inline constexpr int kControlLane = 2;

enum class Moved { kBytes, kNothing, kEnd };

// A stream per peer and lane (data and points), and a socket per peer for faults, goodbyes and the
// end of its process. One thread at a time.
class WEFT_API Streams {
 public:
  virtual ~Streams() = default;

  virtual Moved read(int peer, int lane, char* to, size_t bytes, size_t* got) = 0;
  virtual Moved write(int peer, int lane, const iovec* parts, size_t count, size_t* sent) = 0;
  // What a thread that waits for that peer's control messages sleeps on; -1: no such peer.
  virtual int control(int peer) const = 0;
  // As recv() without blocking, of the control messages.
  virtual ssize_t hear(int peer, char* to, size_t bytes);
  // Sends a control message, if there is room for it now. Any thread.
  virtual void say(int peer, std::string_view message);
  // Passes on what write() has taken and the peer's connection had no room for. False: some is left.
  virtual bool flush() { return true; }

  // How often to look before sleeping, and what to do between two looks. From look `yields()` on
  // relax() gives the core to others; see Note [Yields].
  virtual int looks() const = 0;
  virtual int yields() const { return 0; }
  virtual void relax(int look) = 0;
  // This thread is about to sleep, unless one more look finds something; then it did, or does not.
  virtual void begin_sleep() {}
  virtual void end_sleep() {}
  // Whether all that the peer ever wrote is there when its goodbye is.
  virtual bool goodbye_comes_last(int peer) const {
    (void)peer;
    return false;
  }
  // Discards what has come. True: what this rank has written is not lost if the streams end now.
  virtual bool drained() { return true; }
  // What to wait for besides the control sockets. `to_read`: so many bytes are awaited, of a message
  // that the peer has begun to send if there are more than a header has; 0: none.
  virtual void poll_for(int peer, int lane, size_t to_read, bool to_write,
                        std::vector<pollfd>* fds) = 0;
};

class StreamLink : public Link {
 public:
  // REQUIRES for done: says whether what is waited for has come; sets *moved when it got nearer.
  // Ends with an error when this member or another one fails, or is gone; `position`: see link.h.
  virtual Status until(uint64_t position, absl::Time deadline,
                       absl::FunctionRef<StatusOr<bool>(bool* moved)> done,
                       absl::FunctionRef<void(std::vector<pollfd>*)> fill,
                       absl::FunctionRef<Status()> late) = 0;
  // Error of an operation of that number: the peer has left.
  virtual Status still_there(int peer, uint64_t position) = 0;
};

// For poll(): at most so long that the caller looks around again every 100 ms.
int milliseconds_until(absl::Time now, absl::Time deadline);

WEFT_API StatusOr<std::unique_ptr<StreamLink>> make_stream_link(const Membership& member,
                                                                std::unique_ptr<Streams> streams,
                                                                std::shared_ptr<Runtime> runtime);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_STREAM_LINK_H_
