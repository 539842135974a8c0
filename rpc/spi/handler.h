#ifndef WEFT_RPC_SPI_HANDLER_H_
#define WEFT_RPC_SPI_HANDLER_H_

// The callee's side of types: from encoded arguments through a handler of any shape to its result.
// Part of weft/rpc/library.h; nothing here is for users. Any thread.

#include <array>
#include <compare>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeindex>
#include <typeinfo>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "weft/common/api.h"
#include "weft/common/future.h"
#include "weft/rpc/spi/signature.h"
#include "weft/rpc/spi/untyped_call.h"
#include "weft/rpc/value.h"

namespace weft::internal {

// Throws weft::Error, kind invalid_argument, unless `name` is letters, digits and '_', does not
// begin with a digit and has at most 128 characters.
WEFT_API void check_name(std::string_view name, std::string_view what);

// The exception being handled, as what the caller gets: status_from_current_exception(). REQUIRES:
// called inside a catch block.
WEFT_API Status status_from_handler_exception();
// An error that a handler returned, or that its future has: kind user unless it says otherwise.
WEFT_API Status as_handler_error(Status status);

// A function or method pointer: its type (without noexcept) and its bytes.
struct PointerKey {
  std::type_index type;
  std::array<unsigned char, 16> bytes{};

  template <class F>
  static PointerKey of(F f) {
    using Pointer = typename Callee<F>::Pointer;
    const Pointer plain = f;
    static_assert(sizeof(plain) <= 16);
    PointerKey key{typeid(Pointer), {}};
    std::memcpy(key.bytes.data(), &plain, sizeof(plain));
    return key;
  }
  friend bool operator<(const PointerKey& a, const PointerKey& b) {
    return a.type != b.type ? a.type < b.type : a.bytes < b.bytes;
  }
};

// Appends the object as one value; null for what cannot be sent.
using EncodeObject = void (*)(Encoder& out, const void* object);
template <class T>
constexpr EncodeObject encode_object() {
  if constexpr (Sendable<T>) {
    return [](Encoder& out, const void* object) { out.put<T>(*static_cast<const T*>(object)); };
  } else {
    return nullptr;
  }
}

// Where a handler's result goes: encoded into a reply, or kept here as an object. Used once.
class WEFT_API Outcome {
 public:
  explicit Outcome(ReplyFn reply) : reply_(std::move(reply)) {}
  explicit Outcome(KeepFn keep) : keep_(std::move(keep)) {}

  bool keeps() const { return keep_ != nullptr; }
  void fail(Status error);
  void done(KeptObject object);
  void done(Payload result, const Status& encoded);

  template <class T>
  void give(T&& value) {
    using Value = std::remove_cvref_t<T>;
    if (keeps()) {
      keep(std::make_shared<Value>(std::forward<T>(value)));
      return;
    }
    Payload result;
    Encoder out(&result);
    out.put<Value>(value);
    if constexpr (!std::is_lvalue_reference_v<T> && !std::is_const_v<std::remove_reference_t<T>> &&
                  !std::is_trivially_destructible_v<Value>) {
      // Only the payload holds its tensors now, unless the object does.
      [[maybe_unused]] const Value gone(std::move(value));
    }
    done(std::move(result), out.status());
  }

  // REQUIRES: keeps().
  template <class T>
  void keep(std::shared_ptr<T> object) {
    done(KeptObject{std::move(object), &typeid(T), encode_object<T>()});
  }

 private:
  ReplyFn reply_;
  KeepFn keep_;
};

// Decodes, runs, gives the outcome exactly once. Does not throw.
using Invoker = std::function<void(CallContext& context, const std::shared_ptr<void>& object,
                                   Payload arguments, Outcome outcome)>;

struct MethodEntry {
  Method method;
  uint64_t signature_hash = 0;
  Invoker invoker;
};
WEFT_API MethodEntry make_entry(std::string name, std::string_view signature, bool inline_ok,
                                Invoker invoker);

template <class... Ts>
StatusOr<std::tuple<Ts...>> take_arguments(Payload arguments) {
  Decoder in(std::move(arguments));
  StatusOr<std::tuple<Ts...>> taken = in.take<std::tuple<Ts...>>();
  if (taken.ok()) {
    if (Status s = in.finish(); !s.ok()) taken = s;
  }
  if (!taken.ok()) return annotate(taken.status(), "arguments");
  return taken;
}

// A stored argument as the parameter wants it. By value and && it is moved from: it has no other
// user.
template <class P, class S>
decltype(auto) pass(S& stored) {
  if constexpr (std::is_lvalue_reference_v<P> && std::is_same_v<std::remove_cvref_t<P>, S>) {
    return static_cast<const S&>(stored);
  } else if constexpr (std::is_same_v<std::remove_cvref_t<P>, S>) {
    return std::move(stored);
  } else {
    return std::remove_cvref_t<P>(stored);  // string_view, ArrayRef
  }
}

// Keeps what a handler's future may still refer to: the handler too, since a coroutine that is a
// lambda reads its captures from the lambda.
template <class Call, class Arguments>
struct HandlerFrame {
  std::shared_ptr<const Call> call;
  Arguments arguments;
  std::shared_ptr<void> object;
};

// `Result`: StatusOr<T>, moved from when there is no other owner.
template <class T, class Result>
void give_result(Outcome& outcome, Result&& result) {
  if (!result.ok()) {
    outcome.fail(as_handler_error(result.status()));
  } else if constexpr (std::is_same_v<T, Unit>) {
    outcome.give(std::monostate());
  } else {
    outcome.give(*std::forward<Result>(result));
  }
}

// Runs when a handler has returned, before its caller gets the answer, so that what the arguments
// held (an RRef) is given back by then.
template <class Arguments>
void let_go(StatusOr<Arguments>& taken) {
  taken = absl::CancelledError();
}

// `(*call)(object, context, parameters...)` for a handler that returns Raw.
template <class Raw, class Call, class... Params>
void run_handler(const std::shared_ptr<const Call>& call, CallContext& context,
                 const std::shared_ptr<void>& object, Payload arguments, Outcome outcome,
                 TypeList<Params...>) {
  using Arguments = std::tuple<StoredArg<Params>...>;
  StatusOr<Arguments> taken = take_arguments<StoredArg<Params>...>(std::move(arguments));
  if (!taken.ok()) {
    outcome.fail(taken.status());
    return;
  }
  const auto apply = [&](Arguments& stored) -> Raw {
    return [&]<size_t... I>(std::index_sequence<I...>)->Raw {
      return (*call)(object.get(), context, pass<Params>(std::get<I>(stored))...);
    }
    (std::index_sequence_for<Params...>());
  };
  try {
    if constexpr (kIsFuture<Raw>) {
      auto frame = std::make_shared<HandlerFrame<Call, Arguments>>(
          HandlerFrame<Call, Arguments>{call, *std::move(taken), object});
      Raw future = apply(frame->arguments);
      if (!future.valid()) {
        outcome.fail(make_error(ErrorKind::kUser, "the handler returned an invalid Future"));
        return;
      }
      const auto state = future.state();
      using Value = std::remove_cvref_t<decltype(*state->result())>;
      if (state->of_coroutine() && !state->done()) context.set_body_goes_on();
      // The frame is let go only after the outcome was given, and an object of which it holds the
      // last reference not on a thread that serves others.
      state->on_complete_inline([state, frame = std::move(frame), outcome = std::move(outcome),
                                 executor = context.executor()]() mutable {
        state->before_use();
        give_result<Value>(outcome, state->result());
        if (executor != nullptr && !on_pool_thread() && frame->object.use_count() == 1) {
          (void)executor->post([frame = std::move(frame)] {});
        }
      });
    } else if constexpr (std::is_void_v<Raw>) {
      apply(*taken);
      let_go(taken);
      outcome.give(std::monostate());
    } else if constexpr (std::is_same_v<Raw, Status>) {
      if (Status s = apply(*taken); !s.ok()) {
        outcome.fail(as_handler_error(std::move(s)));
      } else {
        outcome.give(std::monostate());
      }
    } else if constexpr (!std::is_void_v<typename ResultOf<Raw>::Type> &&
                         std::is_same_v<Raw, StatusOr<typename ResultOf<Raw>::Type>>) {
      Raw result = apply(*taken);
      give_result<typename ResultOf<Raw>::Type>(outcome, std::move(result));
    } else {
      std::remove_cvref_t<Raw> result = apply(*taken);
      let_go(taken);
      outcome.give(std::move(result));
    }
  } catch (...) {
    outcome.fail(status_from_handler_exception());
  }
}

template <class Shape, class Call>
MethodEntry make_shaped_entry(std::string name, bool inline_ok, Call call) {
  using Signature = SignatureOf<typename Shape::Result, typename Shape::Parameters>;
  return make_entry(std::move(name), Signature::kText.view(), inline_ok,
                    [call = std::make_shared<const Call>(std::move(call))](
                        CallContext& context, const std::shared_ptr<void>& object,
                        Payload arguments, Outcome outcome) {
                      run_handler<typename Shape::Raw>(call, context, object, std::move(arguments),
                                                       std::move(outcome),
                                                       typename Shape::Parameters());
                    });
}

template <class F>
MethodEntry make_function_entry(std::string name, F f, bool inline_ok) {
  using Shape = Callee<F>;
  return make_shaped_entry<Shape>(std::move(name), inline_ok,
                                  [f = std::move(f)](void*, CallContext& context, auto&&... args) ->
                                  typename Shape::Raw {
                                    if constexpr (Shape::kTakesContext) {
                                      return f(context, std::forward<decltype(args)>(args)...);
                                    } else {
                                      (void)context;
                                      return f(std::forward<decltype(args)>(args)...);
                                    }
                                  });
}

template <class T, class F>
MethodEntry make_method_entry(std::string name, F method, bool inline_ok) {
  using Shape = Callee<F>;
  MethodEntry entry = make_shaped_entry<Shape>(
      std::move(name), inline_ok,
      [method](void* object, CallContext& context, auto&&... args) -> typename Shape::Raw {
        T* const self = static_cast<T*>(object);
        if constexpr (Shape::kTakesContext) {
          return (self->*method)(context, std::forward<decltype(args)>(args)...);
        } else {
          (void)context;
          return (self->*method)(std::forward<decltype(args)>(args)...);
        }
      });
  entry.method.is_const = Shape::kIsConst;
  return entry;
}

template <class T, class... Params>
struct ConstructorSignature {
  static constexpr auto kText = SignatureText<void, StoredArg<Params>...>::kArguments;
};

template <class T, class... Params>
MethodEntry make_constructor_entry(std::string class_name, bool inline_ok) {
  const std::string signature =
      std::string(ConstructorSignature<T, Params...>::kText.view()) + "->" + class_name;
  return make_entry(
      std::move(class_name), signature, inline_ok,
      [](CallContext&, const std::shared_ptr<void>&, Payload arguments, Outcome outcome) {
        if (!outcome.keeps()) {
          outcome.fail(make_error(ErrorKind::kInvalidArgument,
                                  "a constructor makes an object that stays here: create it with "
                                  "remote(), it cannot be the result of a call"));
          return;
        }
        auto taken = take_arguments<StoredArg<Params>...>(std::move(arguments));
        if (!taken.ok()) {
          outcome.fail(taken.status());
          return;
        }
        std::shared_ptr<T> object;
        try {
          object = [&taken]<size_t... I>(std::index_sequence<I...>) {
            return std::make_shared<T>(pass<Params>(std::get<I>(*taken))...);
          }
          (std::index_sequence_for<Params...>());
        } catch (...) {
          outcome.fail(status_from_handler_exception());
          return;
        }
        outcome.keep(std::move(object));
      });
}

}  // namespace weft::internal

#endif  // WEFT_RPC_SPI_HANDLER_H_
