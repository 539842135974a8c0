// Any bytes as a safetensors file: an error, or a header that is written and read again alike, and
// tensors that can be read.
#include <memory>
#include <string>
#include <string_view>

#include "weft/common/files.h"
#include "weft/rpc/safetensors.h"
#include "weft/tests/fuzz/target.h"

// An empty tensor takes some 50 bytes of a header, and 200 in the map with its name and shape; a
// dimension takes 2 bytes, and 8 in a vector that doubles.
const size_t kMostBytesPerByte = 64;

weft::Status fuzz_one(std::string_view input) {
  const auto header =
      decoded(input.size(), [&] { return weft::decode_safetensors_header(input, input.size()); });
  if (!header.ok()) {
    require(weft::error_kind(header.status()) == weft::ErrorKind::kInvalidArgument);
    return header.status();
  }
  const auto bytes = weft::encode_safetensors_header(*header);
  require(bytes.ok());
  const auto again =
      weft::decode_safetensors_header(*bytes, bytes->size() + (input.size() - header->data_begin));
  require(again.ok() && again->tensors == header->tensors && again->metadata == header->metadata);
  const auto files = weft::make_memory_files();
  require(files->write_atomic("f", input).ok());
  const auto file = weft::SafetensorsFile::open(*files, "f");
  require(file.ok() && file->header() == *header);
  for (const auto& [name, entry] : header->tensors) {
    // An empty tensor may have other sizes that no tensor can have.
    const auto tensor = file->read(name);
    require(!tensor.ok() || tensor->nbytes() == entry.end - entry.begin);
  }
  return absl::OkStatus();
}
