#ifndef WEFT_RPC_SPI_SIGNATURE_H_
#define WEFT_RPC_SPI_SIGNATURE_H_

// What a function looks like on the wire: "(tensor,int)->tensor". Signatures consist of wire kinds
// (weft/rpc/value.h), so functions that differ in const, references, noexcept, the width of their
// integers, a leading CallContext&, or in returning T, StatusOr<T>, Future<T> or a coroutine's
// Future<T> have the same one. All of it is known at
// compile time.

#include <functional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/future.h"
#include "weft/rpc/call_context.h"
#include "weft/rpc/struct.h"
#include "weft/rpc/value.h"

namespace weft {

// The wire kind of a type: kind_of<std::vector<int>>() is "list<int>".
template <class T>
constexpr std::string_view kind_of() {
  if constexpr (std::is_void_v<T>) {
    return "none";
  } else {
    return Codec<T>::kKind.view();
  }
}

namespace internal {

// What a parameter is stored as between decoding and the handler's end.
template <class P>
struct StoredArgument {
  static_assert(!std::is_lvalue_reference_v<P> || std::is_const_v<std::remove_reference_t<P>>,
                "weft: a parameter T& is an out-parameter, and nothing travels back through "
                "arguments: take T or const T&, and return the result");
  using Type = std::remove_cvref_t<P>;
};
template <class P>
requires(std::is_same_v<std::remove_cvref_t<P>, std::string_view>) struct StoredArgument<P> {
  using Type = std::string;
};
template <class T>
struct ArrayRefElement;
template <class T>
struct ArrayRefElement<c10::ArrayRef<T>> {
  using Type = T;
};
template <class P>
requires requires { typename ArrayRefElement<std::remove_cvref_t<P>>::Type; }
struct StoredArgument<P> {
  using Type = std::vector<typename ArrayRefElement<std::remove_cvref_t<P>>::Type>;
};
template <class P>
using StoredArg = typename StoredArgument<P>::Type;

// What a handler's return type means on the wire.
template <class R>
struct ResultOf {
  using Type = std::remove_cvref_t<R>;
};
template <class T>
struct ResultOf<Future<T>> {
  using Type = T;
};
template <class T>
struct ResultOf<StatusOr<T>> {
  using Type = T;
};
template <>
struct ResultOf<Status> {
  using Type = void;
};

template <class T>
using WireResult = std::conditional_t<std::is_void_v<T>, std::monostate, T>;

template <class... Ts>
struct TypeList {
  static constexpr size_t kSize = sizeof...(Ts);
};

template <class R, class... Stores>
struct SignatureText {
  static_assert((check_sendable<Stores>() && ...));
  static_assert(check_sendable<WireResult<R>>());
  static constexpr auto kArguments = KindText{"("} + joined_kinds<Stores...>() + KindText{")"};
  static constexpr auto kText = kArguments + KindText{"->"} + Codec<WireResult<R>>::kKind;
};

// A leading CallContext& is the callee's own business.
template <class... Params>
struct StripContext {
  static constexpr bool kTakesContext = false;
  using List = TypeList<Params...>;
};
template <class... Params>
struct StripContext<CallContext&, Params...> {
  static constexpr bool kTakesContext = true;
  using List = TypeList<Params...>;
};
template <class... Params>
struct StripContext<const CallContext&, Params...> : StripContext<CallContext&, Params...> {};

template <class R, class... Params>
struct Shape {
  using Raw = R;                              // as written
  using Result = typename ResultOf<R>::Type;  // what the caller gets
  using Parameters = typename StripContext<Params...>::List;
  static constexpr bool kTakesContext = StripContext<Params...>::kTakesContext;
};

// The shape of a function pointer, a method pointer or a callable object. kForm says which; empty
// for everything else (kForm == Form::kNone).
enum class Form { kNone, kFunction, kMethod, kObject };
template <class F>
struct Callee {
  static constexpr Form kForm = Form::kNone;
};
template <class R, class... Params>
struct Callee<R (*)(Params...)> : Shape<R, Params...> {
  static constexpr Form kForm = Form::kFunction;
  using Pointer = R (*)(Params...);
};
template <class R, class... Params>
struct Callee<R (*)(Params...) noexcept> : Callee<R (*)(Params...)> {};

template <bool Const, class C, class R, class... Params>
struct MethodCallee : Shape<R, Params...> {
  static constexpr Form kForm = Form::kMethod;
  static constexpr bool kIsConst = Const;
  using Class = C;
};
template <class C, class R, class... Params>
struct Callee<R (C::*)(Params...)> : MethodCallee<false, C, R, Params...> {
  using Pointer = R (C::*)(Params...);
};
template <class C, class R, class... Params>
struct Callee<R (C::*)(Params...) const> : MethodCallee<true, C, R, Params...> {
  using Pointer = R (C::*)(Params...) const;
};
template <class C, class R, class... Params>
struct Callee<R (C::*)(Params...)&> : MethodCallee<false, C, R, Params...> {
  using Pointer = R (C::*)(Params...) &;
};
template <class C, class R, class... Params>
struct Callee<R (C::*)(Params...) const&> : MethodCallee<true, C, R, Params...> {
  using Pointer = R (C::*)(Params...) const&;
};
template <class C, class R, class... Params>
struct Callee<R (C::*)(Params...) noexcept> : Callee<R (C::*)(Params...)> {};
template <class C, class R, class... Params>
struct Callee<R (C::*)(Params...) const noexcept> : Callee<R (C::*)(Params...) const> {};
template <class C, class R, class... Params>
struct Callee<R (C::*)(Params...)& noexcept> : Callee<R (C::*)(Params...)&> {};
template <class C, class R, class... Params>
struct Callee<R (C::*)(Params...) const& noexcept> : Callee<R (C::*)(Params...) const&> {};

template <class F>
requires requires { &F::operator(); }
struct Callee<F> : Callee<decltype(&F::operator())> {
  static constexpr Form kForm = Form::kObject;
};

template <class R, class Parameters>
struct SignatureOf;
template <class R, class... Params>
struct SignatureOf<R, TypeList<Params...>> : SignatureText<R, StoredArg<Params>...> {};

}  // namespace internal

// The signature of a function type: signature_of<at::Tensor(at::Tensor, int)>() is
// "(tensor,int)->tensor".
template <class F>
constexpr std::string_view signature_of() {
  using Callee = internal::Callee<std::decay_t<F>>;
  static_assert(Callee::kForm != internal::Form::kNone,
                "weft: expected a function, a method pointer or an object with one operator()");
  return internal::SignatureOf<typename Callee::Result, typename Callee::Parameters>::kText.view();
}

}  // namespace weft

#endif  // WEFT_RPC_SPI_SIGNATURE_H_
