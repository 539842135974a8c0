#ifndef WEFT_TRANSPORT_FAULTY_TRANSPORT_H_
#define WEFT_TRANSPORT_FAULTY_TRANSPORT_H_

// faulty: puts faults into the traffic of any transport, by a plan that tests write and change
// while they run.
//
//   auto plan = std::make_shared<FaultPlan>(seed);
//   plan->add({.fault = Fault::kFailAfter, .kind = FrameKind::kRequest, .to = "ps0", .times = 2});
//   TransportFactory factory = faulty_transport(inproc_transport(network), plan);
//
// A decision depends only on (seed, rule, link, kind, index of the frame among its kind on this
// link), so a run that failed fails again. A link is a direction: names of sender and receiver.
//
// Faults of the handshake are rules for FrameKind::kHello: kFailBefore refuses the dial, kDrop lets
// it run into its deadline, kDelay delays it, kFailAfter breaks the connection once it is open.
// There the receiver's name is not known yet: `to` is compared with the address. Rules for
// kHelloAck with kFailBefore let the acceptor refuse. Other faults do nothing to these two kinds.
//
// Threads: all methods from anywhere.

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/mutex.h"
#include "weft/transport/transport.h"

namespace weft {

enum class Fault : uint8_t {
  kNone,
  kFailBefore,  // send() fails, the frame is never seen
  kLoseUnsent,  // send() accepts, then the connection is cut; on_lost lists the cookie
  kFailAfter,   // the frame is delivered, then the connection is cut
  kCut,         // the connection is cut instead
  kDrop,        // vanishes (no real connection does that: CONN-2 is broken on purpose)
  kDelay,       // leaves after `delay`; the lane's order is kept
  kReorder,     // leaves after the next frame of another lane, at the latest after `delay`
  kDuplicate,   // arrives twice (breaks CONN-2 on purpose)
  kTruncate,    // loses the second half of its payload, or of its header without one
  kFlipByte,    // has one byte of its header changed, or of its payload without one
};
WEFT_API std::string_view fault_name(Fault fault);

struct FaultRule {  // which frames are hit, and what becomes of them
  Fault fault = Fault::kNone;
  std::optional<FrameKind> kind = std::nullopt;  // unset: every kind but hello and hello_ack
  std::string from = {};                         // names of workers; "": any
  std::string to = {};
  // Applied where the frame is received instead of where it is sent: for kFailAfter, kCut, kDrop,
  // kDuplicate, kTruncate and kFlipByte.
  bool at_receiver = false;
  // For the frames that match on one link: how many pass first, how many may be hit at most, and
  // with which probability.
  int64_t skip = 0;
  int64_t times = std::numeric_limits<int64_t>::max();
  double probability = 1;
  // Hits no frame before so many bytes (headers and payloads) have gone over the link.
  uint64_t after_bytes = 0;
  absl::Duration delay = absl::Milliseconds(10);
};

class WEFT_API FaultPlan {
 public:
  explicit FaultPlan(uint64_t seed) : seed_(seed) {}

  // The first rule that hits a frame decides. Returns an id for remove().
  int add(FaultRule rule);
  void remove(int id);
  void clear();
  // How many frames a rule has hit, also after it was removed.
  int64_t hits(int id) const;
  int64_t hits() const;
  uint64_t seed() const { return seed_; }
  // What was done, one line each, the newest last.
  std::string log() const;

  struct Decision {  // what happens to one frame
    Fault fault = Fault::kNone;
    absl::Duration delay;  // of kDelay
    uint64_t random = 0;   // for the place of a flipped byte
  };
  // For the transport. `bytes` is the size of the frame.
  Decision decide(std::string_view from, std::string_view to, FrameKind kind, size_t bytes,
                  bool at_receiver);

 private:
  using Link = std::pair<std::string, std::string>;

  const uint64_t seed_;
  mutable Mutex mutex_;
  int next_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int, FaultRule> rules_ ABSL_GUARDED_BY(mutex_);
  std::map<int, int64_t> hits_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<int, Link>, int64_t> matched_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<int, Link>, int64_t> hit_on_link_ ABSL_GUARDED_BY(mutex_);
  std::map<std::tuple<Link, FrameKind, bool>, uint64_t> index_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<Link, bool>, uint64_t> bytes_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> log_ ABSL_GUARDED_BY(mutex_);
};

WEFT_API TransportFactory faulty_transport(TransportFactory inner, std::shared_ptr<FaultPlan> plan);

}  // namespace weft

#endif  // WEFT_TRANSPORT_FAULTY_TRANSPORT_H_
