#ifndef WEFT_RPC_SAFETENSORS_H_
#define WEFT_RPC_SAFETENSORS_H_

// Tensors in a file, in the safetensors format: what Python's package `safetensors` reads and
// writes.
//
//   Files& files = worker.runtime().files();
//   throw_if_error(write_safetensors(files, "/data/a.safetensors", {{"layer1.weight", w}},
//                                    {{"step", "120"}}));
//   SafetensorsFile file = value_or_throw(SafetensorsFile::open(files, "/data/a.safetensors"));
//   at::Tensor w = value_or_throw(file.read("layer1.weight"));
//
// The file is 8 bytes (length of the header, little endian), the header (JSON: dtype, shape and
// place of every tensor), and the tensors' elements, without a gap. Writer and reader hold one
// tensor at a time, and copy it in pieces. Values; any thread, one at a time for one file.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/files.h"

namespace weft {

struct SafetensorsEntry {  // one tensor of a file
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape{};
  uint64_t begin = 0;  // bytes, from the end of the header
  uint64_t end = 0;
  friend bool operator==(const SafetensorsEntry&, const SafetensorsEntry&) = default;
};

struct SafetensorsHeader {  // what a file holds
  std::map<std::string, SafetensorsEntry> tensors{};
  std::map<std::string, std::string> metadata{};  // of the writer
  uint64_t data_begin = 0;                        // bytes, from the beginning of the file
  friend bool operator==(const SafetensorsHeader&, const SafetensorsHeader&) = default;
};

// The header may have so many bytes; the Python package refuses more, too.
inline constexpr uint64_t kMaxSafetensorsHeader = 100'000'000;

// Strict: `head` is the beginning of a file of `file_size` bytes, with all of the header. Kind
// invalid_argument, with the byte and what was expected there, for anything but one JSON object
// whose tensors fill the file exactly, without a gap and without sharing a byte, each as long as
// its dtype and shape say, each name once.
WEFT_API StatusOr<SafetensorsHeader> decode_safetensors_header(std::string_view head,
                                                               uint64_t file_size);
// The header as bytes, with its length before it. `header.data_begin` is not used. Kind
// invalid_argument for a dtype that the format does not have, and for names that are not UTF-8.
WEFT_API StatusOr<std::string> encode_safetensors_header(const SafetensorsHeader& header);

// Writes the file, beginning with nothing; tensors on other devices are copied to the CPU. The
// length of the header is written last, so that a file whose writer was interrupted is refused by
// every reader. A file of that name is overwritten, not replaced in one step: a checkpoint has a
// new name each time. Kind invalid_argument for a tensor that is undefined, sparse, quantized or of
// a dtype that the format does not have, named; unavailable while another process has the file
// locked; otherwise the error of the file system.
WEFT_API Status write_safetensors(Files& files, std::string_view path,
                                  const std::map<std::string, at::Tensor>& tensors,
                                  const std::map<std::string, std::string>& metadata = {});

// As write_safetensors(), but replaces the file in one step (Files::replace): readers see the file
// that was there before, or the whole new one. Nothing is changed when it fails.
WEFT_API Status replace_safetensors(Files& files, std::string_view path,
                                    const std::map<std::string, at::Tensor>& tensors,
                                    const std::map<std::string, std::string>& metadata = {});

class WEFT_API SafetensorsFile {
 public:
  // Reads the header. `files` must outlive the object. Kind not_found when there is no such file;
  // invalid_argument, with path and byte, for one that is not whole.
  static StatusOr<SafetensorsFile> open(Files& files, std::string_view path);

  const SafetensorsHeader& header() const { return header_; }
  // A tensor on the CPU. Kind not_found for another name; state when the file has been changed
  // since open().
  StatusOr<at::Tensor> read(std::string_view name) const;

 private:
  SafetensorsFile(Files& files, std::string path) : files_(&files), path_(std::move(path)) {}

  Files* files_;
  std::string path_;
  FileStamp stamp_{};
  SafetensorsHeader header_{};
};

}  // namespace weft

#endif  // WEFT_RPC_SAFETENSORS_H_
