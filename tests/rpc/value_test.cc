// What travels, arrives; what should not, is refused with words.

#include "weft/rpc/value.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "weft/common/worker_info.h"
#include "weft/rpc/aten_operators.h"
#include "weft/rpc/struct.h"

namespace values {

struct Point {
  double x = 0;
  double y = 0;
  std::string label = "none";
  friend bool operator==(const Point&, const Point&) = default;
};
WEFT_STRUCT(Point, x, y, label);

// The same struct as programs of other ages know it.
namespace older {
struct Point {
  double x = 0;
};
WEFT_STRUCT(Point, x);
}  // namespace older
namespace newer {
struct Point {
  double x = 0;
  double y = 0;
  std::string label = "none";
  std::vector<std::map<std::string, std::optional<int>>> extra{};
  std::variant<int, std::string> more = 1;
  at::Tensor weights{};
};
WEFT_STRUCT(Point, x, y, label, extra, more, weights);
}  // namespace newer

struct Tree {
  int value = 0;
  std::vector<Tree> children{};
  friend bool operator==(const Tree&, const Tree&) = default;
};
WEFT_STRUCT(Tree, value, children);

struct Empty {
  friend bool operator==(const Empty&, const Empty&) = default;
};
WEFT_STRUCT(Empty);

class Hidden {
 public:
  Hidden() = default;
  explicit Hidden(int secret) : secret_(secret) {}
  int secret() const { return secret_; }

 private:
  friend WEFT_STRUCT(Hidden, secret_);
  int secret_ = 0;
};

// No default constructor, an own invariant: the serializer is replaced.
class Money {
 public:
  static Money of_cents(int64_t cents) { return Money(cents); }
  int64_t cents() const { return cents_; }

 private:
  explicit Money(int64_t cents) : cents_(cents) {}
  int64_t cents_;
};

enum class Color : uint8_t { kRed = 1, kBlue = 200 };

}  // namespace values

template <>
struct weft::Codec<values::Money> {
  static constexpr weft::KindText kKind{"Money"};
  static void encode(weft::Encoder& out, const values::Money& m) { out.put(m.cents()); }
  static weft::StatusOr<values::Money> decode(weft::Decoder& in) {
    WEFT_ASSIGN_OR_RETURN(const int64_t cents, in.take<int64_t>());
    if (cents < 0) return in.fail("expected an amount, found a debt");
    return values::Money::of_cents(cents);
  }
};

namespace weft {
namespace {

template <class T>
Payload encoded(const T& value) {
  Payload payload;
  Encoder out(&payload);
  out.put(value);
  EXPECT_TRUE(out.status().ok()) << out.status();
  return payload;
}

template <class T>
StatusOr<T> decoded(Payload payload) {
  Decoder in(std::move(payload));
  StatusOr<T> value = in.take<T>();
  if (value.ok()) {
    if (Status s = in.finish(); !s.ok()) return s;
  }
  return value;
}

template <class T>
std::string kind_text() {
  return std::string(Codec<T>::kKind.view());
}

template <class From, class To>
void round_trip(const From& from, const To& to) {
  const StatusOr<To> result = decoded<To>(encoded(from));
  ASSERT_TRUE(result.ok()) << kind_text<From>() << ": " << result.status();
  EXPECT_TRUE(*result == to) << kind_text<From>();
}

template <class T>
void round_trip(const T& value) {
  const StatusOr<T> result = decoded<T>(encoded(value));
  ASSERT_TRUE(result.ok()) << kind_text<T>() << ": " << result.status();
  EXPECT_TRUE(*result == value) << kind_text<T>();
}

template <class T>
void limits() {
  round_trip(std::numeric_limits<T>::min());
  round_trip(std::numeric_limits<T>::max());
  round_trip(T{0});
  round_trip(T{1});
  round_trip(std::vector<T>{std::numeric_limits<T>::min(), T{7}, std::numeric_limits<T>::max()});
}

TEST(Value, NumbersOfEveryWidth) {
  limits<char>();
  limits<signed char>();
  limits<unsigned char>();
  limits<int16_t>();
  limits<uint16_t>();
  limits<int32_t>();
  limits<uint32_t>();
  limits<int64_t>();
  limits<uint64_t>();
  limits<long>();           // NOLINT
  limits<long long>();      // NOLINT
  limits<unsigned long>();  // NOLINT
  limits<char16_t>();
  limits<float>();
  limits<double>();
  round_trip(-1);
  round_trip(std::numeric_limits<double>::infinity());
  round_trip(true);
  round_trip(false);
  round_trip(values::Color::kBlue);
  const StatusOr<double> nan = decoded<double>(encoded(std::numeric_limits<double>::quiet_NaN()));
  ASSERT_TRUE(nan.ok());
  EXPECT_TRUE(*nan != *nan);
}

TEST(Value, ContainersOfEveryKind) {
  round_trip(std::string());
  round_trip(std::string("a\0b\xff", 4));
  round_trip(std::string(1 << 20, 'x'));
  round_trip(Bytes{std::string("\0\1\2", 3)});
  round_trip(std::vector<std::byte>{std::byte{0}, std::byte{255}});
  round_trip(std::monostate());
  round_trip(std::vector<int>{});
  round_trip(std::vector<bool>{true, false, true});
  round_trip(std::vector<std::string>{"a", "", "c"});
  round_trip(std::vector<std::vector<double>>{{}, {1.5}, {2, 3}});
  round_trip(std::vector<values::Color>{values::Color::kRed, values::Color::kBlue});
  round_trip(std::array<int, 3>{1, 2, 3});
  round_trip(std::array<std::string, 2>{"x", "y"});
  round_trip(std::array<double, 0>{});
  round_trip(std::set<int>{3, 1, 2});
  round_trip(std::unordered_set<std::string>{"p", "q"});
  round_trip(std::map<std::string, int>{{"a", 1}, {"b", -2}});
  round_trip(std::unordered_map<int, std::vector<int>>{{1, {1}}, {-7, {}}});
  round_trip(std::optional<int>());
  round_trip(std::optional<int>(5));
  round_trip(std::optional<std::optional<int>>(std::optional<int>()));
  round_trip(std::optional<std::optional<int>>());
  round_trip(std::tuple<>());
  round_trip(std::tuple<int, std::string, double>(1, "two", 3.0));
  round_trip(std::pair<bool, std::string>(true, "x"));
  round_trip(std::variant<int, std::string, std::monostate>("s"));
  round_trip(std::variant<int, int>(std::in_place_index<1>, 4));
  round_trip(WorkerInfo{"trainer-0", 7, 0xfedcba9876543210u});
  round_trip(values::Point{1, 2, "here"});
  round_trip(values::Empty{});
  round_trip(values::Tree{1, {values::Tree{2, {}}, values::Tree{3, {values::Tree{4, {}}}}}});
  round_trip(std::map<std::string, std::vector<std::tuple<values::Point, std::optional<Bytes>>>>{
      {"k", {{values::Point{}, Bytes{"b"}}, {values::Point{3, 4, ""}, std::nullopt}}}});
}

TEST(Value, ListsOfOneKindMeetWhateverTheContainer) {
  round_trip(std::vector<int>{1, 2, 3}, std::vector<int64_t>{1, 2, 3});
  round_trip(std::vector<int64_t>{1, 2, 3}, std::array<uint8_t, 3>{1, 2, 3});
  round_trip(std::set<int16_t>{1, 2}, std::vector<uint64_t>{1, 2});
  round_trip(std::vector<float>{1.5F}, std::vector<double>{1.5});
  round_trip(std::vector<double>{1.5}, std::vector<float>{1.5F});
  round_trip(std::vector<values::Color>{values::Color::kBlue}, std::vector<int>{200});
  round_trip(std::vector<int>{1, 200},
             std::vector<values::Color>{values::Color::kRed, values::Color::kBlue});
  round_trip(std::vector<std::pair<int, int>>{{1, 2}},
             std::vector<std::tuple<int64_t, int8_t>>{{1, 2}});
}

TEST(Value, ScalarsAndTensorOptions) {
  for (const at::Scalar& s : {at::Scalar(true), at::Scalar(-3), at::Scalar(2.5),
                              at::Scalar(std::numeric_limits<uint64_t>::max()),
                              at::Scalar(c10::complex<double>(1, -2))}) {
    const StatusOr<at::Scalar> back = decoded<at::Scalar>(encoded(s));
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(back->type(), s.type());
    EXPECT_EQ(back->toComplexDouble(), s.toComplexDouble());
  }
  const at::TensorOptions options = at::TensorOptions().dtype(at::kHalf).requires_grad(true);
  const StatusOr<at::TensorOptions> back = decoded<at::TensorOptions>(encoded(options));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->dtype(), at::kHalf);
  EXPECT_TRUE(back->requires_grad());
  EXPECT_FALSE(back->has_device());
}

TEST(Value, ADecodedIntMustFit) {
  const auto refused = [](const Status& status, std::string_view text) {
    EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange) << status;
    EXPECT_NE(status.message().find(absl::string_view(text.data(), text.size())), std::string::npos)
        << status;
  };
  refused(decoded<int8_t>(encoded(300)).status(), "300 does not fit a signed integer of 8 bits");
  refused(decoded<uint8_t>(encoded(-1)).status(), "-1 does not fit an unsigned integer of 8 bits");
  refused(decoded<int64_t>(encoded(std::numeric_limits<uint64_t>::max())).status(),
          "18446744073709551615 does not fit a signed integer of 64 bits");
  refused(decoded<std::vector<int8_t>>(encoded(std::vector<int>{1, 128})).status(),
          "128 does not fit");
  refused(decoded<values::Color>(encoded(256)).status(), "256 does not fit");
  round_trip(255, uint8_t{255});
}

TEST(Value, RPC_51_the_serializer_of_a_type_can_be_replaced) {
  const StatusOr<values::Money> back =
      decoded<values::Money>(encoded(values::Money::of_cents(1234)));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->cents(), 1234);
  const auto list =
      decoded<std::vector<values::Money>>(encoded(std::vector<values::Money>{*back, *back}));
  ASSERT_TRUE(list.ok()) << list.status();
  EXPECT_EQ(list->size(), 2u);
  const Status debt = decoded<values::Money>(encoded(-1)).status();
  EXPECT_EQ(error_kind(debt), ErrorKind::kProtocol);
  EXPECT_EQ(kind_text<std::optional<values::Money>>(), "optional<Money>");
}

TEST(Value, PrivateFieldsTravelWithAFriend) {
  const StatusOr<values::Hidden> back = decoded<values::Hidden>(encoded(values::Hidden(42)));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->secret(), 42);
}

TEST(Value, AStructMayGainFieldsAtItsEnd) {
  values::older::Point old;
  old.x = 1.5;
  const StatusOr<values::Point> more = decoded<values::Point>(encoded(old));
  ASSERT_TRUE(more.ok()) << more.status();
  EXPECT_EQ(*more, (values::Point{1.5, 0, "none"}));

  values::newer::Point young;
  young.x = 2;
  young.label = "young";
  young.extra = {{{"a", 1}, {"b", std::nullopt}}, {}};
  young.more = std::string("text");
  // What is passed over may hold anything, tensors too; what follows is not disturbed.
  Payload payload;
  Encoder out(&payload);
  out.put(young);
  out.put(std::string("after"));
  Decoder in(std::move(payload));
  const StatusOr<values::older::Point> less = in.take<values::older::Point>();
  ASSERT_TRUE(less.ok()) << less.status();
  EXPECT_EQ(less->x, 2);
  EXPECT_EQ(*in.take<std::string>(), "after");
  EXPECT_TRUE(in.finish().ok());
  EXPECT_EQ(kind_text<values::older::Point>(), kind_text<values::newer::Point>());
}

TEST(Value, UnorderedContainersEncodeInOrder) {
  std::unordered_map<std::string, int> a;
  std::unordered_map<std::string, int> b(1024);
  for (int i = 0; i < 100; ++i) a[std::to_string(i)] = i;
  for (int i = 99; i >= 0; --i) b[std::to_string(i)] = i;
  EXPECT_EQ(encoded(a).body, encoded(b).body);
  EXPECT_EQ(encoded(a).body, encoded(std::map<std::string, int>(a.begin(), a.end())).body);
  const std::unordered_set<int> s1{1, 2, 3};
  const std::unordered_set<int> s2{3, 2, 1};
  EXPECT_EQ(encoded(s1).body, encoded(s2).body);
}

TEST(Value, ArithmeticVectorsArePacked) {
  EXPECT_LE(encoded(std::vector<float>(1000)).body.size(), 4000u + 8);
  EXPECT_LE(encoded(std::vector<uint8_t>(1000)).body.size(), 1000u + 8);
  EXPECT_LE(encoded(std::array<int64_t, 10>{}).body.size(), 80u + 8);
}

TEST(Value, DepthIsBounded) {
  values::Tree deep;
  for (int i = 0; i < 7; ++i) deep = values::Tree{i, {deep}};
  round_trip(deep);  // 8 structs and 8 lists
  deep = values::Tree{8, {deep}};
  Payload payload;
  Encoder out(&payload);
  out.put(deep);
  EXPECT_EQ(error_kind(out.status()), ErrorKind::kInvalidArgument) << out.status();
  const Status refused = decoded<values::Tree>(payload).status();
  EXPECT_EQ(error_kind(refused), ErrorKind::kProtocol) << refused;
  // Passing over what one does not know has the same bound, whatever the bytes.
  Payload nested;
  nested.body.assign(1 << 20, '\x0f');
  Decoder in(nested);
  EXPECT_EQ(error_kind(in.skip()), ErrorKind::kProtocol);
}

TEST(Value, ErrorsSayWhatWasExpectedAndFoundAndWhere) {
  const Status wrong =
      decoded<std::tuple<int, int>>(encoded(std::tuple<int, std::string>(1, "x"))).status();
  EXPECT_EQ(error_kind(wrong), ErrorKind::kProtocol);
  EXPECT_EQ(wrong.message(), "value at byte 4 of 7: expected int, found string");
  EXPECT_EQ(decoded<int>(Payload{}).status().message(),
            "value at byte 0 of 0: expected int, found the end");
  EXPECT_EQ(decoded<bool>(Payload{std::string("\x63"), {}}).status().message(),
            "value at byte 0 of 1: expected bool, found the unknown tag 99");
  EXPECT_EQ((decoded<std::tuple<int>>(encoded(std::tuple<int, int>(1, 2))).status().message()),
            "value at byte 2 of 6: expected a tuple of 1, found one of 2");
  EXPECT_EQ((decoded<std::variant<int>>(encoded(std::variant<int, int>(std::in_place_index<1>, 1)))
                 .status()
                 .message()),
            "value at byte 2 of 4: expected one of 1 alternatives, found number 1");
  Payload more = encoded(1);
  more.body.push_back('\0');
  EXPECT_EQ(decoded<int>(more).status().message(),
            "value at byte 2 of 3: expected the end, found 1 more bytes");
}

TEST(Value, TheFirstErrorStays) {
  Decoder in(encoded(std::string("text")));
  const Status first = in.take<int>().status();
  EXPECT_FALSE(first.ok());
  EXPECT_EQ(in.take<std::string>().status(), first);
  EXPECT_EQ(in.finish(), first);
}

// Every prefix of a value is an error, never a crash, never another value.
TEST(Value, TruncatedBytesAreRefused) {
  using Value =
      std::tuple<std::map<std::string, std::vector<int>>, std::optional<values::Point>,
                 std::variant<int, std::string>, std::vector<double>, values::Tree, Bytes>;
  const Value value{{{"a", {1, 2}}, {"b", {}}},
                    values::Point{1, 2, "p"},
                    std::string("v"),
                    {1.5, 2.5},
                    values::Tree{1, {values::Tree{}}},
                    Bytes{"xyz"}};
  const Payload whole = encoded(value);
  for (size_t n = 0; n < whole.body.size(); ++n) {
    const Status refused = decoded<Value>(Payload{whole.body.substr(0, n), {}}).status();
    EXPECT_EQ(error_kind(refused), ErrorKind::kProtocol) << "prefix " << n << ": " << refused;
  }
  // Flipped bits either still are a value or are refused by kind.
  std::mt19937 random(7);
  for (int i = 0; i < 20000; ++i) {
    Payload bent = whole;
    for (int k = static_cast<int>(random() % 3); k >= 0; --k) {
      bent.body[random() % bent.body.size()] ^= static_cast<char>(1u << (random() % 8));
    }
    const StatusOr<Value> result = decoded<Value>(bent);
    if (!result.ok()) {
      EXPECT_TRUE(error_kind(result.status()) == ErrorKind::kProtocol ||
                  result.status().code() == absl::StatusCode::kOutOfRange)
          << result.status();
    }
  }
}

TEST(Value, CountsAreCheckedAgainstTheBytesThatAreLeft) {
  const auto refused = [](const Status& status) {
    EXPECT_EQ(error_kind(status), ErrorKind::kProtocol) << status;
  };
  const std::string huge = "\xff\xff\xff\xff\xff\xff\xff\xff\x7f";
  refused(decoded<std::vector<std::string>>(Payload{"\x09" + huge, {}}).status());
  refused(decoded<std::vector<int>>(Payload{std::string("\x0a\x07") + huge, {}}).status());
  refused((decoded<std::map<int, int>>(Payload{"\x0c" + huge, {}}).status()));
  refused(decoded<std::string>(Payload{"\x06" + huge, {}}).status());
  refused(decoded<values::Point>(Payload{"\x0d" + huge, {}}).status());
  refused(decoded<std::vector<int>>(Payload{std::string("\x0a\x0b\x00", 3), {}}).status());
  refused(decoded<std::vector<int>>(encoded(std::vector<double>{1})).status());
  // A number spelled with padding, or with more than 64 bits, has no second spelling.
  refused(decoded<int>(Payload{std::string("\x03\x80\x00", 3), {}}).status());
  refused(decoded<uint64_t>(Payload{std::string("\x04\x05", 2), {}}).status());
  refused(decoded<int64_t>(Payload{"\x03\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", {}}).status());
}

TEST(Value, KeysAndMembersAreDistinct) {
  const std::vector<int> twice{5, 5};
  EXPECT_EQ(error_kind(decoded<std::set<int>>(encoded(twice)).status()), ErrorKind::kProtocol);
  Payload payload;
  Encoder out(&payload);
  out.begin_map(2);
  for (int i = 0; i < 4; ++i) out.put(1);
  out.end();
  EXPECT_EQ(error_kind(decoded<std::map<int, int>>(payload).status()), ErrorKind::kProtocol);
}

TEST(Value, KindsOnTheWire) {
  EXPECT_EQ(kind_text<char>(), "int");
  EXPECT_EQ(kind_text<values::Color>(), "int");
  EXPECT_EQ(kind_text<float>(), "float");
  EXPECT_EQ(kind_text<bool>(), "bool");
  EXPECT_EQ(kind_text<at::Tensor>(), "tensor");
  EXPECT_EQ((kind_text<std::map<std::string, std::array<int, 3>>>()), "map<string,list<int>>");
  EXPECT_EQ((kind_text<std::variant<std::monostate, Bytes>>()), "variant<none,bytes>");
  EXPECT_EQ((kind_text<std::pair<int, std::optional<double>>>()), "tuple<int,optional<float>>");
  EXPECT_EQ((kind_text<std::unordered_set<std::string>>()), "list<string>");
  EXPECT_EQ(kind_text<values::Point>(), "Point");
  EXPECT_EQ(kind_text<WorkerInfo>(), "WorkerInfo");
  EXPECT_EQ(kind_text<at::Scalar>(), "scalar");
}

}  // namespace
}  // namespace weft
