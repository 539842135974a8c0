// Chunks that a transport reads to where they belong by itself: what it is told, and that no other
// thread touches the place meanwhile.

#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/Functions.h"
#include "gtest/gtest.h"
#include "weft/common/byte_budget.h"
#include "weft/rpc/internal/agent/message.h"
#include "weft/rpc/internal/agent/tensor_meta.h"

namespace weft::internal {
namespace {

constexpr int64_t kElements = 100'000;
constexpr size_t kBytes = kElements * 4;
constexpr uint64_t kTransfer = 7;

class ChunkPlace : public ::testing::Test {
 protected:
  // A message with a body of 4 bytes, which comes with the header, and one tensor, which does not.
  void begin() {
    const Status begun = try_begin();
    ASSERT_TRUE(begun.ok()) << begun;
  }
  Status try_begin() { return try_begin(&assembler_); }
  Status try_begin(Assembler* assembler) {
    v1::Layout layout;
    const StatusOr<TensorParts> parts = split_for_wire(at::zeros({kElements}), false);
    EXPECT_TRUE(parts.ok()) << parts.status();
    std::string metas;
    append_meta(parts->meta, &metas);
    layout.set_tensor_metas(metas);
    layout.add_segments()->set_length(4);
    v1::Segment* segment = layout.add_segments();
    segment->set_length(kBytes);
    segment->set_transfer_id(kTransfer);
    const std::string_view body = "body";
    const FrameView frame{FrameKind::kRequest, {}, absl::MakeConstSpan(&body, 1), 4};
    return assembler->begin(layout, frame, nullptr, [this](StatusOr<Payload> payload) {
      ASSERT_FALSE(got_.has_value());
      got_ = std::move(payload);
    });
  }
  static std::string at(uint64_t offset) { return encode_chunk_header(kTransfer, offset); }
  Status chunk(uint64_t offset, size_t bytes) {
    const std::string header = at(offset);
    const std::string zeros(bytes, '\0');
    const std::string_view piece = zeros;
    return assembler_.on_chunk({FrameKind::kChunk, header, absl::MakeConstSpan(&piece, 1), bytes});
  }
  // As a transport does it.
  void place(uint64_t offset, size_t bytes, char value) {
    const ChunkTarget target = assembler_.chunk_target(at(offset), bytes);
    ASSERT_NE(target.data, nullptr);
    std::memset(target.data, value, bytes);
    ASSERT_TRUE(assembler_.chunk_filled(at(offset), bytes).ok());
  }

  ByteBudget budget_{1 << 20, "test"};
  Assembler assembler_{MessageLimits(), &budget_};
  std::optional<StatusOr<Payload>> got_;
};

TEST_F(ChunkPlace, AMessageIsCompleteWhenItsPlacesAreFilled) {
  begin();
  place(0, 300'000, 1);
  EXPECT_FALSE(got_.has_value());
  // The two ways may take turns.
  ASSERT_TRUE(chunk(300'000, 50'000).ok());
  place(350'000, 50'000, 3);
  ASSERT_TRUE(got_.has_value());
  ASSERT_TRUE(got_->ok()) << got_->status();
  EXPECT_EQ((*got_)->body, "body");
  ASSERT_EQ((*got_)->tensors.size(), 1u);
  const char* bytes = static_cast<const char*>((*got_)->tensors[0].const_data_ptr());
  EXPECT_EQ(bytes[0], 1);
  EXPECT_EQ(bytes[299'999], 1);
  EXPECT_EQ(bytes[300'000], 0);
  EXPECT_EQ(bytes[350'000], 3);
  EXPECT_EQ(bytes[399'999], 3);
  EXPECT_EQ(budget_.used(), 0u);
  EXPECT_EQ(assembler_.incomplete_for_test(), 0u);
}

TEST_F(ChunkPlace, OnlyTheNextChunkHasAPlace) {
  EXPECT_EQ(assembler_.chunk_target(at(0), 10).data, nullptr) << "nobody announced it";
  begin();
  EXPECT_EQ(assembler_.chunk_target(at(1), 10).data, nullptr) << "a gap";
  EXPECT_EQ(assembler_.chunk_target(at(0), kBytes + 1).data, nullptr) << "too long";
  EXPECT_EQ(assembler_.chunk_target(at(0), 0).data, nullptr) << "nothing";
  EXPECT_EQ(assembler_.chunk_target("short", 10).data, nullptr);
  place(0, 1000, 1);
  EXPECT_EQ(assembler_.chunk_target(at(0), 10).data, nullptr) << "again";
  EXPECT_EQ(assembler_.chunk_target(at(~uint64_t{0}), 10).data, nullptr);
}

TEST_F(ChunkPlace, NobodyElseWritesWhereATransportReads) {
  begin();
  const ChunkTarget target = assembler_.chunk_target(at(0), kBytes);
  ASSERT_NE(target.data, nullptr);
  EXPECT_EQ(assembler_.chunk_target(at(0), kBytes).data, nullptr) << "another lane";
  // Else the message were complete, and its receiver would see it change.
  EXPECT_EQ(error_kind(chunk(0, kBytes)), ErrorKind::kProtocol);
  EXPECT_FALSE(got_.has_value());
  EXPECT_EQ(error_kind(assembler_.chunk_filled(at(0), 5)), ErrorKind::kProtocol);
  EXPECT_TRUE(assembler_.chunk_filled(at(0), kBytes).ok());
  EXPECT_TRUE(got_.has_value());
}

TEST_F(ChunkPlace, ThePlaceOutlivesAMessageThatIsGivenUp) {
  begin();
  const ChunkTarget target = assembler_.chunk_target(at(0), 1000);
  ASSERT_NE(target.data, nullptr);
  assembler_.give_up({{Assembler::Purpose(), make_error(ErrorKind::kDeadline, "over")}});
  ASSERT_TRUE(got_.has_value());
  EXPECT_EQ(error_kind(got_->status()), ErrorKind::kDeadline);
  std::memset(target.data, 1, 1000);  // under AddressSanitizer: it is there
  EXPECT_TRUE(assembler_.chunk_filled(at(0), 1000).ok());
  EXPECT_EQ(assembler_.chunk_target(at(1000), 10).data, nullptr) << "the rest is discarded";
  EXPECT_TRUE(chunk(1000, kBytes - 1000).ok());
  EXPECT_EQ(assembler_.incomplete_for_test(), 0u);
  EXPECT_EQ(budget_.used(), 0u);
}

TEST_F(ChunkPlace, ThePlaceOutlivesItsConnection) {
  begin();
  const ChunkTarget target = assembler_.chunk_target(at(0), 1000);
  assembler_.abandon();
  std::memset(target.data, 1, 1000);
  EXPECT_TRUE(assembler_.chunk_filled(at(0), 1000).ok());
  EXPECT_FALSE(got_.has_value());
  EXPECT_EQ(budget_.used(), 0u);
}

TEST_F(ChunkPlace, AMessageOfAllThatIsAllowedIsTaken) {
  for (const size_t missing : {0U, 1U}) {
    got_.reset();
    MessageLimits limits;
    limits.max_message_bytes = 4 + kBytes - missing;
    Assembler assembler(limits, &budget_);
    ASSERT_TRUE(try_begin(&assembler).ok());
    EXPECT_EQ(got_.has_value(), missing > 0) << "refused at once";
    EXPECT_EQ(budget_.used(), missing > 0 ? 0U : 4 + kBytes);
    if (missing > 0) {
      EXPECT_EQ(error_kind(got_->status()), ErrorKind::kResource);
    }
    assembler.abandon();
  }
}

// Before their header come chunks over another lane; a peer may send more than it announces.
TEST_F(ChunkPlace, BadInput_a_chunk_before_its_header_that_is_behind_the_end) {
  ASSERT_TRUE(chunk(0, kBytes).ok());
  ASSERT_TRUE(chunk(kBytes, 10).ok()) << "nobody has said yet where the end is";
  const Status begun = try_begin();
  EXPECT_EQ(error_kind(begun), ErrorKind::kProtocol) << begun;
  EXPECT_NE(begun.message().find("transfer 7, which is over"), std::string::npos) << begun;
  // As when they come after it: the message is there, and the connection goes.
  ASSERT_TRUE(got_.has_value());
  EXPECT_TRUE(got_->ok()) << got_->status();
  assembler_.abandon();
  EXPECT_EQ(budget_.used(), 0u);
}

TEST_F(ChunkPlace, ARefusedMessageDiscardsWhatCameBeforeItsHeader) {
  ASSERT_TRUE(budget_.charge(budget_.limit()).ok());
  ASSERT_TRUE(chunk(0, 1000).ok());
  begin();
  ASSERT_TRUE(got_.has_value());
  EXPECT_EQ(error_kind(got_->status()), ErrorKind::kResource) << got_->status();
  const Status rest = chunk(1000, kBytes - 1000);
  EXPECT_TRUE(rest.ok()) << rest;
  EXPECT_EQ(assembler_.incomplete_for_test(), 0u);
  EXPECT_EQ(budget_.used(), budget_.limit());
}

}  // namespace
}  // namespace weft::internal
