// Wide messages from send_message() to an Assembler without a network between them: every size of
// chunk, places that a transport fills by itself, and what is given up in the middle.

#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "gtest/gtest.h"
#include "weft/common/byte_budget.h"
#include "weft/rpc/internal/agent/header.h"
#include "weft/rpc/internal/agent/message.h"

namespace weft::internal {
namespace {

constexpr int kMany = 9000;

// Keeps what is sent.
class Line final : public Connection {
 public:
  explicit Line(uint32_t version) {
    hello_.name = "ps0";
    hello_.version_max = version;
    hello_.max_frame_bytes = 5 << 20;
  }
  const Hello& peer() const override { return hello_; }
  bool dialled() const override { return true; }
  Status send(Frame frame, int lane) override {
    lanes.push_back(lane);
    frames.push_back(std::move(frame));
    return absl::OkStatus();
  }
  void close(Status) override {}
  std::string describe() const override { return "line"; }

  std::deque<Frame> frames;
  std::vector<int> lanes;

 private:
  Hello hello_;
};

std::string bytes_of(const Frame& frame) {
  std::string out;
  for (const Slice& s : frame.payload) out.append(s.data, s.size);
  return out;
}

class WideAssembler : public ::testing::Test {
 protected:
  // A body and kMany tensors, some of them large, some empty, some sparse.
  static Payload payload() {
    Payload out;
    out.body = "body";
    for (int i = 0; i < kMany; ++i) {
      const int64_t n = i % 1000 == 0 ? 40'000 : i % 3;
      out.tensors.push_back(at::full({n}, i, at::kFloat));
      if (i % 2000 == 7) out.tensors.back() = at::eye(i % 2000, at::kDouble).to_sparse();
    }
    return out;
  }
  static void expect_payload(const StatusOr<Payload>& got) {
    ASSERT_TRUE(got.ok()) << got.status();
    const Payload want = payload();
    EXPECT_EQ(got->body, want.body);
    ASSERT_EQ(got->tensors.size(), want.tensors.size());
    int wrong = 0;
    for (size_t i = 0; i < want.tensors.size(); ++i) {
      const bool sparse = want.tensors[i].is_sparse();
      const at::Tensor a = sparse ? got->tensors[i].to_dense() : got->tensors[i];
      const at::Tensor b = sparse ? want.tensors[i].to_dense() : want.tensors[i];
      wrong += at::equal(a, b) ? 0 : 1;
    }
    EXPECT_EQ(wrong, 0);
  }
  // `limits` of the sender; the frames are in line_ then.
  Status pack_and_send(const MessageLimits& limits, uint32_t version = kVersion,
                       size_t riding = 0) {
    line_.emplace(version);
    v1::CallHeader header;
    header.set_call_id(7);
    header.set_attempt(3);
    header.set_method("a.method");
    header.add_metadata()->set_value(std::string(riding, 'm'));
    const auto message = pack(payload(), TensorMemory::kCopied);
    EXPECT_TRUE(message.ok()) << message.status();
    (*message)->riding = riding;
    return send_message(&*line_, FrameKind::kRequest, &header, OutMessageRef(*message), limits, 99,
                        &transfers_);
  }
  Status begin(const Frame& first) { return begin(first, &assembler_); }
  Status begin(const Frame& first, Assembler* assembler) {
    const FrameView view{FrameKind::kRequest, first.header, {}, 0};
    v1::CallHeader brief;
    WEFT_RETURN_IF_ERROR(parse_header(view, &brief));
    EXPECT_EQ(brief.call_id(), 7U);
    EXPECT_TRUE(is_wide(brief.layout()));
    const auto tell = [this](StatusOr<Payload> payload) {
      ASSERT_FALSE(got_.has_value());
      got_ = std::move(payload);
    };
    return assembler->begin_wide(
        brief.layout(), view, nullptr,
        [this, brief, tell](std::string_view bytes) -> StatusOr<Assembler::Opened> {
          ++opened_;
          v1::CallHeader header;
          WEFT_RETURN_IF_ERROR(parse_wide(bytes, brief, &header));
          EXPECT_EQ(header.method(), "a.method");
          auto layout = std::make_unique<v1::Layout>(header.layout());
          return Assembler::Opened{std::move(layout), tell};
        },
        tell);
  }
  Status chunk(const Frame& frame) {
    const std::string bytes = bytes_of(frame);
    const std::string_view piece = bytes;
    return assembler_.on_chunk(
        {FrameKind::kChunk, frame.header, absl::MakeConstSpan(&piece, 1), bytes.size()});
  }
  // As a transport does it that reads by itself; true when there was a place.
  bool place(const Frame& frame) {
    const std::string bytes = bytes_of(frame);
    const ChunkTarget target = assembler_.chunk_target(frame.header, bytes.size());
    if (target.data == nullptr) return false;
    std::memcpy(target.data, bytes.data(), bytes.size());
    const Status filled = assembler_.chunk_filled(frame.header, bytes.size());
    EXPECT_TRUE(filled.ok()) << filled;
    return true;
  }
  void expect_nothing_left() {
    EXPECT_EQ(budget_.used(), 0U);
    EXPECT_EQ(assembler_.incomplete_for_test(), 0U);
  }

  ByteBudget budget_{1 << 28, "test"};
  Assembler assembler_{MessageLimits(), &budget_};
  std::atomic<uint64_t> transfers_{0};
  std::optional<Line> line_;
  std::optional<StatusOr<Payload>> got_;
  int opened_ = 0;
};

TEST_F(WideAssembler, DEF_22_what_is_sent_arrives_whatever_the_chunks) {
  for (const size_t chunk_bytes : {700U, 4096U, 65'537U, 160U << 10, 1U << 20}) {
    MessageLimits limits;
    limits.chunk_bytes = chunk_bytes;
    const Status sent = pack_and_send(limits);
    ASSERT_TRUE(sent.ok()) << sent;
    EXPECT_EQ(line_->frames[0].kind, FrameKind::kRequest);
    EXPECT_LT(line_->frames[0].header.size(), 64U);
    ASSERT_TRUE(begin(line_->frames[0]).ok());
    for (size_t i = 1; i < line_->frames.size(); ++i) {
      const Frame& frame = line_->frames[i];
      EXPECT_LE(frame.payload_bytes(), chunk_bytes);
      EXPECT_LE(frame.payload.size(), 256U);
      EXPECT_FALSE(got_.has_value()) << "before the last byte";
      // CALL-4: with the last one it is delivered.
      EXPECT_EQ(frame.cookie, i + 1 == line_->frames.size() ? 99U : 0U);
      const Status taken = chunk(frame);
      ASSERT_TRUE(taken.ok()) << taken;
    }
    ASSERT_TRUE(got_.has_value());
    expect_payload(*got_);
    got_.reset();
    expect_nothing_left();
  }
  EXPECT_EQ(opened_, 5);
}

TEST_F(WideAssembler, DEF_22_a_transport_fills_the_places_of_header_and_large_tensors) {
  MessageLimits limits;
  limits.chunk_bytes = 50'000;
  ASSERT_TRUE(pack_and_send(limits).ok());
  ASSERT_TRUE(begin(line_->frames[0]).ok());
  int placed = 0;
  for (size_t i = 1; i < line_->frames.size(); ++i) {
    if (place(line_->frames[i])) {
      ++placed;
    } else {
      ASSERT_TRUE(chunk(line_->frames[i]).ok());
    }
  }
  // The header's first, and of each of the nine tensors of 160,000 bytes all four.
  EXPECT_GE(placed, 1 + 9 * 4);
  EXPECT_LT(placed, static_cast<int>(line_->frames.size()) - 1) << "small ones lie apart";
  ASSERT_TRUE(got_.has_value());
  expect_payload(*got_);
  expect_nothing_left();
}

// At each frame: the connection is lost, or the call is over.
TEST_F(WideAssembler, DEF_22_what_is_given_up_in_the_middle_gives_its_bytes_back) {
  MessageLimits limits;
  limits.chunk_bytes = 30'000;
  ASSERT_TRUE(pack_and_send(limits).ok());
  const size_t frames = line_->frames.size();
  for (size_t end = 1; end < frames; end += 13) {
    for (const bool over : {false, true}) {
      got_.reset();
      ASSERT_TRUE(begin(line_->frames[0]).ok());
      for (size_t i = 1; i < end; ++i) ASSERT_TRUE(chunk(line_->frames[i]).ok());
      EXPECT_GT(budget_.used(), 0U);
      if (over) {
        EXPECT_EQ(assembler_.incomplete().size(), 1U);
        assembler_.give_up({{Assembler::Purpose(), make_error(ErrorKind::kDeadline, "over")}});
        ASSERT_TRUE(got_.has_value());
        EXPECT_EQ(error_kind(got_->status()), ErrorKind::kDeadline);
        // What still comes is discarded.
        for (size_t i = end; i < frames; ++i) ASSERT_TRUE(chunk(line_->frames[i]).ok());
      } else {
        assembler_.abandon();
        EXPECT_FALSE(got_.has_value());
      }
      expect_nothing_left();
    }
  }
}

// The place lives as long as the transport reads to it, whatever becomes of the message.
TEST_F(WideAssembler, DEF_22_the_place_of_a_header_outlives_its_message) {
  MessageLimits limits;
  limits.chunk_bytes = 30'000;
  ASSERT_TRUE(pack_and_send(limits).ok());
  ASSERT_TRUE(begin(line_->frames[0]).ok());
  const std::string bytes = bytes_of(line_->frames[1]);
  const ChunkTarget target = assembler_.chunk_target(line_->frames[1].header, bytes.size());
  ASSERT_NE(target.data, nullptr);
  EXPECT_EQ(error_kind(chunk(line_->frames[1])), ErrorKind::kProtocol) << "another lane";
  assembler_.abandon();
  std::memcpy(target.data, bytes.data(), bytes.size());  // under AddressSanitizer: it is there
  EXPECT_TRUE(assembler_.chunk_filled(line_->frames[1].header, bytes.size()).ok());
  EXPECT_FALSE(got_.has_value());
  expect_nothing_left();
}

// Refused before its header is there, or when that has said how much it takes.
TEST_F(WideAssembler, DEF_22_a_budget_refuses_at_either_place_and_the_rest_is_discarded) {
  MessageLimits limits;
  ASSERT_TRUE(pack_and_send(limits).ok());
  v1::CallHeader brief;
  ASSERT_TRUE(brief.ParseFromString(line_->frames[0].header));
  const uint64_t first = brief.layout().wide_length() + 48 * brief.layout().wide_header_length();
  int seen = 0;
  for (const uint64_t taken : {budget_.limit() - first + 1, budget_.limit() - first}) {
    got_.reset();
    ASSERT_TRUE(budget_.charge(taken).ok());
    for (size_t i = 0; i < line_->frames.size(); ++i) {
      const Status s = i == 0 ? begin(line_->frames[0]) : chunk(line_->frames[i]);
      ASSERT_TRUE(s.ok()) << s;
    }
    ASSERT_TRUE(got_.has_value());
    EXPECT_TRUE(is_no_room_now(got_->status())) << got_->status();
    EXPECT_EQ(opened_, seen++);
    EXPECT_EQ(budget_.used(), taken);
    budget_.release(taken);
    expect_nothing_left();
  }
}

TEST_F(WideAssembler, DEF_22_a_message_of_all_that_is_allowed_is_taken) {
  ASSERT_TRUE(pack_and_send(MessageLimits()).ok());
  v1::CallHeader brief;
  ASSERT_TRUE(brief.ParseFromString(line_->frames[0].header));
  for (const size_t missing : {0U, 1U}) {
    got_.reset();
    MessageLimits limits;
    limits.max_message_bytes = brief.layout().wide_length() - missing;
    Assembler assembler(limits, &budget_);
    ASSERT_TRUE(begin(line_->frames[0], &assembler).ok());
    EXPECT_EQ(got_.has_value(), missing > 0) << "refused at once";
    if (missing > 0) {
      EXPECT_EQ(error_kind(got_->status()), ErrorKind::kResource);
    }
    assembler.abandon();
    EXPECT_EQ(budget_.used(), 0U);
  }
}

// Chunks that come before their header by another lane.
TEST_F(WideAssembler, DEF_22_chunks_before_the_frame_that_announces_them) {
  MessageLimits limits;
  ASSERT_TRUE(pack_and_send(limits).ok());
  for (size_t i = 1; i < line_->frames.size(); ++i) ASSERT_TRUE(chunk(line_->frames[i]).ok());
  EXPECT_FALSE(got_.has_value());
  ASSERT_TRUE(begin(line_->frames[0]).ok());
  ASSERT_TRUE(got_.has_value());
  expect_payload(*got_);
  expect_nothing_left();
}

TEST_F(WideAssembler, BadInput_a_peer_of_version_1_is_sent_none) {
  const Status many = pack_and_send(MessageLimits(), 1);
  EXPECT_EQ(error_kind(many), ErrorKind::kUnimplemented) << many;
  for (const char* part : {"9005 tensor buffers", "'ps0'", "protocol version 1"}) {
    EXPECT_NE(many.message().find(part), absl::string_view::npos) << part << ": " << many;
  }
  EXPECT_TRUE(line_->frames.empty());
  // Metadata above its bound, in a header that is small enough.
  Line old(1);
  v1::CallHeader header;
  auto message = std::make_shared<OutMessage>();
  message->body = "x";
  message->bytes = 1;
  for (const size_t riding : {16U << 10, (16U << 10) + 1}) {
    header.clear_metadata();
    header.add_metadata()->set_value(std::string(riding, 'm'));
    message->riding = riding;
    const Status sent = send_message(&old, FrameKind::kRequest, &header, OutMessageRef(message),
                                     MessageLimits(), 99, &transfers_);
    EXPECT_EQ(sent.ok(), riding == 16U << 10) << sent;
  }
  EXPECT_EQ(old.frames.size(), 1U);
}

// What fitted before goes as it went.
TEST_F(WideAssembler, DEF_22_a_header_that_fits_travels_in_its_frame) {
  Line line(kVersion);
  v1::CallHeader header;
  Payload some;
  for (int i = 0; i < 5000; ++i) some.tensors.push_back(at::ones({1}));
  const auto message = pack(std::move(some), TensorMemory::kCopied);
  ASSERT_TRUE(message.ok());
  ASSERT_TRUE((*message)->maybe_wide());
  ASSERT_TRUE(send_message(&line, FrameKind::kRequest, &header, OutMessageRef(*message),
                           MessageLimits(), 99, &transfers_)
                  .ok());
  ASSERT_EQ(line.frames.size(), 1U);
  EXPECT_EQ(line.frames[0].payload_bytes(), 20'000U);
  EXPECT_EQ(line.lanes, std::vector<int>{kControlLane});
}

}  // namespace
}  // namespace weft::internal
