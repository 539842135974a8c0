#include "weft/transport/internal/data/pipe.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "weft/common/posix.h"
#include "weft/transport/tls_stream.h"

namespace weft::internal {
namespace {

// Staging for bytes whose place is not known yet: mostly the head of the next frame.
constexpr size_t kStageBytes = 4096;
constexpr size_t kPiecesAtOnce = 64;

WEFT_COLD Status connection_broken(int code) {
  return make_error(ErrorKind::kUnavailable, system_error(code));
}
StatusOr<PipeState> end_of(const StreamReader& to) {
  if (to.ended()) return PipeState::kEnded;
  return make_error(ErrorKind::kUnavailable, "it ended without a data_end");
}
bool not_now(int code) { return code == EAGAIN || code == EWOULDBLOCK; }

// The bytes of a frame from `sent` on, piece by piece, until `take` says no.
template <class Take>
void each_piece(const OutFrame& out, Take take) {
  size_t skip = out.sent;
  const auto one = [&](const char* data, size_t size) {
    const size_t n = std::min(skip, size);
    skip -= n;
    return n == size || take(std::string_view(data + n, size - n));
  };
  if (!one(out.head.data(), out.head.size())) return;
  for (const Slice& slice : out.frame.payload) {
    if (!one(slice.data, slice.size)) return;
  }
}

// Calls `take` with each of the next pieces of the frames, `room` bytes together, and how many were
// before it; how many they are.
template <class Take>
size_t gather(const std::deque<OutFrame>& frames, size_t room, Take take) {
  size_t n = 0;
  for (auto frame = frames.begin(); frame != frames.end() && n < kPiecesAtOnce && room > 0;
       ++frame) {
    each_piece(*frame, [&](std::string_view piece) {
      if (n == kPiecesAtOnce || room == 0) return false;
      piece = piece.substr(0, room);
      take(n++, piece);
      room -= piece.size();
      return true;
    });
  }
  return n;
}

// Whether the last frame of this direction is out.
bool note_sent(std::deque<OutFrame>* frames, size_t n) {
  bool last = false;
  while (n > 0) {
    OutFrame& front = frames->front();
    const size_t k = std::min(n, front.bytes - front.sent);
    front.sent += k;
    n -= k;
    if (front.sent < front.bytes) break;
    last = front.frame.kind == FrameKind::kDataEnd;
    frames->pop_front();
  }
  return last;
}

class PlainWriter final : public PipeWriter {
 public:
  explicit PlainWriter(int fd) : fd_(fd) {}

  StatusOr<PipeState> write(std::deque<OutFrame>* frames, size_t budget) override {
    for (size_t written = 0; !frames->empty();) {
      if (written >= budget) return PipeState::kPaused;
      std::array<iovec, kPiecesAtOnce> pieces;
      const size_t n = gather(*frames, budget - written, [&](size_t i, std::string_view piece) {
        pieces[i] = {const_cast<char*>(piece.data()), piece.size()};
      });
      msghdr message = {};
      message.msg_iov = pieces.data();
      message.msg_iovlen = n;
      const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0) {
        if (errno == EINTR) continue;
        if (not_now(errno)) return PipeState::kBlocked;
        return connection_broken(errno);
      }
      note_sent(frames, static_cast<size_t>(sent));
      written += static_cast<size_t>(sent);
    }
    return PipeState::kDone;
  }

 private:
  const int fd_;
};

class PlainReader final : public PipeReader {
 public:
  explicit PlainReader(int fd) : fd_(fd) {}

  StatusOr<PipeState> read(StreamReader* to, size_t budget) override {
    for (size_t done = 0;;) {
      if (done >= budget) return PipeState::kPaused;
      const absl::Span<char> direct = to->direct().subspan(0, budget - done);
      const bool all = direct.size() == to->direct().size();
      iovec places[] = {{direct.data(), direct.size()}, {stage_.data(), stage_.size()}};
      const bool staged_only = direct.empty();
      const ssize_t n = readv(fd_, places + (staged_only ? 1 : 0), staged_only || !all ? 1 : 2);
      if (n < 0) {
        if (errno == EINTR) continue;
        if (not_now(errno)) return PipeState::kBlocked;
        return connection_broken(errno);
      }
      if (n == 0) return end_of(*to);
      const size_t got = static_cast<size_t>(n);
      const size_t k = std::min(got, direct.size());
      if (k > 0) WEFT_RETURN_IF_ERROR(to->advance(k));
      WEFT_RETURN_IF_ERROR(to->feed({stage_.data(), got - k}));
      done += got;
      // The socket is empty: another read would only say so.
      if (all && got < direct.size() + stage_.size() && got > k) return PipeState::kBlocked;
    }
  }

 private:
  const int fd_;
  std::array<char, kStageBytes> stage_;
};

class TlsWriter final : public PipeWriter {
 public:
  explicit TlsWriter(std::shared_ptr<TlsStream> tls) : tls_(std::move(tls)) {}

  StatusOr<PipeState> write(std::deque<OutFrame>* frames, size_t budget) override {
    for (size_t written = 0;;) {
      std::array<std::string_view, kPiecesAtOnce> pieces;
      const size_t n = gather(*frames, budget - std::min(budget, written),
                              [&](size_t i, std::string_view piece) { pieces[i] = piece; });
      // With none it still sends what was sealed before.
      WEFT_ASSIGN_OR_RETURN(const TlsMoved moved, tls_->write({pieces.data(), n}));
      const bool last = note_sent(frames, moved.bytes);
      written += moved.bytes;
      TlsState state = moved.state;
      if (last) {
        WEFT_ASSIGN_OR_RETURN(state, tls_->close());
      }
      if (state == TlsState::kWantWrite) return PipeState::kBlocked;
      if (frames->empty()) return PipeState::kDone;
      if (written >= budget) return PipeState::kPaused;
    }
  }

  bool pending() const override { return tls_->pending(); }

 private:
  const std::shared_ptr<TlsStream> tls_;
};

class TlsReader final : public PipeReader {
 public:
  explicit TlsReader(std::shared_ptr<TlsStream> tls) : tls_(std::move(tls)) {}

  StatusOr<PipeState> read(StreamReader* to, size_t budget) override {
    // What has come from the socket is used up, whatever the budget: the socket would not become
    // ready for it.
    for (size_t done = 0;;) {
      const size_t more = budget - std::min(budget, done);
      const absl::Span<char> direct = to->direct();
      const absl::Span<char> place = direct.empty() ? absl::MakeSpan(stage_) : direct;
      WEFT_ASSIGN_OR_RETURN(const TlsMoved moved, tls_->read(place, more));
      done += moved.socket_bytes;
      if (moved.bytes > 0) {
        WEFT_RETURN_IF_ERROR(direct.empty() ? to->feed({stage_.data(), moved.bytes})
                                            : to->advance(moved.bytes));
      }
      if (moved.state == TlsState::kEnded) return end_of(*to);
      if (moved.state == TlsState::kWantRead) return PipeState::kBlocked;
      if (moved.bytes < place.size() && done >= budget) return PipeState::kPaused;
    }
  }

 private:
  const std::shared_ptr<TlsStream> tls_;
  std::array<char, kStageBytes> stage_;
};

}  // namespace

OutFrame::OutFrame(Frame f) : frame(std::move(f)), head(kPrefixBytes, '\0') {
  const size_t payload = frame.payload_bytes();
  encode_prefix(frame.kind, frame.header.size(), payload, head.data());
  head += frame.header;
  bytes = head.size() + payload;
}

std::unique_ptr<PipeWriter> make_pipe_writer(int fd) { return std::make_unique<PlainWriter>(fd); }
std::unique_ptr<PipeReader> make_pipe_reader(int fd) { return std::make_unique<PlainReader>(fd); }
std::unique_ptr<PipeWriter> make_pipe_writer(std::shared_ptr<TlsStream> tls) {
  return std::make_unique<TlsWriter>(std::move(tls));
}
std::unique_ptr<PipeReader> make_pipe_reader(std::shared_ptr<TlsStream> tls) {
  return std::make_unique<TlsReader>(std::move(tls));
}

}  // namespace weft::internal
