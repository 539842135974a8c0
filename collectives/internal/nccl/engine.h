#ifndef WEFT_COLLECTIVES_INTERNAL_NCCL_ENGINE_H_
#define WEFT_COLLECTIVES_INTERNAL_NCCL_ENGINE_H_

// NcclEngine: the operations of one group by NCCL. Those that the caller waits for are queued on the
// caller's current stream, which costs no event to wait for; the others on a stream of the engine.
// Operations on different streams end in the order of their turns.
//
// Threads: see device_engine.h.

#include <c10/cuda/CUDAStream.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/collectives/internal/device_engine.h"
#include "weft/collectives/internal/nccl/comm.h"
#include "weft/collectives/internal/nccl/watch.h"

namespace weft::internal {

class NcclEngine : public DeviceEngine {
 public:
  // Throws c10::Error. `comm` is connected.
  NcclEngine(std::shared_ptr<Runtime> runtime, std::unique_ptr<Comm> comm, std::string group,
             const Membership& member, int device, Logger log);
  ~NcclEngine() override;

  int device() const override { return device_; }
  bool reduces(at::ScalarType type, ReduceOp::Kind kind) const override;
  void start(DeviceHooks hooks) override;
  StatusOr<DeviceQueued> perform(const Turn& turn, absl::Span<const Operation> operations,
                                 DeviceOrder order) override;
  void abort(const Status& cause) override;
  void drain() override;
  void close() override;

 private:
  class Call;
  StatusOr<DeviceQueued> queue(const Turn& turn, absl::Span<const Operation> operations,
                               DeviceOrder order);
  // Hands what was queued to the watch; a barrier gets a future for its end.
  std::optional<Future<void>> follow(const Turn& turn, absl::Span<const Operation> operations,
                                     std::shared_ptr<c10::cuda::CUDAEvent> end,
                                     std::vector<at::Tensor> kept);

  const std::shared_ptr<Runtime> runtime_;
  const std::unique_ptr<Comm> comm_;
  const std::string group_;
  const Membership member_;
  const int device_;
  const Logger log_;
  const c10::cuda::CUDAStream stream_;
  // The last operation's, if it is not part of a graph.
  std::shared_ptr<c10::cuda::CUDAEvent> last_end_;
  std::optional<c10::cuda::CUDAStream> last_stream_;
  bool closed_ = false;    // of the owner's thread
  bool captured_ = false;  // its work is part of a graph
  at::Tensor token_;       // of barriers
  std::unique_ptr<Watch> watch_;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_NCCL_ENGINE_H_
