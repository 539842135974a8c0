#ifndef WEFT_PS_INTERNAL_SNAPSHOT_FILES_H_
#define WEFT_PS_INTERNAL_SNAPSHOT_FILES_H_

// The files of a snapshot: one of each server, with its parts, and the manifest, which names them with
// their hashes and is written last. proto/ps_snapshot.proto specifies both. Any thread.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "weft/common/error.h"
#include "weft/common/files.h"
#include "weft/ps/internal/copy_wire.h"
#include "weft/ps/internal/cut.h"
#include "weft/ps/internal/part_data.h"
#include "weft/rpc/safetensors.h"

namespace weft::v1 {
class PsSnapshot;
class PsSnapshot_Table;
}  // namespace weft::v1

namespace weft::ps::internal {

// 64 bits of a sequence of bytes, however it is cut into pieces: XXH64 with seed 0.
class WEFT_API ByteHash {
 public:
  ByteHash();
  void add(std::string_view bytes);
  uint64_t value() const;

 private:
  static constexpr size_t kStripe = 32;
  void add_stripe(const char* bytes);

  uint64_t lanes_[4];
  char rest_[kStripe];  // what is no whole stripe yet
  size_t rest_size_ = 0;
  uint64_t size_ = 0;
};
WEFT_API uint64_t hash_bytes(std::string_view bytes);

// A part of a table at a cut.
struct NamedCut {
  std::string table{};
  uint32_t index = 0;
  PartCut cut{};
};
// How long a file is, and the hash of its bytes.
struct FileSum {
  uint64_t bytes = 0;
  uint64_t hash = 0;
  friend bool operator==(const FileSum&, const FileSum&) = default;
};

// Parts of the name of a server's file.
inline constexpr std::string_view kFilePrefix = "snapshot-";
inline constexpr std::string_view kFileSuffix = ".safetensors";
// "FOLDER/NAME".
WEFT_API std::string path_in(std::string_view folder, std::string_view name);
// The name of server `index`'s file in a snapshot. Files of a cutter that has ended have other names.
std::string file_name(uint64_t number, uint64_t cutter, uint64_t cut, size_t index);
// Whether file_name() may have made a name, or a writer left it that ended before its rename().
WEFT_API bool is_file_name(std::string_view name);
// Replaces the file in one step; when it returns, the file survives a stop of the machine. Errors as those of
// Files.
WEFT_API StatusOr<FileSum> write_parts(Files& files, const std::string& path,
                                       const std::vector<NamedCut>& parts);
// Kind invalid_argument, naming the file, when it is not there, or is another than was written.
WEFT_API Status check_file(Files& files, const std::string& path, const FileSum& sum);

// With its hash in `sum`; kind not_found, when there is none; invalid_argument, naming the file, when it
// is damaged or nonsense.
WEFT_API Status read_manifest(Files& files, const std::string& path, v1::PsSnapshot* manifest,
                              uint64_t* hash);
// What is behind the head and the hash of the file `path`.
WEFT_API Status decode_manifest(std::string_view body, const std::string& path,
                                v1::PsSnapshot* manifest);
WEFT_API Status write_manifest(Files& files, const std::string& path,
                               const v1::PsSnapshot& manifest);

// What a part of a snapshot's table is on a list of servers, as Part::restore() takes it. A sparse part
// without rows has no tensors of data.
struct LoadedPart {
  PartImage image{};
  std::vector<at::Tensor> tensors{};
};

// Reads parts of a table for any list of servers. One thread at a time.
class WEFT_API TableReader {
 public:
  // `files` and `manifest` outlive it.
  TableReader(Files& files, std::string folder, const v1::PsSnapshot& manifest,
              const v1::PsSnapshot_Table& table);
  // Opens the files and checks their hashes.
  Status open();
  const TableDefinition& definition() const { return definition_; }
  // Names of the rule's buffers, as the files have them: PartData::buffer_names() without "".
  std::vector<std::string> buffers() const;
  // `buffers`: as PartData::buffer_names().
  StatusOr<LoadedPart> load(const std::vector<std::string>& servers, uint32_t index,
                            const std::vector<std::string>& buffers) const;

 private:
  StatusOr<at::Tensor> read(size_t part, std::string_view what) const;
  Status load_dense(uint32_t index, size_t parts, const std::vector<std::string>& buffers,
                    LoadedPart* out) const;
  Status load_sparse(const std::vector<std::string>& servers, uint32_t index,
                     const std::vector<std::string>& buffers, LoadedPart* out) const;

  Files& files_;
  const std::string folder_;
  const v1::PsSnapshot& manifest_;
  const v1::PsSnapshot_Table& table_;
  TableDefinition definition_;
  std::map<uint32_t, SafetensorsFile> opened_;
  std::vector<PartImage> images_;  // by part
};

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_SNAPSHOT_FILES_H_
