#ifndef WEFT_RPC_SPI_MISUSE_H_
#define WEFT_RPC_SPI_MISUSE_H_

// Calls that cannot compile. The overloads at the end of call.h and rref.h take what no other
// overload takes, and say in one sentence what is wrong with it. They are never preferred to an
// overload that makes a call: they are constrained to calls that have none, or take the arguments
// by a conversion. All of it happens at compile time.

#include <initializer_list>
#include <string_view>
#include <type_traits>
#include <vector>

#include "weft/rpc/call_options.h"
#include "weft/rpc/spi/destination.h"
#include "weft/rpc/spi/function_ref.h"
#include "weft/rpc/spi/signature.h"

namespace weft::internal {

// Result of a call that does not compile. It converts to everything, so that the line has no
// further errors.
struct Refused {
  template <class T>
  operator T() const;  // NOLINT(google-explicit-constructor): never defined
};

// Parameter for an argument in braces, of which a template cannot deduce a type.
struct Braced {
  Braced();
  template <class T>
  Braced(const T&);                       // NOLINT(google-explicit-constructor): never defined
  Braced(std::initializer_list<Braced>);  // NOLINT(google-explicit-constructor): never defined
};

// Type of a template parameter that keeps an overload out of remote<T>().
enum class Misuse {};

// False, but only where it is instantiated.
template <class...>
inline constexpr bool kNever = false;

template <class To>
inline constexpr bool kIsDestination =
    std::disjunction_v<std::is_convertible<const To&, Destination>,
                       std::is_convertible<const To&, std::vector<Destination>>>;

// Says what is wrong with what stands where a callee should.
template <class To>
constexpr Refused refuse_destination() {
  if constexpr (requires(const To& to) { Destination(*to.begin()); }) {
    static_assert(kNever<To>,
                  "weft: several callees are a std::vector<weft::Destination>; of names it is made "
                  "by std::vector<weft::Destination>(names.begin(), names.end())");
  } else {
    static_assert(kNever<To>,
                  "weft: a callee is a worker's name, id or WorkerInfo, or a "
                  "std::vector<weft::Destination> of these");
  }
  return {};
}

// Says what is wrong with what stands where a function should.
template <class F>
constexpr Refused refuse_function() {
  using Plain = std::decay_t<F>;
  if constexpr (std::is_convertible_v<const F&, std::string_view>) {
    static_assert(kNever<F>,
                  "weft: a string is no function: pass a pointer, &forward, or the name with its "
                  "type, weft::FunctionRef<R(Params...)>(\"app.forward\")");
  } else if constexpr (Callee<Plain>::kForm == Form::kMethod) {
    static_assert(kNever<F>,
                  "weft: a method needs an object: weft::on(\"object\", &T::method), or an RRef");
  } else if constexpr (std::is_class_v<Plain>) {
    static_assert(kNever<F>,
                  "weft: a lambda or function object does not travel: the callee registers it with "
                  "def(), and a call names it, weft::FunctionRef<R(Params...)>(\"app.name\")");
  } else {
    static_assert(kNever<F>,
                  "weft: expected a function: a pointer, a weft::FunctionRef, or weft::on() with a "
                  "method");
  }
  return {};
}

template <class F>
constexpr Refused refuse_braces() {
  static_assert(kNever<F>,
                "weft: arguments in braces have no type: pass them one by one, &f, a, b, or write "
                "the type, std::vector<int>{1, 2}");
  return {};
}

// Whether an RRef can call it; says why not.
template <class F>
constexpr bool check_method() {
  constexpr bool kIsMethod = Callee<std::decay_t<F>>::kForm == Form::kMethod || kIsFunctionRef<F>;
  static_assert(kIsMethod,
                "weft: an RRef calls methods of its object: &T::method, or a FunctionRef");
  return kIsMethod;
}

}  // namespace weft::internal

#endif  // WEFT_RPC_SPI_MISUSE_H_
