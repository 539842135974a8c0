// Groups over tcp with credentials: who is taken for a member, and who is not.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/ones.h"
#include "weft/collectives/internal/header.h"
#include "weft/collectives/internal/tcp_mesh.h"
#include "weft/common/posix.h"
#include "weft/proto/collectives.pb.h"
#include "weft/tests/collectives/world.h"
#include "weft/tests/testing/tls_files.h"
#include "weft/transport/address.h"
#include "weft/transport/tls_stream.h"

namespace weft::testing {
namespace {

using internal::TlsCertificates;
using internal::TlsRole;
using internal::TlsState;
using internal::TlsStream;
using internal::UniqueFd;

TEST(SecureGroups, LargeTensorsBothWaysAtOnce) {
  // More than sockets and records hold, so that both ends write before they have read.
  constexpr int64_t kElements = (1 << 20) + 3;
  World(Setting::tls(), 2).run([](ProcessGroup& group) {
    EXPECT_EQ(group.backend(), "tcp");
    const at::Tensor t = at::arange(kElements, at::kDouble) + group.rank();
    group.all_reduce(t);
    EXPECT_TRUE(at::equal(t, at::arange(kElements, at::kDouble) * 2 + 1));
    const at::Tensor mine = at::arange(kElements, at::kDouble) * (group.rank() + 1);
    const at::Tensor theirs = at::ones({kElements}, at::kDouble);
    const Work sent = group.send_async(mine, 1 - group.rank());
    group.recv(theirs, 1 - group.rank());
    sent.wait();
    EXPECT_TRUE(at::equal(theirs, at::arange(kElements, at::kDouble) * (2 - group.rank())));
  });
}

// What connects to the port of a member while its group is made.
class Strangers : public ::testing::Test {
 protected:
  // Rank 0 waits for rank 1 when it has written its record.
  void before_rank_1(const std::function<void(const std::string& address)>& act) {
    world_.run_ranks([&](int rank) {
      ProcessGroupOptions o = world_.options(rank);
      o.init_timeout = absl::Seconds(120);
      if (rank == 1) {
        const StatusOr<std::string> record = world_.store->get("weft//collectives/world/m/0");
        ASSERT_TRUE(record.ok()) << record.status();
        wire::GroupMember member;
        ASSERT_TRUE(member.ParseFromString(*record));
        EXPECT_TRUE(member.secure());
        EXPECT_EQ(member.worker(), "w0");
        // The kernel keeps the connection and its bytes until rank 0 accepts, which it does when
        // rank 1 has written its record.
        act(member.address());
      }
      StatusOr<ProcessGroup> group = try_init_process_group(o);
      ASSERT_TRUE(group.ok()) << group.status();
      const at::Tensor t = at::ones({1000});
      group->all_reduce(t);
      EXPECT_EQ(t[999].item<double>(), 2);
    });
  }

  static UniqueFd connect_to(const std::string& address) {
    StatusOr<UniqueFd> fd = internal::begin_connect(address);
    EXPECT_TRUE(fd.ok()) << fd.status();
    if (!fd.ok()) return UniqueFd();
    pollfd ready = {fd->get(), POLLOUT, 0};
    EXPECT_EQ(poll(&ready, 1, 30'000), 1);
    return *std::move(fd);
  }

  // Returns how the other side answers: the first error of the handshake or of a read after it.
  Status handshake(const UniqueFd& fd, const Credentials& credentials) {
    auto certificates = TlsCertificates::load(credentials, *world_.runtime);
    EXPECT_TRUE(certificates.ok()) << certificates.status();
    auto tls = TlsStream::with_certificates(fd.get(), TlsRole::kClient, *certificates);
    EXPECT_TRUE(tls.ok()) << tls.status();
    while (true) {
      StatusOr<TlsState> state = (*tls)->handshake();
      if (!state.ok()) return state.status();
      if (*state == TlsState::kDone) break;
      pollfd ready = {fd.get(), POLLIN, 0};
      EXPECT_EQ(poll(&ready, 1, 30'000), 1);
    }
    while (true) {
      char byte = 0;
      const auto moved = (*tls)->read({&byte, 1});
      if (!moved.ok()) return moved.status();
      if (moved->bytes > 0 || moved->state == TlsState::kEnded) return absl::OkStatus();
      pollfd ready = {fd.get(), POLLIN, 0};
      EXPECT_EQ(poll(&ready, 1, 30'000), 1);
    }
  }

  const World world_{Setting::tls(), 2};
};

TEST_F(Strangers, BadInput_plain_text_at_a_port_with_credentials) {
  UniqueFd fd;
  before_rank_1([&](const std::string& address) {
    fd = connect_to(address);
    wire::GroupHello hello;
    hello.set_version(internal::kGroupVersion);
    hello.set_rank(1);
    const std::string body = hello.SerializeAsString();
    const auto length = static_cast<uint32_t>(body.size());
    std::string bytes(reinterpret_cast<const char*>(&length), sizeof length);
    bytes += body;
    EXPECT_EQ(send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  });
}

TEST_F(Strangers, BadInput_a_certificate_of_another_authority) {
  TlsFiles others;
  Status answer;
  std::unique_ptr<Thread> stranger;
  before_rank_1([&](const std::string& address) {
    auto fd = std::make_shared<UniqueFd>(connect_to(address));
    // Rank 0 answers a handshake when rank 1 has come.
    stranger = world_.runtime->spawn("stranger", [&, fd] {
      // It is called what rank 1 is called.
      answer = handshake(*fd, others.make("w1", {.rank = 1}));
    });
  });
  stranger->join();
  EXPECT_FALSE(answer.ok());
}

// They hold no place: neither one that says nothing, nor one that stops within its handshake.
TEST_F(Strangers, BadInput_silent_and_slow_ones_at_a_port_with_credentials) {
  std::vector<UniqueFd> silent;
  UniqueFd slow;
  before_rank_1([&](const std::string& address) {
    for (int i = 0; i < 20; ++i) silent.push_back(connect_to(address));
    slow = connect_to(address);
    // A record of TLS that says it is longer than what ever comes.
    const char begun[] = {0x16, 0x03, 0x01, 0x02, 0x00, 0x01};
    EXPECT_EQ(send(slow.get(), begun, sizeof begun, MSG_NOSIGNAL),
              static_cast<ssize_t>(sizeof begun));
  });
}

// What stands at the store as rank 0 is not one.
class Impostors : public ::testing::Test {
 protected:
  Impostors() {
    StatusOr<internal::TcpListener> made = internal::TcpListener::make("127.0.0.1", false);
    EXPECT_TRUE(made.ok()) << made.status();
    listener_ = *std::move(made);
    wire::GroupMember member;
    member.set_version(internal::kGroupVersion);
    member.set_size(2);
    member.set_identity(77);
    member.set_backend("tcp");
    member.set_address(listener_.address());
    member.set_secure(true);
    member.set_worker("w0");
    EXPECT_TRUE(world_.store->set("weft//collectives/world/m/0", member.SerializeAsString()).ok());
  }

  // How rank 1 answers.
  Status rank_1(absl::Duration init_timeout) {
    ProcessGroupOptions o = world_.options(1);
    o.init_timeout = init_timeout;
    return try_init_process_group(o).status();
  }
  // `act` on the first connection of rank 1, on a thread of its own.
  std::unique_ptr<Thread> first_connection(std::function<void(int fd)> act) {
    return world_.runtime->spawn("impostor", [this, act = std::move(act)] {
      pollfd ready = {listener_.fd(), POLLIN, 0};
      ASSERT_EQ(poll(&ready, 1, 60'000), 1);
      const UniqueFd fd(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      ASSERT_TRUE(fd.valid());
      act(fd.get());
      // Until rank 1 has given up.
      ready.fd = fd.get();
      char bytes[4096];
      do {
        ASSERT_EQ(poll(&ready, 1, 60'000), 1);
      } while (recv(fd.get(), bytes, sizeof bytes, 0) > 0);
    });
  }

  const World world_{Setting::tls(), 2};
  internal::TcpListener listener_;
};

TEST_F(Impostors, BadInput_a_member_that_is_silent_in_the_handshake) {
  const auto impostor = first_connection([](int) {});
  expect_error(rank_1(absl::Milliseconds(300)), ErrorKind::kDeadline,
               {"rank 0 at 127.0.0.1:", "TLS handshake"});
}

TEST_F(Impostors, BadInput_a_member_that_answers_in_plain_text) {
  const auto impostor = first_connection([](int fd) {
    const std::string hello("\x04\0\0\0\x08\x01\x10\x02", 8);
    EXPECT_EQ(send(fd, hello.data(), hello.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(hello.size()));
  });
  const Status s = rank_1(absl::Minutes(2));
  expect_error(s, ErrorKind::kProtocol, {"rank 0 at 127.0.0.1:", "TLS"});
}

// It has a certificate of the authority, and not that of the worker that it says it is.
TEST_F(Impostors, BadInput_another_worker_of_the_job_at_the_port_of_a_member) {
  auto certificates = TlsCertificates::load(world_.tls_files->make("w5"), *world_.runtime);
  ASSERT_TRUE(certificates.ok()) << certificates.status();
  const auto impostor = first_connection([&](int fd) {
    auto tls = TlsStream::with_certificates(fd, TlsRole::kServer, *certificates);
    ASSERT_TRUE(tls.ok()) << tls.status();
    for (StatusOr<TlsState> state = (*tls)->handshake(); state.ok() && *state != TlsState::kDone;
         state = (*tls)->handshake()) {
      pollfd ready = {fd, POLLIN, 0};
      ASSERT_EQ(poll(&ready, 1, 60'000), 1);
    }
  });
  expect_error(rank_1(absl::Minutes(2)), ErrorKind::kPermission,
               {"rank 0 at 127.0.0.1:", "'w5'", "not of 'w0' with rank 0"});
}

// Both ranks hear of it, and soon.
TEST(SecureGroups, BadInput_a_member_with_another_authority) {
  const World world(Setting::tls(), 3);
  TlsFiles others;
  const Credentials wrong = others.make("w1", {.rank = 1});
  world.run_ranks([&](int rank) {
    ProcessGroupOptions o = world.options(rank);
    o.init_timeout = absl::Minutes(5);
    if (rank == 1) o.credentials = wrong;
    const absl::Time begin = world.runtime->now();
    const Status s = try_init_process_group(o).status();
    EXPECT_FALSE(s.ok());
    EXPECT_LT(world.runtime->now() - begin, absl::Minutes(4)) << s;
    if (rank == 1) {
      EXPECT_TRUE(error_kind(s) == ErrorKind::kPermission ||
                  error_kind(s) == ErrorKind::kUnavailable)
          << s;
      expect_error(s, error_kind(s), {"rank "});
    }
  });
  EXPECT_EQ(*world.store->num_keys(), 0);
}

TEST(SecureGroups, BadInput_a_certificate_of_another_worker) {
  const World world(Setting::tls(), 2);
  ProcessGroupOptions o = world.options(1);
  o.worker_name = "w0";
  expect_error(try_init_process_group(o).status(), ErrorKind::kPermission,
               {"'w1' (rank 1)", "'w0' with rank 1"});
  o = world.options(1);
  o.job_rank = 0;
  expect_error(try_init_process_group(o).status(), ErrorKind::kPermission,
               {"'w1' (rank 1)", "'w1' with rank 0"});
}

// Rank 1 has written to the store that it is a worker whose certificate it does not have.
TEST(SecureGroups, BadInput_a_rank_that_is_not_the_worker_of_its_record) {
  World world(Setting::tls(), 2);
  world.run_ranks([&](int rank) {
    ProcessGroupOptions o = world.options(rank);
    o.init_timeout = absl::Minutes(5);
    if (rank == 1) {
      // Its own check is passed over: all have one certificate, it says.
      o.credentials.shared_certificate = true;
      o.worker_name = "w7";
    }
    const Status s = try_init_process_group(o).status();
    EXPECT_FALSE(s.ok());
    if (rank == 0) expect_error(s, error_kind(s), {"rank 1"});
  });
}

TEST(SecureGroups, BadInput_another_cluster_token) {
  const World world(Setting::tls(), 2);
  world.run_ranks([&](int rank) {
    ProcessGroupOptions o = world.options(rank);
    o.init_timeout = absl::Minutes(5);
    o.credentials.token = rank == 0 ? "sixteen bytes at least" : "sixteen other bytes";
    const Status s = try_init_process_group(o).status();
    EXPECT_TRUE(error_kind(s) == ErrorKind::kPermission || error_kind(s) == ErrorKind::kUnavailable)
        << s;
    expect_error(s, error_kind(s), {"cluster token"});
  });
}

TEST(SecureGroups, BadInput_credentials_at_some_members_only) {
  const World world(Setting::tls(), 3);
  world.run_ranks([&](int rank) {
    ProcessGroupOptions o = world.options(rank);
    if (rank == 2) o.credentials = {};
    expect_error(try_init_process_group(o).status(), ErrorKind::kInvalidArgument,
                 {"credentials", "rank 2 of 3", "without credentials"});
  });
}

TEST(SecureGroups, GroupsOfAGroupProveThemselvesByTheRankInTheJob) {
  World(Setting::tls(), 3).run([](ProcessGroup& group) {
    ProcessGroup some;
    if (group.rank() != 0) {
      some = group.new_group({2, 1});
      const at::Tensor t = at::ones({5});
      some.all_reduce(t);
      EXPECT_EQ(t[0].item<double>(), 2);
    }
    group.barrier();
  });
}

TEST(SecureGroups, ByTheVariablesOfTheLauncher) {
  const World world(Setting::tls(), 2);
  world.run_ranks([&](int rank) {
    ProcessGroupOptions o = world.options(rank);
    const Credentials c = o.credentials;
    o.credentials = {};
    o.environment = Environment{
        {"WEFT_TLS_CA", c.ca_file}, {"WEFT_TLS_CERT", c.cert_file}, {"WEFT_TLS_KEY", c.key_file}};
    StatusOr<ProcessGroup> group = try_init_process_group(o);
    ASSERT_TRUE(group.ok()) << group.status();
    group->barrier();
  });
}

}  // namespace
}  // namespace weft::testing
