#ifndef WEFT_RPC_INTERNAL_DEVICE_DEVICE_COPIER_H_
#define WEFT_RPC_INTERNAL_DEVICE_DEVICE_COPIER_H_

// DeviceCopier: the way of tensors between a worker's devices and messages: which map holds for a peer, copies to the
// host before a message is sent and to its devices when one has come, and the order of streams around a handler. What a
// device is only the backend knows. It has no state but the published streams; any thread.

#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "c10/core/Device.h"
#include "weft/common/call_scope.h"
#include "weft/common/executor.h"
#include "weft/rpc/internal/agent/message.h"
#include "weft/rpc/internal/device/device_backend.h"
#include "weft/rpc/internal/device/devices.h"
#include "weft/rpc/internal/device/published_streams.h"
#include "weft/rpc/internal/membership/members.h"
#include "weft/rpc/payload.h"

namespace weft::internal {

// A message with buffers on devices, and what their copies come after.
struct Unstaged {
  std::shared_ptr<OutMessage> message;
  std::shared_ptr<const void> after;
};

// The devices of this worker that a route names.
std::vector<DeviceCode> own_devices(const DeviceRoute& route);

class DeviceCopier {
 public:
  // `backend` and `devices`: both or none.
  DeviceCopier(std::string self, std::shared_ptr<DeviceBackend> backend,
               std::shared_ptr<const MemberDevices> devices, std::shared_ptr<Executor> pool);

  bool has_devices() const { return devices_ != nullptr; }

  // REQUIRES: has_devices().
  std::shared_ptr<const DeviceRoute> route_to(const Member& to) const;
  // That of arguments which say themselves where they belong.
  StatusOr<std::shared_ptr<const DeviceRoute>> explicit_route(const Member& to,
                                                              const Payload& payload) const;
  // The pairs of a request, ours first; kind invalid_argument when one of them is no device here.
  StatusOr<DevicePairs> read_map(const v1::CallHeader& header) const;

  // The calling thread's current streams are marked.
  StatusOr<std::shared_ptr<const Unstaged>> unstaged(std::shared_ptr<OutMessage> message) const;
  // Brings the buffers to the host, into `memory` (may be null). `done` on the pool; until then the message is
  // the copier's.
  void stage(const std::shared_ptr<const Unstaged>& unstaged, HostMemory memory,
             absl::AnyInvocable<void(Status)> done) const;

  // Null where there is no backend and no device is named.
  StatusOr<std::shared_ptr<DeviceWork>> make_work(const std::vector<DeviceCode>& devices) const;
  // Tensors that came, to where they belong; `allowed` are the devices that the two workers agreed
  // on. `done` on the pool, or here at once with an error.
  void land(Payload payload, const std::vector<DeviceCode>& allowed,
            std::shared_ptr<DeviceWork> work,
            absl::AnyInvocable<void(StatusOr<Payload>)> done) const;

  PublishedStreams& published() { return published_; }
  // What is queued now on the calling thread's current streams of the devices that this worker
  // uses; null: it uses none. Throws as rpc/spi/device_order.h says.
  GuardRef mark_here() const;
  // A handler begins on the calling thread's current streams: STREAM-5, and STREAM-6 with the
  // streams of its object (may be null), whose making `after` (may be null) marks.
  Status begin(const GuardRef& after, ObjectStreams* object, bool is_const);
  // The handler in that scope has ended.
  Status end(const ScopeRef& scope, ObjectStreams* object, bool is_const) const;
  // What was queued in that scope. Null: there is no backend.
  StatusOr<GuardRef> mark(const ScopeRef& scope) const;

 private:
  const std::string self_;
  const std::shared_ptr<DeviceBackend> backend_;
  const std::shared_ptr<const MemberDevices> devices_;
  const std::vector<c10::Device> in_use_;  // empty without a backend
  const std::shared_ptr<Executor> pool_;
  PublishedStreams published_;
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_DEVICE_DEVICE_COPIER_H_
