#include "weft/transport/internal/data/stream_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"

namespace weft::internal {
namespace {

// More than this is given back after the frame that needed it.
constexpr size_t kKeptPayload = 256u << 10;

}  // namespace

bool StreamReader::gather(size_t wanted, std::string_view* in) {
  const size_t n = std::min(wanted - head_.size(), in->size());
  head_.append(in->substr(0, n));
  in->remove_prefix(n);
  return head_.size() == wanted;
}

Status StreamReader::feed(std::string_view bytes) {
  while (!bytes.empty()) {
    switch (stage_) {
      case Stage::kPrefix: {
        if (!gather(kPrefixBytes, &bytes)) break;
        WEFT_ASSIGN_OR_RETURN(prefix_, decode_prefix(head_, limits_));
        if (ended_) return make_error(ErrorKind::kProtocol, "a frame behind a data_end");
        if (prefix_.kind == FrameKind::kDataEnd && prefix_.header_len + prefix_.payload_len == 0) {
          ended_ = true;
          head_.clear();
          break;
        }
        // What else is the transport's own goes over the control lane.
        if (prefix_.kind >= FrameKind::kArenaProbe) {
          return make_error(ErrorKind::kProtocol,
                            absl::StrCat("a frame of kind ", view(frame_kind_name(prefix_.kind)),
                                         " on a data connection"));
        }
        head_.clear();
        stage_ = Stage::kHeader;
        if (prefix_.header_len == 0) WEFT_RETURN_IF_ERROR(begin_payload());
        break;
      }
      case Stage::kHeader: {
        if (gather(prefix_.header_len, &bytes)) WEFT_RETURN_IF_ERROR(begin_payload());
        break;
      }
      case Stage::kPayload: {
        const size_t n = std::min(left_, bytes.size());
        if (target_.data != nullptr) {
          std::memcpy(place_, bytes.data(), n);
        } else {
          payload_.append(bytes.substr(0, n));
        }
        bytes.remove_prefix(n);
        WEFT_RETURN_IF_ERROR(advance(n));
        break;
      }
    }
  }
  return absl::OkStatus();
}

Status StreamReader::begin_payload() {
  stage_ = Stage::kPayload;
  left_ = prefix_.payload_len;
  if (left_ == 0) return end_frame();
  if (prefix_.kind == FrameKind::kChunk) target_ = sink_->stream_target(head_, left_);
  place_ = target_.data;
  return absl::OkStatus();
}

Status StreamReader::advance(size_t n) {
  if (target_.data != nullptr) place_ += n;
  left_ -= n;
  return left_ > 0 ? absl::OkStatus() : end_frame();
}

Status StreamReader::end_frame() {
  Status status;
  if (target_.data != nullptr) {
    const ChunkTarget held = std::exchange(target_, {});
    status = sink_->stream_filled(head_, prefix_.payload_len);
  } else {
    const std::string_view piece = payload_;
    FrameView frame;
    frame.kind = prefix_.kind;
    frame.header = head_;
    frame.payload_bytes = prefix_.payload_len;
    if (!piece.empty()) frame.payload = absl::MakeConstSpan(&piece, 1);
    status = sink_->stream_frame(frame);
    payload_.clear();
    if (payload_.capacity() > kKeptPayload) std::string().swap(payload_);
  }
  head_.clear();
  stage_ = Stage::kPrefix;
  return status;
}

}  // namespace weft::internal
