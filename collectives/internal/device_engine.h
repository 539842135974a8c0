#ifndef WEFT_COLLECTIVES_INTERNAL_DEVICE_ENGINE_H_
#define WEFT_COLLECTIVES_INTERNAL_DEVICE_ENGINE_H_

// DeviceEngine: performs the operations of a group on tensors of one GPU, where they are. The core
// knows this interface and no device; weft::nccl is the library behind it, opened when a group
// wants it (nccl_library.h).
//
// A group with one has an Engine as well: its link carries faults and goodbyes, and what the ranks
// compare on the CPU.
//
// DEVICE-1  nothing here waits for the GPU, except what says so: an operation is queued behind what
//           the calling thread has queued, and the guard makes a reader's stream wait for it.
// DEVICE-2  memory that the GPU still uses is kept until the operation has ended there.
// DEVICE-3  an operation that does not end by its deadline, or after a failure of the group, is
//           aborted on the GPU, in bounded time.

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "weft/collectives/internal/engine.h"
#include "weft/collectives/internal/operation.h"
#include "weft/common/future.h"
#include "weft/common/log.h"
#include "weft/common/runtime.h"
#include "weft/common/value_guard.h"

namespace weft::internal {

// What a member's record says of its GPU.
struct DeviceOffer {
  std::string id;       // rank 0: by which all connect
  std::string address;  // of the GPU on its host
  std::string library;  // "NCCL 2.28.9"
  bool shared = false;  // several ranks may be on one GPU
};

struct DeviceHooks {
  // The group fails. On a thread of the engine, without locks of it.
  std::function<void(const Status&)> fail;
  // OK, or the failure that other ranks have told and that concerns an operation of this number.
  // Does not wait.
  std::function<Status(uint64_t sequence)> look;
};

// An operation that was queued.
struct DeviceQueued {
  std::shared_ptr<ValueGuard> guard;  // none: what the caller queues comes after it anyway
  // For operations that say that all ranks have come: completes when the GPU has done it.
  std::optional<Future<void>> ended;
};

// When the kernels that the caller queues next may run.
enum class DeviceOrder {
  kBeforeCaller,  // after the operation, which is queued on the caller's current stream
  kBesideCaller,  // at once; what reads a result comes after the guard
};

class DeviceEngine {
 public:
  virtual ~DeviceEngine() = default;

  // Number of its GPU in this process.
  virtual int device() const = 0;
  virtual bool reduces(at::ScalarType type, ReduceOp::Kind kind) const = 0;

  // Once, before the first operation.
  virtual void start(DeviceHooks hooks) = 0;
  // One operation, or several sends and receives that begin together. One call at a time.
  // REQUIRES: check_on_device().
  virtual StatusOr<DeviceQueued> perform(const Turn& turn, absl::Span<const Operation> operations,
                                         DeviceOrder order) = 0;
  // The group has failed: operations under way end. Returns at once. Any thread.
  virtual void abort(const Status& cause) = 0;
  // Waits until all that was queued has ended, by its deadlines at the latest.
  virtual void drain() = 0;
  // REQUIRES: drain(). No operation comes any more.
  virtual void close() = 0;
};

struct DeviceLibraryOptions {
  std::shared_ptr<Runtime> runtime;
  std::string file;             // of libnccl
  std::optional<int> device;    // default: the calling thread's current one
  bool shares_devices = false;  // the user has allowed several ranks on one GPU
  std::string group;            // its name, for errors
  Logger log;
};

// One member's side of connecting.
class DeviceLibrary {
 public:
  virtual ~DeviceLibrary() = default;
  virtual StatusOr<DeviceOffer> offer(bool first) = 0;
  // `given_up`: see making.h.
  virtual StatusOr<std::unique_ptr<DeviceEngine>> connect(const Membership& member,
                                                          const std::string& id,
                                                          absl::FunctionRef<Status()> given_up,
                                                          absl::Time deadline) = 0;
};

// What weft::nccl exports, as `weft_nccl_open`.
using OpenDeviceLibrary = void(const DeviceLibraryOptions& options,
                               StatusOr<std::unique_ptr<DeviceLibrary>>* library);

// What the engine has not, before anything moves. Error, kind invalid_argument or unimplemented.
Status check_on_device(const Membership& member, const DeviceEngine& engine, const Operation& o);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_DEVICE_ENGINE_H_
