#ifndef WEFT_RPC_SPI_UNTYPED_CALL_H_
#define WEFT_RPC_SPI_UNTYPED_CALL_H_

// The untyped core under every call: one path for functions, methods, ATen operators and the
// framework's own services. rpc/call.h puts types on the caller's side, rpc/library.h on the
// callee's. Any thread.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "weft/common/api.h"
#include "weft/common/executor.h"
#include "weft/common/wait_driver.h"
#include "weft/common/worker_info.h"
#include "weft/rpc/call_context.h"
#include "weft/rpc/call_options.h"
#include "weft/rpc/payload.h"
#include "weft/rpc/spi/destination.h"

namespace weft {

class TraceWriter;

// ---- callee ------------------------------------------------------------------------------------

// What becomes of a result's tensors whose memory something else holds, too, and may write to
// before the result has left.
enum class TensorResults : unsigned char {
  kValue,  // copied when the handler has returned: the caller gets what it was then (default)
  kBorrow,  // no copy: the handler writes nothing to it until the caller has it; of an at-most-once call,
            // until the caller has acknowledged it
};

// One thing that others may call.
struct Method {
  std::string name;        // "app.forward", "app.Embedding.lookup"
  std::string signature;   // "(tensor,int)->tensor": wire kinds only
  bool inline_ok = false;  // short: may run on the poller, must not wait
  // With inline_ok: may also run on an application thread that waits for an answer, which may hold
  // locks of the application. For services, which run no user code.
  bool waiting_ok = false;
  // As inline_ok for calls whose tensors have at most so many elements together; 0: never.
  int64_t inline_elements = 0;
  // For methods of an object: the registered class ("app.Embedding"), "" for functions.
  std::string class_name;
  bool is_const = false;  // methods: may run beside other const ones
  TensorResults results = TensorResults::kValue;
  // Decodes, runs, replies exactly once. `object` is null for functions. Does not throw. `context`
  // lives until reply was called.
  std::function<void(CallContext& context, const std::shared_ptr<void>& object, Payload arguments,
                     ReplyFn reply)>
      invoke;
};

// 64-bit FNV-1a of the signature text: what travels with a call.
WEFT_API uint64_t signature_hash(std::string_view signature);

// ---- caller ------------------------------------------------------------------------------------

// What an interceptor is to know about a call besides its arguments: that its callee is to be found
// through a reference, or its result to be kept. Held until the call has ended.
class WEFT_API CallRider {
 public:
  virtual ~CallRider();
};

struct UntypedCall {   // a call without its types
  std::string method;  // full name
  // The caller's view, compared by hash at the callee, printed on mismatch. Never copied: text of
  // the program, as a literal is.
  std::string_view signature;
  std::string object;  // name of an instance at the callee; "" for functions
  Payload arguments;
  CallOptions options;
  std::shared_ptr<const CallRider> rider{};
  // A thread of the callee waits for it: if it is small, by the prompt lane of the connection
  // (transport/transport.h).
  bool prompt = false;
};

// Runs when the call is complete, on a poller or the caller's thread: short, decodes and completes.
using CallDone = absl::AnyInvocable<void(StatusOr<Payload>)>;

// Cancels a call that was started; does nothing when it is complete. Cheap to copy.
class CallHandle {
 public:
  CallHandle() = default;
  explicit CallHandle(std::function<void()> cancel) : cancel_(std::move(cancel)) {}
  void cancel() const {  // idempotent
    if (cancel_ != nullptr) cancel_();
  }

 private:
  std::function<void()> cancel_;
};

// Starts a call; `done` runs exactly once, whatever happens (possibly before this returns).
WEFT_API CallHandle start_call(const Worker& worker, const Destination& to, UntypedCall call,
                               CallDone done);
// The same call to several workers, encoded once; done(index, result) once per destination.
WEFT_API std::vector<CallHandle> start_calls(const Worker& worker,
                                             const std::vector<Destination>& to, UntypedCall call,
                                             std::function<void(size_t, StatusOr<Payload>)> done);

class Library;
// The library given at join, for looking up a function pointer's name; null for a worker that left.
WEFT_API const Library* library_of(const Worker& worker);
// The executor on which continuations of this worker's futures run.
WEFT_API std::shared_ptr<Executor> executor_of(const Worker& worker);
// What the future of a call needs of its worker; null for one that left.
struct Continuation {
  std::shared_ptr<Executor> executor;  // where it runs
  std::shared_ptr<WaitDriver> driver;  // what a thread may do while it waits; may be null
};
WEFT_API Continuation continuation_of(const Worker& worker);
// The timeline of the worker's calls, for services that add to it; null without a trace.
WEFT_API std::shared_ptr<TraceWriter> trace_of(const Worker& worker);

}  // namespace weft

#endif  // WEFT_RPC_SPI_UNTYPED_CALL_H_
