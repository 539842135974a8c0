#include "weft/rpc/codec.h"

#include <bit>
#include <cstring>

#include "weft/rpc/internal/agent/tensor_meta.h"
#include "weft/rpc/internal/codec/text.h"
#include "weft/rpc/internal/codec/varint.h"

static_assert(std::endian::native == std::endian::little,
              "packed numbers are sent as they lie in memory, lowest byte first");

namespace weft {
namespace {

using internal::cat;

// What stands before a value; sent, never reused.
enum Tag : uint8_t {
  kNone = 0,
  kFalse = 1,
  kTrue = 2,
  kInt = 3,
  kUnsigned = 4,  // above the range of int64
  kFloat = 5,
  kString = 6,
  kBytes = 7,
  kTensor = 8,
  kList = 9,
  kPacked = 10,
  kTuple = 11,
  kMap = 12,
  kStruct = 13,
  kVariant = 14,
  kSome = 15,
  kReference = 16,
};
constexpr uint8_t kTags = 17;

constexpr const char* kTagNames[kTags] = {
    "none",   "bool", "bool",           "int",   "int", "float",  "string",  "bytes",
    "tensor", "list", "packed numbers", "tuple", "map", "struct", "variant", "a present optional",
    "rref"};

// 0: unknown.
size_t packed_item_bytes(uint8_t code) {
  constexpr size_t kBytes[] = {0, 1, 1, 2, 2, 4, 4, 8, 8, 4, 8};
  return code < sizeof(kBytes) / sizeof(kBytes[0]) ? kBytes[code] : 0;
}
constexpr uint8_t kFirstFloatCode = 9;

constexpr size_t kUsualTensors = 4;  // one allocation where there are no more

template <class T>
T load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

}  // namespace

namespace internal {

Status does_not_fit(WireInt value, size_t type_bytes, bool type_signed) {
  const std::string text =
      value.above ? std::to_string(static_cast<uint64_t>(value.bits)) : std::to_string(value.bits);
  return make_error(absl::StatusCode::kOutOfRange, ErrorKind::kInvalidArgument,
                    cat(text, " does not fit ", type_signed ? "a signed" : "an unsigned",
                        " integer of ", type_bytes * 8, " bits"));
}

WireInt PackedNumbers::integer(size_t i) const {
  switch (code) {
    case 1: return WireInt::of(load<int8_t>(data + i));
    case 2: return WireInt::of(load<uint8_t>(data + i));
    case 3: return WireInt::of(load<int16_t>(data + 2 * i));
    case 4: return WireInt::of(load<uint16_t>(data + 2 * i));
    case 5: return WireInt::of(load<int32_t>(data + 4 * i));
    case 6: return WireInt::of(load<uint32_t>(data + 4 * i));
    case 7: return WireInt::of(load<int64_t>(data + 8 * i));
    default: return WireInt::of(load<uint64_t>(data + 8 * i));
  }
}

double PackedNumbers::floating(size_t i) const {
  return code == kFirstFloatCode ? static_cast<double>(load<float>(data + 4 * i))
                                 : load<double>(data + 8 * i);
}

void PackedNumbers::copy_to(void* out) const {
  std::memcpy(out, data, count * packed_item_bytes(code));
}

}  // namespace internal

Reference::~Reference() = default;

// ---- Encoder -----------------------------------------------------------------------------------

void Encoder::put_none() { out_->body.push_back(kNone); }
void Encoder::put_bool(bool value) { out_->body.push_back(value ? kTrue : kFalse); }

void Encoder::put_int(internal::WireInt value) {
  if (value.above) {
    out_->body.push_back(kUnsigned);
    internal::append_varint(static_cast<uint64_t>(value.bits), &out_->body);
  } else {
    out_->body.push_back(kInt);
    internal::append_varint(internal::zigzag(value.bits), &out_->body);
  }
}

void Encoder::put_float(double value) {
  char bytes[9] = {kFloat};
  std::memcpy(bytes + 1, &value, sizeof(value));
  out_->body.append(bytes, sizeof(bytes));
}

void Encoder::put_string(std::string_view text) {
  out_->body.push_back(kString);
  internal::append_varint(text.size(), &out_->body);
  out_->body.append(text);
}

void Encoder::put_bytes(std::string_view bytes) {
  out_->body.push_back(kBytes);
  internal::append_varint(bytes.size(), &out_->body);
  out_->body.append(bytes);
}

void Encoder::put_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    put_none();
    return;
  }
  if (Status s = internal::check_sendable_tensor(tensor); !s.ok()) {
    fail(std::move(s));
    return;
  }
  out_->body.push_back(kTensor);
  if (out_->tensors.empty()) out_->tensors.reserve(kUsualTensors);
  out_->tensors.push_back(tensor);
}

void Encoder::put_reference(std::shared_ptr<const Reference> reference) {
  out_->body.push_back(kReference);
  out_->references.push_back(std::move(reference));
}

void Encoder::put_packed(uint8_t code, const void* data, size_t count, size_t item_bytes) {
  out_->body.push_back(kPacked);
  out_->body.push_back(static_cast<char>(code));
  internal::append_varint(count, &out_->body);
  if (count > 0) out_->body.append(static_cast<const char*>(data), count * item_bytes);
}

void Encoder::begin(uint8_t tag) {
  out_->body.push_back(static_cast<char>(tag));
  if (++depth_ > kMaxValueDepth) {
    fail(make_error(ErrorKind::kInvalidArgument,
                    cat("values are nested more than ", kMaxValueDepth, " deep")));
  }
}
void Encoder::begin_counted(uint8_t tag, uint64_t count) {
  begin(tag);
  internal::append_varint(count, &out_->body);
}
void Encoder::begin_list(size_t count) { begin_counted(kList, count); }
void Encoder::begin_tuple(size_t count) { begin_counted(kTuple, count); }
void Encoder::begin_map(size_t count) { begin_counted(kMap, count); }
void Encoder::begin_struct(size_t fields) { begin_counted(kStruct, fields); }
void Encoder::begin_variant(size_t index) { begin_counted(kVariant, index); }
void Encoder::begin_some() { begin(kSome); }

// ---- Decoder -----------------------------------------------------------------------------------

Status Decoder::fail(std::string_view what) {
  return fail_with(make_error(ErrorKind::kProtocol, what));
}

Status Decoder::fail_with(Status error) {
  if (status_.ok()) {
    status_ = annotate(error, cat("value at byte ", at_, " of ", payload_.body.size()));
  }
  return status_;
}

Status Decoder::wrong_tag(std::string_view expected) {
  if (!status_.ok()) return status_;
  if (left() == 0) return fail(cat("expected ", expected, ", found the end"));
  const auto tag = static_cast<uint8_t>(payload_.body[at_]);
  if (tag >= kTags) return fail(cat("expected ", expected, ", found the unknown tag ", int{tag}));
  return fail(cat("expected ", expected, ", found ", kTagNames[tag]));
}

Status Decoder::expect(uint8_t tag) {
  if (!status_.ok()) return status_;
  if (left() == 0 || static_cast<uint8_t>(payload_.body[at_]) != tag) {
    return wrong_tag(kTagNames[tag]);
  }
  ++at_;
  return absl::OkStatus();
}

StatusOr<uint64_t> Decoder::take_number(std::string_view what) {
  uint64_t value = 0;
  const size_t used = internal::take_varint(std::string_view(payload_.body).substr(at_), &value);
  if (used == 0) return fail(cat("expected ", what, ", found no number"));
  at_ += used;
  return value;
}

StatusOr<std::string_view> Decoder::take_span(uint8_t tag) {
  WEFT_RETURN_IF_ERROR(expect(tag));
  WEFT_ASSIGN_OR_RETURN(const uint64_t length, take_number("a length"));
  if (length > left()) {
    return fail(cat("expected a ", kTagNames[tag], " of ", length, " bytes, found ", left()));
  }
  const std::string_view span = std::string_view(payload_.body).substr(at_, length);
  at_ += length;
  return span;
}

StatusOr<size_t> Decoder::take_count(size_t least_bytes_each) {
  WEFT_ASSIGN_OR_RETURN(const uint64_t count, take_number("a count"));
  if (count > left() / least_bytes_each) {
    return fail(cat("expected ", count, " values, found ", left(), " bytes for them"));
  }
  return static_cast<size_t>(count);
}

Status Decoder::descend() {
  if (++depth_ > kMaxValueDepth) {
    return fail(cat("expected at most ", kMaxValueDepth, " levels, found more"));
  }
  return absl::OkStatus();
}

Status Decoder::take_none() { return expect(kNone); }

StatusOr<bool> Decoder::take_bool() {
  if (!status_.ok()) return status_;
  if (left() > 0 && (payload_.body[at_] == kTrue || payload_.body[at_] == kFalse)) {
    return payload_.body[at_++] == kTrue;
  }
  return wrong_tag("bool");
}

StatusOr<internal::WireInt> Decoder::take_int() {
  if (!status_.ok()) return status_;
  if (left() == 0 || (payload_.body[at_] != kInt && payload_.body[at_] != kUnsigned)) {
    return wrong_tag("int");
  }
  const bool above = payload_.body[at_++] == kUnsigned;
  WEFT_ASSIGN_OR_RETURN(const uint64_t bits, take_number("an int"));
  if (!above) return internal::WireInt{internal::unzigzag(bits), false};
  if (bits <= static_cast<uint64_t>(INT64_MAX)) {
    return fail(cat("expected an int above the range of int64, found ", bits));
  }
  return internal::WireInt{static_cast<int64_t>(bits), true};
}

StatusOr<double> Decoder::take_float() {
  WEFT_RETURN_IF_ERROR(expect(kFloat));
  if (left() < sizeof(double)) return fail(cat("expected 8 bytes of a float, found ", left()));
  const auto value = load<double>(payload_.body.data() + at_);
  at_ += sizeof(double);
  return value;
}

StatusOr<std::string> Decoder::take_string() {
  WEFT_ASSIGN_OR_RETURN(const std::string_view span, take_span(kString));
  return std::string(span);
}

StatusOr<std::string> Decoder::take_bytes() {
  WEFT_ASSIGN_OR_RETURN(const std::string_view span, take_span(kBytes));
  return std::string(span);
}

StatusOr<at::Tensor> Decoder::take_tensor() {
  if (!status_.ok()) return status_;
  if (left() > 0 && payload_.body[at_] == kNone) {
    ++at_;
    return at::Tensor();
  }
  WEFT_RETURN_IF_ERROR(expect(kTensor));
  if (next_tensor_ >= payload_.tensors.size()) {
    return fail(cat("expected tensor number ", next_tensor_, ", found only ",
                    payload_.tensors.size(), " beside the value"));
  }
  return std::move(payload_.tensors[next_tensor_++]);
}

StatusOr<std::shared_ptr<const Reference>> Decoder::take_reference() {
  WEFT_RETURN_IF_ERROR(expect(kReference));
  if (next_reference_ >= payload_.references.size()) {
    return fail(cat("expected reference number ", next_reference_, ", found only ",
                    payload_.references.size(),
                    " beside the value: an RRef travels with calls only, its bytes alone say "
                    "nothing"));
  }
  return std::move(payload_.references[next_reference_++]);
}

Status Decoder::take_packed_body(internal::PackedNumbers* numbers) {
  if (left() == 0) return fail("expected a type of numbers, found the end");
  const auto code = static_cast<uint8_t>(payload_.body[at_]);
  const size_t item_bytes = packed_item_bytes(code);
  if (item_bytes == 0) return fail(cat("expected a type of numbers, found ", int{code}));
  ++at_;
  WEFT_ASSIGN_OR_RETURN(const size_t count, take_count(item_bytes));
  *numbers = internal::PackedNumbers{code, count, payload_.body.data() + at_};
  at_ += count * item_bytes;
  return absl::OkStatus();
}

StatusOr<std::optional<internal::PackedNumbers>> Decoder::take_packed(bool floating) {
  if (!status_.ok()) return status_;
  if (left() == 0 || payload_.body[at_] != kPacked) {
    return std::optional<internal::PackedNumbers>();
  }
  ++at_;
  internal::PackedNumbers numbers;
  WEFT_RETURN_IF_ERROR(take_packed_body(&numbers));
  if ((numbers.code >= kFirstFloatCode) != floating) {
    return fail(floating ? "expected packed floats, found ints"
                         : "expected packed ints, found floats");
  }
  return std::optional<internal::PackedNumbers>(numbers);
}

StatusOr<size_t> Decoder::begin_list() {
  WEFT_RETURN_IF_ERROR(expect(kList));
  WEFT_RETURN_IF_ERROR(descend());
  return take_count(1);
}

Status Decoder::begin_tuple(size_t expected) {
  WEFT_RETURN_IF_ERROR(expect(kTuple));
  WEFT_RETURN_IF_ERROR(descend());
  WEFT_ASSIGN_OR_RETURN(const size_t count, take_count(1));
  if (count != expected)
    return fail(cat("expected a tuple of ", expected, ", found one of ", count));
  return absl::OkStatus();
}

StatusOr<size_t> Decoder::begin_map() {
  WEFT_RETURN_IF_ERROR(expect(kMap));
  WEFT_RETURN_IF_ERROR(descend());
  return take_count(2);
}

StatusOr<size_t> Decoder::begin_struct() {
  WEFT_RETURN_IF_ERROR(expect(kStruct));
  WEFT_RETURN_IF_ERROR(descend());
  return take_count(1);
}

StatusOr<size_t> Decoder::begin_variant(size_t alternatives) {
  WEFT_RETURN_IF_ERROR(expect(kVariant));
  WEFT_RETURN_IF_ERROR(descend());
  WEFT_ASSIGN_OR_RETURN(const uint64_t index, take_number("an alternative"));
  if (index >= alternatives) {
    return fail(cat("expected one of ", alternatives, " alternatives, found number ", index));
  }
  return static_cast<size_t>(index);
}

StatusOr<bool> Decoder::begin_some() {
  if (!status_.ok()) return status_;
  if (left() > 0 && payload_.body[at_] == kNone) {
    ++at_;
    return false;
  }
  if (left() == 0 || payload_.body[at_] != kSome) return wrong_tag("an optional");
  ++at_;
  WEFT_RETURN_IF_ERROR(descend());
  return true;
}

ValueKind Decoder::next() const {
  constexpr ValueKind kKinds[kTags] = {
      ValueKind::kNone,     ValueKind::kBool,   ValueKind::kBool,    ValueKind::kInt,
      ValueKind::kInt,      ValueKind::kFloat,  ValueKind::kString,  ValueKind::kBytes,
      ValueKind::kTensor,   ValueKind::kList,   ValueKind::kList,    ValueKind::kTuple,
      ValueKind::kMap,      ValueKind::kStruct, ValueKind::kVariant, ValueKind::kSome,
      ValueKind::kReference};
  if (!status_.ok() || left() == 0) return ValueKind::kEnd;
  const auto tag = static_cast<uint8_t>(payload_.body[at_]);
  return tag < kTags ? kKinds[tag] : ValueKind::kEnd;
}

Status Decoder::skip() {
  if (!status_.ok()) return status_;
  if (left() == 0) return wrong_tag("a value");
  const auto tag = static_cast<uint8_t>(payload_.body[at_]);
  StatusOr<size_t> count = size_t{0};
  switch (tag) {
    case kNone:
    case kFalse:
    case kTrue: ++at_; return absl::OkStatus();
    case kInt:
    case kUnsigned: return take_int().status();
    case kFloat: return take_float().status();
    case kString:
    case kBytes: return take_span(tag).status();
    case kTensor: return take_tensor().status();
    case kReference: return take_reference().status();
    case kPacked: {
      ++at_;
      internal::PackedNumbers ignored;
      return take_packed_body(&ignored);
    }
    case kList: count = begin_list(); break;
    case kMap:
      count = begin_map();
      if (count.ok()) *count *= 2;
      break;
    case kStruct: count = begin_struct(); break;
    case kTuple:
      ++at_;
      WEFT_RETURN_IF_ERROR(descend());
      count = take_count(1);
      break;
    case kVariant:
      count = begin_variant(SIZE_MAX);
      if (count.ok()) count = size_t{1};
      break;
    case kSome:
      ++at_;
      WEFT_RETURN_IF_ERROR(descend());
      count = size_t{1};
      break;
    default: return wrong_tag("a value");
  }
  if (!count.ok()) return count.status();
  for (size_t i = 0; i < *count; ++i) WEFT_RETURN_IF_ERROR(skip());
  end();
  return absl::OkStatus();
}

Status Decoder::finish() {
  if (!status_.ok()) return status_;
  if (left() > 0) return fail(cat("expected the end, found ", left(), " more bytes"));
  if (next_tensor_ != payload_.tensors.size()) {
    return fail(cat("expected ", next_tensor_, " tensors beside the value, found ",
                    payload_.tensors.size()));
  }
  if (next_reference_ != payload_.references.size()) {
    return fail(cat("expected ", next_reference_, " references beside the value, found ",
                    payload_.references.size()));
  }
  return absl::OkStatus();
}

}  // namespace weft
