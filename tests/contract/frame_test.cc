// The bytes of frames and hellos (proto/transport.proto). Golden: these bytes are on other
// machines.
#include "weft/transport/frame.h"

#include <random>

#include "absl/strings/escaping.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/tests/contract/transport_harness.h"
#include "weft/transport/internal/wire/handshake.h"

namespace weft::internal {
namespace {

using weft::testing::make_frame;
using weft::testing::pattern;

std::string encoded(const Frame& frame) {
  std::string out(frame_bytes(frame), '\0');
  EXPECT_EQ(encode_frame(frame, out.data()), out.data() + out.size());
  return out;
}

std::string hex(const std::string& bytes) { return absl::BytesToHexString(bytes); }

struct Seen {
  FrameKind kind;
  std::string header, payload;
};

StatusOr<std::vector<Seen>> read(const std::vector<std::string_view>& pieces,
                                 const FrameLimits& limits) {
  std::vector<Seen> out;
  FrameReader reader;
  WEFT_RETURN_IF_ERROR(reader.read(pieces, limits, [&](const FrameView& frame) {
    Seen seen{frame.kind, std::string(frame.header), ""};
    for (std::string_view piece : frame.payload) seen.payload.append(piece);
    EXPECT_EQ(seen.payload.size(), frame.payload_bytes);
    out.push_back(seen);
    return true;
  }));
  return out;
}

Hello some_hello() {
  Hello hello;
  hello.version_min = 1;
  hello.version_max = 2;
  hello.job_id = std::string("\x00\xff job", 6);
  hello.name = "ps-0";
  hello.id = 7;
  hello.incarnation = 0x1122334455667788;
  hello.to_id = 9;
  hello.to_incarnation = 0x99;
  hello.max_frame_bytes = 5u << 20;
  hello.connection_id = 0xabcdef;
  hello.lanes = 2;
  return hello;
}

TEST(Frame, GoldenBytesOfEveryKind) {
  const std::pair<FrameKind, const char*> golden[] = {
      {FrameKind::kHello,
       "01770100"
       "01000000"
       "0200000000000000"
       "68"
       "7070"},
      {FrameKind::kHelloAck,
       "01770200"
       "01000000"
       "0200000000000000"
       "68"
       "7070"},
      {FrameKind::kRequest,
       "01770300"
       "01000000"
       "0200000000000000"
       "68"
       "7070"},
      {FrameKind::kResponse,
       "01770400"
       "01000000"
       "0200000000000000"
       "68"
       "7070"},
      {FrameKind::kError,
       "01770500"
       "01000000"
       "0200000000000000"
       "68"
       "7070"},
      {FrameKind::kChunk,
       "01770600"
       "01000000"
       "0200000000000000"
       "68"
       "7070"},
      {FrameKind::kTransferAbort,
       "01770700"
       "01000000"
       "0200000000000000"
       "68"
       "7070"},
      {FrameKind::kCancel,
       "01770800"
       "01000000"
       "0200000000000000"
       "68"
       "7070"},
      {FrameKind::kHeartbeat,
       "01770900"
       "01000000"
       "0200000000000000"
       "68"
       "7070"},
      {FrameKind::kGoodbye,
       "01770a00"
       "01000000"
       "0200000000000000"
       "68"
       "7070"},
      {FrameKind::kArenaProbe,
       "01770b00"
       "01000000"
       "0200000000000000"
       "68"
       "7070"},
      {FrameKind::kArenaFree,
       "01770c00"
       "01000000"
       "0200000000000000"
       "68"
       "7070"},
      {FrameKind::kDataOffer,
       "01770d00"
       "01000000"
       "0200000000000000"
       "68"
       "7070"},
      {FrameKind::kDataEnd,
       "01770e00"
       "01000000"
       "0200000000000000"
       "68"
       "7070"},
      {FrameKind::kLanesWanted,
       "01770f00"
       "01000000"
       "0200000000000000"
       "68"
       "7070"},
  };
  for (const auto& [kind, bytes] : golden) {
    EXPECT_EQ(hex(encoded(make_frame(kind, "h", "pp"))), bytes) << frame_kind_name(kind);
    EXPECT_NE(frame_kind_name(kind), "unknown");
  }
  EXPECT_EQ(frame_kind_name(static_cast<FrameKind>(16)), "unknown");
  EXPECT_EQ(hex(encoded(make_frame(FrameKind::kChunk, std::string(258, 'h'), ""))).substr(0, 32),
            "01770600"
            "02010000"
            "0000000000000000");
}

TEST(Frame, GoldenHelloAndAnswers) {
  const char* const hello =
      "08011002"
      "1d04030201"
      "220600ff206a6f62"
      "2a0470732d30"
      "3007"
      "398877665544332211"
      "4009"
      "499900000000000000"
      "508080c002"
      "59efcdab0000000000"
      "6002"
      "6801";
  EXPECT_EQ(hex(encode_hello(some_hello(), 1)), hello);
  EXPECT_EQ(hex(encode_ack(some_hello(), 1)), std::string("0a3f") + hello);
  ErrorDetails details = {ErrorKind::kPermission, "b", "", ""};
  const Status why = with_details(absl::PermissionDeniedError("no"), details);
  EXPECT_EQ(hex(encode_refusal(why)),
            "120b"
            "0807"
            "1010"
            "1a026e6f"
            "220162");
}

TEST(Frame, HelloComesBack) {
  const Hello sent = some_hello();
  const StatusOr<Hello> got = decode_hello(encode_hello(sent, 1), 1);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->job_id, sent.job_id);
  EXPECT_EQ(got->name, sent.name);
  EXPECT_EQ(got->incarnation, sent.incarnation);
  EXPECT_EQ(got->to_incarnation, sent.to_incarnation);
  EXPECT_EQ(got->max_frame_bytes, sent.max_frame_bytes);
  EXPECT_EQ(got->connection_id, sent.connection_id);
  EXPECT_FALSE(decode_hello(encode_hello(sent, 1), 0).ok());
  // A field of a later version is no error: fields are only added.
  EXPECT_TRUE(decode_hello(encode_hello(sent, 1) + std::string("\xf2\x07\x01x", 4), 1).ok());
}

// Names stand in logs and errors as they are.
TEST(Frame, ANameThatIsNoLineOfTextIsRefused) {
  Hello hello = some_hello();
  for (const char* name : {"worker\xff", "\xc0\xaf", "\xed\xa0\x80", "a\nb", "\x1b[2J", "a\x7f"}) {
    hello.name = name;
    const StatusOr<Hello> got = decode_hello(encode_hello(hello, 0), 0);
    EXPECT_EQ(error_kind(got.status()), ErrorKind::kProtocol) << name;
    EXPECT_THAT(std::string(got.status().message()), ::testing::HasSubstr("no line of UTF-8 text"));
  }
  hello.name = "Z\xc3\xbcrich";
  EXPECT_TRUE(decode_hello(encode_hello(hello, 0), 0).ok());
}

TEST(Frame, RefusalComesBackAsTheErrorThatWasSent) {
  ErrorDetails details = {ErrorKind::kState, "origin", "", ""};
  const Status sent =
      with_details(absl::FailedPreconditionError(std::string("odd \xff\x00 bytes", 12)), details);
  const StatusOr<Hello> got = decode_ack(encode_refusal(sent), some_hello(), 0);
  EXPECT_EQ(got.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(got.status().message(), sent.message());
  EXPECT_EQ(error_details(got.status()).origin, "origin");
  EXPECT_EQ(error_kind(got.status()), ErrorKind::kState);
  // An endless one is cut, so that it fits into a header.
  const Status endless = absl::InternalError(std::string(1 << 20, 'x'));
  EXPECT_LE(encode_refusal(endless).size(), kMaxHeaderBytes);
}

TEST(Frame, AnswersOfSomeoneElseAreErrors) {
  const Hello sent = some_hello();
  Hello answer = sent;
  answer.id = 9;
  answer.incarnation = 0x99;
  answer.version_max = 1;
  EXPECT_TRUE(decode_ack(encode_ack(answer, 0), sent, 0).ok());
  auto broken = [&](auto change) {
    Hello changed = answer;
    change(&changed);
    return error_kind(decode_ack(encode_ack(changed, 0), sent, 0).status());
  };
  EXPECT_EQ(broken([](Hello* h) { h->connection_id = 1; }), ErrorKind::kProtocol);
  EXPECT_EQ(broken([](Hello* h) { h->lanes = 3; }), ErrorKind::kProtocol);
  EXPECT_EQ(broken([](Hello* h) { h->job_id = "x"; }), ErrorKind::kPermission);
  EXPECT_EQ(broken([](Hello* h) { h->id = 10; }), ErrorKind::kPeerLost);
  EXPECT_EQ(broken([](Hello* h) { h->incarnation = 1; }), ErrorKind::kPeerLost);
  EXPECT_EQ(broken([](Hello* h) { h->version_min = h->version_max = 3; }),
            ErrorKind::kUnimplemented);
  for (const char* bytes : {"", "x", "\x0a", "\x0a\x00", "\x12\x7f"}) {
    EXPECT_EQ(error_kind(decode_ack(bytes, sent, 0).status()), ErrorKind::kProtocol);
  }
}

TEST(Frame, MessagesInPiecesOfAnySize) {
  std::string message;
  for (int i = 0; i < 40; ++i) {
    message += encoded(make_frame(FrameKind::kRequest, pattern(static_cast<size_t>(i), 1),
                                  pattern(static_cast<size_t>(7 * i), 2)));
  }
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::string_view> pieces;
    for (size_t at = 0; at < message.size();) {
      const size_t n = std::min<size_t>(random() % (1 + round), message.size() - at);
      pieces.push_back(std::string_view(message).substr(at, n));  // empty ones, too
      at += n;
      if (n == 0 && round == 0) pieces.push_back(std::string_view(message).substr(at++, 1));
    }
    const StatusOr<std::vector<Seen>> got = read(pieces, {WireState::kOpen, 1 << 20});
    ASSERT_TRUE(got.ok()) << got.status();
    ASSERT_EQ(got->size(), 40u);
    for (size_t i = 0; i < 40; ++i) {
      EXPECT_EQ((*got)[i].header, pattern(i, 1));
      EXPECT_EQ((*got)[i].payload, pattern(7 * i, 2));
    }
  }
}

TEST(Frame, EveryTruncationIsAnErrorAndDeliversNothing) {
  const std::string one = encoded(make_frame(FrameKind::kResponse, "header", "payload"));
  const std::string message = one + one;
  for (size_t n = 0; n < message.size(); ++n) {
    if (n == one.size()) continue;
    int delivered = 0;
    FrameReader reader;
    const std::string_view piece = std::string_view(message).substr(0, n);
    const Status s = reader.read({&piece, 1}, {WireState::kOpen, 1 << 20}, [&](const FrameView&) {
      ++delivered;
      return true;
    });
    EXPECT_EQ(error_kind(s), ErrorKind::kProtocol) << n;
    EXPECT_EQ(delivered, 0) << n;
  }
}

TEST(Frame, LimitsAtAndAboveThem) {
  const FrameLimits limits{WireState::kOpen, 100'000};
  auto status = [&](size_t header, size_t payload) {
    const std::string bytes =
        encoded(make_frame(FrameKind::kChunk, std::string(header, 'h'), std::string(payload, 'p')));
    return read({bytes}, limits).status();
  };
  EXPECT_TRUE(status(0, 100'000 - 16).ok());
  EXPECT_FALSE(status(0, 100'000 - 15).ok());
  EXPECT_TRUE(status(64 << 10, 10).ok());
  EXPECT_FALSE(status((64 << 10) + 1, 10).ok());
  EXPECT_TRUE(check_sendable(make_frame(FrameKind::kChunk, "", std::string(84, 'p')), 100).ok());
  EXPECT_FALSE(check_sendable(make_frame(FrameKind::kChunk, "", std::string(85, 'p')), 100).ok());
  // Lengths near 2^64 do not wrap around.
  std::string bytes = encoded(make_frame(FrameKind::kChunk, "hh", "pp"));
  for (size_t i = 8; i < 16; ++i) bytes[i] = '\xff';
  EXPECT_FALSE(read({bytes}, limits).ok());
  bytes[8] = '\xee';  // 16 + 2 + this is 0 in 64 bits
  EXPECT_FALSE(read({bytes}, limits).ok());
  // A batch has its own limit.
  std::string batch;
  while (batch.size() <= kMaxBatchBytes) batch += encoded(make_frame(FrameKind::kChunk, "", "x"));
  EXPECT_FALSE(read({batch}, limits).ok());
  EXPECT_TRUE(read({std::string_view(batch).substr(0, batch.size() - 17)}, limits).ok());
}

TEST(Frame, KindsBelongToStates) {
  for (int k = 0; k < 256; ++k) {
    std::string bytes = encoded(make_frame(FrameKind::kHeartbeat, "h", ""));
    bytes[2] = static_cast<char>(k);
    EXPECT_EQ(read({bytes}, {WireState::kAwaitHello, 1000}).ok(), k == 1) << k;
    EXPECT_EQ(read({bytes}, {WireState::kAwaitAck, 1000}).ok(), k == 2) << k;
    EXPECT_EQ(read({bytes}, {WireState::kOpen, 1000}).ok(), k >= 3 && k <= 15) << k;
  }
}

TEST(Frame, TheSinkMayStop) {
  const std::string one = encoded(make_frame(FrameKind::kResponse, "header", "payload"));
  const std::string message = one + one + one;
  const std::string_view piece = message;
  int delivered = 0;
  FrameReader reader;
  EXPECT_TRUE(reader
                  .read({&piece, 1}, {WireState::kOpen, 1000},
                        [&](const FrameView&) { return ++delivered < 2; })
                  .ok());
  EXPECT_EQ(delivered, 2);
}

TEST(HalfOpen, GathersLanesByConnection) {
  HalfOpenTable<std::shared_ptr<int>> table(4);
  Hello a = some_hello(), b = some_hello();
  b.connection_id = 2;
  auto lane = std::make_shared<int>(1);
  EXPECT_EQ(*table.add(a, 0, lane), nullptr);
  EXPECT_EQ(*table.add(b, 1, lane), nullptr);
  EXPECT_EQ(error_kind(table.add(a, 0, lane).status()), ErrorKind::kProtocol);
  Hello liar = a;
  liar.name = "other";
  EXPECT_EQ(error_kind(table.add(liar, 1, lane).status()), ErrorKind::kProtocol);
  const auto complete = table.add(a, 1, lane);
  ASSERT_TRUE(complete.ok());
  ASSERT_NE(*complete, nullptr);
  EXPECT_EQ((*complete)->lanes.size(), 2u);
  EXPECT_EQ(table.lanes(), 1u);
  // Only the lane that is in the table takes its connection out.
  int other = 0;
  EXPECT_EQ(table.remove_lane(b, 1, &other), nullptr);
  EXPECT_NE(table.remove_lane(b, 1, lane.get()), nullptr);
  EXPECT_EQ(table.lanes(), 0u);
  for (uint64_t i = 0; i < 4; ++i) {
    a.connection_id = 100 + i;
    EXPECT_TRUE(table.add(a, 0, lane).ok());
  }
  a.connection_id = 200;
  EXPECT_EQ(error_kind(table.add(a, 0, lane).status()), ErrorKind::kResource);
}

}  // namespace
}  // namespace weft::internal
