#ifndef WEFT_RPC_CALL_H_
#define WEFT_RPC_CALL_H_

// Calls of functions of other workers (or of one's own), typed where they are made.
//
//   at::Tensor y = weft::rpc_sync(worker, "ps0", &forward, x);
//   weft::Future<at::Tensor> f = weft::rpc_async(worker, "ps0", {.deadline = 5s}, &forward, x);
//   auto all = weft::rpc_async(worker, std::vector<weft::Destination>{"a", "b"}, &forward, x);
//   weft::rpc_sync(worker, "ps0", weft::on("table", &Table::lookup), ids);
//   weft::rpc_sync(worker, "ps0", weft::FunctionRef<at::Tensor(at::Tensor)>{"app.forward"}, x);
//
// The callee is a name, an id or a WorkerInfo, or a vector of these: then the arguments are encoded
// once, and results come in that order. The function is a pointer that this worker's own library
// also registers, a FunctionRef, or either with on() for a method of a named object. Arguments
// convert to the parameters' types here: what would not compile as a plain call does not compile.
//
// Every call completes, with a result or an error, by its deadline at the latest (options, else the
// worker's rpc_timeout of 60 s, and never later than the call whose handler makes this one).
//
//   function         returns                              errors of the call     of the arguments
//   rpc_async        Future<R>                            in the future          thrown
//   try_rpc_async    StatusOr<Future<R>>                  in the future          returned
//   rpc_sync         R                                    thrown                 thrown
//   try_rpc_sync     StatusOr<R>, Status for void         returned               returned
//
// Errors of the arguments are found before anything is sent: a number that does not fit the
// parameter (code out_of_range), a tensor that cannot be sent, values nested too deep
// (invalid_argument), a pointer that this worker's library does not have or has twice (not_found,
// invalid_argument).
//
// Tensors are not copied unless CallOptions says so: do not write to an argument before the future
// is complete. Threads: any. Never call rpc_sync on a poller (inline_ok handlers).

#include <cmath>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeindex>
#include <utility>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/future.h"
#include "weft/common/worker_info.h"
#include "weft/rpc/aten_operators.h"
#include "weft/rpc/call_options.h"
#include "weft/rpc/spi/destination.h"
#include "weft/rpc/spi/function_ref.h"
#include "weft/rpc/spi/handler.h"
#include "weft/rpc/spi/misuse.h"
#include "weft/rpc/spi/signature.h"
#include "weft/rpc/spi/untyped_call.h"
#include "weft/rpc/value.h"

namespace weft {
namespace internal {

// Makes the future of a call: named "rpc 'app.forward' to 'ps0'" in errors, continued on the
// worker's pool; it ends by its own deadline, and a thread that waits for it may poll for the
// answer itself. REQUIRES: no other thread has seen `future` yet.
WEFT_API void expect_answer(const Worker& worker, std::string_view method, const Destination& to,
                            FutureCore* future);
// Returns the name under which the worker's library registers a function; kind state after its
// shutdown, else the errors above.
WEFT_API StatusOr<std::string> name_in_library(const Worker& worker, const PointerKey& pointer,
                                               std::type_index type, std::string_view signature);
// Returns `why`, naming the argument and the method.
WEFT_API Status argument_error(const Status& why, size_t index, std::string_view method);
// Returns the error for a number that an integer of that size and sign cannot hold.
WEFT_API Status does_not_fit(double value, size_t type_bytes, bool type_signed);

// Types that a call site can pass as the function: kIs says whether F is one, name() and object()
// give what travels. kForm as in Callee; methods need on().
template <class F>
struct CallTarget : Callee<F> {
  static constexpr bool kIs = Callee<F>::kForm == Form::kFunction;
  static StatusOr<std::string> name(const Worker& worker, const F& f, std::string_view signature) {
    return name_in_library(worker, PointerKey::of(f), typeid(void), signature);
  }
  static std::string object(const F&) { return ""; }
};
template <class R, class... Params>
struct CallTarget<FunctionRef<R(Params...)>> : FunctionRef<R(Params...)>::Callee {
  static constexpr bool kIs = true;
  static StatusOr<std::string> name(const Worker&, const FunctionRef<R(Params...)>& f,
                                    std::string_view) {
    return f.name();
  }
  static std::string object(const FunctionRef<R(Params...)>&) { return ""; }
};
template <class T, class F>
struct CallTarget<BoundMethod<T, F>> : Callee<F> {
  static constexpr bool kIs = true;
  static StatusOr<std::string> name(const Worker& worker, const BoundMethod<T, F>& f,
                                    std::string_view signature) {
    return name_in_library(worker, PointerKey::of(f.method()), typeid(T), signature);
  }
  static std::string object(const BoundMethod<T, F>& f) { return f.object(); }
};
template <class T, class S>
struct CallTarget<BoundMethod<T, FunctionRef<S>>> : CallTarget<FunctionRef<S>> {
  using Bound = BoundMethod<T, FunctionRef<S>>;
  static StatusOr<std::string> name(const Worker&, const Bound& f, std::string_view) {
    return f.method().name();
  }
  static std::string object(const Bound& f) { return f.object(); }
};

template <class F>
concept Target = CallTarget<std::decay_t<F>>::kIs;
template <class F>
using TargetResult = typename CallTarget<std::decay_t<F>>::Result;

// Matches a call that no overload accepts, because of its callee or its function.
template <class To, class F>
concept Misused = !std::is_same_v<F, CallOptions> && (!kIsDestination<To> || !Target<F>);
template <class To, class F>
constexpr Refused refuse_call() {
  if constexpr (!kIsDestination<To>) {
    return refuse_destination<To>();
  } else {
    return refuse_function<F>();
  }
}

// Encodes one argument, converted to the type of parameter P.
template <class P, class A>
void put_argument(Encoder& out, const A& argument) {
  using Plain = std::remove_cvref_t<P>;
  static_assert(std::is_convertible_v<const A&, Plain>,
                "weft: an argument does not convert to the type of its parameter");
  if constexpr (std::is_same_v<A, Plain> && std::is_same_v<StoredArg<P>, Plain>) {
    out.put<A>(argument);
  } else if constexpr (kIsWireInteger<Plain> && kIsWireInteger<A>) {
    const WireInt wide = WireInt::of(argument);
    if (!wide.fits<Plain>()) out.fail(does_not_fit<Plain>(wide));
    out.put(static_cast<Plain>(argument));
  } else if constexpr (kIsWireInteger<Plain> && std::is_enum_v<A>) {
    put_argument<P>(out, static_cast<std::underlying_type_t<A>>(argument));
  } else if constexpr (kIsWireInteger<Plain> && std::is_floating_point_v<A>) {
    // Truncates as a plain call would; out of range that would be undefined behaviour.
    const auto whole = static_cast<double>(std::trunc(argument));
    const double limit =
        std::ldexp(1.0, static_cast<int>(8 * sizeof(Plain)) - (std::is_signed_v<Plain> ? 1 : 0));
    if (!(whole < limit && whole >= (std::is_signed_v<Plain> ? -limit : 0.0))) {
      out.fail(does_not_fit(static_cast<double>(argument), sizeof(Plain), std::is_signed_v<Plain>));
      return;
    }
    out.put(static_cast<Plain>(argument));
  } else if constexpr (std::is_same_v<Plain, std::string_view>) {
    out.put_string(static_cast<Plain>(argument));
  } else if constexpr (!std::is_same_v<StoredArg<P>, Plain>) {
    const Plain view = argument;
    out.put(StoredArg<P>(view.begin(), view.end()));
  } else {
    const Plain converted = argument;
    out.put(converted);
  }
}

// Encodes all arguments; the error names the first that cannot be sent.
template <class... Params, class... Args>
Status put_arguments(TypeList<Params...>, Payload* payload, std::string_view method,
                     const Args&... args) {
  Encoder out(payload);
  size_t failed = 0;
  out.begin_tuple(sizeof...(Params));
  ((put_argument<Params>(out, args), failed += out.status().ok() ? 1 : 0), ...);
  out.end();
  if (!out.status().ok()) return argument_error(out.status(), failed, method);
  return absl::OkStatus();
}

// Returns the call of `f` with these arguments, ready to be sent.
template <class F, class... Args>
StatusOr<UntypedCall> make_call(const Worker& worker, const CallOptions& options, const F& f,
                                const Args&... args) {
  using To = CallTarget<F>;
  using Parameters = typename To::Parameters;
  using Signature = SignatureOf<typename To::Result, Parameters>;
  static_assert(sizeof...(Args) == Parameters::kSize,
                "weft: wrong number of arguments (a CallContext& parameter is not passed, defaults "
                "do not travel)");
  if constexpr (sizeof...(Args) != Parameters::kSize) {
    return absl::UnknownError("");
  } else {
    UntypedCall call;
    WEFT_ASSIGN_OR_RETURN(call.method, To::name(worker, f, Signature::kText.view()));
    call.signature = Signature::kText.view();
    call.object = To::object(f);
    call.options = options;
    WEFT_RETURN_IF_ERROR(put_arguments(Parameters(), &call.arguments, call.method, args...));
    return call;
  }
}

// Decodes the result of a call.
template <class R>
StatusOr<internal::Stored<R>> take_result(StatusOr<Payload> payload) {
  if (!payload.ok()) return payload.status();
  Decoder in(*std::move(payload));
  auto taken = in.take<WireResult<R>>();
  if (taken.ok()) {
    if (Status s = in.finish(); !s.ok()) taken = s;
  }
  if (!taken.ok()) return annotate(taken.status(), "the result that came back");
  if constexpr (std::is_void_v<R>) {
    return Unit{};
  } else {
    return taken;
  }
}

// Completes the promise with the result of a call, and the guard that orders its use on devices.
template <class R>
void settle(Promise<R>* promise, StatusOr<Payload> payload) {
  std::shared_ptr<ValueGuard> guard;
  if (payload.ok() && payload->devices != nullptr) guard = payload->devices->guard;
  promise->try_set(take_result<R>(std::move(payload)), std::move(guard));
}

// Sends a call; the future's cancel() cancels it.
template <class R>
Future<R> start(const Worker& worker, const Destination& to, UntypedCall call) {
  Promise<R> promise;
  Future<R> future = promise.future();
  expect_answer(worker, call.method, to, future.state().get());
  CallHandle handle = start_call(worker, to, std::move(call),
                                 [promise = std::move(promise)](StatusOr<Payload> result) mutable {
                                   settle(&promise, std::move(result));
                                 });
  future.state()->set_cancel_hook([handle = std::move(handle)] { handle.cancel(); });
  return future;
}

// Sends one call to several workers, encoded once.
template <class R>
std::vector<Future<R>> start_all(const Worker& worker, const std::vector<Destination>& to,
                                 UntypedCall call) {
  // Shared, because the callback is copied to every call.
  auto promises = std::make_shared<std::vector<Promise<R>>>();
  std::vector<Future<R>> futures;
  promises->reserve(to.size());
  for (const Destination& one : to) {
    promises->emplace_back();
    futures.push_back(promises->back().future());
    expect_answer(worker, call.method, one, futures.back().state().get());
  }
  std::vector<CallHandle> handles =
      start_calls(worker, to, std::move(call), [promises](size_t i, StatusOr<Payload> result) {
        settle(&(*promises)[i], std::move(result));
      });
  for (size_t i = 0; i < handles.size() && i < futures.size(); ++i) {
    futures[i].state()->set_cancel_hook([handle = std::move(handles[i])] { handle.cancel(); });
  }
  return futures;
}

template <class T>
using TryResult = std::conditional_t<std::is_void_v<T>, Status, StatusOr<internal::Stored<T>>>;

// Cancels a synchronous call whose caller stops waiting, also when the wait is refused (the pool
// has a bound on waiting handlers): no other code could take the result.
template <class T>
class CancelUnlessDone {
 public:
  explicit CancelUnlessDone(Future<T>* future) : future_(future) {}
  ~CancelUnlessDone() {
    if (!future_->done()) future_->cancel();
  }
  CancelUnlessDone(const CancelUnlessDone&) = delete;
  CancelUnlessDone& operator=(const CancelUnlessDone&) = delete;

 private:
  Future<T>* const future_;
};

}  // namespace internal

// ---- one callee --------------------------------------------------------------------------------

// Each calls `f` at `to`; the table above says what they return and how they fail.

template <internal::Target F, class... Args>
StatusOr<Future<internal::TargetResult<F>>> try_rpc_async(const Worker& worker,
                                                          const Destination& to,
                                                          const CallOptions& options, const F& f,
                                                          const Args&... args) {
  WEFT_ASSIGN_OR_RETURN(UntypedCall call,
                        internal::make_call<std::decay_t<F>>(worker, options, f, args...));
  return internal::start<internal::TargetResult<F>>(worker, to, std::move(call));
}
template <internal::Target F, class... Args>
auto try_rpc_async(const Worker& worker, const Destination& to, const F& f, const Args&... args) {
  return try_rpc_async(worker, to, CallOptions(), f, args...);
}

template <internal::Target F, class... Args>
Future<internal::TargetResult<F>> rpc_async(const Worker& worker, const Destination& to,
                                            const CallOptions& options, const F& f,
                                            const Args&... args) {
  return value_or_throw(try_rpc_async(worker, to, options, f, args...));
}
template <internal::Target F, class... Args>
Future<internal::TargetResult<F>> rpc_async(const Worker& worker, const Destination& to, const F& f,
                                            const Args&... args) {
  return value_or_throw(try_rpc_async(worker, to, CallOptions(), f, args...));
}

template <internal::Target F, class... Args>
internal::TargetResult<F> rpc_sync(const Worker& worker, const Destination& to,
                                   const CallOptions& options, const F& f, const Args&... args) {
  auto future = rpc_async(worker, to, options, f, args...);
  const internal::CancelUnlessDone guard(&future);
  return std::move(future).wait();
}
template <internal::Target F, class... Args>
internal::TargetResult<F> rpc_sync(const Worker& worker, const Destination& to, const F& f,
                                   const Args&... args) {
  return rpc_sync(worker, to, CallOptions(), f, args...);
}

template <internal::Target F, class... Args>
internal::TryResult<internal::TargetResult<F>> try_rpc_sync(const Worker& worker,
                                                            const Destination& to,
                                                            const CallOptions& options, const F& f,
                                                            const Args&... args) {
  auto future = try_rpc_async(worker, to, options, f, args...);
  if (!future.ok()) return future.status();
  const internal::CancelUnlessDone guard(&*future);
  return future->try_wait();
}
template <internal::Target F, class... Args>
auto try_rpc_sync(const Worker& worker, const Destination& to, const F& f, const Args&... args) {
  return try_rpc_sync(worker, to, CallOptions(), f, args...);
}

// ---- several callees ---------------------------------------------------------------------------

// The same for several workers: one call to each, with futures in the order of `to`.

template <internal::Target F, class... Args>
StatusOr<std::vector<Future<internal::TargetResult<F>>>> try_rpc_async(
    const Worker& worker, const std::vector<Destination>& to, const CallOptions& options,
    const F& f, const Args&... args) {
  WEFT_ASSIGN_OR_RETURN(UntypedCall call,
                        internal::make_call<std::decay_t<F>>(worker, options, f, args...));
  return internal::start_all<internal::TargetResult<F>>(worker, to, std::move(call));
}
template <internal::Target F, class... Args>
auto try_rpc_async(const Worker& worker, const std::vector<Destination>& to, const F& f,
                   const Args&... args) {
  return try_rpc_async(worker, to, CallOptions(), f, args...);
}

template <internal::Target F, class... Args>
std::vector<Future<internal::TargetResult<F>>> rpc_async(const Worker& worker,
                                                         const std::vector<Destination>& to,
                                                         const CallOptions& options, const F& f,
                                                         const Args&... args) {
  return value_or_throw(try_rpc_async(worker, to, options, f, args...));
}
template <internal::Target F, class... Args>
std::vector<Future<internal::TargetResult<F>>> rpc_async(const Worker& worker,
                                                         const std::vector<Destination>& to,
                                                         const F& f, const Args&... args) {
  return value_or_throw(try_rpc_async(worker, to, CallOptions(), f, args...));
}

// Returns the results in the order of `to` (nothing for void). Throws the first error at once.
template <internal::Target F, class... Args>
auto rpc_sync(const Worker& worker, const std::vector<Destination>& to, const CallOptions& options,
              const F& f, const Args&... args) {
  auto all = when_all(rpc_async(worker, to, options, f, args...));
  return std::move(all).wait(kInfinite);  // every call ends by its deadline
}
template <internal::Target F, class... Args>
auto rpc_sync(const Worker& worker, const std::vector<Destination>& to, const F& f,
              const Args&... args) {
  return rpc_sync(worker, to, CallOptions(), f, args...);
}

// ---- overloads that reject wrong calls at compile time and say what is wrong -------------------

template <class To, class F, class... Args>
requires internal::Misused<To, F>
auto rpc_async(const Worker&, const To&, const F&, const Args&...) {
  return internal::refuse_call<To, F>();
}
template <class To, class F, class... Args>
requires internal::Misused<To, F>
auto rpc_async(const Worker&, const To&, const CallOptions&, const F&, const Args&...) {
  return internal::refuse_call<To, F>();
}
template <internal::Target F>
auto rpc_async(const Worker&, const Destination&, const F&, internal::Braced, internal::Braced = {},
               internal::Braced = {}, internal::Braced = {}) {
  return internal::refuse_braces<F>();
}
template <internal::Target F>
auto rpc_async(const Worker&, const Destination&, const CallOptions&, const F&, internal::Braced,
               internal::Braced = {}, internal::Braced = {}, internal::Braced = {}) {
  return internal::refuse_braces<F>();
}

template <class To, class F, class... Args>
requires internal::Misused<To, F>
auto try_rpc_async(const Worker&, const To&, const F&, const Args&...) {
  return internal::refuse_call<To, F>();
}
template <class To, class F, class... Args>
requires internal::Misused<To, F>
auto try_rpc_async(const Worker&, const To&, const CallOptions&, const F&, const Args&...) {
  return internal::refuse_call<To, F>();
}
template <internal::Target F>
auto try_rpc_async(const Worker&, const Destination&, const F&, internal::Braced,
                   internal::Braced = {}, internal::Braced = {}, internal::Braced = {}) {
  return internal::refuse_braces<F>();
}
template <internal::Target F>
auto try_rpc_async(const Worker&, const Destination&, const CallOptions&, const F&,
                   internal::Braced, internal::Braced = {}, internal::Braced = {},
                   internal::Braced = {}) {
  return internal::refuse_braces<F>();
}

template <class To, class F, class... Args>
requires internal::Misused<To, F>
auto rpc_sync(const Worker&, const To&, const F&, const Args&...) {
  return internal::refuse_call<To, F>();
}
template <class To, class F, class... Args>
requires internal::Misused<To, F>
auto rpc_sync(const Worker&, const To&, const CallOptions&, const F&, const Args&...) {
  return internal::refuse_call<To, F>();
}
template <internal::Target F>
auto rpc_sync(const Worker&, const Destination&, const F&, internal::Braced, internal::Braced = {},
              internal::Braced = {}, internal::Braced = {}) {
  return internal::refuse_braces<F>();
}
template <internal::Target F>
auto rpc_sync(const Worker&, const Destination&, const CallOptions&, const F&, internal::Braced,
              internal::Braced = {}, internal::Braced = {}, internal::Braced = {}) {
  return internal::refuse_braces<F>();
}

template <class To, class F, class... Args>
requires internal::Misused<To, F>
auto try_rpc_sync(const Worker&, const To&, const F&, const Args&...) {
  return internal::refuse_call<To, F>();
}
template <class To, class F, class... Args>
requires internal::Misused<To, F>
auto try_rpc_sync(const Worker&, const To&, const CallOptions&, const F&, const Args&...) {
  return internal::refuse_call<To, F>();
}
template <internal::Target F>
auto try_rpc_sync(const Worker&, const Destination&, const F&, internal::Braced,
                  internal::Braced = {}, internal::Braced = {}, internal::Braced = {}) {
  return internal::refuse_braces<F>();
}
template <internal::Target F>
auto try_rpc_sync(const Worker&, const Destination&, const CallOptions&, const F&, internal::Braced,
                  internal::Braced = {}, internal::Braced = {}, internal::Braced = {}) {
  return internal::refuse_braces<F>();
}

}  // namespace weft

#endif  // WEFT_RPC_CALL_H_
