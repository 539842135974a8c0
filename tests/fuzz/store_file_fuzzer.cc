// Arbitrary bytes as the file of a FileStore. What is accepted must take another record, and then
// read as the same content plus that.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "weft/rpc/internal/store/file_format.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using weft::internal::StoreFile;
  std::string content(reinterpret_cast<const char*>(data), size);
  weft::StatusOr<StoreFile> file = weft::internal::parse_store_file(content);
  if (!file.ok()) {
    require(weft::error_kind(file.status()) == weft::ErrorKind::kProtocol);
    return 0;
  }
  require(file->end <= file->size && file->size == size);
  file->table.set("key", "value");
  weft::internal::append_store_record(*file, "key", &content);
  const weft::StatusOr<StoreFile> again = weft::internal::parse_store_file(content);
  require(again.ok() && again->end == content.size() && again->size >= size);
  require(again->table.entries() == file->table.entries());
  require(again->run_id == file->run_id && again->retired == file->retired);
  const weft::StatusOr<StoreFile> anew =
      weft::internal::parse_store_file(weft::internal::begin_store_file(*again));
  require(anew.ok() && anew->table.entries() == file->table.entries());
  return 0;
}
