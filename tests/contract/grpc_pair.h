#ifndef WEFT_TESTS_CONTRACT_GRPC_PAIR_H_
#define WEFT_TESTS_CONTRACT_GRPC_PAIR_H_

// A fixture for the lanes that the grpc transport adds to a connection: two peers with options of their own, the
// connection between them, and the wait until the lanes are up.

#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "weft/tests/contract/transport_harness.h"
#include "weft/tests/testing/tls_files.h"
#include "weft/transport/grpc_transport.h"

namespace weft::testing {

// With and without TLS.
class GrpcPair : public ::testing::TestWithParam<bool> {
 protected:
  void TearDown() override { leave(); }
  void leave() {
    for (const auto& peer : {a_.get(), b_.get()}) {
      if (peer != nullptr) peer->transport->shutdown();
    }
  }
  // Makes both peers anew, "b" listens. `here` is for the dialler, `there` for the acceptor.
  void make_peers(const GrpcTransportOptions& here, const GrpcTransportOptions& there,
                  uint32_t version_here = Hello().version_max,
                  uint32_t version_there = Hello().version_max) {
    leave();
    GrpcTransportOptions next = there;
    const bool tls = GetParam();
    Backend backend{"grpc", false, true, [&next, tls, this](World&) -> TransportFactory {
                      return [&next, tls, this](const TransportContext& context) {
                        GrpcTransportOptions options = next;
                        if (tls) options.credentials = files_.make(context.worker_name, {});
                        return grpc_transport(options)(context);
                      };
                    }};
    a_ = nullptr;
    b_ = nullptr;
    world_ = std::make_unique<World>(backend, 1);
    b_ = world_->make_peer("b");
    b_->hello.version_max = version_there;
    b_->acceptor->set_own(b_->hello);
    ASSERT_TRUE(world_->listen(*b_).ok());
    next = here;
    a_ = world_->make_peer("a");
    a_->hello.version_max = version_here;
  }
  void dial_at(const std::string& address) {
    const size_t before = b_->acceptor->accepted_count();
    StatusOr<End> end = world_->dial(*a_, address);
    ASSERT_TRUE(end.ok()) << end.status();
    here_ = *end;
    there_ = b_->acceptor->accepted(before);
    ASSERT_NE(there_.handler, nullptr);
  }
  static void ping(const End& from, const End& to) {
    const size_t before = to.handler->frame_count();
    ASSERT_TRUE(
        from.connection->send(make_frame(FrameKind::kRequest, "ping", ""), kControlLane).ok());
    ASSERT_TRUE(to.handler->wait_frames(before + 1));
  }
  // Frames on the control lane: time passes, and what was sent before has arrived.
  virtual void ping() { ping(here_, there_); }
  virtual bool up(const End& end) const = 0;
  void wait_up() {
    const absl::Time limit = world_->runtime().now() + absl::Seconds(30);
    while (!up(here_) || !up(there_)) {
      ASSERT_LT(world_->runtime().now(), limit) << here_.connection->stats().data;
      ASSERT_NO_FATAL_FAILURE(ping());
    }
  }
  static int64_t counter(const Peer& peer, const std::string& name) {
    for (const auto& [key, value] : peer.transport->counters()) {
      if (key == name) return value;
    }
    return 0;
  }

  TlsFiles files_;
  std::unique_ptr<World> world_;
  std::unique_ptr<Peer> a_, b_;
  End here_, there_;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_CONTRACT_GRPC_PAIR_H_
