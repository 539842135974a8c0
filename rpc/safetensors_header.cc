// The header of safetensors: JSON, strictly.

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "c10/core/ScalarType.h"
#include "weft/rpc/safetensors.h"

namespace weft {
namespace {

struct DtypeName {
  std::string_view name;
  at::ScalarType dtype;
};
constexpr DtypeName kDtypes[] = {
    {"BOOL", at::kBool},
    {"U8", at::kByte},
    {"I8", at::kChar},
    {"I16", at::kShort},
    {"I32", at::kInt},
    {"I64", at::kLong},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"F32", at::kFloat},
    {"F64", at::kDouble},
    {"U16", at::kUInt16},
    {"U32", at::kUInt32},
    {"U64", at::kUInt64},
    {"C64", at::kComplexFloat},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E5M2", at::kFloat8_e5m2},
};
constexpr std::string_view kMetadata = "__metadata__";
constexpr size_t kLengthBytes = 8;
constexpr size_t kMaxDimensions = 64;

Status refused(std::string_view what) { return make_error(ErrorKind::kInvalidArgument, what); }

// The length of the UTF-8 sequence that begins `text`; 0 when it is none.
size_t utf8_length(std::string_view text) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = at(0);
  const size_t n = first < 0x80   ? 1
                   : first < 0xC2 ? 0
                   : first < 0xE0 ? 2
                   : first < 0xF0 ? 3
                   : first < 0xF5 ? 4
                                  : 0;
  if (n == 0 || n > text.size()) return 0;
  for (size_t i = 1; i < n; ++i) {
    if ((at(i) & 0xC0) != 0x80) return 0;
  }
  if (n == 3 && ((first == 0xE0 && at(1) < 0xA0) || (first == 0xED && at(1) > 0x9F))) return 0;
  if (n == 4 && ((first == 0xF0 && at(1) < 0x90) || (first == 0xF4 && at(1) > 0x8F))) return 0;
  return n;
}

Status append_json_string(std::string_view text, std::string* out) {
  out->push_back('"');
  for (size_t i = 0; i < text.size();) {
    const size_t n = utf8_length(text.substr(i));
    if (n == 0) return refused(absl::StrCat("byte ", i, " of a name or value is not UTF-8"));
    const auto c = static_cast<unsigned char>(text[i]);
    if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(text[i]);
    } else if (c < 0x20) {
      absl::StrAppend(out, "\\u", absl::Hex(c, absl::kZeroPad4));
    } else {
      out->append(text.substr(i, n));
    }
    i += n;
  }
  out->push_back('"');
  return absl::OkStatus();
}

void append_utf8(uint32_t code, std::string* out) {
  const auto put = [out](uint32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | (code >> 6));
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | (code >> 12));
    put(0x80 | ((code >> 6) & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | (code >> 18));
    put(0x80 | ((code >> 12) & 0x3F));
    put(0x80 | ((code >> 6) & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

// The JSON of such a header: objects of strings, and of entries with strings and numbers.
class HeaderReader {
 public:
  explicit HeaderReader(std::string_view text) : text_(text) {}

  StatusOr<SafetensorsHeader> read() {
    if (Status s = object([this](std::string name) { return item(std::move(name)); }); !s.ok()) {
      return at_byte(s);
    }
    skip();
    if (at_ != text_.size()) return at_byte(expected("the end of the header"));
    return std::move(header_);
  }

 private:
  Status at_byte(const Status& status) const {
    return annotate(status, absl::StrCat("safetensors header, byte ", at_));
  }
  void skip() {
    while (at_ < text_.size() && std::strchr(" \t\n\r", text_[at_]) != nullptr && text_[at_] != 0) {
      ++at_;
    }
  }
  bool take(char c) {
    skip();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  Status expected(std::string_view what) const { return refused("expected " + std::string(what)); }
  Status expect(char c) {
    return take(c) ? absl::OkStatus() : expected(absl::StrCat("'", std::string(1, c), "'"));
  }

  // `use` reads each value; names are checked by it.
  template <class Use>
  Status object(const Use& use) {
    WEFT_RETURN_IF_ERROR(expect('{'));
    if (take('}')) return absl::OkStatus();
    do {
      WEFT_ASSIGN_OR_RETURN(std::string name, string());
      WEFT_RETURN_IF_ERROR(expect(':'));
      WEFT_RETURN_IF_ERROR(use(std::move(name)));
    } while (take(','));
    return expect('}');
  }
  template <class Use>
  Status array(const Use& use) {
    WEFT_RETURN_IF_ERROR(expect('['));
    if (take(']')) return absl::OkStatus();
    do {
      WEFT_RETURN_IF_ERROR(use());
    } while (take(','));
    return expect(']');
  }
  StatusOr<uint32_t> hex4() {
    if (text_.size() - at_ < 4) return expected("four hexadecimal digits");
    uint32_t code = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const char c = text_[at_];
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) return expected("four hexadecimal digits");
      code = code * 16 + static_cast<uint32_t>(digit);
    }
    return code;
  }
  Status escape(std::string* out) {
    constexpr std::string_view kFrom = "\"\\/bfnrt";
    constexpr std::string_view kTo = "\"\\/\b\f\n\r\t";
    if (at_ >= text_.size()) return expected("an escape");
    const char c = text_[at_++];
    if (const size_t i = kFrom.find(c); i != std::string_view::npos) {
      out->push_back(kTo[i]);
      return absl::OkStatus();
    }
    if (c != 'u') return expected("an escape that JSON has");
    WEFT_ASSIGN_OR_RETURN(uint32_t code, hex4());
    if (code >= 0xD800 && code < 0xDC00 && text_.substr(at_, 2) == "\\u") {
      at_ += 2;
      WEFT_ASSIGN_OR_RETURN(const uint32_t low, hex4());
      if (low < 0xDC00 || low > 0xDFFF) return expected("the second half of a pair");
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    if (code >= 0xD800 && code <= 0xDFFF) return expected("a character, not half of a pair");
    append_utf8(code, out);
    return absl::OkStatus();
  }
  StatusOr<std::string> string() {
    WEFT_RETURN_IF_ERROR(expect('"'));
    std::string out;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '"') {
        ++at_;
        return out;
      }
      if (c == '\\') {
        ++at_;
        WEFT_RETURN_IF_ERROR(escape(&out));
        continue;
      }
      const size_t n = utf8_length(text_.substr(at_));
      if (n == 0 || static_cast<unsigned char>(c) < 0x20) return expected("UTF-8 text");
      out.append(text_.substr(at_, n));
      at_ += n;
    }
    return expected("the end of a text");
  }
  StatusOr<uint64_t> number() {
    skip();
    const size_t begin = at_;
    uint64_t value = 0;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      const auto digit = static_cast<uint64_t>(text_[at_] - '0');
      constexpr auto kMost = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
      if (value > (kMost - digit) / 10) return expected("a number below 2^63");
      value = value * 10 + digit;
    }
    if (at_ == begin || (at_ > begin + 1 && text_[begin] == '0')) {
      return expected("a whole number");
    }
    return value;
  }

  Status item(std::string name) {
    if (name == kMetadata) {
      if (!header_.metadata.empty()) return expected("one '__metadata__'");
      return object([this](std::string key) -> Status {
        WEFT_ASSIGN_OR_RETURN(std::string value, string());
        const bool is_new = header_.metadata.emplace(key, std::move(value)).second;
        return is_new ? absl::OkStatus() : refused(absl::StrCat("'", key, "' twice"));
      });
    }
    SafetensorsEntry entry;
    WEFT_RETURN_IF_ERROR(annotate_name(read_entry(&entry), name));
    const bool is_new = header_.tensors.emplace(name, std::move(entry)).second;
    return is_new ? absl::OkStatus() : refused(absl::StrCat("tensor '", name, "' twice"));
  }
  static Status annotate_name(const Status& status, const std::string& name) {
    return status.ok() ? status : annotate(status, absl::StrCat("tensor '", name, "'"));
  }
  Status read_entry(SafetensorsEntry* entry) {
    bool dtype = false;
    bool shape = false;
    bool offsets = false;
    WEFT_RETURN_IF_ERROR(object([&](const std::string& key) -> Status {
      if (key == "dtype" && !dtype) {
        dtype = true;
        WEFT_ASSIGN_OR_RETURN(const std::string name, string());
        for (const DtypeName& d : kDtypes) {
          if (d.name == name) {
            entry->dtype = d.dtype;
            return absl::OkStatus();
          }
        }
        return refused(absl::StrCat("dtype '", name, "' is not known"));
      }
      if (key == "shape" && !shape) {
        shape = true;
        return array([&]() -> Status {
          WEFT_ASSIGN_OR_RETURN(const uint64_t size, number());
          if (entry->shape.size() == kMaxDimensions) return expected("at most 64 dimensions");
          entry->shape.push_back(static_cast<int64_t>(size));
          return absl::OkStatus();
        });
      }
      if (key == "data_offsets" && !offsets) {
        offsets = true;
        WEFT_RETURN_IF_ERROR(expect('['));
        WEFT_ASSIGN_OR_RETURN(entry->begin, number());
        WEFT_RETURN_IF_ERROR(expect(','));
        WEFT_ASSIGN_OR_RETURN(entry->end, number());
        return expect(']');
      }
      return refused(absl::StrCat("key '", key,
                                  "': expected 'dtype', 'shape' and 'data_offsets', "
                                  "each once"));
    }));
    if (!dtype || !shape || !offsets) {
      return refused("expected 'dtype', 'shape' and 'data_offsets'");
    }
    return absl::OkStatus();
  }

  const std::string_view text_;
  size_t at_ = 0;
  SafetensorsHeader header_;
};

// Bytes of a tensor; nothing when they do not fit 63 bits.
std::optional<uint64_t> bytes_of(const SafetensorsEntry& entry) {
  uint64_t bytes = c10::elementSize(entry.dtype);
  bool empty = false;
  for (const int64_t size : entry.shape) empty = empty || size == 0;
  if (empty) return 0;
  for (const int64_t size : entry.shape) {
    if (bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max() / size)) return {};
    bytes *= static_cast<uint64_t>(size);
  }
  return bytes;
}

Status check_places(const SafetensorsHeader& header, uint64_t data_size) {
  std::vector<const std::pair<const std::string, SafetensorsEntry>*> order;
  for (const auto& item : header.tensors) order.push_back(&item);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  uint64_t at = 0;
  for (const auto* item : order) {
    const auto& [name, entry] = *item;
    const auto bytes = bytes_of(entry);
    if (entry.begin != at || entry.end < entry.begin || !bytes.has_value() ||
        entry.end - entry.begin != *bytes) {
      return refused(absl::StrCat("tensor '", name, "' is at bytes ", entry.begin, " to ",
                                  entry.end, " of the data, and should begin at ", at, " with ",
                                  bytes.has_value() ? absl::StrCat(*bytes) : "2^63 or more",
                                  " bytes"));
    }
    at = entry.end;
  }
  if (at != data_size) {
    return refused(absl::StrCat("the tensors have ", at, " bytes, and the file has ", data_size,
                                " for them: it is cut, or not a safetensors file"));
  }
  return absl::OkStatus();
}

}  // namespace

StatusOr<SafetensorsHeader> decode_safetensors_header(std::string_view head, uint64_t file_size) {
  if (head.size() < kLengthBytes || file_size < head.size()) {
    return refused(absl::StrCat("safetensors: a file of ", file_size, " bytes has no header"));
  }
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;) {
    length = (length << 8) | static_cast<unsigned char>(head[i]);
  }
  if (length == 0) {
    return refused("safetensors: the header has no length: its writer was interrupted");
  }
  if (length > kMaxSafetensorsHeader || length > file_size - kLengthBytes) {
    return refused(absl::StrCat("safetensors: a header of ", length, " bytes in a file of ",
                                file_size, ": it is cut, or not a safetensors file"));
  }
  if (head.size() - kLengthBytes < length) {
    return refused(
        absl::StrCat("safetensors: ", head.size(), " bytes are given of a header of ", length));
  }
  const std::string_view json = head.substr(kLengthBytes, length);
  if (json[0] != '{') return refused("safetensors header, byte 0: expected '{'");
  WEFT_ASSIGN_OR_RETURN(SafetensorsHeader header, HeaderReader(json).read());
  header.data_begin = kLengthBytes + length;
  if (Status s = check_places(header, file_size - header.data_begin); !s.ok()) {
    return annotate(s, "safetensors");
  }
  return header;
}

StatusOr<std::string> encode_safetensors_header(const SafetensorsHeader& header) {
  std::string json = "{";
  const auto begin_item = [&](std::string_view name) {
    if (json.size() > 1) json.push_back(',');
    const Status status = append_json_string(name, &json);
    json.push_back(':');
    return status;
  };
  if (!header.metadata.empty()) {
    WEFT_RETURN_IF_ERROR(begin_item(kMetadata));
    json.push_back('{');
    bool first = true;
    for (const auto& [key, value] : header.metadata) {
      if (!first) json.push_back(',');
      first = false;
      WEFT_RETURN_IF_ERROR(append_json_string(key, &json));
      json.push_back(':');
      WEFT_RETURN_IF_ERROR(append_json_string(value, &json));
    }
    json.push_back('}');
  }
  for (const auto& [name, entry] : header.tensors) {
    const at::ScalarType type = entry.dtype;  // clang 14 captures no structured bindings
    const auto* dtype = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                     [&](const DtypeName& d) { return d.dtype == type; });
    if (dtype == std::end(kDtypes) || name == kMetadata) {
      return refused(absl::StrCat("tensor '", name, "' of ", c10::toString(entry.dtype),
                                  ": safetensors has no such dtype, or no such name"));
    }
    WEFT_RETURN_IF_ERROR(begin_item(name));
    absl::StrAppend(&json, "{\"dtype\":\"", std::string(dtype->name), "\",\"shape\":[");
    for (size_t i = 0; i < entry.shape.size(); ++i) {
      absl::StrAppend(&json, i == 0 ? "" : ",", entry.shape[i]);
    }
    absl::StrAppend(&json, "],\"data_offsets\":[", entry.begin, ",", entry.end, "]}");
  }
  json.push_back('}');
  while (json.size() % 8 != 0) json.push_back(' ');
  if (json.size() > kMaxSafetensorsHeader) {
    return refused(absl::StrCat("safetensors: a header of ", json.size(), " bytes exceeds ",
                                kMaxSafetensorsHeader));
  }
  std::string out;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    out.push_back(static_cast<char>((static_cast<uint64_t>(json.size()) >> (8 * i)) & 0xFF));
  }
  return out + json;
}

}  // namespace weft
