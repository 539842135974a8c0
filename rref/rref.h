#ifndef WEFT_RREF_RREF_H_
#define WEFT_RREF_RREF_H_

// RRef<T>: a reference to an object that lives at one worker, its owner, for as long as any worker
// holds one.
//
//   auto table = weft::remote<Embedding>(worker, "ps0", 100'000, 64);  // a constructor, there
//   at::Tensor y = table.rpc_sync(&Embedding::lookup, ids);            // a method, there
//   auto sum = weft::remote(worker, "ps0", &add, 40, 2);               // a function, there
//   int64_t n = sum.to_here();                                         // a copy of the value
//   auto mine = weft::RRef<at::Tensor>::local(worker, x);              // owned here
//   weft::rpc_sync(worker, "trainer1", &train, table);                 // train(RRef<Embedding>)
//
// All workers that meet an RRef list rref_service() at join. remote() returns at once and never
// waits: what its function throws, or why its call failed, is what every use of the RRef gets, here
// and at every worker that it was passed to. Uses wait at the owner until the value is there,
// without a thread, so a chain of calls over RRefs of one owner costs one round trip:
// a.remote(&T::f).rpc_async(&U::g). The owner's death fails every use at once (kind peer_lost).
//
// An RRef is a shared handle, as shared_ptr is: copies share it, the last one gives it back. It may
// outlive its worker; then uses fail (kind state) and its end is silent. It travels as an argument
// or result of calls, also inside containers and structs; handlers take RRef<T> or const RRef<T>&,
// and start when its owner has confirmed it. T need not be sendable, unless its value is fetched.
//
// Calls on the object run one at a time, const methods and fetches together.
//
//   function          returns                           errors
//   remote            RRef<R>                           thrown for wrong arguments (as rpc_async
//                                                       does) or an unknown worker; all others at
//                                                       the first use
//   to_here           T                                 thrown; try_to_here returns them
//   to_here_async     Future<T>                         in the future
//   local_value       shared_ptr<T> to the object       thrown; kind state when not at the owner
//   creation          Future<void>: the value exists    in the future
//   rpc_sync, ...     as those of rpc/call.h
//
// Deadlines are those of calls (60 s unless given); an infinite wait must be explicit. Threads:
// any; the synchronous functions never on a poller.

#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/future.h"
#include "weft/rpc/call.h"
#include "weft/rref/id.h"
#include "weft/rref/service.h"

namespace weft {

template <class T>
class RRef;

namespace internal {

class RRefHandle;
using RRefHandleRef = std::shared_ptr<const RRefHandle>;

// The untyped part (rref.cc). A null handle is an RRef that refers to nothing: kind state.
// Starts a call whose result stays at `to`; returns the handle of that result.
WEFT_API StatusOr<RRefHandleRef> start_remote(const Worker& worker, const Destination& to,
                                              UntypedCall call, const CallSite& at);
// The same for a method of the object of `on`, at its owner.
WEFT_API StatusOr<RRefHandleRef> start_remote(const RRefHandleRef& on, UntypedCall call);
// Makes a handle of an object that this worker owns.
WEFT_API StatusOr<RRefHandleRef> make_local_rref(const Worker& worker, KeptObject value,
                                                 const CallSite& at);
// Returns the call of a constructor, without its arguments; `arguments`: their kinds, "(int,int)".
WEFT_API StatusOr<UntypedCall> constructor_call(const Worker& worker, const std::type_info& type,
                                                std::string_view arguments);
// Returns the call that fetches the object's value.
WEFT_API UntypedCall fetch_call(const CallOptions& options);
// Returns the call that waits until the value exists, and returns nothing.
WEFT_API UntypedCall creation_call(const CallOptions& options);
// Sends a call to the owner, on the object of the handle. `done` completes `future`.
WEFT_API CallHandle start_use(const RRefHandleRef& handle, UntypedCall&& call, FutureCore* future,
                              CallDone done);
// Waits at the owner until the object exists; `done` gets it, if it is of this type.
WEFT_API CallHandle start_local_use(const RRefHandleRef& handle, const std::type_info& type,
                                    Timeout deadline,
                                    absl::AnyInvocable<void(StatusOr<KeptObject>)> done);
// Returns the worker of this process that holds the handle; an error after its shutdown.
WEFT_API StatusOr<std::shared_ptr<const Worker>> worker_of(const RRefHandleRef& handle);
WEFT_API WorkerInfo owner_info(const RRefHandleRef& handle);
WEFT_API RRefId id_of(const RRefHandleRef& handle);
WEFT_API bool is_owned_here(const RRefHandleRef& handle);
WEFT_API bool is_confirmed(const RRefHandleRef& handle);
WEFT_API bool is_ready(const RRefHandleRef& handle);
// Encode and decode an RRef inside a value.
WEFT_API void put_rref(Encoder& out, const RRefHandleRef& handle);
WEFT_API StatusOr<RRefHandleRef> take_rref(Decoder& in);

template <class T>
constexpr auto rref_kind() {
  if constexpr (Sendable<WireResult<T>>) {
    return KindText{"rref<"} + Codec<WireResult<T>>::kKind + KindText{">"};
  } else {
    return KindText{"rref<object>"};
  }
}

// The type that an argument of a constructor travels as. The caller does not see the constructor's
// parameters, so every text is a string.
template <class A>
using ConstructorArg =
    std::conditional_t<!Sendable<std::decay_t<A>> && std::is_convertible_v<A, std::string_view>,
                       std::string, std::decay_t<A>>;

}  // namespace internal

template <class T>
class RRef {
 public:
  using Value = T;  // the type of the object

  // An RRef that refers to nothing: every use is an error of kind state.
  RRef() = default;
  // Makes an RRef of an object that this worker owns. No message is sent before it is shared.
  static RRef local(const Worker& worker, std::shared_ptr<T> value,
                    const char* file = __builtin_FILE(), uint32_t line = __builtin_LINE()) {
    return RRef(value_or_throw(internal::make_local_rref(
        worker, KeptObject{std::move(value), &typeid(T), internal::encode_object<T>()},
        CallSite{file, line})));
  }
  template <class V = T>
  requires(!std::is_void_v<V>) static RRef
      local(const Worker& worker, V value, const char* file = __builtin_FILE(),
            uint32_t line = __builtin_LINE()) {
    return local(worker, std::make_shared<T>(std::move(value)), file, line);
  }

  bool valid() const { return handle_ != nullptr; }  // refers to something
  explicit operator bool() const { return valid(); }
  // Releases this copy.
  void reset() { handle_ = nullptr; }

  // These throw, kind state, for an RRef that refers to nothing.
  WorkerInfo owner() const { return internal::owner_info(handle_); }
  std::string owner_name() const { return owner().name; }
  RRefId id() const { return internal::id_of(handle_); }
  bool is_owner() const { return internal::is_owned_here(handle_); }
  // Whether the owner has confirmed it; the function of remote() may still run. True at the owner.
  bool confirmed_by_owner() const { return internal::is_confirmed(handle_); }
  // Whether it is known here that the value, or its error, exists: the creator has had the answer,
  // or a use has succeeded. Sends no message.
  bool ready() const { return internal::is_ready(handle_); }
  // Completes when the value exists, or with the error that every use gets. Asks the owner, and
  // copies nothing. cancel() ends this wait, not the creation, which other holders may wait for.
  Future<void> creation(const CallOptions& options = {}) const {
    return start<void>(internal::creation_call(options));
  }

  // Returns a copy of the value. The fetch is repeated over a new connection when one breaks.
  Future<T> to_here_async(const CallOptions& options = {}) const {
    static_assert(Sendable<internal::WireResult<T>>,
                  "weft: to_here() copies the value, and this class cannot be sent: call its "
                  "methods through the RRef, or describe it with WEFT_STRUCT");
    return start<T>(internal::fetch_call(options));
  }
  T to_here(const CallOptions& options = {}) const {
    auto future = to_here_async(options);
    const internal::CancelUnlessDone guard(&future);
    return std::move(future).wait();
  }
  auto try_to_here(const CallOptions& options = {}) const {
    auto future = to_here_async(options);
    const internal::CancelUnlessDone guard(&future);
    return future.try_wait();
  }

  // Returns the object itself, at its owner only; waits until it exists.
  std::shared_ptr<T> local_value(Timeout deadline = {}) const {
    auto future = local_value_async(deadline);
    return future.wait();
  }
  Future<std::shared_ptr<T>> local_value_async(Timeout deadline = {}) const {
    Promise<std::shared_ptr<T>> promise;
    Future<std::shared_ptr<T>> future = promise.future();
    if (const auto worker = internal::worker_of(handle_); worker.ok()) {
      internal::expect_answer(**worker, "local_value", owner(), future.state().get());
    }
    CallHandle handle = internal::start_local_use(
        handle_, typeid(internal::WireResult<T>), deadline,
        [promise = std::move(promise)](StatusOr<KeptObject> value) mutable {
          if (!value.ok()) {
            promise.try_set(value.status());
          } else {
            promise.try_set(std::static_pointer_cast<T>(std::move(value->object)),
                            std::move(value->after));
          }
        });
    future.state()->set_cancel_hook([handle = std::move(handle)] { handle.cancel(); });
    return future;
  }

  // ---- calls of the object's methods at its owner: `method` is a pointer or a FunctionRef ----

  template <class F, class... Args>  // without exceptions
  StatusOr<Future<internal::TargetResult<internal::BoundMethod<T, F>>>> try_rpc_async(
      const CallOptions& options, const F& method, const Args&... args) const {
    WEFT_ASSIGN_OR_RETURN(UntypedCall call, call_of(options, method, args...));
    return start<internal::TargetResult<internal::BoundMethod<T, F>>>(std::move(call));
  }
  template <class F, class... Args>
  auto rpc_async(const CallOptions& options, const F& method, const Args&... args) const {
    return value_or_throw(try_rpc_async(options, method, args...));
  }
  template <class F, class... Args>
  requires(!std::is_same_v<F, CallOptions>) auto rpc_async(const F& method,
                                                           const Args&... args) const {
    if constexpr (internal::check_method<F>()) {
      return value_or_throw(try_rpc_async(CallOptions(), method, args...));
    } else {
      return internal::Refused();
    }
  }
  template <class F, class... Args>
  auto rpc_sync(const CallOptions& options, const F& method, const Args&... args) const {
    auto future = rpc_async(options, method, args...);
    const internal::CancelUnlessDone guard(&future);
    return std::move(future).wait();
  }
  template <class F, class... Args>
  requires(!std::is_same_v<F, CallOptions>) auto rpc_sync(const F& method,
                                                          const Args&... args) const {
    if constexpr (internal::check_method<F>()) {
      return rpc_sync(CallOptions(), method, args...);
    } else {
      return internal::Refused();
    }
  }
  template <class F, class... Args>  // without exceptions
  internal::TryResult<internal::TargetResult<internal::BoundMethod<T, F>>> try_rpc_sync(
      const CallOptions& options, const F& method, const Args&... args) const {
    auto future = try_rpc_async(options, method, args...);
    if (!future.ok()) return future.status();
    const internal::CancelUnlessDone guard(&*future);
    return future->try_wait();
  }
  template <class F, class... Args>  // without exceptions
  requires(!std::is_same_v<F, CallOptions>) auto try_rpc_sync(const F& method,
                                                              const Args&... args) const {
    if constexpr (internal::check_method<F>()) {
      return try_rpc_sync(CallOptions(), method, args...);
    } else {
      return internal::Refused();
    }
  }
  // Calls a method whose result stays at the owner; returns an RRef to that result.
  template <class F, class... Args>
  RRef<internal::TargetResult<internal::BoundMethod<T, F>>> remote(const CallOptions& options,
                                                                   const F& method,
                                                                   const Args&... args) const {
    return RRef<internal::TargetResult<internal::BoundMethod<T, F>>>(value_or_throw(
        internal::start_remote(handle_, value_or_throw(call_of(options, method, args...)))));
  }
  template <class F, class... Args>
  requires(!std::is_same_v<F, CallOptions>) auto remote(const F& method,
                                                        const Args&... args) const {
    if constexpr (internal::check_method<F>()) {
      return remote(CallOptions(), method, args...);
    } else {
      return internal::Refused();
    }
  }

  // Rejects arguments in braces, and says why they do not compile.
  template <class F>
  requires(!std::is_same_v<F, CallOptions>) auto rpc_async(const F&, internal::Braced,
                                                           internal::Braced = {},
                                                           internal::Braced = {}) const {
    return internal::refuse_braces<F>();
  }
  template <class F>
  requires(!std::is_same_v<F, CallOptions>) auto rpc_sync(const F&, internal::Braced,
                                                          internal::Braced = {},
                                                          internal::Braced = {}) const {
    return internal::refuse_braces<F>();
  }

  friend bool operator==(const RRef& a, const RRef& b) {
    return a.handle_ == b.handle_ || (a.valid() && b.valid() && a.id() == b.id());
  }

  // For weft's own code.
  explicit RRef(internal::RRefHandleRef handle) : handle_(std::move(handle)) {}
  const internal::RRefHandleRef& handle() const { return handle_; }

 private:
  template <class F, class... Args>
  StatusOr<UntypedCall> call_of(const CallOptions& options, const F& method,
                                const Args&... args) const {
    using Bound = internal::BoundMethod<T, F>;
    static_assert(internal::check_method<F>());
    WEFT_ASSIGN_OR_RETURN(const auto worker, internal::worker_of(handle_));
    return internal::make_call<Bound>(*worker, options, Bound("", method), args...);
  }
  template <class R>
  Future<R> start(UntypedCall call) const {
    Promise<R> promise;
    Future<R> future = promise.future();
    CallHandle handle =
        internal::start_use(handle_, std::move(call), future.state().get(),
                            [promise = std::move(promise)](StatusOr<Payload> result) mutable {
                              internal::settle(&promise, std::move(result));
                            });
    future.state()->set_cancel_hook([handle = std::move(handle)] { handle.cancel(); });
    return future;
  }

  internal::RRefHandleRef handle_;
};

template <class T>
struct Codec<RRef<T>> {
  static constexpr auto kKind = internal::rref_kind<T>();
  static void encode(Encoder& out, const RRef<T>& value) {
    internal::put_rref(out, value.handle());
  }
  static StatusOr<RRef<T>> decode(Decoder& in) {
    WEFT_ASSIGN_OR_RETURN(internal::RRefHandleRef handle, internal::take_rref(in));
    return RRef<T>(std::move(handle));
  }
};

// The worker at which remote() makes an object: a name, an id or a WorkerInfo. It also says where
// in the program that was, for the list of what is alive at shutdown.
class RemoteTo {
 public:
  template <class D>
  requires(std::is_convertible_v<const D&, Destination>)
      RemoteTo(const D& to,  // NOLINT(google-explicit-constructor)
               const char* file = __builtin_FILE(), uint32_t line = __builtin_LINE())
      : worker(to), at{file, line} {}

  const Destination worker;
  const CallSite at;
};

// Calls `f` at a worker, where the result stays; returns an RRef to it immediately.
template <internal::Target F, class... Args>
RRef<internal::TargetResult<F>> remote(const Worker& worker, const RemoteTo& to,
                                       const CallOptions& options, const F& f,
                                       const Args&... args) {
  UntypedCall call =
      value_or_throw(internal::make_call<std::decay_t<F>>(worker, options, f, args...));
  return RRef<internal::TargetResult<F>>(
      value_or_throw(internal::start_remote(worker, to.worker, std::move(call), to.at)));
}
template <internal::Target F, class... Args>
RRef<internal::TargetResult<F>> remote(const Worker& worker, const RemoteTo& to, const F& f,
                                       const Args&... args) {
  return remote(worker, to, CallOptions(), f, args...);
}

// Overloads that reject wrong calls at compile time and say what is wrong. The first parameter
// keeps these out of remote<T>().
template <internal::Misuse = internal::Misuse(), class To, class F, class... Args>
requires internal::Misused<To, F>
auto remote(const Worker&, const To&, const F&, const Args&...) {
  return internal::refuse_call<To, F>();
}
template <internal::Misuse = internal::Misuse(), class To, class F, class... Args>
requires internal::Misused<To, F>
auto remote(const Worker&, const To&, const CallOptions&, const F&, const Args&...) {
  return internal::refuse_call<To, F>();
}
template <internal::Misuse = internal::Misuse(), internal::Target F>
auto remote(const Worker&, const RemoteTo&, const F&, internal::Braced, internal::Braced = {},
            internal::Braced = {}, internal::Braced = {}) {
  return internal::refuse_braces<F>();
}
template <internal::Misuse = internal::Misuse(), internal::Target F>
auto remote(const Worker&, const RemoteTo&, const CallOptions&, const F&, internal::Braced,
            internal::Braced = {}, internal::Braced = {}, internal::Braced = {}) {
  return internal::refuse_braces<F>();
}

// Makes an object of class T at a worker, by the constructor that it registered for these kinds of
// arguments; returns an RRef to it immediately. class_ must register T here, too. Give each
// argument the parameter's type: 1.0, not 1, for a double.
template <class T, class... Args>
RRef<T> remote(const Worker& worker, const RemoteTo& to, const CallOptions& options,
               const Args&... args) {
  constexpr auto& kArguments =
      internal::ConstructorSignature<T, internal::ConstructorArg<Args>...>::kText;
  UntypedCall call =
      value_or_throw(internal::constructor_call(worker, typeid(T), kArguments.view()));
  call.options = options;
  throw_if_error(internal::put_arguments(internal::TypeList<internal::ConstructorArg<Args>...>(),
                                         &call.arguments, call.method, args...));
  return RRef<T>(value_or_throw(internal::start_remote(worker, to.worker, std::move(call), to.at)));
}
template <class T, class... Args>
RRef<T> remote(const Worker& worker, const RemoteTo& to, const Args&... args) {
  return remote<T>(worker, to, CallOptions(), args...);
}

}  // namespace weft

#endif  // WEFT_RREF_RREF_H_
