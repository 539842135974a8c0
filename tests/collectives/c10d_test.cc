// Groups as backends of LibTorch's c10d: its Reducer on top of them, and each operation that it
// asks of a backend.
#include "weft/collectives/c10d_backend.h"

#include <latch>
#include <map>
#include <string>
#include <vector>

#include <torch/nn.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/tests/collectives/ddp_world.h"
#include "weft/tests/testing/gloo_group.h"

namespace weft::testing {
namespace {

using TheirBackend = c10::intrusive_ptr<c10d::Backend>;
using TensorRows = std::vector<std::vector<at::Tensor>>;

// Two layers and an embedding whose gradient may be sparse, trained on batches of this rank's own.
std::vector<at::Tensor> trained_by_their_reducer(const TheirBackend& backend, int rank, int size,
                                                 bool sparse) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);

  std::vector<at::Tensor> parameters;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const auto parameter = [&](at::IntArrayRef sizes) {
    parameters.push_back(at::randn(sizes, generator).mul_(0.3).requires_grad_());
    return parameters.back();
  };
  const at::Tensor table = parameter({11, 6});
  const at::Tensor first = parameter({6, 32});
  const at::Tensor second = parameter({32, 1});
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.1));
  const std::vector<std::vector<size_t>> buckets = {{1, 2}, {0}};
  c10d::Reducer reducer(parameters, buckets, group, {sparse, false, false}, 1 << 20, false, false,
                        {}, 1 << 10, false, false, {1 << 20});
  for (int step = 0; step < 6; ++step) {
    auto batches = at::make_generator<at::CPUGeneratorImpl>(100 * step + rank);
    const at::Tensor words = at::randint(11, {9}, batches, at::kLong);
    const at::Tensor wanted = at::randn({9, 1}, batches);
    reducer.prepare_for_forward();
    const at::Tensor rows = at::embedding(table, words, -1, false, sparse);
    const at::Tensor loss = (rows.matmul(first).tanh().matmul(second) - wanted).square().mean();
    reducer.prepare_for_backward({loss});
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
  }
  std::vector<at::Tensor> out;
  for (const at::Tensor& one : parameters) out.push_back(one.detach().clone());
  return out;
}

TEST(C10dBridge, CL_25_their_reducer_trains_as_over_gloo) {
  for (const bool sparse : {false, true}) {
    std::vector<std::vector<at::Tensor>> ours(2);
    run_ranks(2, make_system_runtime(), [&](ProcessGroup& group, InprocFabric&) {
      ours[static_cast<size_t>(group.rank())] =
          trained_by_their_reducer(c10d_backend(group), group.rank(), 2, sparse);
    });
    std::vector<std::vector<at::Tensor>> theirs(2);
    const auto store = c10::make_intrusive<c10d::HashStore>();
    run_ranks(2, make_system_runtime(), [&](ProcessGroup& group, InprocFabric&) {
      const int rank = group.rank();
      theirs[static_cast<size_t>(rank)] = trained_by_their_reducer(
          begun_one_at_a_time(make_gloo_group(store, rank, 2)), rank, 2, sparse);
    });
    for (size_t i = 0; i < ours[0].size(); ++i) {
      EXPECT_TRUE(at::equal(ours[0][i], ours[1][i])) << "parameter " << i;
      // Two ranks: one sum, in either order.
      EXPECT_TRUE(at::equal(ours[0][i], theirs[0][i]))
          << "parameter " << i << ", by " << (ours[0][i] - theirs[0][i]).abs().max();
    }
  }
}

// ---- our DistributedDataParallel against their Reducer, over the same group ----
//
// Static graphs are compared with Python's DDP, whose Python code begins the first reduction of one (ddp_oracle_test.cc).

struct ReducedNetImpl : torch::nn::Module {
  explicit ReducedNetImpl(bool sparse) {
    using torch::nn::Linear;
    table = register_module(
        "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(12, 8).sparse(sparse)));
    twice = register_module("twice", Linear(8, 8));
    frozen = register_module("frozen", Linear(8, 8));
    sometimes = register_module("sometimes", Linear(8, 8));
    out = register_module("out", Linear(8, 3));
    to(torch::kFloat64);
    auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
    const torch::NoGradGuard no_grad;
    for (at::Tensor& one : parameters()) one.normal_(0, 0.4, generator);
    for (at::Tensor& one : frozen->parameters()) one.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& ids, bool all) {
    at::Tensor h = frozen(torch::tanh(twice(torch::tanh(twice(table(ids))))));
    if (all) h = torch::tanh(sometimes(h));
    return out(h);
  }
  std::vector<at::Tensor> trained() const {
    std::vector<at::Tensor> out;
    for (const at::Tensor& one : parameters()) {
      if (one.requires_grad()) out.push_back(one);
    }
    return out;
  }
  torch::nn::Embedding table = nullptr;
  torch::nn::Linear twice = nullptr, frozen = nullptr, sometimes = nullptr, out = nullptr;
};

struct ReducedCase {
  std::string name{};
  int ranks = 2;
  bool adam = false;
  bool unused = false;
  bool views = false;
  bool sparse = false;
  int micro = 1;  // backwards of a step, of which the last one is reduced

  // Without it the graph of a rank changes from step to step.
  bool uses_all(int step, int rank) const { return !unused || (step % 2 == 0 && rank == 0); }
};

// `forward`: of a backward that is reduced, or not.
using ReducedForward = std::function<at::Tensor(bool reduced, const at::Tensor& ids, bool all)>;

std::vector<at::Tensor> train_reduced(const ReducedCase& c, ReducedNetImpl& net, int rank,
                                      const ReducedForward& forward) {
  const std::vector<at::Tensor> parameters = net.trained();
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (c.adam) {
    optimizer = std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.01));
  } else {
    optimizer = std::make_unique<torch::optim::SGD>(
        parameters, torch::optim::SGDOptions(0.1).momentum(c.sparse ? 0 : 0.9));
  }
  for (int step = 0; step < 8; ++step) {
    for (const at::Tensor& one : parameters) {
      at::Tensor& grad = one.mutable_grad();
      if (!grad.defined()) continue;
      if (c.views && !grad.is_sparse()) {
        grad.zero_();
      } else {
        grad.reset();
      }
    }
    for (int m = 0; m < c.micro; ++m) {
      auto batches = at::make_generator<at::CPUGeneratorImpl>(1000 * step + 10 * m + rank);
      const at::Tensor ids = at::randint(12, {5}, batches, at::kLong);
      const at::Tensor wanted = at::randn({5, 3}, batches, at::kDouble);
      const at::Tensor y = forward(m + 1 == c.micro, ids, c.uses_all(step, rank));
      ((y - wanted).square().mean() / c.micro).backward();
    }
    optimizer->step();
  }
  std::vector<at::Tensor> ended;
  for (const at::Tensor& one : parameters) ended.push_back(one.detach().clone());
  return ended;
}

std::vector<at::Tensor> trained_by_ours(const ReducedCase& c, ProcessGroup& group) {
  const auto net = std::make_shared<ReducedNetImpl>(c.sparse);
  DistributedDataParallel ddp(net, group,
                              {.bucket_cap_mb = 0.001,
                               .first_bucket_mb = 0.0005,
                               .find_unused_parameters = c.unused,
                               .gradient_as_bucket_view = c.views});
  return train_reduced(c, *net, group.rank(), [&](bool reduced, const at::Tensor& ids, bool all) {
    if (reduced) return ddp.forward(ids, all);
    const auto local = ddp.no_sync();
    return ddp.forward(ids, all);
  });
}

std::vector<at::Tensor> trained_by_theirs(const ReducedCase& c, ProcessGroup& group) {
  auto theirs = c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(),
                                                        group.rank(), c.ranks);
  theirs->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, c10d_backend(group));
  theirs->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  ReducedNetImpl net(c.sparse);
  const std::vector<at::Tensor> parameters = net.trained();
  std::vector<bool> sparse(parameters.size());
  sparse[0] = c.sparse;
  auto [buckets, limits] =
      c10d::compute_bucket_assignment_by_size(parameters, {512, 1024}, sparse, {});
  std::reverse(buckets.begin(), buckets.end());
  const auto reducer =
      std::make_shared<c10d::Reducer>(parameters, buckets, theirs, sparse, 1024, c.unused, c.views,
                                      std::unordered_map<size_t, std::string>{}, 512, false, false,
                                      std::vector<int64_t>{512, 1024});
  const auto logger = std::make_shared<c10d::Logger>(reducer);
  reducer->set_logger(logger);
  return train_reduced(c, net, group.rank(), [&](bool reduced, const at::Tensor& ids, bool all) {
    reducer->prepare_for_forward();
    reducer->rebuild_buckets();
    const at::Tensor y = net.forward(ids, all);
    if (reduced)
      reducer->prepare_for_backward(c.unused ? std::vector<at::Tensor>{y}
                                             : std::vector<at::Tensor>{});
    return y;
  });
}

TEST(C10dBridge, CL_25_their_reducer_ends_with_our_parameters) {
  const std::vector<ReducedCase> cases = {
      {.name = "plain"},
      {.name = "three_ranks_adam", .ranks = 3, .adam = true},
      {.name = "views", .views = true},
      {.name = "unused", .unused = true},
      {.name = "unused_adam_three_ranks", .ranks = 3, .adam = true, .unused = true},
      {.name = "sparse", .sparse = true},
      {.name = "micro", .micro = 4},
      {.name = "micro_views_three_ranks", .ranks = 3, .views = true, .micro = 2},
      {.name = "micro_unused", .unused = true, .micro = 2},
  };
  for (const ReducedCase& c : cases) {
    SCOPED_TRACE(c.name);
    std::vector<std::vector<at::Tensor>> ours(static_cast<size_t>(c.ranks));
    std::vector<std::vector<at::Tensor>> theirs(ours.size());
    run_ranks(c.ranks, [&](ProcessGroup& group) {
      const auto rank = static_cast<size_t>(group.rank());
      ours[rank] = trained_by_ours(c, group);
      group.barrier();
      theirs[rank] = trained_by_theirs(c, group);
      group.barrier();
    });
    for (size_t r = 0; r < ours.size(); ++r) {
      ASSERT_EQ(ours[r].size(), theirs[r].size());
      for (size_t i = 0; i < ours[r].size(); ++i) {
        EXPECT_TRUE(at::equal(ours[r][i], ours[0][i])) << "rank " << r << ", parameter " << i;
        // Three ranks add up in another order where buckets are cut elsewhere.
        expect_near(ours[r][i], theirs[r][i], c.ranks == 2 ? 0 : 1e-12);
      }
    }
  }
}

at::Tensor numbers_from(int64_t first, int64_t count) {
  return at::arange(first, first + count, at::kLong);
}

void expect_numbers(const at::Tensor& got, const std::vector<int64_t>& wanted) {
  EXPECT_TRUE(at::equal(got.reshape({-1}), at::tensor(wanted))) << got;
}

// What c10d asks and how it comes out. Three ranks; rank r has r*10, r*10 + 1, ...
void ask_everything(c10d::Backend& b) {
  const int64_t r = b.getRank();
  EXPECT_EQ(b.getBackendName(), "weft");
  EXPECT_EQ(b.getBackendOptions()->backend, "weft");
  b.setSequenceNumberForGroup();
  EXPECT_EQ(b.getSequenceNumberForGroup(), 0u);
  std::vector<at::Tensor> t = {numbers_from(r * 10, 2)};
  const c10d::BroadcastOptions from_two{.rootRank = 2};
  b.broadcast(t, from_two)->wait();
  expect_numbers(t[0], {20, 21});
  t = {numbers_from(r * 10, 2)};
  auto work = b.allreduce(t, {});
  EXPECT_TRUE(work->wait());
  EXPECT_TRUE(work->isCompleted() && work->isSuccess());
  work->getFuture()->wait();
  expect_numbers(work->getFuture()->value().toTensorVector()[0], {30, 33});
  c10d::AllreduceOptions largest;
  largest.reduceOp = c10d::ReduceOp::MAX;
  t = {numbers_from(r * 10, 2)};
  b.allreduce(t, largest)->wait();
  expect_numbers(t[0], {20, 21});
  largest.reduceOp = c10d::makeNCCLPreMulSum(0.5);
  t = {at::full({2}, static_cast<double>(r))};
  b.allreduce(t, largest)->wait();
  EXPECT_EQ(t[0][1].item<double>(), 1.5);
  t = {numbers_from(r, 1), numbers_from(r * 10, 2)};
  b.allreduce_coalesced(t, {})->wait();
  expect_numbers(t[0], {3});
  expect_numbers(t[1], {30, 33});
  t = {numbers_from(r * 10, 2)};
  c10d::ReduceOptions at_one;
  at_one.rootRank = 1;
  b.reduce(t, at_one)->wait();
  if (r == 1) expect_numbers(t[0], {30, 33});

  const auto zeros = [](int64_t n) { return at::zeros({n}, at::kLong); };
  std::vector<at::Tensor> in = {numbers_from(r * 10, 2)};
  TensorRows rows = {{zeros(2), zeros(2), zeros(2)}};
  b.allgather(rows, in, {})->wait();
  expect_numbers(at::cat(rows[0]), {0, 1, 10, 11, 20, 21});
  at::Tensor flat = zeros(6);
  b._allgather_base(flat, in[0], {})->wait();
  expect_numbers(flat, {0, 1, 10, 11, 20, 21});
  std::vector<at::Tensor> two = {numbers_from(r * 10, 1), numbers_from(r, 1)};
  TensorRows lists = {{zeros(1), zeros(1)}, {zeros(1), zeros(1)}, {zeros(1), zeros(1)}};
  b.allgather_coalesced(lists, two, {})->wait();
  expect_numbers(at::cat({lists[0][0], lists[2][0], lists[2][1]}), {0, 20, 2});
  std::vector<at::Tensor> flats = {zeros(3), zeros(3)};
  b.allgather_into_tensor_coalesced(flats, two, {})->wait();
  expect_numbers(at::cat(flats), {0, 10, 20, 0, 1, 2});
  rows = {};
  if (r == 2) rows = {{zeros(2), zeros(2), zeros(2)}};
  c10d::GatherOptions to_two;
  to_two.rootRank = 2;
  b.gather(rows, in, to_two)->wait();
  if (r == 2) expect_numbers(at::cat(rows[0]), {0, 1, 10, 11, 20, 21});
  TensorRows dealt;
  if (r == 0) dealt = {{numbers_from(0, 1), numbers_from(5, 1), numbers_from(9, 1)}};
  t = {zeros(1)};
  b.scatter(t, dealt, {})->wait();
  expect_numbers(t[0], {r == 0 ? 0 : r == 1 ? 5 : 9});
  rows = {{numbers_from(r, 1), numbers_from(r + 1, 1), numbers_from(r + 2, 1)}};
  b.reduce_scatter(t, rows, {})->wait();
  expect_numbers(t[0], {3 + 3 * r});
  flat = numbers_from(r, 3);
  b._reduce_scatter_base(t[0], flat, {})->wait();
  expect_numbers(t[0], {3 + 3 * r});
  flats = {numbers_from(r, 3), numbers_from(10 * r, 3)};
  std::vector<at::Tensor> parts = {zeros(1), zeros(1)};
  b.reduce_scatter_tensor_coalesced(parts, flats, {})->wait();
  expect_numbers(at::cat(parts), {3 + 3 * r, 30 + 3 * r});
  std::vector<int64_t> none;
  flat = zeros(3);
  at::Tensor row = numbers_from(r * 10, 3);
  b.alltoall_base(flat, row, none, none, {})->wait();
  expect_numbers(flat, {r, 10 + r, 20 + r});
  std::vector<at::Tensor> outputs = {zeros(1), zeros(1), zeros(1)};
  std::vector<at::Tensor> inputs = {numbers_from(r, 1), numbers_from(r + 3, 1),
                                    numbers_from(r + 6, 1)};
  b.alltoall(outputs, inputs, {})->wait();
  expect_numbers(at::cat(outputs), {3 * r, 3 * r + 1, 3 * r + 2});
  t = {numbers_from(r, 1)};
  if (r == 0) b.send(t, 1, 7)->wait();
  if (r == 1) {
    work = b.recvAnysource(t, 7);
    work->wait();
    EXPECT_EQ(work->sourceRank(), 0);
    expect_numbers(t[0], {0});
    b.send(t, 2, 8)->wait();
  }
  if (r == 2) {
    b.recv(t, 1, 8)->wait();
    expect_numbers(t[0], {0});
  }
  b.setTimeout(std::chrono::milliseconds(20'000));
  b.barrier({})->wait();
  b.monitoredBarrier({}, true);
  EXPECT_EQ(b.getError(), c10d::ErrorType::SUCCESS);
  const auto part = b.split(nullptr, {2, 0}, nullptr);
  EXPECT_EQ(part == nullptr, r == 1);
  if (part != nullptr) {
    t = {numbers_from(r, 1)};
    part->allreduce(t, {})->wait();
    expect_numbers(t[0], {2});
  }
}

TEST(C10dBridge, CL_25_every_operation_of_a_backend) {
  run_ranks(3, make_system_runtime(), [](ProcessGroup& group, InprocFabric&) {
    ask_everything(*c10d_backend(group));
    group.barrier();
  });
}

// The message of what `call` throws.
template <class F>
std::string refusal(F call) {
  try {
    call();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "nothing was thrown";
}

TEST(C10dBridge, BadInput_and_CL_25_what_is_refused_is_refused_by_name) {
  std::latch all_through(2);
  run_ranks(2, make_system_runtime(), [&](ProcessGroup& group, InprocFabric&) {
    const TheirBackend b = c10d_backend(group);
    const auto expect_named = [](const std::string& message, const std::string& word) {
      EXPECT_NE(message.find("weft"), std::string::npos) << message;
      EXPECT_NE(message.find(word), std::string::npos) << message;
    };
    std::vector<at::Tensor> two = {at::zeros({1}), at::zeros({1})};
    std::vector<at::Tensor> one = {at::zeros({1})};
    expect_named(refusal([&] { b->startCoalescing(); }), "startCoalescing");
    expect_named(refusal([&] { b->endCoalescing(); }), "endCoalescing");
    expect_named(refusal([&] { b->shrink({0}); }), "shrink");
    expect_named(refusal([&] { b->merge(nullptr, nullptr, 0, 2); }), "merge");
    expect_named(refusal([&] { b->waitForPendingWorks(); }), "waitForPendingWorks");
    expect_named(refusal([&] { b->allreduce(two, {}); }), "allreduce of 2");
    expect_named(refusal([&] { b->allreduce_sparse(one, {}); }), "sparse");
    c10d::AllreduceOptions unknown;
    unknown.reduceOp.op_ = c10d::ReduceOp::UNUSED;
    expect_named(refusal([&] { b->allreduce(one, unknown); }), "reduction");
    // What our own check refuses comes with the work; the group lives on.
    c10d::BroadcastOptions outside;
    outside.rootRank = 7;
    const auto work = b->broadcast(one, outside);
    EXPECT_NE(refusal([&] { work->wait(); }).find("7"), std::string::npos);
    EXPECT_FALSE(work->isSuccess());
    work->getFuture()->wait();
    EXPECT_TRUE(work->getFuture()->hasError());
    b->barrier({})->wait();
    // An abort ends it, and the cause is the error's; no rank is in the barrier any more.
    all_through.arrive_and_wait();
    if (group.rank() == 0) b->abort();
    EXPECT_NE(refusal([&] { b->barrier({})->wait(); }).find("c10d aborts"), std::string::npos);
    EXPECT_EQ(b->getError(), c10d::ErrorType::COMM_ERROR);
  });
}

}  // namespace
}  // namespace weft::testing
