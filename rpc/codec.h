#ifndef WEFT_RPC_CODEC_H_
#define WEFT_RPC_CODEC_H_

// Values: how arguments and results become bytes and come back. A closed set travels, and nothing
// that could be code:
//
//   kind            C++ types                                       bytes
//   none            std::monostate, void                            tag
//   bool            bool                                            tag
//   int             every integer type but bool, every enum         tag, 1..10
//   float           float, double                                   tag, 8
//   string, bytes   std::string; weft::Bytes, vector<std::byte>     tag, length, bytes
//   tensor          at::Tensor (an undefined one travels as none)   tag; the tensor goes beside
//   list<T>         std::vector, std::array, std::set               tag, count, values; numbers
//   packed tuple<...>      std::tuple, std::pair                           tag, count, values
//   map<K,V>        std::map, std::unordered_map                    tag, count, sorted entries
//   optional<T>     std::optional                                   tag, value
//   variant<...>    std::variant                                    tag, index, value
//   rref<T>         weft::RRef<T> (weft/rref/rref.h)                tag; the reference goes beside
//   Name            a struct with WEFT_STRUCT (weft/rpc/struct.h)   tag, count of fields, values
//
// A type of your own that is none of these gets a Codec, which writes exactly one value:
//
//   template <> struct weft::Codec<Money> {
//     static constexpr weft::KindText kKind{"Money"};
//     static void encode(weft::Encoder& out, const Money& m) { out.put(m.cents()); }
//     static weft::StatusOr<Money> decode(weft::Decoder& in) {
//       WEFT_ASSIGN_OR_RETURN(int64_t cents, in.take<int64_t>());
//       return Money::of_cents(cents);
//     }
//   };
//
// VALUE-1: decoding is strict: wrong kinds, lengths, depths (over 16) or leftovers are an error of
//          kind protocol that says what was expected and what found, at which byte.
// VALUE-2: decoding never allocates more than a constant (the size of a value's type) times the
//          bytes that it has read.
// VALUE-3: equal values give equal bytes, also those of unordered containers.
// An Encoder or Decoder belongs to one thread.

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/rpc/payload.h"

namespace weft {

template <class T>
class Future;

// Raw bytes: unlike a std::string, not text.
struct Bytes {
  std::string data;  // any bytes
  friend bool operator==(const Bytes&, const Bytes&) = default;
  friend auto operator<=>(const Bytes&, const Bytes&) = default;
};

// The name of a wire kind, known at compile time.
template <size_t N>
struct KindText {
  char chars[N + 1] = {};  // with a zero at the end

  constexpr KindText() = default;
  constexpr KindText(const char (&text)[N + 1]) {  // NOLINT: implicit by design
    for (size_t i = 0; i < N; ++i) chars[i] = text[i];
  }
  constexpr std::string_view view() const { return std::string_view(chars, N); }  // without it
};
template <size_t M>
KindText(const char (&)[M]) -> KindText<M - 1>;

template <size_t A, size_t B>  // concatenates
constexpr KindText<A + B> operator+(const KindText<A>& a, const KindText<B>& b) {
  KindText<A + B> sum;
  for (size_t i = 0; i < A; ++i) sum.chars[i] = a.chars[i];
  for (size_t i = 0; i < B; ++i) sum.chars[A + i] = b.chars[i];
  return sum;
}

// How T travels: kKind, encode() and decode(). Specialise it for types of your own.
template <class T>
struct Codec;

template <class T>  // has a Codec
concept Sendable = requires {
  Codec<T>::kKind;
};

inline constexpr int kMaxValueDepth = 16;  // nesting of what is decoded

// What comes next, for codecs that accept several kinds. kEnd: nothing, or nothing known.
enum class ValueKind : uint8_t {
  kEnd,
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kBytes,
  kTensor,
  kList,
  kTuple,
  kMap,
  kStruct,
  kVariant,
  kSome,
  kReference,
};

namespace internal {

template <class T>
inline constexpr bool kIsFuture = false;
template <class T>
inline constexpr bool kIsFuture<Future<T>> = true;
template <class T>
inline constexpr bool kIsSmartPointer = false;
template <class T, class D>
inline constexpr bool kIsSmartPointer<std::unique_ptr<T, D>> = true;
template <class T>
inline constexpr bool kIsSmartPointer<std::shared_ptr<T>> = true;
template <class T>
inline constexpr bool kIsSmartPointer<std::weak_ptr<T>> = true;

template <class T>
inline constexpr bool kIsCallable = false;
template <class R, class... Args>
inline constexpr bool kIsCallable<std::function<R(Args...)>> = true;
template <class T>
requires requires { &T::operator(); }
inline constexpr bool kIsCallable<T> = true;

// Always true; a type that cannot travel stops the compiler here, with the reason.
template <class T>
constexpr bool check_sendable() {
  if constexpr (Sendable<T>) {
    return true;
  } else if constexpr (kIsFuture<T>) {
    static_assert(Sendable<T>,
                  "weft: a Future cannot be sent; wait for it, or return it from the "
                  "handler, whose result it then becomes");
  } else if constexpr (std::is_pointer_v<T> || std::is_member_pointer_v<T> || kIsSmartPointer<T>) {
    static_assert(Sendable<T>,
                  "weft: a pointer cannot be sent: it means nothing to another process");
  } else if constexpr (kIsCallable<T> || std::is_function_v<T>) {
    static_assert(Sendable<T>,
                  "weft: a function or lambda cannot be sent; register it in the "
                  "callee's Library and call it there");
  } else if constexpr (std::is_reference_v<T>) {
    static_assert(Sendable<T>, "weft: a reference cannot be sent as part of a value");
  } else {
    static_assert(Sendable<T>,
                  "weft: this type cannot be sent: describe the struct with "
                  "WEFT_STRUCT(Type, fields...) or give it a weft::Codec<Type>; every "
                  "element of a container must be sendable too");
  }
  return true;
}

// An integer of any type between int64 and uint64.
struct WireInt {
  int64_t bits = 0;
  bool above = false;  // bits are those of a uint64 above the range of int64

  template <class I>
  static constexpr WireInt of(I value) {
    if constexpr (std::is_unsigned_v<I>) {
      const auto wide = static_cast<uint64_t>(value);
      return {static_cast<int64_t>(wide), wide > static_cast<uint64_t>(INT64_MAX)};
    } else {
      return {static_cast<int64_t>(value), false};
    }
  }
  template <class I>
  constexpr bool fits() const {
    if constexpr (std::is_unsigned_v<I>) {
      if (!above && bits < 0) return false;
      return static_cast<uint64_t>(bits) <= static_cast<uint64_t>(std::numeric_limits<I>::max());
    } else {
      return !above && bits >= static_cast<int64_t>(std::numeric_limits<I>::min()) &&
             bits <= static_cast<int64_t>(std::numeric_limits<I>::max());
    }
  }
};
// Code out_of_range, kind invalid_argument: "300 does not fit a signed integer of 8 bits".
WEFT_API Status does_not_fit(WireInt value, size_t type_bytes, bool type_signed);
template <class I>
Status does_not_fit(WireInt value) {
  return does_not_fit(value, sizeof(I), std::is_signed_v<I>);
}

template <class T>
inline constexpr bool kIsWireInteger =
    std::is_integral_v<T> && !std::is_same_v<T, bool> && sizeof(T) <= 8;
template <class T>
inline constexpr bool kIsWireFloat = std::is_same_v<T, float> || std::is_same_v<T, double>;
template <class T>
inline constexpr bool kIsPackable = kIsWireInteger<T> || kIsWireFloat<T>;

// Element types of packed numbers; sent, never reused.
template <class T>
constexpr uint8_t packed_code() {
  if constexpr (std::is_same_v<T, float>) {
    return 9;
  } else if constexpr (std::is_same_v<T, double>) {
    return 10;
  } else {
    constexpr uint8_t kWidth = sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 1 : sizeof(T) == 4 ? 2 : 3;
    return static_cast<uint8_t>(1 + 2 * kWidth + (std::is_unsigned_v<T> ? 1 : 0));
  }
}

struct PackedNumbers {
  uint8_t code = 0;
  size_t count = 0;
  const char* data = nullptr;  // unaligned

  WEFT_API WireInt integer(size_t i) const;
  WEFT_API double floating(size_t i) const;
  WEFT_API void copy_to(void* out) const;
};

}  // namespace internal

// Appends values to a Payload. The first error stays; what is put after it is ignored.
class WEFT_API Encoder {
 public:
  explicit Encoder(Payload* out) : out_(out) {}

  template <class T>
  void put(const T& value) {
    if constexpr (internal::check_sendable<T>()) Codec<T>::encode(*this, value);
  }

  void put_none();                         // an absent value
  void put_bool(bool value);               // one bit
  void put_int(internal::WireInt value);   // any integer type
  void put_float(double value);            // any floating type
  void put_string(std::string_view text);  // UTF-8
  void put_bytes(std::string_view bytes);  // any
  // Refuses at once what could not be sent later.
  void put_tensor(const at::Tensor& tensor);
  // Not null.
  void put_reference(std::shared_ptr<const Reference> reference);
  void put_packed(uint8_t code, const void* data, size_t count, size_t item_bytes);

  // Each is followed by its values (a map by keys and values in turn) and end().
  void begin_list(size_t count);
  void begin_tuple(size_t count);
  void begin_map(size_t count);
  void begin_struct(size_t fields);
  void begin_variant(size_t index);
  void begin_some();
  void end() { --depth_; }

  const Status& status() const { return status_; }  // OK: all was put
  void fail(Status error) {                         // the first stays
    if (status_.ok()) status_ = std::move(error);
  }

 private:
  void begin(uint8_t tag);
  void begin_counted(uint8_t tag, uint64_t count);

  Payload* const out_;
  int depth_ = 0;
  Status status_;
};

// Reads the values of a Payload in order. The first error stays: everything taken after it fails
// with it too.
class WEFT_API Decoder {
 public:
  explicit Decoder(Payload payload) : payload_(std::move(payload)) {}
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  template <class T>
  StatusOr<T> take() {
    static_assert(internal::check_sendable<T>());
    return Codec<T>::decode(*this);
  }

  Status take_none();                                           // an absent value
  StatusOr<bool> take_bool();                                   // one bit
  StatusOr<internal::WireInt> take_int();                       // any integer type
  StatusOr<double> take_float();                                // any floating type
  StatusOr<std::string> take_string();                          // UTF-8, checked
  StatusOr<std::string> take_bytes();                           // any
  StatusOr<at::Tensor> take_tensor();                           // shares memory of the payload
  StatusOr<std::shared_ptr<const Reference>> take_reference();  // an RRef
  // Nothing is taken, and nullopt returned, unless packed numbers come next.
  StatusOr<std::optional<internal::PackedNumbers>> take_packed(bool floating);

  // Each gives the count, and is followed by the values and end().
  StatusOr<size_t> begin_list();
  Status begin_tuple(size_t expected);
  StatusOr<size_t> begin_map();
  StatusOr<size_t> begin_struct();
  StatusOr<size_t> begin_variant(size_t alternatives);
  // False for none, which needs no end().
  StatusOr<bool> begin_some();
  void end() { --depth_; }

  ValueKind next() const;  // takes nothing
  // Takes one value of whatever kind.
  Status skip();
  // Nothing may be left.
  Status finish();

  const Status& status() const { return status_; }  // the first error
  // An error of kind protocol that says where; it stays.
  Status fail(std::string_view what);
  Status fail_with(Status error);
  size_t position() const { return at_; }

 private:
  size_t left() const { return payload_.body.size() - at_; }
  Status expect(uint8_t tag);
  Status wrong_tag(std::string_view expected);
  StatusOr<uint64_t> take_number(std::string_view what);
  StatusOr<std::string_view> take_span(uint8_t tag);
  StatusOr<size_t> take_count(size_t least_bytes_each);
  Status descend();
  Status take_packed_body(internal::PackedNumbers* numbers);

  Payload payload_;
  size_t at_ = 0;
  size_t next_tensor_ = 0;
  size_t next_reference_ = 0;
  int depth_ = 0;
  Status status_;
};

template <>
struct Codec<bool> {
  static constexpr KindText kKind{"bool"};
  static void encode(Encoder& out, bool value) { out.put_bool(value); }
  static StatusOr<bool> decode(Decoder& in) { return in.take_bool(); }
};

template <class T>
requires(internal::kIsWireInteger<T>) struct Codec<T> {
  static constexpr KindText kKind{"int"};
  static void encode(Encoder& out, T value) { out.put_int(internal::WireInt::of(value)); }
  static StatusOr<T> decode(Decoder& in) {
    WEFT_ASSIGN_OR_RETURN(const internal::WireInt wide, in.take_int());
    if (!wide.fits<T>()) return in.fail_with(internal::does_not_fit<T>(wide));
    return static_cast<T>(wide.bits);
  }
};

template <class T>
requires(std::is_enum_v<T>) struct Codec<T> {
  using Under = std::underlying_type_t<T>;
  static constexpr auto kKind = Codec<Under>::kKind;
  static void encode(Encoder& out, T value) { out.put(static_cast<Under>(value)); }
  static StatusOr<T> decode(Decoder& in) {
    WEFT_ASSIGN_OR_RETURN(const Under value, in.take<Under>());
    return static_cast<T>(value);
  }
};

template <class T>
requires(internal::kIsWireFloat<T>) struct Codec<T> {
  static constexpr KindText kKind{"float"};
  static void encode(Encoder& out, T value) { out.put_float(static_cast<double>(value)); }
  static StatusOr<T> decode(Decoder& in) {
    WEFT_ASSIGN_OR_RETURN(const double value, in.take_float());
    return static_cast<T>(value);
  }
};

template <>
struct Codec<std::string> {
  static constexpr KindText kKind{"string"};
  static void encode(Encoder& out, const std::string& value) { out.put_string(value); }
  static StatusOr<std::string> decode(Decoder& in) { return in.take_string(); }
};

template <>
struct Codec<Bytes> {
  static constexpr KindText kKind{"bytes"};
  static void encode(Encoder& out, const Bytes& value) { out.put_bytes(value.data); }
  static StatusOr<Bytes> decode(Decoder& in) {
    WEFT_ASSIGN_OR_RETURN(std::string data, in.take_bytes());
    return Bytes{std::move(data)};
  }
};

template <>
struct Codec<at::Tensor> {
  static constexpr KindText kKind{"tensor"};
  static void encode(Encoder& out, const at::Tensor& value) { out.put_tensor(value); }
  static StatusOr<at::Tensor> decode(Decoder& in) { return in.take_tensor(); }
};

template <>
struct Codec<std::monostate> {
  static constexpr KindText kKind{"none"};
  static void encode(Encoder& out, std::monostate) { out.put_none(); }
  static StatusOr<std::monostate> decode(Decoder& in) {
    WEFT_RETURN_IF_ERROR(in.take_none());
    return std::monostate();
  }
};

}  // namespace weft

#endif  // WEFT_RPC_CODEC_H_
