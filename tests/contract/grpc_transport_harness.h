#ifndef WEFT_TESTS_CONTRACT_GRPC_TRANSPORT_HARNESS_H_
#define WEFT_TESTS_CONTRACT_GRPC_TRANSPORT_HARNESS_H_

// Fixtures for what only the grpc transport has: two peers on real sockets, and a relay between
// them that breaks these at chosen bytes.

#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "weft/tests/contract/transport_harness.h"
#include "weft/tests/testing/relay.h"
#include "weft/transport/grpc_transport.h"

namespace weft::testing {

inline bool says(const Status& s, const std::string& text) {
  return std::string(s.message()).find(text) != std::string::npos;
}

class GrpcTransportTest : public ::testing::Test {
 protected:
  // Data connections have tests of their own (data_connection_test.cc).
  void SetUp() override { open({.local_sockets = false, .data_connections = false}); }
  void open(const GrpcTransportOptions& options) {
    Backend backend{"grpc", false, true, [options](World&) { return grpc_transport(options); }};
    world_ = std::make_unique<World>(backend, 1);
  }
  World& world() { return *world_; }
  static int64_t counter(const Peer& peer, const std::string& name) {
    for (const auto& [key, value] : peer.transport->counters()) {
      if (key == name) return value;
    }
    ADD_FAILURE() << "no counter " << name;
    return -1;
  }

  std::unique_ptr<World> world_;
};

// Without the local socket.
inline std::string tcp_part(const std::string& address) {
  return address.substr(0, address.find('/'));
}

class GrpcRelay : public GrpcTransportTest {
 protected:
  void SetUp() override {
    GrpcTransportTest::SetUp();
    begin();
  }
  void begin() {
    a_ = world().make_peer("a");
    b_ = world().make_peer("b");
    ASSERT_TRUE(world().listen(*b_).ok());
    relay_ = Relay::start(b_->address);
    ASSERT_NE(relay_, nullptr);
  }
  void TearDown() override {
    a_->transport->shutdown();
    b_->transport->shutdown();
  }
  static constexpr int kEach = -1;
  // Breaks the n-th connection that the relay accepts, at a byte of one direction.
  void break_at(RelayAction action, bool to_target, int connection, uint64_t byte) {
    relay_->add(
        {.action = action, .to_target = to_target, .connection = connection, .at_byte = byte});
  }
  // Whatever happened before, an undisturbed dial works.
  void expect_recovered() {
    relay_->clear();
    StatusOr<End> end = world().dial(*a_, relay_->address());
    ASSERT_TRUE(end.ok()) << end.status();
    const size_t last = b_->acceptor->accepted_count() - 1;
    ASSERT_TRUE(end->connection->send(make_frame(FrameKind::kRequest, "hi", ""), 0).ok());
    ASSERT_TRUE(b_->acceptor->accepted(last).handler->wait_frames(1));
    end->connection->close(absl::OkStatus());
    ASSERT_TRUE(end->handler->wait_lost());
  }

  std::unique_ptr<Peer> a_, b_;
  std::unique_ptr<Relay> relay_;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_CONTRACT_GRPC_TRANSPORT_HARNESS_H_
