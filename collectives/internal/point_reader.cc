#include "weft/collectives/internal/point_reader.h"

#include <algorithm>
#include <utility>

#include "weft/collectives/internal/element.h"
#include "weft/collectives/internal/text.h"

namespace weft::internal {
namespace {

// Memory is taken so far ahead of the bytes that have come.
constexpr uint64_t kAhead = 2 << 10;
constexpr uint64_t kMaxDimensions = 64;

}  // namespace

Status check_point_header(const Header& h, uint64_t group, uint32_t generation, int peer) {
  WEFT_RETURN_IF_ERROR(check_origin(h, group, generation, peer));
  const uint64_t size = h.type < kElementTypes ? element_size(static_cast<ElementType>(h.type)) : 0;
  uint64_t bytes = 0;
  const bool right = h.op == static_cast<uint8_t>(OpKind::kSend) && size > 0 &&
                     h.detail <= kMaxDimensions && !__builtin_mul_overflow(h.count, size, &bytes) &&
                     !__builtin_add_overflow(bytes, h.detail * sizeof(int64_t), &bytes) &&
                     bytes == h.bytes && bytes <= PointReader::kMaxBytes;
  if (right) return absl::OkStatus();
  return make_error(ErrorKind::kProtocol,
                    cat("rank ", peer, " sent a header that is none of a tensor: operation ",
                        int{h.op}, ", type ", int{h.type}, ", ", h.count, " elements, ", h.detail,
                        " dimensions, ", h.bytes, " bytes"));
}

char* PointReader::place(size_t* bytes) {
  if (!header_done_) {
    *bytes = sizeof header_ - header_got_;
    return reinterpret_cast<char*>(&header_) + header_got_;
  }
  if (body_got_ == body_.size()) {
    body_.resize(std::min(header_.bytes, std::max(body_got_ * 2, body_got_ + kAhead)));
  }
  *bytes = body_.size() - body_got_;
  return body_.data() + body_got_;
}

Status PointReader::took(size_t bytes) {
  if (header_done_) {
    body_got_ += bytes;
    return absl::OkStatus();
  }
  header_got_ += bytes;
  if (header_got_ < sizeof header_) return absl::OkStatus();
  WEFT_RETURN_IF_ERROR(check_point_header(header_, group_, generation_, peer_));
  header_done_ = true;
  return absl::OkStatus();
}

Header PointReader::take(std::vector<char>* body) {
  *body = std::move(body_);
  body_.clear();
  body_got_ = 0;
  header_got_ = 0;
  header_done_ = false;
  return header_;
}

}  // namespace weft::internal
