#include "weft/ps/internal/snapshot_files.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "weft/proto/ps_snapshot.pb.h"
#include "weft/ps/internal/definition.h"

namespace weft::ps::internal {
namespace {

constexpr std::string_view kManifestHead = "weft ps snapshot 1\n";
constexpr size_t kHashBytes = 8;
constexpr uint64_t kReadPiece = 4 << 20;

constexpr uint64_t kPrime1 = 11400714785074694791U;
constexpr uint64_t kPrime2 = 14029467366897019727U;
constexpr uint64_t kPrime3 = 1609587929392839161U;
constexpr uint64_t kPrime4 = 9650029242287828579U;
constexpr uint64_t kPrime5 = 2870177450012600261U;

uint64_t word_at(const char* bytes) {
  uint64_t out = 0;
  std::memcpy(&out, bytes, sizeof out);
  return out;
}
uint64_t round_of(uint64_t lane, uint64_t word) {
  return std::rotl(lane + word * kPrime2, 31) * kPrime1;
}

Status bad_file(const std::string& path, std::string_view why) {
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("snapshot file '", path, "' ", std::string(why)));
}

std::string hash_text_of(uint64_t hash) { return absl::StrCat(absl::Hex(hash, absl::kZeroPad16)); }

// A tensor of a file, and who writes its bytes.
struct Piece {
  std::string name;
  SafetensorsEntry entry;
  std::function<Status(const std::function<Status(std::string_view)>&)> write;
};

void add_column(const FrozenData& data, size_t column, const std::string& prefix,
                std::vector<Piece>* out) {
  const FrozenData::Column& what = data.columns()[column];
  out->push_back({absl::StrCat(prefix, what.name),
                  {what.dtype, what.shape, 0, 0},
                  [&data, column](const std::function<Status(std::string_view)>& put) {
                    return data.write(column, put);
                  }});
}

void add_bytes(std::string name, at::ScalarType dtype, std::vector<int64_t> shape,
               std::string_view bytes, std::vector<Piece>* out) {
  out->push_back(
      {std::move(name),
       {dtype, std::move(shape), 0, 0},
       [bytes](const std::function<Status(std::string_view)>& put) { return put(bytes); }});
}

}  // namespace

ByteHash::ByteHash() : lanes_{kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1}, rest_{} {}

void ByteHash::add_stripe(const char* bytes) {
  for (size_t i = 0; i < 4; ++i) lanes_[i] = round_of(lanes_[i], word_at(bytes + 8 * i));
}

void ByteHash::add(std::string_view bytes) {
  size_ += bytes.size();
  if (rest_size_ > 0) {
    const size_t taken = std::min(kStripe - rest_size_, bytes.size());
    std::memcpy(rest_ + rest_size_, bytes.data(), taken);
    rest_size_ += taken;
    bytes.remove_prefix(taken);
    if (rest_size_ < kStripe) return;
    add_stripe(rest_);
    rest_size_ = 0;
  }
  while (bytes.size() >= kStripe) {
    add_stripe(bytes.data());
    bytes.remove_prefix(kStripe);
  }
  if (!bytes.empty()) std::memcpy(rest_, bytes.data(), bytes.size());
  rest_size_ = bytes.size();
}

uint64_t ByteHash::value() const {
  uint64_t hash = kPrime5;
  if (size_ >= kStripe) {
    hash = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) +
           std::rotl(lanes_[3], 18);
    for (const uint64_t lane : lanes_) hash = (hash ^ round_of(0, lane)) * kPrime1 + kPrime4;
  }
  hash += size_;
  size_t at = 0;
  for (; at + 8 <= rest_size_; at += 8) {
    hash = std::rotl(hash ^ round_of(0, word_at(rest_ + at)), 27) * kPrime1 + kPrime4;
  }
  if (at + 4 <= rest_size_) {
    uint32_t half = 0;
    std::memcpy(&half, rest_ + at, sizeof half);
    hash = std::rotl(hash ^ half * kPrime1, 23) * kPrime2 + kPrime3;
    at += 4;
  }
  for (; at < rest_size_; ++at) {
    hash = std::rotl(hash ^ static_cast<unsigned char>(rest_[at]) * kPrime5, 11) * kPrime1;
  }
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

uint64_t hash_bytes(std::string_view bytes) {
  ByteHash hash;
  hash.add(bytes);
  return hash.value();
}

std::string path_in(std::string_view folder, std::string_view name) {
  return absl::StrCat(std::string(folder), "/", std::string(name));
}

std::string file_name(uint64_t number, uint64_t cutter, uint64_t cut, size_t index) {
  return absl::StrCat(std::string(kFilePrefix), number, "-", absl::Hex(cutter), "-", cut, "-",
                      index, std::string(kFileSuffix));
}

bool is_file_name(std::string_view name) {
  const size_t suffix = name.find(kFileSuffix);
  if (!name.starts_with(kFilePrefix) || suffix == std::string_view::npos) return false;
  const std::string_view behind = name.substr(suffix + kFileSuffix.size());
  if (!behind.empty() && behind[0] != '.') return false;
  int fields = 1;
  bool empty = true;
  for (const char c : name.substr(kFilePrefix.size(), suffix - kFilePrefix.size())) {
    if (c == '-') {
      if (empty) return false;
      ++fields;
    } else if (!absl::ascii_isxdigit(static_cast<unsigned char>(c)) ||
               (fields != 2 && !absl::ascii_isdigit(static_cast<unsigned char>(c)))) {
      return false;
    }
    empty = c == '-';
  }
  return fields == 4 && !empty;
}

// ---- writing -----------------------------------------------------------------------------------

StatusOr<FileSum> write_parts(Files& files, const std::string& path,
                              const std::vector<NamedCut>& parts) {
  std::vector<std::string> states;
  states.reserve(parts.size());
  std::vector<Piece> pieces;
  for (const NamedCut& part : parts) {
    const std::string prefix = absl::StrCat(part.table, "/", part.index, "/");
    for (size_t c = 0; c < part.cut.data->columns().size(); ++c) {
      add_column(*part.cut.data, c, prefix, &pieces);
    }
    for (size_t i = 0; i < part.cut.held.size(); ++i) {
      const at::Tensor& t = part.cut.held[i];
      add_bytes(absl::StrCat(prefix, "held/", i), t.scalar_type(), t.sizes().vec(),
                {static_cast<const char*>(t.const_data_ptr()), t.nbytes()}, &pieces);
    }
    states.push_back(encode(part.cut.image));
    const std::string& state = states.back();
    add_bytes(prefix + "state", at::kByte, {static_cast<int64_t>(state.size())}, state, &pieces);
  }
  // Larger elements first, so that all are aligned.
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return c10::elementSize(a.entry.dtype) > c10::elementSize(b.entry.dtype);
  });
  SafetensorsHeader header;
  header.metadata["format"] = "weft ps snapshot 1";
  uint64_t end = 0;
  for (Piece& piece : pieces) {
    piece.entry.begin = end;
    uint64_t bytes = c10::elementSize(piece.entry.dtype);
    for (const int64_t n : piece.entry.shape) bytes *= static_cast<uint64_t>(n);
    piece.entry.end = end += bytes;
    header.tensors.emplace(piece.name, piece.entry);
  }
  WEFT_ASSIGN_OR_RETURN(const std::string head, encode_safetensors_header(header));
  ByteHash hash;
  FileSum sum;
  const Status written = files.replace(path, [&](FileAppender* file) -> Status {
    const auto put = [&](std::string_view bytes) -> Status {
      hash.add(bytes);
      sum.bytes += bytes.size();
      return file->append(bytes);
    };
    WEFT_RETURN_IF_ERROR(put(head));
    for (const Piece& piece : pieces) WEFT_RETURN_IF_ERROR(piece.write(put));
    return absl::OkStatus();
  });
  WEFT_RETURN_IF_ERROR(written);
  WEFT_RETURN_IF_ERROR(files.sync_names(path.substr(0, path.rfind('/'))));
  sum.hash = hash.value();
  return sum;
}

Status write_manifest(Files& files, const std::string& path, const v1::PsSnapshot& manifest) {
  const std::string body = manifest.SerializeAsString();
  const uint64_t hash = hash_bytes(body);
  std::string text(kManifestHead);
  for (size_t i = 0; i < kHashBytes; ++i) text.push_back(static_cast<char>(hash >> (8 * i)));
  return files.write_atomic(path, text + body);
}

// ---- reading -----------------------------------------------------------------------------------

Status check_file(Files& files, const std::string& path, const FileSum& sum) {
  if (const auto there = files.stamp(path); !there.ok()) {
    return bad_file(path, absl::StrCat("cannot be read: ", std::string(there.status().message())));
  }
  FileSum seen;
  const auto read = files.try_locked(path, Files::Lock::kShared, [&](LockedFile* file) -> Status {
    ByteHash hash;
    for (;;) {
      WEFT_ASSIGN_OR_RETURN(const std::string piece, file->read(seen.bytes, kReadPiece));
      if (piece.empty()) break;
      seen.bytes += piece.size();
      hash.add(piece);
    }
    seen.hash = hash.value();
    return absl::OkStatus();
  });
  if (!read.ok()) return bad_file(path, std::string(read.status().message()));
  if (!*read) return bad_file(path, "is locked by another process");
  if (seen.bytes != sum.bytes) {
    return bad_file(path,
                    absl::StrCat("has ", seen.bytes, " bytes, and ", sum.bytes, " were written"));
  }
  if (seen == sum) return absl::OkStatus();
  return bad_file(path, absl::StrCat("is damaged: its hash is ", hash_text_of(seen.hash), ", and ",
                                     hash_text_of(sum.hash), " was written"));
}

namespace {

Status check_manifest(const v1::PsSnapshot& manifest, const std::string& path) {
  for (const v1::PsSnapshot::File& file : manifest.files()) {
    if (file.name().empty() || file.name().find('/') != std::string::npos) {
      return bad_file(path, "names a file in another folder");
    }
  }
  for (const v1::PsSnapshot::Table& table : manifest.tables()) {
    WEFT_RETURN_IF_ERROR(check_name(table.name()));
    WEFT_ASSIGN_OR_RETURN(const TableDefinition definition, get(table.definition()));
    const auto servers = static_cast<size_t>(table.servers_size());
    const size_t parts = servers == 0 ? 0 : part_count(definition, servers);
    if (parts == 0 || static_cast<size_t>(table.files_size()) != parts) {
      return bad_file(path, absl::StrCat("has ", table.files_size(), " of ", parts,
                                         " parts of table '", table.name(), "'"));
    }
    for (const uint32_t file : table.files()) {
      if (file >= static_cast<uint32_t>(manifest.files_size())) {
        return bad_file(path, "names a file that it does not have");
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

Status decode_manifest(std::string_view body, const std::string& path, v1::PsSnapshot* manifest) {
  if (!manifest->ParseFromArray(body.data(), static_cast<int>(body.size()))) {
    return bad_file(path, "cannot be parsed");
  }
  if (const Status s = check_manifest(*manifest, path); !s.ok()) {
    return bad_file(path, std::string(s.message()));
  }
  return absl::OkStatus();
}

Status read_manifest(Files& files, const std::string& path, v1::PsSnapshot* manifest,
                     uint64_t* hash) {
  const StatusOr<std::string> text = files.read(path);
  WEFT_RETURN_IF_ERROR(text.status());
  const std::string_view bytes = *text;
  const size_t begin = kManifestHead.size() + kHashBytes;
  if (bytes.size() < begin || bytes.substr(0, kManifestHead.size()) != kManifestHead) {
    return bad_file(path, "is no manifest of a snapshot");
  }
  *hash = word_at(bytes.data() + kManifestHead.size());
  const std::string_view body = bytes.substr(begin);
  if (hash_bytes(body) != *hash) {
    return bad_file(path, absl::StrCat("is damaged: its hash is ", hash_text_of(hash_bytes(body)),
                                       ", and ", hash_text_of(*hash), " was written"));
  }
  return decode_manifest(body, path, manifest);
}

}  // namespace weft::ps::internal
