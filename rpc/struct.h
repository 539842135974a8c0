#ifndef WEFT_RPC_STRUCT_H_
#define WEFT_RPC_STRUCT_H_

// WEFT_STRUCT(Type, fields...): lets a struct of yours travel. One line, after the struct and in
// its namespace; for private fields inside the class, as `friend WEFT_STRUCT(Type, ...);`.
//
//   struct Point { double x = 0, y = 0; std::string label = "none"; };
//   WEFT_STRUCT(Point, x, y, label);
//
// The kind on the wire is the name as written here. The struct needs a default constructor. Fields
// may be added at the end later: a reader that knows more fields than arrive keeps the defaults of
// the others, one that knows fewer passes over the rest. Changing, removing or reordering fields
// needs a new name.

#include <cstddef>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "weft/common/worker_info.h"
#include "weft/rpc/value.h"

namespace weft {
namespace internal {

template <size_t N, class... Members>
struct StructDescription {
  KindText<N> name;
  std::tuple<Members...> members;
};
template <size_t N, class... Members>
constexpr StructDescription<N, Members...> describe_struct(KindText<N> name, Members... members) {
  return {name, std::tuple<Members...>(members...)};
}

template <class T>
concept Described = std::is_class_v<T> && requires {
  weft_describe(static_cast<const T*>(nullptr));
};

}  // namespace internal

template <internal::Described T>
struct Codec<T> {
  static constexpr auto kDescription = weft_describe(static_cast<const T*>(nullptr));
  static constexpr auto kKind = kDescription.name;

  static void encode(Encoder& out, const T& value) {
    std::apply(
        [&](auto... member) {
          out.begin_struct(sizeof...(member));
          (put_field(out, std::invoke(member, value)), ...);
          out.end();
        },
        kDescription.members);
  }
  static StatusOr<T> decode(Decoder& in) {
    static_assert(std::is_default_constructible_v<T>,
                  "weft: a struct with WEFT_STRUCT needs a default constructor (fields that do not "
                  "arrive keep their defaults); otherwise give it a weft::Codec");
    T value{};
    WEFT_ASSIGN_OR_RETURN(const size_t count, in.begin_struct());
    size_t known = 0;
    std::apply(
        [&](auto... member) {
          ((known < count ? take_field(in, std::invoke(member, value)) : void(), ++known), ...);
        },
        kDescription.members);
    for (size_t i = known; i < count && in.status().ok(); ++i) in.skip().IgnoreError();
    WEFT_RETURN_IF_ERROR(in.status());
    in.end();
    return value;
  }

 private:
  template <class F>
  static void put_field(Encoder& out, const F& field) {
    out.put(field);
  }
  template <class F>
  static void take_field(Decoder& in, F& field) {
    auto taken = in.take<F>();
    if (taken.ok()) field = *std::move(taken);
  }
};

}  // namespace weft

#define WEFT_STRUCT(Type, ...)                                                              \
  constexpr auto weft_describe [[maybe_unused]] (const Type*) {                             \
    return ::weft::internal::describe_struct(::weft::KindText{#Type} __VA_OPT__(, )         \
                                                 WEFT_FOR_EACH_MEMBER_(Type, __VA_ARGS__)); \
  }                                                                                         \
  static_assert(true)

// &Type::a, &Type::b, ...: up to 256 fields.
#define WEFT_EXPAND_(...) \
  WEFT_EXPAND_4_(WEFT_EXPAND_4_(WEFT_EXPAND_4_(WEFT_EXPAND_4_(__VA_ARGS__))))
#define WEFT_EXPAND_4_(...) \
  WEFT_EXPAND_3_(WEFT_EXPAND_3_(WEFT_EXPAND_3_(WEFT_EXPAND_3_(__VA_ARGS__))))
#define WEFT_EXPAND_3_(...) \
  WEFT_EXPAND_2_(WEFT_EXPAND_2_(WEFT_EXPAND_2_(WEFT_EXPAND_2_(__VA_ARGS__))))
#define WEFT_EXPAND_2_(...) \
  WEFT_EXPAND_1_(WEFT_EXPAND_1_(WEFT_EXPAND_1_(WEFT_EXPAND_1_(__VA_ARGS__))))
#define WEFT_EXPAND_1_(...) __VA_ARGS__
#define WEFT_PARENS_ ()
#define WEFT_FOR_EACH_MEMBER_(Type, ...) \
  __VA_OPT__(WEFT_EXPAND_(WEFT_NEXT_MEMBER_(Type, __VA_ARGS__)))
#define WEFT_NEXT_MEMBER_(Type, field, ...) \
  &Type::field __VA_OPT__(, WEFT_NEXT_MEMBER_AGAIN_ WEFT_PARENS_(Type, __VA_ARGS__))
#define WEFT_NEXT_MEMBER_AGAIN_() WEFT_NEXT_MEMBER_

namespace weft {

WEFT_STRUCT(WorkerInfo, name, id, incarnation);

}  // namespace weft

#endif  // WEFT_RPC_STRUCT_H_
