#ifndef WEFT_RPC_CONTAINERS_H_
#define WEFT_RPC_CONTAINERS_H_

// How the standard library's containers travel.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "weft/rpc/codec.h"

namespace weft {
namespace internal {

template <class T>
constexpr auto list_kind() {
  return KindText{"list<"} + Codec<T>::kKind + KindText{">"};
}
template <class K, class V>
constexpr auto map_kind() {
  return KindText{"map<"} + Codec<K>::kKind + KindText{","} + Codec<V>::kKind + KindText{">"};
}
// "int", "int,string", ...
template <class... Ts>
constexpr auto joined_kinds() {
  if constexpr (sizeof...(Ts) == 0) {
    return KindText{""};
  } else {
    return []<class First, class... Rest>(std::type_identity<First>, std::type_identity<Rest>...) {
      return (Codec<First>::kKind + ... + (KindText{","} + Codec<Rest>::kKind));
    }(std::type_identity<Ts>()...);
  }
}

template <class T>
std::optional<T> unpack_one(const PackedNumbers& packed, size_t i) {
  if constexpr (kIsWireFloat<T>) {
    return static_cast<T>(packed.floating(i));
  } else {
    const WireInt wide = packed.integer(i);
    if (!wide.fits<T>()) return std::nullopt;
    return static_cast<T>(wide.bits);
  }
}

template <class T>
Status unpack_into(Decoder& in, const PackedNumbers& packed, T* out) {
  if (packed.code == packed_code<T>()) {
    if (packed.count > 0) packed.copy_to(out);
    return absl::OkStatus();
  }
  for (size_t i = 0; i < packed.count; ++i) {
    const std::optional<T> one = unpack_one<T>(packed, i);
    if (!one.has_value()) return in.fail_with(does_not_fit<T>(packed.integer(i)));
    out[i] = *one;
  }
  return absl::OkStatus();
}

// A list into a vector, whichever of the two forms it has.
template <class T, class Vector = std::vector<T>>
StatusOr<Vector> decode_list(Decoder& in) {
  Vector result;
  if constexpr (kIsPackable<T>) {
    WEFT_ASSIGN_OR_RETURN(const std::optional<PackedNumbers> packed,
                          in.take_packed(kIsWireFloat<T>));
    if (packed.has_value()) {
      result.resize(packed->count);
      WEFT_RETURN_IF_ERROR(unpack_into<T>(in, *packed, result.data()));
      return result;
    }
  }
  if constexpr (std::is_enum_v<T>) {
    // A sender of ints of the same kind has packed them.
    using Under = std::underlying_type_t<T>;
    if constexpr (kIsPackable<Under>) {
      WEFT_ASSIGN_OR_RETURN(const std::optional<PackedNumbers> packed, in.take_packed(false));
      if (packed.has_value()) {
        std::vector<Under> numbers(packed->count);
        WEFT_RETURN_IF_ERROR(unpack_into<Under>(in, *packed, numbers.data()));
        for (const Under one : numbers) result.push_back(static_cast<T>(one));
        return result;
      }
    }
  }
  WEFT_ASSIGN_OR_RETURN(const size_t count, in.begin_list());
  // The count is bounded by the bytes that are left, but an element may be far larger than its
  // bytes: beyond a small first step memory grows with what was really read (VALUE-2).
  result.reserve(std::min<size_t>(count, 16));
  for (size_t i = 0; i < count; ++i) {
    WEFT_ASSIGN_OR_RETURN(T one, in.take<T>());
    result.push_back(std::move(one));
  }
  in.end();
  return result;
}

template <class List>
void encode_list(Encoder& out, const List& list) {
  out.begin_list(list.size());
  for (const auto& one : list) out.template put<typename List::value_type>(one);
  out.end();
}

template <class Container>
auto sorted_pointers(const Container& container) {
  std::vector<const typename Container::value_type*> entries;
  entries.reserve(container.size());
  for (const auto& entry : container) entries.push_back(&entry);
  std::sort(entries.begin(), entries.end(), [](const auto* a, const auto* b) {
    if constexpr (requires { typename Container::mapped_type; }) {
      return a->first < b->first;
    } else {
      return *a < *b;
    }
  });
  return entries;
}

template <class Map>
StatusOr<Map> decode_map(Decoder& in) {
  Map result;
  WEFT_ASSIGN_OR_RETURN(const size_t count, in.begin_map());
  for (size_t i = 0; i < count; ++i) {
    WEFT_ASSIGN_OR_RETURN(auto key, in.take<typename Map::key_type>());
    WEFT_ASSIGN_OR_RETURN(auto value, in.take<typename Map::mapped_type>());
    if (!result.emplace(std::move(key), std::move(value)).second) {
      return in.fail("expected distinct keys of a map, found one twice");
    }
  }
  in.end();
  return result;
}

template <class Set>
StatusOr<Set> decode_set(Decoder& in) {
  using T = typename Set::value_type;
  WEFT_ASSIGN_OR_RETURN(std::vector<T> list, decode_list<T>(in));
  Set result;
  for (T& one : list) {
    if (!result.insert(std::move(one)).second) {
      return in.fail("expected distinct values of a set, found one twice");
    }
  }
  return result;
}

template <class Tuple, class... Ts>
StatusOr<Tuple> decode_tuple(Decoder& in) {
  WEFT_RETURN_IF_ERROR(in.begin_tuple(sizeof...(Ts)));
  // In order: a braced list is evaluated from left to right.
  std::tuple<StatusOr<Ts>...> parts{in.take<Ts>()...};
  WEFT_RETURN_IF_ERROR(in.status());
  in.end();
  return std::apply([](auto&... part) { return Tuple(*std::move(part)...); }, parts);
}

}  // namespace internal

template <class T, class Allocator>
requires(Sendable<T> && !std::is_same_v<T, std::byte>) struct Codec<std::vector<T, Allocator>> {
  static constexpr auto kKind = internal::list_kind<T>();
  static void encode(Encoder& out, const std::vector<T, Allocator>& list) {
    if constexpr (internal::kIsPackable<T>) {
      out.put_packed(internal::packed_code<T>(), list.data(), list.size(), sizeof(T));
    } else {
      internal::encode_list(out, list);
    }
  }
  static StatusOr<std::vector<T, Allocator>> decode(Decoder& in) {
    return internal::decode_list<T, std::vector<T, Allocator>>(in);
  }
};

template <>
struct Codec<std::vector<std::byte>> {
  static constexpr KindText kKind{"bytes"};
  static void encode(Encoder& out, const std::vector<std::byte>& bytes) {
    out.put_bytes(std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }
  static StatusOr<std::vector<std::byte>> decode(Decoder& in) {
    WEFT_ASSIGN_OR_RETURN(const std::string data, in.take_bytes());
    std::vector<std::byte> bytes(data.size());
    if (!data.empty()) std::memcpy(bytes.data(), data.data(), data.size());
    return bytes;
  }
};

template <class T, size_t N>
requires(Sendable<T>) struct Codec<std::array<T, N>> {
  static constexpr auto kKind = internal::list_kind<T>();
  static void encode(Encoder& out, const std::array<T, N>& list) {
    if constexpr (internal::kIsPackable<T>) {
      out.put_packed(internal::packed_code<T>(), list.data(), N, sizeof(T));
    } else {
      internal::encode_list(out, list);
    }
  }
  static StatusOr<std::array<T, N>> decode(Decoder& in) {
    WEFT_ASSIGN_OR_RETURN(std::vector<T> list, internal::decode_list<T>(in));
    if (list.size() != N) {
      return in.fail("expected a list of " + std::to_string(N) + ", found one of " +
                     std::to_string(list.size()));
    }
    return [&list]<size_t... I>(std::index_sequence<I...>) {
      return std::array<T, N>{{static_cast<T>(std::move(list[I]))...}};
    }
    (std::make_index_sequence<N>());
  }
};

template <class T, class Less, class Allocator>
requires(Sendable<T>) struct Codec<std::set<T, Less, Allocator>> {
  static constexpr auto kKind = internal::list_kind<T>();
  static void encode(Encoder& out, const std::set<T, Less, Allocator>& set) {
    internal::encode_list(out, set);
  }
  static auto decode(Decoder& in) { return internal::decode_set<std::set<T, Less, Allocator>>(in); }
};

template <class T, class Hash, class Equal, class Allocator>
requires(Sendable<T>) struct Codec<std::unordered_set<T, Hash, Equal, Allocator>> {
  using Set = std::unordered_set<T, Hash, Equal, Allocator>;
  static constexpr auto kKind = internal::list_kind<T>();
  static void encode(Encoder& out, const Set& set) {
    out.begin_list(set.size());
    for (const T* one : internal::sorted_pointers(set)) out.put(*one);
    out.end();
  }
  static StatusOr<Set> decode(Decoder& in) { return internal::decode_set<Set>(in); }
};

template <class K, class V, class Less, class Allocator>
requires(Sendable<K>&& Sendable<V>) struct Codec<std::map<K, V, Less, Allocator>> {
  using Map = std::map<K, V, Less, Allocator>;
  static constexpr auto kKind = internal::map_kind<K, V>();
  static void encode(Encoder& out, const Map& map) {
    out.begin_map(map.size());
    for (const auto& [key, value] : map) {
      out.put(key);
      out.put(value);
    }
    out.end();
  }
  static StatusOr<Map> decode(Decoder& in) { return internal::decode_map<Map>(in); }
};

template <class K, class V, class Hash, class Equal, class Allocator>
requires(Sendable<K>&& Sendable<V>) struct Codec<std::unordered_map<K, V, Hash, Equal, Allocator>> {
  using Map = std::unordered_map<K, V, Hash, Equal, Allocator>;
  static constexpr auto kKind = internal::map_kind<K, V>();
  static void encode(Encoder& out, const Map& map) {
    out.begin_map(map.size());
    for (const auto* entry : internal::sorted_pointers(map)) {
      out.put(entry->first);
      out.put(entry->second);
    }
    out.end();
  }
  static StatusOr<Map> decode(Decoder& in) { return internal::decode_map<Map>(in); }
};

template <class T>
requires(Sendable<T>) struct Codec<std::optional<T>> {
  static constexpr auto kKind = KindText{"optional<"} + Codec<T>::kKind + KindText{">"};
  static void encode(Encoder& out, const std::optional<T>& value) {
    if (!value.has_value()) {
      out.put_none();
      return;
    }
    out.begin_some();
    out.put(*value);
    out.end();
  }
  static StatusOr<std::optional<T>> decode(Decoder& in) {
    WEFT_ASSIGN_OR_RETURN(const bool some, in.begin_some());
    if (!some) return std::optional<T>();
    WEFT_ASSIGN_OR_RETURN(T value, in.take<T>());
    in.end();
    return std::optional<T>(std::move(value));
  }
};

template <class... Ts>
requires(Sendable<Ts>&&...) struct Codec<std::tuple<Ts...>> {
  static constexpr auto kKind =
      KindText{"tuple<"} + internal::joined_kinds<Ts...>() + KindText{">"};
  static void encode(Encoder& out, const std::tuple<Ts...>& value) {
    out.begin_tuple(sizeof...(Ts));
    std::apply([&out](const Ts&... part) { (out.put(part), ...); }, value);
    out.end();
  }
  static StatusOr<std::tuple<Ts...>> decode(Decoder& in) {
    return internal::decode_tuple<std::tuple<Ts...>, Ts...>(in);
  }
};

template <class A, class B>
requires(Sendable<A>&& Sendable<B>) struct Codec<std::pair<A, B>> {
  static constexpr auto kKind = Codec<std::tuple<A, B>>::kKind;
  static void encode(Encoder& out, const std::pair<A, B>& value) {
    out.begin_tuple(2);
    out.put(value.first);
    out.put(value.second);
    out.end();
  }
  static StatusOr<std::pair<A, B>> decode(Decoder& in) {
    return internal::decode_tuple<std::pair<A, B>, A, B>(in);
  }
};

template <class... Ts>
requires(Sendable<Ts>&&...) struct Codec<std::variant<Ts...>> {
  using Variant = std::variant<Ts...>;
  static constexpr auto kKind =
      KindText{"variant<"} + internal::joined_kinds<Ts...>() + KindText{">"};
  static void encode(Encoder& out, const Variant& value) {
    if (value.valueless_by_exception()) {
      out.fail(make_error(ErrorKind::kInvalidArgument, "a variant without a value cannot be sent"));
      return;
    }
    out.begin_variant(value.index());
    std::visit([&out](const auto& one) { out.put(one); }, value);
    out.end();
  }
  static StatusOr<Variant> decode(Decoder& in) {
    WEFT_ASSIGN_OR_RETURN(const size_t index, in.begin_variant(sizeof...(Ts)));
    std::optional<Variant> result;
    [&]<size_t... I>(std::index_sequence<I...>) {
      (void)((index == I && (take_alternative<I>(in, &result), true)) || ...);
    }
    (std::index_sequence_for<Ts...>());
    WEFT_RETURN_IF_ERROR(in.status());
    in.end();
    return *std::move(result);
  }

 private:
  template <size_t I>
  static void take_alternative(Decoder& in, std::optional<Variant>* result) {
    auto one = in.take<std::variant_alternative_t<I, Variant>>();
    if (one.ok()) result->emplace(std::in_place_index<I>, *std::move(one));
  }
};

}  // namespace weft

#endif  // WEFT_RPC_CONTAINERS_H_
