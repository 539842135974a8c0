// Messages whose header is larger than a frame's may be (proto/rpc.proto, CALL-6): calls and answers
// with tens of thousands of tensors.

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/ops/full.h"
#include "gtest/gtest.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/sanitizers.h"
#include "weft/transport/faulty_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

constexpr int64_t kMany = 50'000;

// Tensor i has `elements` elements of value i; each `every`-th has `large` of them. 0: none is large.
std::vector<at::Tensor> make_many(int64_t n, int64_t elements, int64_t every, int64_t large) {
  std::vector<at::Tensor> out;
  out.reserve(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    const int64_t size = every > 0 && i % every == 0 ? large : elements;
    out.push_back(at::full({size}, static_cast<double>(i), at::kFloat));
  }
  return out;
}
// The number of tensors whose elements are all what make_many() made.
int64_t count_right(const std::vector<at::Tensor>& many, int64_t elements, int64_t every,
                    int64_t large) {
  int64_t right = 0;
  for (size_t i = 0; i < many.size(); ++i) {
    const int64_t n = static_cast<int64_t>(i);
    const int64_t size = every > 0 && n % every == 0 ? large : elements;
    const at::Tensor& t = many[i];
    if (t.dim() != 1 || t.numel() != size) continue;
    const float* data = t.const_data_ptr<float>();
    bool same = true;
    for (int64_t k = 0; k < size; ++k) same = same && data[k] == static_cast<float>(i);
    right += same ? 1 : 0;
  }
  return right;
}

class Wide : public ::testing::TestWithParam<Net> {
 protected:
  ClusterOptions options() {
    Library lib("wide");
    lib.def("make_many", &make_many);
    lib.def("count_right", &count_right);
    lib.def("add", &add, {.inline_ok = true});
    return {.net = GetParam(), .library = std::move(lib), .rpc_timeout = 60s};
  }
  // None of a message that will never come, now or soon.
  static void expect_received(const Worker& worker) {
    const absl::Time limit = worker.now() + absl::Seconds(30);
    while (counter(worker, "receive_bytes") > 0) {
      ASSERT_LT(worker.now(), limit) << counter(worker, "receive_bytes");
      std::this_thread::yield();
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Nets, Wide, ::testing::ValuesIn(nets()), net_name);

TEST_P(Wide, DEF_22_calls_and_answers_with_50000_tensors) {
  constexpr int64_t kMany = fewer(testing::kMany, int64_t{12'000});
  Cluster c(options());
  // 4 bytes each, so the header is the larger part.
  EXPECT_EQ(rpc_sync(c[0], 1, &count_right, make_many(kMany, 1, 0, 0), 1, 0, 0), kMany);
  EXPECT_EQ(count_right(rpc_sync(c[0], 1, &make_many, kMany, 1, 0, 0), 1, 0, 0), kMany);
  // Large ones among small ones and among empty ones.
  EXPECT_EQ(rpc_sync(c[0], 1, &count_right, make_many(kMany, 3, 1000, 30'000), 3, 1000, 30'000),
            kMany);
  EXPECT_EQ(count_right(rpc_sync(c[0], 1, &make_many, kMany, 0, 1000, 30'000), 0, 1000, 30'000),
            kMany);
  EXPECT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3);
}

// Wherever it is cut, the whole message is sent again.
TEST_P(Wide, DEF_22_a_connection_that_is_cut_in_the_middle) {
  const auto plan = std::make_shared<FaultPlan>(7);
  ClusterOptions o = options();
  o.adjust = [plan](int, JoinOptions* j) { j->transport = faulty_transport(j->transport, plan); };
  Cluster c(std::move(o));
  const std::vector<at::Tensor> many = make_many(20'000, 1, 100, 3000);
  CallOptions once;
  once.retry = Retry::kAtMostOnce;
  int64_t only = 0;  // with a sanitizer, each fault at one place
  for (const Fault fault : {Fault::kCut, Fault::kFailAfter, Fault::kLoseUnsent}) {
    const int64_t first = fewer<int64_t>(0, 3 * only++);
    for (int64_t skip = first; skip < 8; skip += fewer(3, 8)) {
      plan->clear();
      const int to = plan->add(
          {.fault = fault, .kind = FrameKind::kChunk, .to = "worker1", .skip = skip, .times = 1});
      EXPECT_EQ(rpc_sync(c[0], 1, once, &count_right, many, 1, 100, 3000), 20'000);
      EXPECT_EQ(plan->hits(to), 1);
      const int back = plan->add(
          {.fault = fault, .kind = FrameKind::kChunk, .to = "worker0", .skip = skip, .times = 1});
      EXPECT_EQ(
          count_right(rpc_sync(c[0], 1, once, &make_many, 20'000, 1, 100, 3000), 1, 100, 3000),
          20'000);
      EXPECT_EQ(plan->hits(back), 1);
    }
  }
  plan->clear();
  for (const size_t at : {size_t{0}, size_t{1}}) expect_received(c[at]);
}

// Bytes, header and what is made of it are charged; what has no room now is asked for again.
TEST_P(Wide, DEF_22_wide_messages_wait_for_their_receivers_room) {
  ClusterOptions o = options();
  o.adjust = [](int index, JoinOptions* j) {
    if (index == 1) j->environment = Environment{{"WEFT_PEER_RECEIVE_BUDGET", "32MiB"}};
  };
  Cluster c(std::move(o));
  const std::vector<at::Tensor> many = make_many(20'000, 1, 0, 0);
  CallOptions waits;
  waits.backpressure = Backpressure::kWait;
  waits.retry = Retry::kAtMostOnce;
  std::vector<Future<int64_t>> calls;
  for (int i = 0; i < 6; ++i) {
    calls.push_back(rpc_async(c[0], 1, waits, &count_right, many, 1, 0, 0));
  }
  for (auto& call : calls) EXPECT_EQ(call.wait(), 20'000);
  // 20,000 tensors are 10 MiB besides; three times as many are never let in.
  const Status never =
      try_rpc_sync(c[0], 1, waits, &count_right, make_many(kMany, 1, 0, 0), 1, 0, 0).status();
  EXPECT_EQ(error_kind(never), ErrorKind::kResource) << never;
  EXPECT_NE(never.message().find("WEFT_PEER_RECEIVE_BUDGET"), absl::string_view::npos) << never;
  EXPECT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3);
  EXPECT_EQ(counter(c[0], "connections_lost"), 0);
  expect_received(c[1]);
}

TEST_P(Wide, DEF_22_wide_calls_that_are_given_up) {
  Cluster c(options());
  const std::vector<at::Tensor> many = make_many(20'000, 1, 0, 0);
  for (int i = 0; i < fewer(10, 3); ++i) {
    Future<int64_t> call = rpc_async(c[0], 1, &count_right, many, 1, 0, 0);
    call.cancel();
    const Status status = call.try_wait().status();
    EXPECT_TRUE(status.ok() || error_kind(status) == ErrorKind::kCancelled) << status;
  }
  EXPECT_EQ(rpc_sync(c[0], 1, &count_right, many, 1, 0, 0), 20'000);
  expect_received(c[1]);
}

TEST_P(Wide, BadInput_a_wide_message_above_the_bound) {
  ClusterOptions o = options();
  o.adjust = [](int index, JoinOptions* j) {
    if (index == 0) j->environment = Environment{{"WEFT_MAX_MESSAGE_BYTES", "512KiB"}};
  };
  Cluster c(std::move(o));
  const auto refused = [](const Status& s, const char* part) {
    EXPECT_EQ(error_kind(s), ErrorKind::kResource) << s;
    EXPECT_NE(s.message().find(part), absl::string_view::npos) << s;
    EXPECT_NE(s.message().find("WEFT_MAX_MESSAGE_BYTES"), absl::string_view::npos) << s;
  };
  refused(try_rpc_sync(c[0], 1, &count_right, make_many(kMany, 1, 0, 0), 1, 0, 0).status(),
          "with a header of ");
  // The one who receives looks as well.
  refused(try_rpc_sync(c[0], 1, &make_many, kMany, 1, 0, 0).status(), "524288");
  EXPECT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3);
  EXPECT_EQ(counter(c[0], "connections_lost"), 0);
}

}  // namespace
}  // namespace weft::testing
