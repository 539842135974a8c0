#ifndef WEFT_TRANSPORT_INPROC_TRANSPORT_H_
#define WEFT_TRANSPORT_INPROC_TRANSPORT_H_

// inproc: workers of one process. Made for tests: with the system Runtime every transport delivers
// on a thread of its own; with a SimRuntime every delivery is an event of the simulation with a
// delay drawn from the seed. Bytes are copied, so a receiver never sees its sender's memory.
//
//   auto network = std::make_shared<InprocNetwork>();
//   TransportFactory factory = inproc_transport(network);   // for every worker of this network
//   network->kill("ps0");
//
// The network is also the instrument with which tests look at the traffic and break it. Workers are
// named by TransportContext::worker_name or by address ("inproc:3"); "" stands for any.
//
// Threads: all methods from anywhere.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/transport/transport.h"

namespace weft {

namespace internal {
class InprocCore;
}

struct InprocOptions {  // how a network in memory is made
  // Seed of delays and faults. 0: drawn from the Runtime of the first transport.
  uint64_t seed = 0;
  // Each frame is under way for a time between the two. Unset: 0 on the system's clock, 10 to 500
  // us of virtual time in simulation.
  std::optional<absl::Duration> delay_min = std::nullopt;
  std::optional<absl::Duration> delay_max = std::nullopt;
  // How many frames dump() remembers.
  size_t keep_frames = 256;
};

struct FrameCount {       // frames of one kind between two workers
  int64_t sent = 0;       // given to the network
  int64_t delivered = 0;  // handed to the receiver
  int64_t lost = 0;       // with their connection
};

class WEFT_API InprocNetwork {
 public:
  explicit InprocNetwork(const InprocOptions& options = {});
  ~InprocNetwork();
  InprocNetwork(const InprocNetwork&) = delete;
  InprocNetwork& operator=(const InprocNetwork&) = delete;
  // Frames of a kind from one worker to another; "": any.
  FrameCount count(FrameKind kind, std::string_view from = "", std::string_view to = "") const;
  // Connections that are open on at least one side.
  int connections(std::string_view a = "", std::string_view b = "") const;
  // The last frames and events, one line each.
  std::string dump() const;

  void set_delay(absl::Duration min, absl::Duration max);  // of later frames
  // Frames (and hellos) from one to the other stay at the sender until released. When the
  // connection is lost meanwhile, they are reported as unsent.
  void hold(std::string_view from, std::string_view to);
  void release(std::string_view from, std::string_view to);
  // Nothing passes between the two, either way, and neither is notified. What was sent arrives
  // after heal().
  void partition(std::string_view a, std::string_view b);
  void heal(std::string_view a, std::string_view b);
  // Connections between the two are lost, with what is under way. Returns how many.
  int cut(std::string_view a, std::string_view b);
  // Dials to the worker fail as unavailable.
  void refuse_connects(std::string_view worker, bool refuse);
  // As if the process had died: its connections are lost at the peers, its address refuses, and it
  // hears nothing more, until its own shutdown() tells it so.
  void kill(std::string_view worker);

  // For inproc_transport().
  const std::shared_ptr<internal::InprocCore>& core() const { return core_; }

 private:
  const std::shared_ptr<internal::InprocCore> core_;
};

WEFT_API TransportFactory inproc_transport(std::shared_ptr<InprocNetwork> network);

}  // namespace weft

#endif  // WEFT_TRANSPORT_INPROC_TRANSPORT_H_
