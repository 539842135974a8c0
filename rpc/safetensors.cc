#include "weft/rpc/safetensors.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "c10/core/ScalarType.h"
#include "weft/rpc/plain_tensor.h"

namespace weft {
namespace {

constexpr uint64_t kPiece = 4 << 20;
constexpr uint64_t kBeforeHeader = 8;

Status bad_tensors(std::string_view what) { return make_error(ErrorKind::kInvalidArgument, what); }

Status locked_by_others(std::string_view path) {
  return make_error(
      ErrorKind::kUnavailable,
      absl::StrCat("'", std::string(path), "' is locked by another process; try again"));
}

// What the file system says, with a kind.
Status of_files(const Status& status, std::string_view path) {
  if (status.ok() || error_kind(status) != ErrorKind::kNone) return status;
  const ErrorKind kind = absl::IsNotFound(status) ? ErrorKind::kNotFound : ErrorKind::kUnavailable;
  return make_error(kind,
                    absl::StrCat("'", std::string(path), "': ", std::string(status.message())));
}

// The header's bytes, and where behind them each tensor lies, in that order.
struct Layout {
  std::string head{};
  std::vector<std::pair<at::Tensor, uint64_t>> places{};
};

StatusOr<Layout> lay_out(const std::map<std::string, at::Tensor>& tensors,
                         const std::map<std::string, std::string>& metadata) {
  // Larger elements first, so that all are aligned.
  std::vector<std::pair<std::string, at::Tensor>> order(tensors.begin(), tensors.end());
  for (const auto& [name, tensor] : order) {
    if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_quantized()) {
      return bad_tensors(absl::StrCat(
          "tensor '", name, "' is undefined, sparse or quantized: safetensors has dense ones"));
    }
  }
  std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return a.second.element_size() > b.second.element_size();
  });
  Layout out;
  SafetensorsHeader header;
  header.metadata = metadata;
  uint64_t at = 0;
  for (const auto& [name, tensor] : order) {
    SafetensorsEntry entry{tensor.scalar_type(), tensor.sizes().vec(), at, at};
    entry.end += static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
    out.places.emplace_back(tensor, at);
    at = entry.end;
    header.tensors.emplace(name, std::move(entry));
  }
  WEFT_ASSIGN_OR_RETURN(out.head, encode_safetensors_header(header));
  return out;
}

// Calls `put` with each piece of the tensors and its place behind the header, in order.
Status write_tensors(const Layout& layout,
                     const std::function<Status(uint64_t, std::string_view)>& put) {
  for (const auto& [tensor, begin] : layout.places) {
    const at::Tensor flat = plain(tensor.detach().to(at::kCPU));
    const std::string_view bytes(static_cast<const char*>(flat.const_data_ptr()), flat.nbytes());
    for (uint64_t at = 0; at < bytes.size(); at += kPiece) {
      WEFT_RETURN_IF_ERROR(put(begin + at, bytes.substr(at, kPiece)));
    }
  }
  return absl::OkStatus();
}

Status write_all(LockedFile* file, const Layout& layout) {
  const std::string_view head = layout.head;
  WEFT_RETURN_IF_ERROR(file->truncate(0));
  WEFT_RETURN_IF_ERROR(file->write(0, std::string(kBeforeHeader, '\0')));
  WEFT_RETURN_IF_ERROR(file->write(kBeforeHeader, head.substr(kBeforeHeader)));
  WEFT_RETURN_IF_ERROR(write_tensors(layout, [&](uint64_t at, std::string_view piece) {
    return file->write(head.size() + at, piece);
  }));
  return file->write(0, head.substr(0, kBeforeHeader));
}

}  // namespace

Status write_safetensors(Files& files, std::string_view path,
                         const std::map<std::string, at::Tensor>& tensors,
                         const std::map<std::string, std::string>& metadata) {
  try {
    WEFT_ASSIGN_OR_RETURN(const Layout layout, lay_out(tensors, metadata));
    const auto done = files.try_locked(path, Files::Lock::kExclusive, [&layout](LockedFile* file) {
      return write_all(file, layout);
    });
    if (!done.ok()) return annotate(of_files(done.status(), path), "writing tensors");
    return *done ? absl::OkStatus() : locked_by_others(path);
  } catch (...) {
    return status_from_current_exception();
  }
}

Status replace_safetensors(Files& files, std::string_view path,
                           const std::map<std::string, at::Tensor>& tensors,
                           const std::map<std::string, std::string>& metadata) {
  try {
    WEFT_ASSIGN_OR_RETURN(const Layout layout, lay_out(tensors, metadata));
    const Status done = files.replace(path, [&layout](FileAppender* file) -> Status {
      WEFT_RETURN_IF_ERROR(file->append(layout.head));
      return write_tensors(
          layout, [file](uint64_t, std::string_view piece) { return file->append(piece); });
    });
    return done.ok() ? done : annotate(of_files(done, path), "writing tensors");
  } catch (...) {
    return status_from_current_exception();
  }
}

StatusOr<SafetensorsFile> SafetensorsFile::open(Files& files, std::string_view path) {
  if (const auto there = files.stamp(path); !there.ok()) {
    return annotate(of_files(there.status(), path), "reading tensors");
  }
  SafetensorsFile out(files, std::string(path));
  const auto done = files.try_locked(path, Files::Lock::kShared, [&](LockedFile* file) -> Status {
    WEFT_ASSIGN_OR_RETURN(out.stamp_, file->stamp());
    WEFT_ASSIGN_OR_RETURN(std::string head, file->read(0, kBeforeHeader));
    uint64_t length = 0;
    for (size_t i = head.size(); i-- > 0;) {
      length = (length << 8) | static_cast<unsigned char>(head[i]);
    }
    // What the decoder refuses is not read.
    if (length <= kMaxSafetensorsHeader && length <= out.stamp_.size) {
      WEFT_ASSIGN_OR_RETURN(head, file->read(0, kBeforeHeader + length));
    }
    auto header = decode_safetensors_header(head, out.stamp_.size);
    if (!header.ok()) return annotate(header.status(), absl::StrCat("'", out.path_, "'"));
    out.header_ = *std::move(header);
    return absl::OkStatus();
  });
  if (!done.ok()) return annotate(of_files(done.status(), path), "reading tensors");
  if (!*done) return locked_by_others(path);
  return out;
}

StatusOr<at::Tensor> SafetensorsFile::read(std::string_view name) const {
  const auto it = header_.tensors.find(std::string(name));
  if (it == header_.tensors.end()) {
    return make_error(ErrorKind::kNotFound,
                      absl::StrCat("'", path_, "' has no tensor '", std::string(name), "'; it has ",
                                   header_.tensors.size()));
  }
  const SafetensorsEntry& entry = it->second;
  try {
    at::Tensor out = at::empty(entry.shape, entry.dtype);
    char* const data = static_cast<char*>(out.mutable_data_ptr());
    const uint64_t bytes = entry.end - entry.begin;
    const auto done =
        files_->try_locked(path_, Files::Lock::kShared, [&](LockedFile* file) -> Status {
          WEFT_ASSIGN_OR_RETURN(const FileStamp now, file->stamp());
          if (now != stamp_) {
            return make_error(ErrorKind::kState,
                              absl::StrCat("'", path_, "' was changed while it was read"));
          }
          for (uint64_t at = 0; at < bytes; at += kPiece) {
            const uint64_t n = std::min(kPiece, bytes - at);
            WEFT_ASSIGN_OR_RETURN(const std::string piece,
                                  file->read(header_.data_begin + entry.begin + at, n));
            if (piece.size() != n) {
              return bad_tensors(
                  absl::StrCat("'", path_, "' ends within tensor '", std::string(name), "'"));
            }
            std::memcpy(data + at, piece.data(), n);
            if (entry.dtype != at::kBool) continue;
            for (uint64_t i = at; i < at + n; ++i) data[i] = data[i] != 0 ? 1 : 0;
          }
          return absl::OkStatus();
        });
    if (!done.ok()) return annotate(of_files(done.status(), path_), "reading tensors");
    if (!*done) return locked_by_others(path_);
    return out;
  } catch (...) {
    return status_from_current_exception();
  }
}

}  // namespace weft
