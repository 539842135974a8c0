// DEF_17: the memory that an arena may take, and a listener without its private socket.
#include <sys/socket.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/common/files.h"
#include "weft/tests/contract/grpc_transport_harness.h"
#include "weft/tests/testing/forwarding_runtime.h"
#include "weft/transport/address.h"
#include "weft/transport/internal/memory_limit.h"
#include "weft/transport/local_socket.h"

namespace weft::testing {
namespace {

TEST(MemoryLimit, DEF_17_the_least_of_the_control_groups_counts) {
  constexpr uint64_t kPhysical = uint64_t{64} << 30;
  const auto limit = [](const std::vector<std::pair<std::string, std::string>>& files) {
    const std::unique_ptr<Files> system = make_memory_files();
    for (const auto& [path, text] : files) EXPECT_TRUE(system->write_atomic(path, text).ok());
    return internal::memory_limit(*system, kPhysical);
  };
  const std::pair<std::string, std::string> two = {"/proc/self/cgroup", "0::/job/step\n"};
  EXPECT_EQ(limit({}), kPhysical);
  EXPECT_EQ(limit({two}), kPhysical);
  EXPECT_EQ(limit({two, {"/sys/fs/cgroup/job/step/memory.max", "max\n"}}), kPhysical);
  EXPECT_EQ(limit({two, {"/sys/fs/cgroup/job/step/memory.max", "1048576\n"}}), 1048576u);
  EXPECT_EQ(limit({two,
                   {"/sys/fs/cgroup/job/step/memory.max", "max\n"},
                   {"/sys/fs/cgroup/job/memory.max", "4096\n"}}),
            4096u);
  // A container sees its own group as the root.
  EXPECT_EQ(limit({{"/proc/self/cgroup", "0::/\n"}, {"/sys/fs/cgroup/memory.max", "8192\n"}}),
            8192u);
  EXPECT_EQ(limit({{"/proc/self/cgroup", "5:cpu,memory:/job\n3:cpuset:/\n0::/\n"},
                   {"/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "16384\n"}}),
            16384u);
  EXPECT_EQ(limit({{"/proc/self/cgroup", "5:memory:/job\n"},
                   {"/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n"}}),
            kPhysical);
}

// Names of sockets can be foretold.
class FixedRandom : public Random {
 public:
  uint64_t next() override { return 7; }
};
class FixedNames : public ForwardingRuntime {
 public:
  FixedNames() : ForwardingRuntime(make_system_runtime()) {}
  Random& random() override { return random_; }

 private:
  FixedRandom random_;
};

TEST_F(GrpcTransportTest, DEF_17_without_its_private_socket_no_worker_takes_other_users) {
  const std::string name = internal::gate_name(internal::make_local(7));
  const StatusOr<internal::UniqueFd> taken = internal::listen_local(name, SOCK_SEQPACKET, 1);
  ASSERT_TRUE(taken.ok()) << taken.status();
  for (const bool same_user : {true, false}) {
    TransportContext context;
    context.runtime = std::make_shared<FixedNames>();
    context.worker_name = "b";
    StatusOr<std::unique_ptr<Transport>> made = grpc_transport({.same_user = same_user})(context);
    ASSERT_TRUE(made.ok()) << made.status();
    std::unique_ptr<Peer> b = world().make_peer("b");
    b->transport = *std::move(made);
    const Status listening = world().listen(*b);
    if (same_user) {
      EXPECT_EQ(error_kind(listening), ErrorKind::kResource) << listening;
      EXPECT_THAT(std::string(listening.message()), ::testing::HasSubstr("WEFT_SAME_USER=0"));
    } else {
      // It was asked for: peers come in, and share no memory.
      EXPECT_TRUE(listening.ok()) << listening;
      std::unique_ptr<Peer> a = world().make_peer("a");
      const StatusOr<End> end = world().dial(*a, b->address);
      EXPECT_TRUE(end.ok()) << end.status();
      a->transport->shutdown();
    }
    b->transport->shutdown();
  }
}

}  // namespace
}  // namespace weft::testing
