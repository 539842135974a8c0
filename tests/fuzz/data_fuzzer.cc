// Arbitrary bytes on a data connection: the frames of a stream with an Assembler behind it, offers,
// and handshakes of TLS. Whatever comes, every message is delivered or dropped once, no two write
// to one place, the budget is kept, and no handshake ends well without the key.

#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "weft/common/byte_budget.h"
#include "weft/common/posix.h"
#include "weft/proto/rpc.pb.h"
#include "weft/rpc/internal/agent/arena_message.h"
#include "weft/rpc/internal/agent/header.h"
#include "weft/rpc/internal/agent/message.h"
#include "weft/tests/fuzz/target.h"
#include "weft/transport/internal/data/offer.h"
#include "weft/transport/internal/data/stream_reader.h"
#include "weft/transport/tls_stream.h"

namespace in = weft::internal;
using weft::Status;

namespace {

constexpr uint64_t kBudget = 64 * 1024;
constexpr size_t kMaxFrame = 32 * 1024;

// As a link, for requests and chunks.
class Receiver final : public in::StreamSink {
 public:
  explicit Receiver(weft::ByteBudget* budget) : assembler_(limits(), budget) {}
  ~Receiver() {
    const size_t incomplete = assembler_.incomplete_for_test();
    assembler_.abandon();
    require(assembler_.incomplete_for_test() == 0);
    require(delivered_ <= begun_);
    require((incomplete == 0 && !filling_) || delivered_ <= begun_);
  }

  weft::ChunkTarget stream_target(std::string_view header, size_t bytes) override {
    require(!filling_);
    const weft::ChunkTarget target = assembler_.chunk_target(header, bytes);
    filling_ = target.data != nullptr;
    return target;
  }
  Status stream_filled(std::string_view header, size_t bytes) override {
    require(filling_);
    filling_ = false;
    const Status filled = assembler_.chunk_filled(header, bytes);
    require(filled.ok());  // the one that was asked for
    return filled;
  }
  Status stream_frame(const weft::FrameView& frame) override {
    require(!filling_);
    if (frame.kind == weft::FrameKind::kChunk) return assembler_.on_chunk(frame);
    if (frame.kind != weft::FrameKind::kRequest) return absl::OkStatus();
    in::ArenaMessage<weft::v1::CallHeader> header;
    WEFT_RETURN_IF_ERROR(in::parse_header(frame, header.get()));
    for (const weft::v1::Segment& s : header->layout().segments()) {
      if (s.has_arena_offset()) return weft::make_error(weft::ErrorKind::kProtocol, "no arena");
    }
    ++begun_;
    uint64_t bytes = 0;
    for (const weft::v1::Segment& s : header->layout().segments()) bytes += s.length();
    const Status begun = assembler_.begin(header->layout(), frame, nullptr,
                                          [this, told = false](auto payload) mutable {
                                            require(!told);
                                            told = true;
                                            ++delivered_;
                                            refused_ = !payload.ok();
                                          });
    if (begun.ok() && !std::exchange(refused_, false)) Decoding::charged(bytes);
    return begun;
  }

 private:
  static in::MessageLimits limits() {
    in::MessageLimits out;
    out.max_message_bytes = 48 * 1024;
    out.max_parked_bytes = 16 * 1024;
    return out;
  }

  in::Assembler assembler_;
  int begun_ = 0;
  int delivered_ = 0;
  bool refused_ = false;
  bool filling_ = false;
};

Status read_stream(std::string_view bytes, size_t step, bool direct) {
  weft::ByteBudget budget(kBudget, "fuzzed");
  Status status;
  {
    Receiver receiver(&budget);
    in::StreamReader reader(kMaxFrame, &receiver);
    while (status.ok() && !bytes.empty()) {
      const absl::Span<char> place = direct ? reader.direct() : absl::Span<char>();
      size_t n = std::min(step, bytes.size());
      if (!place.empty()) n = std::min(n, place.size());
      const std::string_view piece = bytes.substr(0, n);
      bytes.remove_prefix(n);
      status = decoded(n, [&] {
        if (place.empty()) return reader.feed(piece);
        std::memcpy(place.data(), piece.data(), n);
        return reader.advance(n);
      });
      require(budget.used() <= kBudget);
    }
    if (status.ok() && !reader.ended()) {
      status = weft::make_error(weft::ErrorKind::kUnavailable, "no data_end");
    }
  }
  require(budget.used() == 0);
  return status;
}

// Feeds what a peer without the key sends to a side that waits for TLS.
Status shake_hands(std::string_view bytes, in::TlsRole role) {
  int fds[2];
  require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
  const in::UniqueFd ours(fds[0]);
  in::UniqueFd theirs(fds[1]);
  auto tls = in::TlsStream::with_key(ours.get(), role, std::string(in::kTlsKeyBytes, 'k'));
  require(tls.ok());
  bytes = bytes.substr(0, 64 * 1024);
  (void)!send(theirs.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  const auto first = (*tls)->handshake();
  if (!first.ok()) return first.status();
  require(*first != in::TlsState::kDone);  // the peer does not have the key
  theirs.reset();
  const auto cut = (*tls)->handshake();
  require(!cut.ok());
  return cut.status();
}

}  // namespace

// As for the headers of frames, and for what is known of a tensor.
const size_t kMostBytesPerByte = 128;

// 'S', length of the pieces (1 byte, 0: one), whether they go into place (1): a stream. 'O', number
// of the first (1), whether there are keys (1): an offer. 'T', any byte, whether we are the server
// (1): a handshake of TLS.
Status fuzz_one(std::string_view input) {
  if (input.empty()) return absl::OkStatus();
  const char what = input[0];
  input.remove_prefix(1);
  if (input.size() < 2) return absl::OkStatus();
  const size_t first = static_cast<unsigned char>(input[0]);
  const bool flag = (input[1] & 1) != 0;
  input.remove_prefix(2);
  if (what == 'T') {
    const Status status = shake_hands(input, flag ? in::TlsRole::kServer : in::TlsRole::kClient);
    const weft::ErrorKind kind = weft::error_kind(status);
    require(kind == weft::ErrorKind::kProtocol || kind == weft::ErrorKind::kPermission ||
            kind == weft::ErrorKind::kUnavailable);
    return status;
  }
  if (what == 'S') return read_stream(input, first == 0 ? input.size() : first, flag);
  if (what != 'O') return absl::OkStatus();
  const size_t lanes = first % 8 + 1;
  const weft::StatusOr<in::DataOffer> offer =
      decoded(input.size() + 32, [&] { return in::decode_data_offer(input, lanes, flag); });
  if (!offer.ok()) {
    require(weft::error_kind(offer.status()) == weft::ErrorKind::kProtocol);
    return offer.status();
  }
  require(offer->index < offer->count && lanes + offer->count <= 8);
  require(offer->key.size() == (flag ? in::kTlsKeyBytes : 0));
  return absl::OkStatus();
}
