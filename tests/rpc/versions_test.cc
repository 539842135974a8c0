// Workers of different protocol versions (proto/transport.proto, Hello): one of the previous version
// joins and is called as before; one without a version in common is refused, and told both ranges.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/ones.h"
#include "gtest/gtest.h"
#include "weft/rpc/internal/agent/message.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/forwarding_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

struct Versions {
  uint32_t min;
  uint32_t max;
};

// The transport of a worker that says other versions than this library has, to those it dials and to
// those that dial it. All else about the handshake is the library's own.
class OtherVersions final : public ForwardingTransport {
 public:
  OtherVersions(std::unique_ptr<Transport> inner, Versions versions)
      : ForwardingTransport(std::move(inner)), versions_(versions) {}

  StatusOr<std::string> listen(const ListenOptions& options,
                               std::shared_ptr<Acceptor> acceptor) override {
    return ForwardingTransport::listen(options,
                                       std::make_shared<Answering>(std::move(acceptor), versions_));
  }
  void connect(std::string_view address, const Hello& hello, absl::Time deadline,
               std::shared_ptr<ConnectionHandler> handler, DialDone done) override {
    Hello other = hello;
    say(versions_, &other);
    ForwardingTransport::connect(address, other, deadline, std::move(handler), std::move(done));
  }

 private:
  static void say(Versions versions, Hello* hello) {
    hello->version_min = versions.min;
    hello->version_max = versions.max;
  }
  class Answering final : public Acceptor {
   public:
    Answering(std::shared_ptr<Acceptor> inner, Versions versions)
        : inner_(std::move(inner)), versions_(versions) {}
    StatusOr<Hello> check_hello(const Hello& theirs) override {
      StatusOr<Hello> ours = inner_->check_hello(theirs);
      if (ours.ok()) say(versions_, &*ours);
      return ours;
    }
    std::shared_ptr<ConnectionHandler> on_connection(
        std::shared_ptr<Connection> connection) override {
      return inner_->on_connection(std::move(connection));
    }

   private:
    const std::shared_ptr<Acceptor> inner_;
    const Versions versions_;
  };

  const Versions versions_;
};

int64_t how_many(const std::vector<at::Tensor>& many) { return static_cast<int64_t>(many.size()); }
std::vector<at::Tensor> some_tensors(int64_t n) {
  return std::vector<at::Tensor>(static_cast<size_t>(n), at::ones({1}));
}

class ProtocolVersions : public ::testing::TestWithParam<Net> {
 protected:
  // Two workers, of which worker1 says `versions`.
  ClusterOptions options(Versions versions) {
    Library library("versions");
    library.def("add", &add).def("how_many", &how_many).def("some_tensors", &some_tensors);
    ClusterOptions out{.net = GetParam(), .library = std::move(library), .rpc_timeout = 60s};
    out.adjust = [versions](int index, JoinOptions* join) {
      if (index != 1) return;
      join->transport =
          [inner = join->transport,
           versions](const TransportContext& context) -> StatusOr<std::unique_ptr<Transport>> {
        WEFT_ASSIGN_OR_RETURN(std::unique_ptr<Transport> made, inner(context));
        return std::make_unique<OtherVersions>(std::move(made), versions);
      };
    };
    return out;
  }
  static void expect_says(const Status& s, const std::vector<std::string>& parts) {
    for (const std::string& part : parts) {
      EXPECT_NE(s.message().find(part), absl::string_view::npos) << part << " in: " << s;
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Nets, ProtocolVersions, ::testing::ValuesIn(nets()), net_name);

TEST_P(ProtocolVersions, a_worker_of_the_previous_version_joins) {
  ASSERT_EQ(internal::kVersion, 3U) << "is version 2 the previous one still?";
  Cluster c(options({1, 2}));
  for (size_t from : {0U, 1U}) {
    const int to = from == 0 ? 1 : 0;
    EXPECT_EQ(rpc_sync(c[from], to, &add, 20, 3), 23);
    EXPECT_EQ(rpc_sync(c[from], to, &how_many, some_tensors(9000)), 9000);
  }
  // What version 2 has not, prompt lanes, is done without.
  for (int64_t i = 0; i < 100; ++i) {
    EXPECT_TRUE(prompt_call(c[0], 1, &add, i, int64_t{1}).ok());
    EXPECT_EQ(rpc_sync(c[1], 0, &add, i, int64_t{1}), i + 1);
  }
  EXPECT_EQ(counter(c[0], "lane2_frames_sent"), 0);
  EXPECT_EQ(counter(c[0], "connections_lost"), 0);
}

TEST_P(ProtocolVersions, a_worker_of_the_first_version_joins) {
  Cluster c(options({1, 1}));
  const at::Tensor chunks = at::ones({1 << 20});
  for (size_t from : {0U, 1U}) {
    const int to = from == 0 ? 1 : 0;
    EXPECT_EQ(rpc_sync(c[from], to, &add, 20, 3), 23);
    // In chunks, which version 1 has as well.
    EXPECT_EQ(rpc_sync(c[from], to, &how_many, std::vector<at::Tensor>(3, chunks)), 3);
    EXPECT_EQ(rpc_sync(c[from], to, &some_tensors, 100).size(), 100U);
  }
  // What version 1 has not fails at its sender, which names both versions; nothing else fails.
  const std::vector<std::string> both = {"9000 tensor buffers", "'worker1'", "protocol version 1",
                                         "version 2"};
  const StatusOr<int64_t> many = rpc_async(c[0], 1, &how_many, some_tensors(9000)).try_wait();
  EXPECT_EQ(error_kind(many.status()), ErrorKind::kUnimplemented) << many.status();
  expect_says(many.status(), both);
  const StatusOr<std::vector<at::Tensor>> answer =
      rpc_async(c[1], 0, &some_tensors, 9000).try_wait();
  EXPECT_EQ(error_kind(answer.status()), ErrorKind::kUnimplemented) << answer.status();
  expect_says(answer.status(), both);
  EXPECT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3);
  EXPECT_EQ(rpc_sync(c[1], 0, &add, 1, 2), 3);
}

TEST_P(ProtocolVersions, BadInput_a_worker_without_a_version_in_common) {
  ClusterOptions three = options({4, 5});
  three.size = 3;
  Cluster c(three);
  for (size_t from : {0U, 1U}) {
    const int to = from == 0 ? 1 : 0;
    // At once: nothing else would be said to a second try.
    const StatusOr<int64_t> got = rpc_async(c[from], to, &add, 20, 3).try_wait();
    EXPECT_EQ(error_kind(got.status()), ErrorKind::kUnimplemented) << got.status();
    expect_says(got.status(), {"'worker0' speaks", "1 to 3", "'worker1' speaks", "4 to 5"});
    EXPECT_EQ(c[from].debug_info().at("calls_pending"), 0);
  }
  EXPECT_EQ(rpc_sync(c[0], 2, &add, 20, 3), 23);
  EXPECT_EQ(rpc_sync(c[2], 0, &add, 20, 3), 23);
  c.shutdown();
}

}  // namespace
}  // namespace weft::testing
