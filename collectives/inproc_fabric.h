#ifndef WEFT_COLLECTIVES_INPROC_FABRIC_H_
#define WEFT_COLLECTIVES_INPROC_FABRIC_H_

// InprocFabric: what the members of process groups share when all are in one process. Made for
// tests: with a SimRuntime every message is under way for a time drawn from the seed.
//
//   auto fabric = std::make_shared<weft::InprocFabric>(runtime);
//   auto group = weft::init_process_group({.store = store, .rank = 0, .size = 2,
//                                          .runtime = runtime, .fabric = fabric});
//
// Bytes are copied, so a receiver never sees its sender's memory. Threads: all methods from
// anywhere.

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/runtime.h"

namespace weft {

namespace internal {
class InprocFabricCore;
}

struct InprocFabricOptions {  // how a fabric in memory is made
  // A message is under way for a time between 0 and this. Unset: 200 us of virtual time in
  // simulation, 0 elsewhere.
  std::optional<absl::Duration> delay_max = std::nullopt;
};

class WEFT_API InprocFabric {
 public:
  explicit InprocFabric(std::shared_ptr<Runtime> runtime, const InprocFabricOptions& options = {});
  ~InprocFabric();
  InprocFabric(const InprocFabric&) = delete;
  InprocFabric& operator=(const InprocFabric&) = delete;

  // As if the process of that rank had died: its messages under way arrive, and then its peers
  // lose it, in every group that it is in under that rank. Its own operations fail.
  void kill(int rank);
  // Messages from one rank to another stay at the sender until released.
  void hold(int from, int to);
  void release(int from, int to);

  // Members of groups that have not left.
  int members() const;
  // For the framework.
  const std::shared_ptr<internal::InprocFabricCore>& core() const { return core_; }

 private:
  const std::shared_ptr<internal::InprocFabricCore> core_;  // for the framework
};

}  // namespace weft

#endif  // WEFT_COLLECTIVES_INPROC_FABRIC_H_
