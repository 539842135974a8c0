#ifndef WEFT_RPC_SPI_FUNCTION_REF_H_
#define WEFT_RPC_SPI_FUNCTION_REF_H_

// Ways to say which function is meant, where a plain pointer does not:
//
//   FunctionRef<at::Tensor(at::Tensor)>{"app.forward"}    by name and type: the caller need not
//                                                         have the implementation
//   overload<int>(&f)                                     the overload of f that takes an int
//   const_overload<int>(&T::get)                          the const one of a const and non-const
//                                                         pair
//   on("ps0.table", &Table::lookup)                       a method of a named object at the callee
//
// Values; any thread.

#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "weft/rpc/spi/signature.h"

namespace weft {

// A function (or method, with on()) that the callee registered under `name`. R is what the caller
// gets: the T of a handler that returns Future<T>.
template <class F>
class FunctionRef;
template <class R, class... Params>
class FunctionRef<R(Params...)> {
 public:
  using Callee = internal::Callee<R (*)(Params...)>;

  explicit FunctionRef(std::string_view name) : name_(name) {}
  const std::string& name() const { return name_; }

 private:
  std::string name_;
};

namespace internal {

template <class... Args>
struct Overload {
  template <class R>
  constexpr auto operator()(R (*f)(Args...)) const {
    return f;
  }
  template <class C, class R>
  constexpr auto operator()(R (C::*f)(Args...)) const {
    return f;
  }
  // For an overload pair the function above is taken: const objects prefer const to volatile ones.
  template <class C, class R>
  constexpr auto operator()(R (C::*f)(Args...) const) const volatile {
    return f;
  }
};

template <class... Args>
struct ConstOverload {
  template <class C, class R>
  constexpr auto operator()(R (C::*f)(Args...) const) const {
    return f;
  }
};

template <class F>
inline constexpr bool kIsFunctionRef = false;
template <class F>
inline constexpr bool kIsFunctionRef<FunctionRef<F>> = true;

// T is void unless the class was named.
template <class T, class F>
class BoundMethod {
 public:
  using Class = T;
  using Method = F;

  BoundMethod(std::string_view object, F method) : object_(object), method_(std::move(method)) {}
  const std::string& object() const { return object_; }
  const F& method() const { return method_; }

 private:
  std::string object_;
  F method_;
};

template <class F>
inline constexpr bool kIsBoundMethod = false;
template <class T, class F>
inline constexpr bool kIsBoundMethod<BoundMethod<T, F>> = true;

}  // namespace internal

// Objects, not functions: a template function would deduce more Args than were given.
// NOLINTBEGIN(readability-identifier-naming)
template <class... Args>
inline constexpr internal::Overload<Args...> overload{};
template <class... Args>
inline constexpr internal::ConstOverload<Args...> const_overload{};
// NOLINTEND(readability-identifier-naming)

// `object` is the name given to Library::instance() at the callee. `method` is a method pointer or
// a FunctionRef. Name the class, on<T>(...), when T inherits the method and the caller's library
// registers it for several classes.
template <class T = void, class F>
auto on(std::string_view object, F method) {
  static_assert(
      internal::Callee<F>::kForm == internal::Form::kMethod || internal::kIsFunctionRef<F>,
      "weft: on() takes a method pointer (&T::method) or a FunctionRef");
  return internal::BoundMethod<T, F>(object, std::move(method));
}

}  // namespace weft

#endif  // WEFT_RPC_SPI_FUNCTION_REF_H_
