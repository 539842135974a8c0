// Arbitrary bytes as the file of a FileStore. What is accepted must take another record, and then
// read as the same content plus that.
#include <cstdint>
#include <string>
#include <string_view>

#include "weft/store/internal/file_format.h"
#include "weft/tests/fuzz/target.h"

namespace {

template <class Int>
Int load(const std::string& bytes, size_t at) {
  Int value = 0;
  for (size_t i = 0; i < sizeof value; ++i) {
    value |= static_cast<Int>(static_cast<unsigned char>(bytes[at + i])) << (8 * i);
  }
  return value;
}

void store(uint64_t value, size_t at, std::string* bytes) {
  for (size_t i = 0; i < 8; ++i) (*bytes)[at + i] = static_cast<char>(value >> (8 * i));
}

uint64_t checksum(uint64_t seed, std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325u ^ seed;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

// Nothing behind a checksum would be reached by chance.
void make_checksums_right(std::string* file) {
  if (file->size() < 16 + 8 + 8) return;
  const size_t body = load<uint32_t>(*file, 12);
  if (body < 8 || body > file->size() - 24) return;
  size_t at = 16 + body;
  store(checksum(0, std::string_view(*file).substr(0, at)), at, file);
  const auto generation = load<uint64_t>(*file, 16);
  for (at += 8; file->size() - at >= 12;) {
    const size_t length = load<uint32_t>(*file, at);
    if (length > file->size() - at - 12) return;
    store(checksum(generation, std::string_view(*file).substr(at + 12, length)), at + 4, file);
    at += 12 + length;
  }
}

}  // namespace

// A record has at least 18 bytes and becomes an entry of some 100.
const size_t kMostBytesPerByte = 16;

// The first byte: 1 when checksums are made right first.
weft::Status fuzz_one(std::string_view input) {
  using weft::internal::StoreFile;
  if (input.empty()) return absl::OkStatus();
  std::string content(input.substr(1));
  if (input[0] == 1) make_checksums_right(&content);
  const size_t size = content.size();
  weft::StatusOr<StoreFile> file =
      decoded(size, [&] { return weft::internal::parse_store_file(content); });
  if (!file.ok()) {
    require(weft::error_kind(file.status()) == weft::ErrorKind::kProtocol);
    return file.status();
  }
  require(file->end <= file->size && file->size == size);
  // FILE-5: record by record it is the same.
  StoreFile steps;
  require(weft::internal::parse_store_header(content, size, &steps).ok());
  while (steps.end < file->end) {
    const size_t record = 12 + load<uint32_t>(content, steps.end);
    const std::string_view one = std::string_view(content).substr(steps.end, record);
    require(weft::internal::parse_store_records(one, &steps).ok());
  }
  require(steps.end == file->end && steps.table.entries() == file->table.entries());
  file->table.set("key", "value");
  weft::internal::append_store_record(*file, "key", &content);
  const weft::StatusOr<StoreFile> again = weft::internal::parse_store_file(content);
  require(again.ok() && again->end == content.size() && again->size >= size);
  require(again->table.entries() == file->table.entries());
  require(again->run_id == file->run_id && again->retired == file->retired);
  const weft::StatusOr<StoreFile> anew =
      weft::internal::parse_store_file(weft::internal::begin_store_file(*again));
  require(anew.ok() && anew->table.entries() == file->table.entries());
  return absl::OkStatus();
}
