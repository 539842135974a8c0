// What data connections are made of, without a network: frames out of bytes in any pieces, offers,
// and the two directions of a socket.
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "weft/tests/contract/tls_pair.h"
#include "weft/tests/contract/transport_harness.h"
#include "weft/transport/frame.h"
#include "weft/transport/internal/data/offer.h"
#include "weft/transport/internal/data/pipe.h"
#include "weft/transport/internal/data/stream_reader.h"
#include "weft/transport/internal/data/turn.h"

namespace weft::testing {
namespace {

using internal::DataOffer;
using internal::OutFrame;
using internal::PipeReader;
using internal::PipeState;
using internal::PipeWriter;
using internal::StreamReader;

constexpr size_t kLimit = 4u << 20;

// Takes chunks into place when their header is "place", and keeps all it gets.
class Sink final : public internal::StreamSink {
 public:
  struct Got {
    FrameKind kind;
    std::string header;
    std::string payload;
    bool in_place;
  };

  ChunkTarget stream_target(std::string_view header, size_t bytes) override {
    if (header != "place") return {};
    EXPECT_EQ(place_, nullptr) << "two at once";
    place_ = std::make_shared<std::string>(bytes, '?');
    return {place_->data(), place_};
  }
  Status stream_filled(std::string_view header, size_t bytes) override {
    EXPECT_EQ(place_->size(), bytes);
    got.push_back({FrameKind::kChunk, std::string(header), *place_, true});
    place_ = nullptr;
    return verdict;
  }
  Status stream_frame(const FrameView& frame) override {
    std::string payload;
    for (std::string_view piece : frame.payload) payload.append(piece);
    EXPECT_EQ(payload.size(), frame.payload_bytes);
    got.push_back({frame.kind, std::string(frame.header), payload, false});
    return verdict;
  }

  std::vector<Got> got;
  Status verdict;

 private:
  std::shared_ptr<std::string> place_;
};

std::vector<Frame> some_frames() {
  std::vector<Frame> frames;
  frames.push_back(make_frame(FrameKind::kRequest, "call", "inline"));
  frames.push_back(make_frame(FrameKind::kChunk, "place", pattern(300'000, 1)));
  frames.push_back(make_frame(FrameKind::kChunk, "place", pattern(1, 2)));
  frames.push_back(make_frame(FrameKind::kHeartbeat, "", ""));
  frames.push_back(make_frame(FrameKind::kChunk, "elsewhere", pattern(70'000, 3)));
  frames.push_back(make_frame(FrameKind::kGoodbye, "bye", ""));
  return frames;
}

std::string bytes_of(const std::vector<Frame>& frames) {
  std::string out;
  for (const Frame& frame : frames) {
    const size_t at = out.size();
    out.resize(at + internal::frame_bytes(frame));
    internal::encode_frame(frame, out.data() + at);
  }
  return out;
}

void expect_all(const Sink& sink) {
  const std::vector<Frame> sent = some_frames();
  ASSERT_EQ(sink.got.size(), sent.size());
  for (size_t i = 0; i < sent.size(); ++i) {
    EXPECT_EQ(sink.got[i].kind, sent[i].kind) << i;
    EXPECT_EQ(sink.got[i].header, sent[i].header) << i;
    std::string payload;
    for (const Slice& slice : sent[i].payload) payload.append(slice.data, slice.size);
    EXPECT_TRUE(sink.got[i].payload == payload) << i;
    EXPECT_EQ(sink.got[i].in_place, sent[i].header == "place") << i;
  }
}

TEST(StreamReader, FramesComeWholeWhateverThePieces) {
  const std::string bytes = bytes_of(some_frames());
  for (const size_t step : {size_t{1}, size_t{7}, size_t{16}, size_t{4096}, bytes.size()}) {
    for (const bool direct : {false, true}) {
      Sink sink;
      StreamReader reader(kLimit, &sink);
      for (size_t at = 0; at < bytes.size();) {
        size_t n = std::min(step, bytes.size() - at);
        const absl::Span<char> place = reader.direct();
        if (direct && !place.empty()) {
          n = std::min(n, place.size());
          std::copy_n(bytes.data() + at, n, place.data());
          ASSERT_TRUE(reader.advance(n).ok());
        } else {
          ASSERT_TRUE(reader.feed(std::string_view(bytes).substr(at, n)).ok());
        }
        at += n;
      }
      EXPECT_FALSE(reader.ended());
      expect_all(sink);
      ASSERT_TRUE(reader.feed(bytes_of({make_frame(FrameKind::kDataEnd, "", "")})).ok());
      EXPECT_TRUE(reader.ended());
      EXPECT_EQ(error_kind(reader.feed(bytes)), ErrorKind::kProtocol) << "behind the end";
    }
  }
}

TEST(StreamReader, WhatIsNoFrameIsAProtocolError) {
  const std::string good = bytes_of({make_frame(FrameKind::kRequest, "h", "p")});
  const auto changed = [&](size_t at, char to) {
    std::string out = good;
    out[at] = to;
    return out;
  };
  std::string terabyte = good;
  terabyte[13] = 1;
  const std::vector<std::string> bad = {changed(0, 'x'),
                                        changed(2, 0),
                                        changed(2, 99),
                                        changed(3, 1),
                                        changed(7, 1),
                                        terabyte,
                                        bytes_of({make_frame(FrameKind::kHello, "h", "")}),
                                        bytes_of({make_frame(FrameKind::kArenaFree, "h", "")}),
                                        bytes_of({make_frame(FrameKind::kDataOffer, "h", "")}),
                                        bytes_of({make_frame(FrameKind::kDataEnd, "h", "")})};
  for (size_t i = 0; i < bad.size(); ++i) {
    Sink sink;
    StreamReader reader(kLimit, &sink);
    EXPECT_EQ(error_kind(reader.feed(bad[i])), ErrorKind::kProtocol) << i;
    EXPECT_TRUE(sink.got.empty()) << i;
  }
}

TEST(StreamReader, ARefusedFrameEndsIt) {
  Sink sink;
  sink.verdict = make_error(ErrorKind::kUnavailable, "enough");
  StreamReader reader(kLimit, &sink);
  EXPECT_EQ(reader.feed(bytes_of(some_frames())).message(), "enough");
  EXPECT_EQ(sink.got.size(), 1u);
}

// ---- offers ------------------------------------------------------------------------------------

TEST(DataOffer, WhatAnAcceptorOffersIsChecked) {
  const DataOffer good{std::string(16, 't'), 1, 2, std::string(32, 'k')};
  const StatusOr<DataOffer> same =
      internal::decode_data_offer(internal::encode_data_offer(good, 3), 3, true);
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_EQ(same->ticket, good.ticket);
  EXPECT_EQ(same->index, 1u);
  EXPECT_EQ(same->count, 2u);
  EXPECT_EQ(same->key, good.key);
  const auto bad = [](DataOffer offer, size_t first, size_t expected_first, bool tls) {
    return error_kind(internal::decode_data_offer(internal::encode_data_offer(offer, first),
                                                  expected_first, tls)
                          .status()) == ErrorKind::kProtocol;
  };
  const auto with = [&](auto change) {
    DataOffer offer = good;
    change(offer);
    return offer;
  };
  EXPECT_TRUE(bad(good, 3, 3, false)) << "a key for plain text";
  EXPECT_TRUE(bad(with([](DataOffer& o) { o.ticket.pop_back(); }), 3, 3, true));
  EXPECT_TRUE(bad(with([](DataOffer& o) { o.key.clear(); }), 3, 3, true));
  EXPECT_TRUE(bad(with([](DataOffer& o) { o.key += 'x'; }), 3, 3, true));
  EXPECT_TRUE(bad(with([](DataOffer& o) { o.index = 2; }), 3, 3, true)) << "the third of two";
  EXPECT_TRUE(bad(good, 1, 3, true)) << "a lane that is there";
  EXPECT_TRUE(bad(with([](DataOffer& o) { o.count = 6; }), 3, 3, true)) << "too many";
  EXPECT_EQ(error_kind(internal::decode_data_offer("\x0a\xff", 3, true).status()),
            ErrorKind::kProtocol);
}

// ---- turns -------------------------------------------------------------------------------------

TEST(DataTurns, TheyAreShortWhileSmallCallsComeAndGo) {
  internal::DataTurn turn;
  EXPECT_EQ(turn.bytes(), internal::DataTurn::kLong);
  absl::Time now = absl::UnixEpoch();
  turn.note_small();
  turn.note_small();
  turn.look(now);
  EXPECT_EQ(turn.bytes(), internal::DataTurn::kShort);
  now += internal::DataTurn::kSmallLasts - absl::Milliseconds(1);
  turn.look(now);
  EXPECT_EQ(turn.bytes(), internal::DataTurn::kShort);
  turn.note_small();
  turn.look(now);
  now += internal::DataTurn::kSmallLasts - absl::Milliseconds(1);
  turn.look(now);
  EXPECT_EQ(turn.bytes(), internal::DataTurn::kShort) << "counted from the last one";
  now += absl::Milliseconds(1);
  turn.look(now);
  EXPECT_EQ(turn.bytes(), internal::DataTurn::kLong);
}

// ---- through sockets ---------------------------------------------------------------------------

class Pipes : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    sockets_ = SocketPair();
    if (GetParam()) {
      auto [client, server] = tls_pair(sockets_);
      writer_ = internal::make_pipe_writer(client);
      reader_ = internal::make_pipe_reader(server);
    } else {
      writer_ = internal::make_pipe_writer(sockets_.client.get());
      reader_ = internal::make_pipe_reader(sockets_.server.get());
    }
  }
  // Everything that can be written now is written, and read, until nothing moves.
  StatusOr<PipeState> pump(std::deque<OutFrame>* frames, StreamReader* to) {
    while (true) {
      WEFT_ASSIGN_OR_RETURN(const PipeState wrote, writer_->write(frames, 100'000));
      WEFT_ASSIGN_OR_RETURN(const PipeState read, reader_->read(to, 50'000));
      if (wrote == PipeState::kDone && read == PipeState::kBlocked) return read;
    }
  }

  SocketPair sockets_;
  std::unique_ptr<PipeWriter> writer_;
  std::unique_ptr<PipeReader> reader_;
};

TEST_P(Pipes, FramesPassASocketThatTakesThemInParts) {
  Sink sink;
  StreamReader to(kLimit, &sink);
  std::deque<OutFrame> frames;
  for (Frame& frame : some_frames()) frames.emplace_back(std::move(frame));
  const StatusOr<PipeState> state = pump(&frames, &to);
  ASSERT_TRUE(state.ok()) << state.status();
  expect_all(sink);
  // The end in good order.
  frames.emplace_back(make_frame(FrameKind::kDataEnd, "", ""));
  ASSERT_EQ(*writer_->write(&frames, 1000), PipeState::kDone);
  sockets_.client.reset();
  StatusOr<PipeState> end = PipeState::kBlocked;
  for (int i = 0; i < 2 && end.ok() && *end != PipeState::kEnded; ++i) {
    end = reader_->read(&to, 1000);
  }
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(*end, PipeState::kEnded);
}

TEST_P(Pipes, FramesThatWereWrittenAreLetGo) {
  auto owner = std::make_shared<std::string>(pattern(3'000'000, 1));
  Frame frame;
  frame.kind = FrameKind::kChunk;
  frame.header = "place";
  frame.payload.push_back({owner->data(), owner->size(), owner});
  std::deque<OutFrame> frames;
  frames.emplace_back(std::move(frame));
  ASSERT_EQ(*writer_->write(&frames, kLimit), PipeState::kBlocked) << "more than a socket takes";
  EXPECT_EQ(writer_->pending(), GetParam()) << "records that were sealed";
  EXPECT_TRUE(frames.front().begun());
  EXPECT_EQ(owner.use_count(), 2);
  Sink sink;
  StreamReader to(kLimit, &sink);
  ASSERT_TRUE(pump(&frames, &to).ok());
  EXPECT_EQ(owner.use_count(), 1);
  ASSERT_EQ(sink.got.size(), 1u);
  EXPECT_TRUE(sink.got[0].payload == *owner);
}

TEST_P(Pipes, ATurnMovesNoMoreThanItsBudget) {
  constexpr size_t kBudget = 10'000;
  const std::string payload = pattern(300'000, 1);
  std::deque<OutFrame> frames;
  frames.emplace_back(make_frame(FrameKind::kChunk, "place", payload));
  // A record that was begun goes out whole.
  const size_t most = kBudget + (GetParam() ? internal::kTlsRecordText : 0);
  ASSERT_EQ(*writer_->write(&frames, kBudget), PipeState::kPaused);
  EXPECT_LE(frames.front().sent, most);
  (void)writer_->write(&frames, kLimit);
  int there = 0;
  ASSERT_EQ(ioctl(sockets_.server.get(), FIONREAD, &there), 0);
  ASSERT_GT(static_cast<size_t>(there), most + 4096);
  Sink sink;
  StreamReader to(kLimit, &sink);
  ASSERT_EQ(*reader_->read(&to, kBudget), PipeState::kPaused);
  int left = 0;
  ASSERT_EQ(ioctl(sockets_.server.get(), FIONREAD, &left), 0);
  EXPECT_LE(static_cast<size_t>(there - left), most + 4096) << "and what is read ahead";
}

TEST_P(Pipes, AStreamThatIsCutIsNoOrderlyEnd) {
  // In the middle of a frame, and behind one.
  for (const bool middle : {true, false}) {
    SetUp();
    Sink sink;
    StreamReader to(kLimit, &sink);
    std::deque<OutFrame> frames;
    frames.emplace_back(make_frame(FrameKind::kRequest, "h", "p"));
    ASSERT_TRUE(pump(&frames, &to).ok());
    if (middle) {
      frames.emplace_back(make_frame(FrameKind::kChunk, "place", pattern(3'000'000, 1)));
      ASSERT_EQ(*writer_->write(&frames, kLimit), PipeState::kBlocked);
    }
    sockets_.client.reset();
    StatusOr<PipeState> state = PipeState::kPaused;
    while (state.ok() && *state == PipeState::kPaused) state = reader_->read(&to, 1u << 20);
    EXPECT_EQ(error_kind(state.status()), ErrorKind::kUnavailable) << state.status();
    EXPECT_EQ(sink.got.size(), 1u);
  }
}

TEST_P(Pipes, APeerThatIsGoneIsAnErrorOfTheWriter) {
  sockets_.server.reset();
  std::deque<OutFrame> frames;
  frames.emplace_back(make_frame(FrameKind::kRequest, "h", "p"));
  EXPECT_EQ(error_kind(writer_->write(&frames, kLimit).status()), ErrorKind::kUnavailable);
}

INSTANTIATE_TEST_SUITE_P(, Pipes, ::testing::Bool(),
                         [](const auto& p) { return p.param ? "tls" : "plain"; });

TEST(TlsPipe, TLS_1_NothingOfARecordThatWasChangedIsDelivered) {
  SocketPair sockets;
  auto [client, server] = tls_pair(sockets);
  auto writer = internal::make_pipe_writer(client);
  auto reader = internal::make_pipe_reader(server);
  std::deque<OutFrame> frames;
  frames.emplace_back(make_frame(FrameKind::kRequest, "h", "p"));
  ASSERT_EQ(*writer->write(&frames, kLimit), PipeState::kDone);
  // A whole frame, with one byte of its payload changed on the way.
  char record[256];
  const ssize_t n = recv(sockets.server.get(), record, sizeof record, MSG_DONTWAIT);
  ASSERT_GT(n, 20);
  record[n - 18] ^= 1;
  ASSERT_EQ(send(sockets.client.get(), record, static_cast<size_t>(n), 0), n);
  Sink sink;
  StreamReader to(kLimit, &sink);
  EXPECT_EQ(error_kind(reader->read(&to, kLimit).status()), ErrorKind::kProtocol);
  EXPECT_TRUE(sink.got.empty());
}

TEST(TlsPipe, TheLastFrameEndsItsDirectionOfTls) {
  SocketPair sockets;
  auto [client, server] = tls_pair(sockets);
  auto writer = internal::make_pipe_writer(client);
  auto reader = internal::make_pipe_reader(server);
  std::deque<OutFrame> frames;
  frames.emplace_back(make_frame(FrameKind::kDataEnd, "", ""));
  ASSERT_EQ(*writer->write(&frames, kLimit), PipeState::kDone);
  Sink sink;
  StreamReader to(kLimit, &sink);
  // The socket is open still: it is TLS that says so.
  EXPECT_EQ(*reader->read(&to, kLimit), PipeState::kEnded);
  // And the other direction goes on.
  auto back = internal::make_pipe_writer(server);
  frames.emplace_back(make_frame(FrameKind::kRequest, "h", "p"));
  ASSERT_EQ(*back->write(&frames, kLimit), PipeState::kDone);
  auto in = internal::make_pipe_reader(client);
  Sink last;
  StreamReader from(kLimit, &last);
  EXPECT_EQ(*in->read(&from, kLimit), PipeState::kBlocked);
  EXPECT_EQ(last.got.size(), 1u);
}

}  // namespace
}  // namespace weft::testing
