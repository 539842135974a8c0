#include "weft/store/internal/file_format.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/store/internal/checks.h"

namespace weft::internal {
namespace {

constexpr std::string_view kMagic = "WEFTSTOR";
constexpr uint32_t kVersion = 1;
constexpr size_t kFixedBytes = 16;       // magic, version, length
constexpr size_t kRecordHeadBytes = 12;  // length, checksum
constexpr size_t kMaxFileHeaderBytes = 32 + (kMaxRetiredRuns + 1) * (4 + kMaxRunId) + 4;
static_assert(kFixedBytes + kMaxFileHeaderBytes + sizeof(uint64_t) <= kMaxStoreHeader);
constexpr size_t kMaxPayload = 5 + kMaxStoreKey + kMaxStoreValue;

enum : uint8_t { kSet = 1, kDelete = 2, kPadding = 3 };

// FNV-1a: these checksums find accidental damage; they are no protection against tampering.
uint64_t checksum(uint64_t seed, std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325u ^ seed;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

template <class Int>
void put(std::string* out, Int value) {
  for (size_t i = 0; i < sizeof value; ++i) out->push_back(static_cast<char>(value >> (8 * i)));
}

void put_string(std::string* out, std::string_view s) {
  put(out, static_cast<uint32_t>(s.size()));
  out->append(s);
}

// Takes values off the front; false when there are too few bytes.
template <class Int>
bool take(std::string_view* in, Int* value) {
  if (in->size() < sizeof *value) return false;
  *value = 0;
  for (size_t i = 0; i < sizeof *value; ++i) {
    *value |= static_cast<Int>(static_cast<unsigned char>((*in)[i])) << (8 * i);
  }
  in->remove_prefix(sizeof *value);
  return true;
}

bool take_string(std::string_view* in, size_t limit, std::string* out) {
  uint32_t n = 0;
  if (!take(in, &n) || n > limit || n > in->size()) return false;
  out->assign(in->substr(0, n));
  in->remove_prefix(n);
  return true;
}

Status damaged(std::string_view how) {
  return make_error(ErrorKind::kProtocol, absl::StrCat("the file is no weft store, or damaged: ",
                                                       absl::string_view(how.data(), how.size())));
}

std::string header(const StoreFile& file, uint64_t committed) {
  std::string body;
  put(&body, file.generation);
  put(&body, committed);
  put_string(&body, file.run_id);
  put(&body, static_cast<uint32_t>(file.retired.size()));
  for (const std::string& run : file.retired) put_string(&body, run);
  std::string out(kMagic);
  put(&out, kVersion);
  put(&out, static_cast<uint32_t>(body.size()));
  out += body;
  put(&out, checksum(0, out));
  return out;
}

void put_record(uint64_t generation, std::string_view payload, std::string* out) {
  put(out, static_cast<uint32_t>(payload.size()));
  put(out, checksum(generation, payload));
  out->append(payload);
}

void put_entry(uint64_t generation, std::string_view key, const std::string* value,
               std::string* out) {
  std::string payload(1, static_cast<char>(value == nullptr ? kDelete : kSet));
  put_string(&payload, key);
  if (value != nullptr) payload += *value;
  put_record(generation, payload, out);
}

Status parse_header(std::string_view content, StoreFile* file) {
  std::string_view in = content;
  uint32_t version = 0, length = 0;
  if (in.substr(0, kMagic.size()) != kMagic) return damaged("it does not begin as one");
  in.remove_prefix(kMagic.size());
  if (!take(&in, &version) || !take(&in, &length)) return damaged("its header is cut");
  if (version != kVersion) {
    return damaged(
        absl::StrCat("its format has version ", version, ", this program knows ", kVersion));
  }
  if (length > kMaxFileHeaderBytes || length > in.size() || in.size() - length < sizeof(uint64_t)) {
    return damaged("its header is cut or too long");
  }
  std::string_view body = in.substr(0, length);
  in.remove_prefix(length);
  uint64_t sum = 0;
  take(&in, &sum);
  if (sum != checksum(0, content.substr(0, kFixedBytes + length))) {
    return damaged("the checksum of its header is wrong");
  }
  uint32_t retired = 0;
  if (!take(&body, &file->generation) || !take(&body, &file->committed) ||
      !take_string(&body, kMaxRunId, &file->run_id) || !take(&body, &retired) ||
      retired > kMaxRetiredRuns) {
    return damaged("its header makes no sense");
  }
  file->retired.resize(retired);
  for (std::string& run : file->retired) {
    if (!take_string(&body, kMaxRunId, &run)) return damaged("its header makes no sense");
  }
  // A header that is written anew in its place has the same length only without more.
  if (!body.empty()) return damaged("its header makes no sense");
  file->header = kFixedBytes + length + sizeof sum;
  return absl::OkStatus();
}

Status apply(std::string_view payload, StoreTable* table) {
  uint8_t kind = 0;
  std::string key;
  if (!take(&payload, &kind)) return damaged("an empty record");
  if (kind == kPadding) return absl::OkStatus();
  if (!take_string(&payload, kMaxStoreKey, &key) || key.empty() ||
      payload.size() > kMaxStoreValue) {
    return damaged("a record without a proper key");
  }
  if (kind == kSet) {
    table->set(key, payload);
  } else if (kind == kDelete && payload.empty()) {
    table->erase(key);
  } else {
    return damaged(absl::StrCat("a record of unknown kind ", kind));
  }
  return absl::OkStatus();
}

}  // namespace

StatusOr<StoreFile> parse_store_file(std::string_view content) {
  StoreFile file;
  WEFT_RETURN_IF_ERROR(parse_store_header(content, content.size(), &file));
  WEFT_RETURN_IF_ERROR(parse_store_records(content.substr(file.end), &file));
  return file;
}

Status parse_store_header(std::string_view begin, size_t size, StoreFile* file) {
  WEFT_RETURN_IF_ERROR(parse_header(begin, file));
  file->end = file->header;
  file->size = size;
  if (size < file->committed) {
    return damaged(
        absl::StrCat("it was cut from at least ", file->committed, " to ", size, " bytes"));
  }
  return absl::OkStatus();
}

Status parse_store_records(std::string_view rest, StoreFile* file) {
  while (!rest.empty()) {
    std::string_view in = rest;
    uint32_t length = 0;
    uint64_t sum = 0;
    const bool whole_head = take(&in, &length) && take(&in, &sum);
    if (whole_head && length > kMaxPayload) {
      return damaged(absl::StrCat("a record of ", length, " bytes at ", file->end));
    }
    if (!whole_head || length > in.size()) {
      if (file->end < file->committed) {
        return damaged(absl::StrCat("a record is cut at ", file->end));
      }
      break;  // FILE-1
    }
    const std::string_view payload = in.substr(0, length);
    if (sum != checksum(file->generation, payload)) {
      return damaged(absl::StrCat("the checksum of the record at ", file->end, " is wrong"));
    }
    WEFT_RETURN_IF_ERROR(apply(payload, &file->table));
    file->end += kRecordHeadBytes + length;
    rest.remove_prefix(kRecordHeadBytes + length);
  }
  return absl::OkStatus();
}

std::string begin_store_file(const StoreFile& file) {
  std::string records;
  for (const auto& [key, value] : file.table.entries()) {
    put_entry(file.generation, key, &value, &records);
  }
  const size_t size = header(file, 0).size() + records.size();
  return header(file, size) + records;
}

StoreAppend make_store_append(const StoreFile& file, std::string_view key) {
  // The header keeps its length: only `committed` and the checksum change.
  StoreAppend out{header(file, file.end), ""};
  put_entry(file.generation, key, file.table.find(key), &out.tail);
  if (file.end + out.tail.size() < file.size) {
    // Covers the rest of a cut record, which could otherwise be left behind ours by a killed
    // writer.
    const size_t rest = file.size - file.end - out.tail.size();
    std::string padding(rest > kRecordHeadBytes ? rest - kRecordHeadBytes : 1, '\0');
    padding[0] = kPadding;
    put_record(file.generation, padding, &out.tail);
  }
  return out;
}

void append_store_record(const StoreFile& file, std::string_view key, std::string* content) {
  const StoreAppend append = make_store_append(file, key);
  content->resize(file.end);
  content->replace(0, append.header.size(), append.header);
  *content += append.tail;
}

}  // namespace weft::internal
