#ifndef WEFT_RPC_INTERNAL_AGENT_INCOMING_H_
#define WEFT_RPC_INTERNAL_AGENT_INCOMING_H_

// What the two files of the Assembler (message.h) share: a message that is being received.

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "weft/rpc/internal/agent/message.h"
#include "weft/transport/stream_copy.h"

namespace weft::internal {

inline constexpr size_t kMaxOpenTransfers = 1 << 16;
// What keeping a chunk costs besides its bytes: chunks of one byte must be bounded, too.
inline constexpr size_t kParkedBytes = 128;

// Reads the payload of a frame front to back.
class PayloadReader {
 public:
  explicit PayloadReader(const FrameView& frame) : pieces_(frame.payload) {}
  // Into a part of a buffer of `whole` bytes.
  void read(char* to, size_t n, size_t whole) {
    while (n > 0) {
      const std::string_view piece = pieces_[at_].substr(offset_);
      const size_t k = std::min(n, piece.size());
      copy_part(to, piece.data(), k, whole);
      to += k;
      n -= k;
      offset_ += k;
      if (offset_ == pieces_[at_].size()) {
        ++at_;
        offset_ = 0;
      }
    }
  }

 private:
  absl::Span<const std::string_view> pieces_;
  size_t at_ = 0;
  size_t offset_ = 0;
};

// The parts of a wide message: its header, and then where the rest belongs. Used by the thread that
// has set `busy` of its transfer; target() with the mutex, while `busy` is not set.
struct WideParts {
  std::string header;  // as long as it will be
  uint64_t header_length = 0;
  uint64_t length = 0;  // of the transfer
  Connection* connection = nullptr;
  Assembler::Open open;  // null: the header has been read
  // Where the bytes after the header belong, in their order; and the next place.
  std::vector<std::pair<char*, uint64_t>> places;
  size_t at = 0;
  uint64_t filled = 0;  // of places[at]

  // Where the next `bytes` belong if they lie together, else null.
  char* target(uint64_t offset, uint64_t bytes) {
    if (open != nullptr) {
      return bytes <= header_length - offset ? header.data() + offset : nullptr;
    }
    if (at == places.size() || bytes > places[at].second - filled) return nullptr;
    return places[at].first + filled;
  }
  // So many more are in place. REQUIRES: not more than lie together.
  void advance(uint64_t bytes) {
    filled += bytes;
    if (filled < places[at].second) return;
    ++at;
    filled = 0;
  }
};

struct Assembler::Incoming {
  Payload payload;
  Metas metas;
  absl::InlinedVector<Buffers, 2> buffers;  // per meta
  size_t open_transfers = 0;
  uint64_t charged = 0;
  Purpose purpose;
  Delivered delivered;
  std::unique_ptr<WideParts> wide;  // null: as most are
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_AGENT_INCOMING_H_
