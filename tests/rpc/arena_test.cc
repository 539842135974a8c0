// Large tensors between workers of one host: through memory that both see, and by the socket when
// there is none. Counts decide, not times.

#include <map>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/rand.h"
#include "ATen/ops/sparse_coo_tensor.h"
#include "gtest/gtest.h"
#include "weft/rpc/arena.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/fake_devices.h"
#include "weft/transport/grpc_transport.h"

namespace weft::testing {
namespace {

constexpr int64_t kElements = kMiB / 4;  // floats in 1 MiB

at::Tensor pass_on(const at::Tensor& x) { return x; }
double total(const at::Tensor& x) { return x.sum().item<double>(); }
// Writes to what it got, which an ordinary sender must not see.
double overwrite(at::Tensor x) {
  x.fill_(-1);
  return x.sum().item<double>();
}

class Keeper {
 public:
  void keep(const at::Tensor& x) {
    MutexLock lock(&mutex_);
    kept_.push_back(x);
  }
  std::vector<at::Tensor> take() {
    MutexLock lock(&mutex_);
    return std::move(kept_);
  }

 private:
  Mutex mutex_;
  std::vector<at::Tensor> kept_ ABSL_GUARDED_BY(mutex_);
};

class Arena : public ::testing::Test {
 protected:
  Arena() : keeper(std::make_shared<Keeper>()) {
    library.def("echo", &pass_on);
    library.def("total", &total);
    library.def("overwrite", &overwrite);
    library.class_<Keeper>("Keeper").def("keep", &Keeper::keep);
    library.instance("keeper", keeper);
  }

  Cluster make(GrpcTransportOptions options = {}) {
    return Cluster({.size = 2,
                    .net = Net::kGrpc,
                    .library = library,
                    .adjust = [options](int, JoinOptions* join) {
                      join->transport = grpc_transport(options);
                    }});
  }

  // The first large message may come before the memory is shared.
  static void share(const Worker& from, const Worker& to) {
    const at::Tensor x = at::ones({kElements});
    while (counter(from, "arena_copies") == 0) rpc_sync(from, to.name(), &total, x);
    while (counter(to, "arena_copies") == 0) rpc_sync(from, to.name(), &pass_on, x);
  }
  // Everything lent was given back, in calls to `peer` or a little later.
  static void expect_nothing_lent(const Worker& worker, const Worker& peer) {
    while (counter(worker, "arena_blocks") > 0) {
      rpc_sync(worker, peer.name(), &total, at::ones({1}));
    }
    EXPECT_EQ(counter(worker, "arena_leases"), 0);
    EXPECT_EQ(counter(worker, "arena_bytes"), 0);
    EXPECT_EQ(counter(worker, "arena_ignored_frees"), 0);
  }

  std::shared_ptr<Keeper> keeper;
  Library library{"arena"};
};

TEST_F(Arena, large_tensors_do_not_go_through_the_socket) {
  Cluster c = make();
  share(c[0], c[1]);
  const int64_t socket = counter(c[0], "lane1_bytes_sent") + counter(c[0], "lane0_bytes_sent");
  const int64_t copies = counter(c[0], "arena_copies");
  const at::Tensor x = at::rand({64 * kElements});
  EXPECT_TRUE(at::equal(rpc_sync(c[0], "worker1", &pass_on, x), x));
  EXPECT_EQ(counter(c[0], "arena_copies"), copies + 1);
  EXPECT_LT(counter(c[0], "lane1_bytes_sent") + counter(c[0], "lane0_bytes_sent") - socket,
            64 << 10);
  expect_nothing_lent(c[0], c[1]);
  expect_nothing_lent(c[1], c[0]);
  c.shutdown();
}

TEST_F(Arena, a_message_above_the_bound_is_refused_before_it_is_copied) {
  Cluster c(
      {.size = 2, .net = Net::kGrpc, .library = library, .adjust = [](int, JoinOptions* join) {
         join->environment = Environment{{"WEFT_MAX_MESSAGE_BYTES", std::to_string(4 * kMiB)}};
         join->transport = grpc_transport();
       }});
  share(c[0], c[1]);
  const int64_t copies = counter(c[0], "arena_copies");
  const auto refused = try_rpc_sync(c[0], "worker1", &total, at::ones({5 * kElements}));
  EXPECT_EQ(error_kind(refused.status()), ErrorKind::kResource) << refused.status();
  EXPECT_EQ(counter(c[0], "arena_copies"), copies);
  expect_nothing_lent(c[0], c[1]);
  c.shutdown();
}

TEST_F(Arena, a_tensor_in_the_arena_is_sent_without_a_copy) {
  Cluster c = make();
  share(c[0], c[1]);
  const int64_t copies = counter(c[0], "arena_copies");
  {
    at::Tensor x = arena_tensor(c[0], {4, kElements});
    x.fill_(2);
    EXPECT_EQ(rpc_sync(c[0], "worker1", &total, x), 8.0 * kElements);
    // Rows, which begin in the middle of the block.
    EXPECT_EQ(rpc_sync(c[0], "worker1", &total, x[3]), 2.0 * kElements);
    const at::Tensor y = move_to_arena(c[0], at::full({kElements}, 3.0));
    EXPECT_EQ(rpc_sync(c[0], "worker1", &total, y), 3.0 * kElements);
    EXPECT_EQ(counter(c[0], "arena_zero_copies"), 3);
    EXPECT_EQ(counter(c[0], "arena_copies"), copies);
  }
  expect_nothing_lent(c[0], c[1]);
}

// A copy from a device ends where the peer reads it.
TEST_F(Arena, a_tensor_on_a_device_is_copied_once_on_the_host) {
  const c10::Device device(c10::kCUDA, 0);
  Cluster c(
      {.size = 2, .net = Net::kGrpc, .library = library, .adjust = [&](int, JoinOptions* join) {
         join->transport = grpc_transport();
         join->device_backend = std::make_shared<FakeDevices>(1);
         join->devices = {device};
         for (const char* to : {"worker0", "worker1"}) join->device_maps[to] = {{device, device}};
       }});
  share(c[0], c[1]);
  const int64_t copies[] = {counter(c[0], "arena_copies"), counter(c[1], "arena_copies")};
  const at::Tensor values = at::rand({4 * kElements});
  {
    const at::Tensor back = rpc_sync(c[0], "worker1", &pass_on, on_device(values, device));
    EXPECT_TRUE(at::equal(on_cpu(back), values));
  }
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(counter(c[i], "arena_zero_copies"), 1) << "worker" << i;
    EXPECT_EQ(counter(c[i], "arena_copies"), copies[i]) << "worker" << i;
  }
  expect_nothing_lent(c[0], c[1]);
  expect_nothing_lent(c[1], c[0]);
  c.shutdown();
}

TEST_F(Arena, the_receiver_of_an_ordinary_tensor_has_a_copy_of_its_own) {
  Cluster c = make();
  share(c[0], c[1]);
  const at::Tensor x = at::ones({kElements});
  EXPECT_EQ(rpc_sync(c[0], "worker1", &overwrite, x), -1.0 * kElements);
  EXPECT_EQ(total(x), 1.0 * kElements);
}

TEST_F(Arena, what_was_received_can_be_written_and_resized) {
  Cluster c = make();
  share(c[0], c[1]);
  at::Tensor y = rpc_sync(c[0], "worker1", &pass_on, at::ones({kElements}));
  y.add_(1);
  EXPECT_EQ(total(y), 2.0 * kElements);
  y.resize_({2 * kElements});
  y.fill_(1);
  EXPECT_EQ(total(y), 2.0 * kElements);
}

TEST_F(Arena, what_was_received_outlives_connection_and_workers) {
  at::Tensor received;
  {
    Cluster c = make();
    share(c[0], c[1]);
    received = rpc_sync(c[0], "worker1", &pass_on, at::full({kElements}, 5.0));
    rpc_sync(c[0], "worker1", on("keeper", &Keeper::keep), at::full({kElements}, 6.0));
    c.shutdown();
  }
  EXPECT_EQ(total(received), 5.0 * kElements);
  received.fill_(1);
  const std::vector<at::Tensor> kept = keeper->take();
  ASSERT_EQ(kept.size(), 1u);
  EXPECT_EQ(total(kept[0]), 6.0 * kElements);
}

// ARENA-4
TEST_F(Arena, what_does_not_fit_goes_by_the_socket) {
  Cluster c = make({.arena_bytes = 4 << 20});
  share(c[0], c[1]);
  const at::Tensor big = at::rand({8 * kElements});
  EXPECT_TRUE(at::equal(rpc_sync(c[0], "worker1", &pass_on, big), big));
  EXPECT_GE(counter(c[0], "arena_full"), 1);
  EXPECT_GE(counter(c[0], "lane1_bytes_sent"), 8 * kMiB);
  // A message of which one tensor fits and the other does not.
  const at::Tensor x = at::rand({kElements});
  EXPECT_EQ(rpc_sync(c[0], "worker1", &total, x), total(x));
  const at::Tensor in_vain = arena_tensor(c[0], {8 * kElements});
  EXPECT_EQ(in_vain.numel(), 8 * kElements) << "ordinary memory then";
  expect_nothing_lent(c[0], c[1]);
}

TEST_F(Arena, switched_off_or_without_local_sockets_everything_goes_by_the_socket) {
  for (const GrpcTransportOptions& options :
       {GrpcTransportOptions{.arena_bytes = 0}, GrpcTransportOptions{.local_sockets = false}}) {
    Cluster c = make(options);
    const at::Tensor x = at::rand({8 * kElements});
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(rpc_sync(c[0], "worker1", &pass_on, x), x));
    EXPECT_EQ(counter(c[0], "arena_copies"), 0);
    EXPECT_EQ(counter(c[0], "arena_links_on"), 0);
    EXPECT_EQ(arena_tensor(c[0], {3}).numel(), 3);
    c.shutdown();
  }
}

// What is checked before it is used as an address must not change afterwards, and what is corrected
// in place must not be the sender's.
TEST_F(Arena, indices_of_sparse_tensors_and_bools_are_copied_out) {
  Cluster c = make();
  share(c[0], c[1]);
  {
    const int64_t nnz = kElements;
    const at::Tensor sparse =
        at::sparse_coo_tensor(at::arange(nnz).unsqueeze(0), at::ones({nnz}), {2 * nnz});
    const at::Tensor back = rpc_sync(c[0], "worker1", &pass_on, sparse);
    EXPECT_TRUE(at::equal(back._indices(), sparse._indices()));
    EXPECT_TRUE(at::equal(back._values(), sparse._values()));
    // The indices go back at once, the values with `back`.
    while (counter(c[1], "arena_leases") > 1) rpc_sync(c[0], "worker1", &total, at::ones({1}));
    EXPECT_EQ(counter(c[1], "arena_leases"), 1);
  }
  const at::Tensor bools = at::rand({kMiB}) > 0.5;
  EXPECT_TRUE(at::equal(rpc_sync(c[0], "worker1", &pass_on, bools), bools));
  expect_nothing_lent(c[1], c[0]);
}

TEST_F(Arena, refuses_what_cannot_lie_there) {
  Cluster c = make();
  EXPECT_THROW(move_to_arena(c[0], at::ones({3}).to_sparse()), Error);
  EXPECT_THROW(arena_tensor(c[0], {-1}), c10::Error);
  EXPECT_THROW(arena_tensor(c[0], {int64_t{1} << 40, int64_t{1} << 40}), c10::Error);
}

}  // namespace
}  // namespace weft::testing
