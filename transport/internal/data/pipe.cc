#include "weft/transport/internal/data/pipe.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "weft/common/posix.h"
#include "weft/transport/internal/data/sealed.h"

namespace weft::internal {
namespace {

// What is read where nobody knows yet where it belongs: mostly the head of the next frame.
constexpr size_t kStageBytes = 4096;
constexpr size_t kPiecesAtOnce = 64;
// A payload of this size begins a record of its own, so that it can be opened into its place.
constexpr size_t kOwnRecord = 4096;

WEFT_COLD Status broken(int code) {
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

void note_sent(std::deque<OutFrame>* frames, size_t n) {
  while (n > 0) {
    OutFrame& front = frames->front();
    const size_t k = std::min(n, front.bytes - front.sent);
    front.sent += k;
    n -= k;
    if (front.sent == front.bytes) frames->pop_front();
  }
}

class PlainWriter final : public PipeWriter {
 public:
  explicit PlainWriter(int fd) : fd_(fd) {}

  StatusOr<PipeState> write(std::deque<OutFrame>* frames, size_t budget) override {
    for (size_t written = 0; !frames->empty();) {
      if (written >= budget) return PipeState::kPaused;
      std::array<iovec, kPiecesAtOnce> pieces;
      size_t n = 0;
      size_t room = budget - written;
      for (auto frame = frames->begin(); frame != frames->end() && n < pieces.size() && room > 0;
           ++frame) {
        each_piece(*frame, [&](std::string_view piece) {
          if (n == pieces.size() || room == 0) return false;
          const size_t k = std::min(piece.size(), room);
          pieces[n++] = {const_cast<char*>(piece.data()), k};
          room -= k;
          return true;
        });
      }
      msghdr message = {};
      message.msg_iov = pieces.data();
      message.msg_iovlen = n;
      const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0) {
        if (errno == EINTR) continue;
        if (not_now(errno)) return PipeState::kBlocked;
        return broken(errno);
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
        return broken(errno);
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

class SealedWriter final : public PipeWriter {
 public:
  SealedWriter(int fd, std::unique_ptr<Sealer> sealer)
      : fd_(fd), sealer_(std::move(sealer)), record_(new char[kMaxRecordBytes]) {}

  StatusOr<PipeState> write(std::deque<OutFrame>* frames, size_t budget) override {
    for (size_t written = 0;;) {
      WEFT_ASSIGN_OR_RETURN(const PipeState state, flush());
      if (state != PipeState::kDone || frames->empty()) return state;
      if (written >= budget) return PipeState::kPaused;
      WEFT_ASSIGN_OR_RETURN(const size_t text, make_record(*frames));
      note_sent(frames, text);
      written += text;
    }
  }

  bool pending() const override { return begin_ < end_; }

 private:
  // Heads and small payloads together; of a large payload as much as fits, alone.
  StatusOr<size_t> make_record(const std::deque<OutFrame>& frames) {
    absl::InlinedVector<std::string_view, 16> pieces;
    size_t text = 0;
    bool full = false;
    for (auto frame = frames.begin(); frame != frames.end() && !full; ++frame) {
      each_piece(*frame, [&](std::string_view piece) {
        const bool large = piece.size() >= kOwnRecord;
        full = (large && text > 0) || text + std::min(piece.size(), kOwnRecord) > kMaxRecordText;
        if (full) return false;
        pieces.push_back(piece.substr(0, kMaxRecordText - text));
        text += pieces.back().size();
        full = large;
        return !full;
      });
    }
    WEFT_ASSIGN_OR_RETURN(end_, sealer_->seal(pieces, record_.get()));
    begin_ = 0;
    return text;
  }
  StatusOr<PipeState> flush() {
    while (begin_ < end_) {
      const ssize_t sent =
          send(fd_, record_.get() + begin_, end_ - begin_, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0) {
        if (errno == EINTR) continue;
        if (not_now(errno)) return PipeState::kBlocked;
        return broken(errno);
      }
      begin_ += static_cast<size_t>(sent);
    }
    return PipeState::kDone;
  }

  const int fd_;
  const std::unique_ptr<Sealer> sealer_;
  const std::unique_ptr<char[]> record_;  // from begin_ to end_ is to be written
  size_t begin_ = 0;
  size_t end_ = 0;
};

class SealedReader final : public PipeReader {
 public:
  SealedReader(int fd, std::unique_ptr<Opener> opener)
      : fd_(fd),
        opener_(std::move(opener)),
        buffer_(new char[kMaxRecordBytes + kRecordHeadBytes]),
        text_(new char[kMaxRecordText]) {}

  StatusOr<PipeState> read(StreamReader* to, size_t budget) override {
    for (size_t done = 0;;) {
      if (done >= budget) return PipeState::kPaused;
      // The rest of this record and the head of the next: what would be read beyond had to be
      // moved.
      const size_t wanted = (record_ > 0 ? record_ : kMaxRecordBytes) + kRecordHeadBytes - have_;
      const ssize_t n = recv(fd_, buffer_.get() + have_, wanted, MSG_DONTWAIT);
      if (n < 0) {
        if (errno == EINTR) continue;
        if (not_now(errno)) return PipeState::kBlocked;
        return broken(errno);
      }
      if (n == 0) return end_of(*to);
      have_ += static_cast<size_t>(n);
      done += static_cast<size_t>(n);
      WEFT_RETURN_IF_ERROR(open_records(to));
    }
  }

 private:
  Status open_records(StreamReader* to) {
    size_t begin = 0;
    record_ = 0;
    while (have_ - begin >= kRecordHeadBytes) {
      WEFT_ASSIGN_OR_RETURN(const size_t text,
                            Opener::text_bytes({buffer_.get() + begin, kRecordHeadBytes}));
      const size_t bytes = kRecordHeadBytes + text + kRecordTagBytes;
      if (have_ - begin < bytes) {
        record_ = bytes;
        break;
      }
      const absl::Span<char> direct = to->direct();
      WEFT_RETURN_IF_ERROR(opener_->open({buffer_.get() + begin, bytes}, direct, text_.get()));
      begin += bytes;
      const size_t k = std::min(direct.size(), text);
      if (k > 0) WEFT_RETURN_IF_ERROR(to->advance(k));
      WEFT_RETURN_IF_ERROR(to->feed({text_.get(), text - k}));
    }
    have_ -= begin;
    if (begin > 0) std::memmove(buffer_.get(), buffer_.get() + begin, have_);
    return absl::OkStatus();
  }

  const int fd_;
  const std::unique_ptr<Opener> opener_;
  const std::unique_ptr<char[]> buffer_;
  const std::unique_ptr<char[]> text_;
  size_t have_ = 0;
  size_t record_ = 0;  // length of the record under way; 0: not known yet
};

}  // namespace

OutFrame::OutFrame(Frame f) : frame(std::move(f)), head(kPrefixBytes, '\0') {
  const size_t payload = frame.payload_bytes();
  encode_prefix(frame.kind, frame.header.size(), payload, head.data());
  head += frame.header;
  bytes = head.size() + payload;
}

StatusOr<std::unique_ptr<PipeWriter>> make_pipe_writer(int fd, std::string_view key) {
  if (key.empty()) return std::make_unique<PlainWriter>(fd);
  WEFT_ASSIGN_OR_RETURN(std::unique_ptr<Sealer> sealer, Sealer::make(key));
  return std::make_unique<SealedWriter>(fd, std::move(sealer));
}

StatusOr<std::unique_ptr<PipeReader>> make_pipe_reader(int fd, std::string_view key) {
  if (key.empty()) return std::make_unique<PlainReader>(fd);
  WEFT_ASSIGN_OR_RETURN(std::unique_ptr<Opener> opener, Opener::make(key));
  return std::make_unique<SealedReader>(fd, std::move(opener));
}

}  // namespace weft::internal
