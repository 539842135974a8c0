#ifndef WEFT_COLLECTIVES_INTERNAL_NCCL_ENGINE_H_
#define WEFT_COLLECTIVES_INTERNAL_NCCL_ENGINE_H_

// NcclEngine: the operations of one group by NCCL, on a stream of its own.
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
  StatusOr<DeviceQueued> perform(const Turn& turn, absl::Span<const Operation> operations) override;
  void abort(const Status& cause) override;
  void drain() override;
  void close() override;

 private:
  class Call;
  StatusOr<DeviceQueued> queue(const Turn& turn, absl::Span<const Operation> operations);

  const std::shared_ptr<Runtime> runtime_;
  const std::unique_ptr<Comm> comm_;
  const std::string group_;
  const Membership member_;
  const int device_;
  const Logger log_;
  c10::cuda::CUDAStream stream_;
  bool closed_ = false;    // of the owner's thread
  bool captured_ = false;  // its work is part of a graph
  at::Tensor token_;       // of barriers
  std::unique_ptr<Watch> watch_;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_NCCL_ENGINE_H_
