#ifndef WEFT_RPC_SPI_INTERCEPTOR_H_
#define WEFT_RPC_SPI_INTERCEPTOR_H_

// Interceptor: how a part of the framework above rpc lets something ride on calls, which rpc
// carries and does not understand: references to objects, contexts of autograd. A Service brings it
// (Service::interceptor), so it exists before the first call.
//
//   INT-1  what attach() gave is told its end exactly once, before the call's result is given out.
//   INT-2  arrive() is called at most once for a request, however often that comes (CALL-2), and
//          the handler starts only after its `proceed(OK)`.
//   INT-3  a request whose metadata is for an interceptor that the callee does not have fails,
//          `unimplemented`, and no interceptor sees it.
//   INT-4  a call that no interceptor attaches to costs one question, concerns(), and nothing else:
//          no allocation, no message that is longer.
//
// One message carries at most 16 entries of metadata (proto/rpc.proto), of any size below
// WEFT_MAX_MESSAGE_BYTES; a call that would need more fails before it is sent.
//
// Threads: all methods are called from anywhere, without locks; they are short and wait for
// nothing.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/worker_info.h"
#include "weft/rpc/call_context.h"
#include "weft/rpc/payload.h"
#include "weft/rpc/spi/untyped_call.h"

namespace weft {

namespace internal {
class ObjectTurns;
}

// How a message ended, for the interceptor that attached something to it.
enum class Delivery : uint8_t {
  kDelivered,     // a request: its handler has answered, so every interceptor has let it pass
  kNotDelivered,  // proven: no interceptor of the receiver has seen it or ever will
  kUnknown,       // it may have arrived, or arrive later
};

// What was attached to one message. It lives as long as that may be sent again.
class WEFT_API Attachment {
 public:
  explicit Attachment(std::string bytes) : bytes_(std::move(bytes)) {}
  virtual ~Attachment() = default;
  Attachment(const Attachment&) = delete;
  Attachment& operator=(const Attachment&) = delete;

  // For the interceptor of the same key at the other side.
  const std::string& bytes() const { return bytes_; }
  // INT-1. `result`: how the call ended. For an answer: kNotDelivered, or kUnknown once it is on
  // its way, since the arrival of an answer is not acknowledged.
  virtual void ended(Delivery delivery, const Status& result) = 0;
  // Called for a large answer, each time it is sent: what goes with its frames and is destroyed
  // when the transport has let go of all of them, because they have left or their connection is
  // lost, or none was sent. On any thread, under locks of the transport: a destructor may post, no
  // more. ended() may come before. Null: nothing.
  virtual std::shared_ptr<const void> on_its_way() { return nullptr; }

 private:
  const std::string bytes_;
};
using AttachmentPtr = std::unique_ptr<Attachment>;

// An object without a name, on which a method is to run.
struct TargetObject {
  std::shared_ptr<void> object{};
  std::string class_name{};                        // as it is registered
  std::shared_ptr<internal::ObjectTurns> turns{};  // null: calls may run beside each other
  std::shared_ptr<ValueGuard> after{};             // of what makes it on devices; null: nothing
};
// For an object whose calls run one at a time, const methods together.
WEFT_API std::shared_ptr<internal::ObjectTurns> make_object_turns();

// A request between its arrival and the end of its handler.
class IncomingRequest {
 public:
  virtual CallContext& context() = 0;        // of the handler that will run
  virtual const Method& method() const = 0;  // which the request asks for

  // Until proceed() only.
  virtual Payload& arguments() = 0;
  // For a method: the object, in place of the named instance that the request does not name.
  virtual void set_target(TargetObject target) = 0;
  // The result stays here and the answer is empty, whatever the handler does: `keep` gets its
  // object or its error, exactly once from proceed(OK) on. Constructors only keep.
  virtual void keep_result(KeepFn keep) = 0;
  // What calls made by the handler find in their CallScope's slots.
  virtual void set_slot(std::string_view name, std::shared_ptr<void> value) = 0;
  // Runs when the request has ended, whether its handler ran or not, before the answer leaves.
  virtual void on_end(absl::AnyInvocable<void()> fn) = 0;

 protected:
  ~IncomingRequest() = default;
};

// Called once, from any thread; dropping it is an error of the call.
using Proceed = absl::AnyInvocable<void(Status)>;

class WEFT_API Interceptor {
 public:
  virtual ~Interceptor() = default;

  // The same on every worker, at most 32 bytes, no other interceptor's: "@rref".
  virtual std::string_view key() const = 0;

  // ---- the caller
  // Whether attach() is to be asked.
  virtual bool concerns(const UntypedCall& call) const = 0;
  // On the thread that calls. Null: nothing. An error fails the call.
  virtual StatusOr<AttachmentPtr> attach(const WorkerInfo& to, const UntypedCall& call) = 0;

  // ---- the callee
  // `request` lives until it has ended; `metadata` until this returns. An interceptor that delays
  // the request must end with it: context().on_cancel().
  virtual void arrive(IncomingRequest& request, std::string_view metadata, Proceed proceed) = 0;
  // To the answer of a request that had metadata, or whose result has references. Null: nothing.
  virtual StatusOr<AttachmentPtr> attach_answer(IncomingRequest& request, const Payload& result) {
    (void)request, (void)result;
    return AttachmentPtr();
  }

  // ---- the caller again
  // `result` lives until proceed(); the call's future completes after it. When the call is given up
  // meanwhile, what proceed() is told does not matter any more.
  virtual void arrive_answer(const WorkerInfo& from, Payload& result, std::string_view metadata,
                             Proceed proceed) {
    (void)from, (void)result, (void)metadata;
    proceed(absl::OkStatus());
  }
};

}  // namespace weft

#endif  // WEFT_RPC_SPI_INTERCEPTOR_H_
