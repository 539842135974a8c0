// Real sockets that break, stall and crawl at chosen bytes (tests/testing/relay.h).
#include <cstdlib>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "gtest/gtest.h"
#include "weft/tests/contract/grpc_transport_harness.h"
#include "weft/tests/testing/sanitizers.h"
#include "weft/transport/frame.h"

namespace weft::testing {
namespace {

TEST_F(GrpcRelay, BrokenAtEveryPlaceOfTheHandshake) {
  // A handshake is some 400 bytes each way on each of the two sockets.
  for (const RelayAction action : {RelayAction::kCut, RelayAction::kReset, RelayAction::kHalfClose,
                                   RelayAction::kGarbage, RelayAction::kFlip}) {
    for (const bool to_target : {true, false}) {
      for (uint64_t at = 0; at < 480; at += 37) {
        relay_->clear();
        // One lane or the other.
        break_at(action, to_target, relay_->accepted() + static_cast<int>(at % 2), at);
        StatusOr<End> end = world().dial(*a_, relay_->address(), absl::Seconds(1));
        if (end.ok()) {
          end->connection->close(make_error(ErrorKind::kState, "enough"));
          ASSERT_TRUE(end->handler->wait_lost());
          EXPECT_EQ(end->handler->lost_calls(), 1);
        } else {
          EXPECT_TRUE(says(end.status(), relay_->address())) << end.status();
        }
      }
    }
  }
  expect_recovered();
}

TEST_F(GrpcRelay, BrokenInTheMiddleOfTraffic) {
  for (const RelayAction action :
       {RelayAction::kCut, RelayAction::kReset, RelayAction::kHalfClose, RelayAction::kGarbage}) {
    for (const bool to_target : {true, false}) {
      relay_->clear();
      const size_t before = b_->acceptor->accepted_count();
      StatusOr<End> end = world().dial(*a_, relay_->address());
      ASSERT_TRUE(end.ok()) << end.status();
      const End there = b_->acceptor->accepted(before);
      break_at(action, to_target, kEach, 3'000'000);
      for (uint64_t i = 1; i <= 16; ++i) {
        (void)end->connection->send(
            make_frame(FrameKind::kChunk, std::to_string(i), pattern(1 << 20, i), i), kBulkLane);
        (void)there.connection->send(
            make_frame(FrameKind::kChunk, std::to_string(i), pattern(1 << 20, i), i), kBulkLane);
      }
      ASSERT_TRUE(end->handler->wait_lost());
      ASSERT_TRUE(there.handler->wait_lost());
      // What did arrive is whole and in order (CONN-2); that its bytes are the sender's own, only
      // TLS could tell where a relay puts garbage between them.
      for (const End& side : {*end, there}) {
        EXPECT_EQ(side.handler->lost_calls(), 1);
        const std::vector<Received> got = side.handler->frames();
        EXPECT_LT(got.size(), 17u);
        for (size_t i = 0; i < got.size(); ++i) {
          EXPECT_EQ(got[i].header, std::to_string(i + 1));
          EXPECT_EQ(got[i].payload.size(), 1u << 20);
          if (action != RelayAction::kGarbage) {
            EXPECT_TRUE(got[i].payload == pattern(1 << 20, i + 1));
          }
        }
      }
    }
  }
  expect_recovered();
}

TEST_F(GrpcRelay, OneOfTwoSocketsIsResetAndTheConnectionIsLostOnBothSides) {
  for (int lane = 0; lane < 2; ++lane) {
    const size_t before = b_->acceptor->accepted_count();
    const int first = relay_->accepted();
    StatusOr<End> end = world().dial(*a_, relay_->address());
    ASSERT_TRUE(end.ok()) << end.status();
    const End there = b_->acceptor->accepted(before);
    break_at(RelayAction::kReset, /*to_target=*/true, first + lane, 0);
    ASSERT_TRUE(end->handler->wait_lost());
    ASSERT_TRUE(there.handler->wait_lost());
    relay_->clear();
  }
  expect_recovered();
}

// 64 KiB in 4 ms, so 4 MiB take a quarter of a second; the small frame does not wait for them.
TEST_F(GrpcRelay, AThrottledLinkDeliversAllInOrderAndSmallFramesInBetween) {
  for (const bool to_target : {true, false}) {
    relay_->add(
        {.action = RelayAction::kThrottle, .to_target = to_target, .count = 64 << 10, .millis = 4});
  }
  StatusOr<End> end = world().dial(*a_, relay_->address());
  ASSERT_TRUE(end.ok()) << end.status();
  const End there = b_->acceptor->accepted();
  constexpr uint64_t kChunks = 16;
  for (uint64_t i = 1; i <= kChunks; ++i) {
    ASSERT_TRUE(end->connection
                    ->send(make_frame(FrameKind::kChunk, std::to_string(i), pattern(256 << 10, i)),
                           kBulkLane)
                    .ok());
  }
  ASSERT_TRUE(end->connection->send(make_frame(FrameKind::kRequest, "small", ""), 0).ok());
  ASSERT_TRUE(there.handler->wait_frames(kChunks + 1));
  uint64_t chunks = 0;
  for (const Received& got : there.handler->frames()) {
    if (got.kind == FrameKind::kRequest) {
      EXPECT_LT(chunks, kChunks) << "it came last, behind all of the bulk";
      continue;
    }
    ++chunks;
    EXPECT_EQ(got.header, std::to_string(chunks));
    EXPECT_TRUE(got.payload == pattern(256 << 10, chunks));
  }
  EXPECT_EQ(chunks, kChunks);
}

TEST_F(GrpcRelay, SlowNetworkDelivers) {
  relay_->add({.action = RelayAction::kDelay, .to_target = true, .millis = 3});
  relay_->add({.action = RelayAction::kDelay, .to_target = false, .millis = 3});
  StatusOr<End> end = world().dial(*a_, relay_->address());
  ASSERT_TRUE(end.ok()) << end.status();
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(end->connection->send(make_frame(FrameKind::kRequest, "x", ""), i % 2).ok());
  }
  ASSERT_TRUE(b_->acceptor->accepted().handler->wait_frames(20));
}

TEST_F(GrpcRelay, AStalledPeerDoesNotHoldUpADialBeyondItsDeadline) {
  relay_->add({.action = RelayAction::kStall, .to_target = false, .at_byte = 100});
  StatusOr<End> end = world().dial(*a_, relay_->address(), absl::Milliseconds(300));
  EXPECT_EQ(error_kind(end.status()), ErrorKind::kDeadline) << end.status();
  expect_recovered();
}

TEST_F(GrpcRelay, AStalledPeerDoesNotHoldUpShutdownOrClose) {
  open({.drain_timeout = absl::Milliseconds(200), .same_user = false});
  a_->transport->shutdown();
  b_->transport->shutdown();
  begin();
  StatusOr<End> closed = world().dial(*a_, relay_->address());
  StatusOr<End> left = world().dial(*a_, relay_->address());
  ASSERT_TRUE(closed.ok() && left.ok());
  relay_->add({.action = RelayAction::kStall, .to_target = true});
  relay_->add({.action = RelayAction::kStall, .to_target = false});
  for (uint64_t i = 1; i <= 64; ++i) {
    for (const End& end : {*closed, *left}) {
      ASSERT_TRUE(
          end.connection
              ->send(make_frame(FrameKind::kChunk, "", std::string(1 << 20, 'x'), i), kBulkLane)
              .ok());
    }
  }
  // close() wants to send 64 MiB and cannot: it gives up and tells what was never handed over.
  closed->connection->close(absl::OkStatus());
  ASSERT_TRUE(closed->handler->wait_lost());
  EXPECT_FALSE(closed->handler->lost().why.ok());
  EXPECT_GT(closed->handler->lost().unsent.size(), 10u);
  const absl::Time begin = world().runtime().now();
  a_->transport->shutdown();
  // A bound against hanging: it takes some 1.5 s.
  EXPECT_LT(world().runtime().now() - begin, absl::Seconds(20));
  EXPECT_EQ(left->handler->lost_calls(), 1);
  EXPECT_GT(left->handler->lost().unsent.size(), 10u);
}

TEST_F(GrpcRelay, RefusedSockets) {
  relay_->refuse(true);
  StatusOr<End> end = world().dial(*a_, relay_->address());
  EXPECT_EQ(error_kind(end.status()), ErrorKind::kUnavailable) << end.status();
  relay_->refuse(false);
  expect_recovered();
}

// ---- at every byte -----------------------------------------------------------------------------

// Denser under soak: WEFT_RELAY_SWEEP=all.
bool sweep_all() {
  const char* const wanted = std::getenv("WEFT_RELAY_SWEEP");
  return wanted != nullptr && std::string_view(wanted) == "all";
}

class GrpcSweep : public GrpcRelay {
 protected:
  static constexpr RelayAction kEnds[] = {RelayAction::kCut, RelayAction::kReset,
                                          RelayAction::kHalfClose};
  struct Pair {
    int control = 0;  // lanes as connections of the relay
    int bulk = 0;
    End here;
    End there;
  };
  // Lanes are told apart by sending on one.
  void connect(Pair* out) {
    relay_->clear();
    const int first = relay_->accepted();
    const size_t before = b_->acceptor->accepted_count();
    StatusOr<End> end = world().dial(*a_, relay_->address());
    ASSERT_TRUE(end.ok()) << end.status();
    out->here = *end;
    out->there = b_->acceptor->accepted(before);
    ASSERT_EQ(relay_->accepted(), first + 2);
    const uint64_t bytes[] = {relay_->passed(first, true), relay_->passed(first + 1, true)};
    // Longer than what the end of the handshake may still bring.
    const std::string pad(2000, 'x');
    ASSERT_TRUE(out->here.connection->send(make_frame(FrameKind::kRequest, "pad", pad), 0).ok());
    ASSERT_TRUE(out->there.handler->wait_frames(1));
    ASSERT_TRUE(out->there.connection->send(make_frame(FrameKind::kResponse, "pad", pad), 0).ok());
    ASSERT_TRUE(out->here.handler->wait_frames(1));
    const bool is_first = relay_->passed(first, true) - bytes[0] >= pad.size();
    EXPECT_NE(is_first, relay_->passed(first + 1, true) - bytes[1] >= pad.size());
    out->control = is_first ? first : first + 1;
    out->bulk = is_first ? first + 1 : first;
  }
  // Counted from the bytes that have passed on that lane by now.
  void break_after(RelayAction action, bool to_target, int lane, uint64_t bytes) {
    break_at(action, to_target, lane, relay_->passed(lane, to_target) + bytes);
  }
  // Both ends hear of it once, whatever was said before.
  static void expect_lost(const Pair& pair) {
    ASSERT_TRUE(pair.here.handler->wait_lost());
    ASSERT_TRUE(pair.there.handler->wait_lost());
    EXPECT_EQ(pair.here.handler->lost_calls(), 1);
    EXPECT_EQ(pair.there.handler->lost_calls(), 1);
  }
};

TEST_F(GrpcSweep, CutAtEveryByteOfAHello) {
  // With a sanitizer, at every 11th, which are others for each way of breaking.
  uint64_t first = 0;
  for (const RelayAction action : kEnds) {
    for (const bool to_target : {true, false}) {
      for (uint64_t i = fewer<uint64_t>(0, first++); i < (sweep_all() ? 840 : 420);
           i += fewer(1, 11)) {
        const uint64_t at = i % 420;
        // By default one of the ends in each direction, in turn; under soak, all of them.
        if (!sweep_all() && kEnds[(at + (to_target ? 0 : 1)) % std::size(kEnds)] != action)
          continue;
        relay_->clear();
        // One lane or the other; under soak, both.
        const int lane = relay_->accepted() + static_cast<int>((i + i / 420) % 2);
        break_at(action, to_target, lane, at);
        StatusOr<End> end = world().dial(*a_, relay_->address(), absl::Seconds(2));
        if (end.ok()) {
          end->connection->close(make_error(ErrorKind::kState, "enough"));
          ASSERT_TRUE(end->handler->wait_lost());
          ASSERT_EQ(end->handler->lost_calls(), 1);
        } else {
          ASSERT_TRUE(says(end.status(), relay_->address())) << at << ": " << end.status();
        }
      }
    }
  }
  expect_recovered();
}

// Whole or not at all, and once.
TEST_F(GrpcSweep, CutAtEveryByteOfASmallFrame) {
  const Frame call = make_frame(FrameKind::kRequest, "header", "payload");
  // Besides its own: the prefix of gRPC's message and the header of HTTP/2's frame.
  const uint64_t bytes = internal::frame_bytes(call) + 5 + 9;
  for (const RelayAction action : kEnds) {
    for (const bool to_target : {true, false}) {
      int delivered = 0;
      for (uint64_t at = 0; at <= bytes; at += fewer(1, 3)) {
        Pair pair;
        ASSERT_NO_FATAL_FAILURE(connect(&pair));
        const End& from = to_target ? pair.here : pair.there;
        const End& to = to_target ? pair.there : pair.here;
        break_after(action, to_target, pair.control, at);
        (void)from.connection->send(make_frame(FrameKind::kRequest, "header", "payload"), 0);
        // The byte at which it breaks comes in any case.
        (void)from.connection->send(make_frame(FrameKind::kRequest, "next", std::string(64, 'n')),
                                    0);
        ASSERT_NO_FATAL_FAILURE(expect_lost(pair));
        const std::vector<Received> got = to.handler->frames();
        ASSERT_LE(got.size(), 2u) << "the next one cannot be whole";
        if (got.size() < 2) continue;
        ++delivered;
        EXPECT_EQ(got[1].header, "header");
        EXPECT_EQ(got[1].payload, "payload");
      }
      EXPECT_LE(delivered, 1) << "it was whole although it was cut";
    }
  }
  expect_recovered();
}

TEST_F(GrpcSweep, CutInStepsThroughChunks) {
  constexpr uint64_t kChunk = 256 << 10;
  const uint64_t step = sweep_all() ? 9973 : fewer(60013, 180039);
  for (const RelayAction action : kEnds) {
    for (const bool to_target : {true, false}) {
      for (uint64_t at = 0; at < 3 * kChunk; at += step) {
        Pair pair;
        ASSERT_NO_FATAL_FAILURE(connect(&pair));
        const End& from = to_target ? pair.here : pair.there;
        const End& to = to_target ? pair.there : pair.here;
        break_after(action, to_target, pair.bulk, at);
        for (uint64_t i = 1; i <= 4; ++i) {
          (void)from.connection->send(
              make_frame(FrameKind::kChunk, std::to_string(i), pattern(kChunk, i), i), kBulkLane);
        }
        ASSERT_NO_FATAL_FAILURE(expect_lost(pair));
        const std::vector<Received> got = to.handler->frames();
        ASSERT_LE(got.size(), 1 + at / kChunk + 1);
        for (size_t i = 1; i < got.size(); ++i) {
          EXPECT_EQ(got[i].header, std::to_string(i));
          EXPECT_TRUE(got[i].payload == pattern(kChunk, i));
        }
      }
    }
  }
  expect_recovered();
}

}  // namespace
}  // namespace weft::testing
