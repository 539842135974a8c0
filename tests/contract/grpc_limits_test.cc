// DEF_12: the descriptors of a process, and what the grpc transport makes of them.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/common/posix.h"
#include "weft/tests/contract/grpc_transport_harness.h"

namespace weft::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr rlim_t kMostRaised = 65'536;

rlimit descriptor_limit() {
  rlimit out = {};
  EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &out), 0);
  return out;
}

// The soft limit of descriptors, for a scope.
class LowLimit {
 public:
  LowLimit() : before_(descriptor_limit()) {}
  ~LowLimit() { EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before_), 0); }
  LowLimit(const LowLimit&) = delete;
  LowLimit& operator=(const LowLimit&) = delete;

  void set(rlim_t soft) const {
    const rlimit limit = {soft, before_.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  }
  // So many more may be opened: each takes the lowest number that is free.
  void leave_spare(size_t count) const {
    std::vector<internal::UniqueFd> tried;
    for (size_t i = 0; i <= count; ++i) tried.emplace_back(dup(STDIN_FILENO));
    set(static_cast<rlim_t>(tried.back().get()));
  }
  rlim_t hard() const { return before_.rlim_max; }

 private:
  const rlimit before_;
};

TEST_F(GrpcTransportTest, DEF_12_the_limit_of_descriptors_is_raised) {
  const LowLimit limit;
  const rlim_t low = std::min<rlim_t>(limit.hard(), kMostRaised) / 2;
  limit.set(low);
  open({.local_sockets = false, .raise_descriptor_limit = false});
  std::unique_ptr<Peer> a = world().make_peer("a");
  EXPECT_EQ(descriptor_limit().rlim_cur, low) << "it was to be left as it is";
  open({.local_sockets = false});
  a = world().make_peer("a");
  EXPECT_EQ(descriptor_limit().rlim_cur, std::min(limit.hard(), kMostRaised));
  EXPECT_EQ(counter(*a, "descriptors_limit"),
            static_cast<int64_t>(std::min(limit.hard(), kMostRaised)));
  EXPECT_GE(counter(*a, "descriptors_open"), 3);
}

TEST_F(GrpcTransportTest, DEF_12_data_connections_are_given_up_first) {
  open({.local_sockets = false, .raise_descriptor_limit = false});
  std::unique_ptr<Peer> a = world().make_peer("a");
  std::unique_ptr<Peer> b = world().make_peer("b");
  ASSERT_TRUE(world().listen(*a).ok());
  ASSERT_TRUE(world().listen(*b).ok());
  // Both ends are here: three sockets each for control and bulk lanes, and two each that are
  // optional. There is room for eight connections without those, and for the spare descriptors that
  // a dial asks for.
  constexpr size_t kConnections = 8;
  const LowLimit limit;
  limit.leave_spare(kConnections * 6 + 8);
  std::vector<End> ends;
  for (size_t i = 0; i < kConnections; ++i) {
    StatusOr<End> end =
        world().dial(*a, b->address, absl::Seconds(5), [](Hello* hello) { hello->lanes = 3; });
    ASSERT_TRUE(end.ok()) << i << " others: " << end.status();
    EXPECT_NE(b->acceptor->accepted(i).connection, nullptr) << i;
    // By then it is settled whether there is an offer.
    ASSERT_TRUE(end->connection->send(make_frame(FrameKind::kRequest, "x", ""), 0).ok());
    ASSERT_TRUE(b->acceptor->accepted(i).handler->wait_frames(1));
    ends.push_back(*end);
  }
  EXPECT_THAT(b->acceptor->accepted(0).connection->stats().data,
              AllOf(HasSubstr("RLIMIT_NOFILE"), HasSubstr("ulimit -n")));
  EXPECT_EQ(counter(*b, "data_sockets_refused"), static_cast<int64_t>(2 * kConnections));
  for (Peer* peer : {a.get(), b.get()}) peer->transport->shutdown();
}

// The connection is there, and its bulk lanes would be made now: what would go over them goes by the control lane.
TEST_F(GrpcTransportTest, LATE_2_a_connection_without_descriptors_carries_large_messages) {
  open({.local_sockets = false, .data_connections = false, .raise_descriptor_limit = false});
  std::unique_ptr<Peer> a = world().make_peer("a");
  std::unique_ptr<Peer> b = world().make_peer("b");
  ASSERT_TRUE(world().listen(*b).ok());
  for (size_t i = 0; i < 2; ++i) {  // the dialler sends, or the acceptor
    const StatusOr<End> here =
        world().dial(*a, b->address, absl::Seconds(5), [](Hello* hello) { hello->lanes = 0; });
    ASSERT_TRUE(here.ok()) << here.status();
    const End there = b->acceptor->accepted(i);
    ASSERT_NE(there.connection, nullptr);
    const End& from = i == 0 ? *here : there;
    const End& to = i == 0 ? there : *here;
    const LowLimit limit;
    limit.leave_spare(1);
    for (const char* header : {"0", "1"}) {
      ASSERT_TRUE(
          from.connection->send(make_frame(FrameKind::kChunk, header, pattern(5000)), kBulkLane)
              .ok());
    }
    ASSERT_TRUE(to.handler->wait_frames(2));
    const std::vector<Received> got = to.handler->frames();
    EXPECT_EQ(got[0].header + got[1].header, "01");
    for (const Received& one : got) EXPECT_EQ(one.lane, kControlLane);
  }
  for (Peer* peer : {a.get(), b.get()}) peer->transport->shutdown();
}

TEST_F(GrpcTransportTest, DEF_12_a_dial_without_descriptors_names_the_limit) {
  open({.same_user = false, .raise_descriptor_limit = false});
  std::unique_ptr<Peer> a = world().make_peer("a");
  std::unique_ptr<Peer> b = world().make_peer("b");
  ASSERT_TRUE(world().listen(*b).ok());
  for (const std::string& address : {b->address, tcp_part(b->address)}) {
    const LowLimit limit;
    limit.leave_spare(1);
    const Status s = world().dial(*a, address, absl::Seconds(5)).status();
    EXPECT_EQ(error_kind(s), ErrorKind::kUnavailable) << s;
    EXPECT_THAT(std::string(s.message()),
                HasSubstr(absl::StrCat("this process may have ", descriptor_limit().rlim_cur,
                                       " (RLIMIT_NOFILE")));
  }
  const StatusOr<End> end = world().dial(*a, b->address);
  EXPECT_TRUE(end.ok()) << end.status();
  for (Peer* peer : {a.get(), b.get()}) peer->transport->shutdown();
}

}  // namespace
}  // namespace weft::testing
