// RPC-138: a parameter server that answers when the gradients of a whole batch have come. No thread
// waits for the others: the last one completes the futures of all.

#include <memory>
#include <mutex>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/allclose.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "weft/tests/rref/fixture.h"

namespace weft::testing {
namespace {

constexpr double kRate = 0.5;

class BatchServer {
 public:
  BatchServer(int64_t trainers, int64_t elements)
      : trainers_(static_cast<size_t>(trainers)),
        model_(at::zeros({elements})),
        sum_(at::zeros({elements})) {}

  at::Tensor model() {
    const std::lock_guard lock(mutex_);
    return model_.clone();
  }
  // The model after the step that this gradient is part of.
  Future<at::Tensor> update_and_fetch(at::Tensor gradient) {
    std::vector<Promise<at::Tensor>> whole;
    at::Tensor stepped;
    Promise<at::Tensor> mine;
    Future<at::Tensor> future = mine.future();
    {
      const std::lock_guard lock(mutex_);
      sum_.add_(gradient);
      waiting_.push_back(std::move(mine));
      if (waiting_.size() == trainers_) {
        model_.sub_(sum_, kRate / static_cast<double>(trainers_));
        sum_.zero_();
        ++steps_;
        whole.swap(waiting_);
        stepped = model_.clone();
      }
    }
    for (auto& promise : whole) promise.set_value(stepped);
    return future;
  }
  int64_t steps() {
    const std::lock_guard lock(mutex_);
    return steps_;
  }

 private:
  const size_t trainers_;
  std::mutex mutex_;
  at::Tensor model_;
  at::Tensor sum_;
  std::vector<Promise<at::Tensor>> waiting_;
  int64_t steps_ = 0;
};

// Pulls the model towards `target`; gives the last model seen.
at::Tensor train(RRef<BatchServer> server, double target, int64_t steps) {
  at::Tensor model = server.rpc_sync(&BatchServer::model);
  for (int64_t i = 0; i < steps; ++i) {
    model = server.rpc_sync(&BatchServer::update_and_fetch, model - target);
  }
  return model;
}

class RRefPatterns : public RRefTest {};

TEST_P(RRefPatterns, RPC_138_batch_updating_parameter_server) {
  constexpr int kTrainers = 5;
  constexpr int64_t kSteps = 12;
  Library ps("ps");
  ps.class_<BatchServer>("BatchServer", {.concurrent = true})
      .constructor<int64_t, int64_t>()
      .def("model", &BatchServer::model)
      .def("update_and_fetch", &BatchServer::update_and_fetch)
      .def("steps", &BatchServer::steps);
  ps.def("train", &train);
  lib_.library.merge(ps);
  // One thread for handlers each: waiting for the others must not cost the server any.
  auto c = make({.size = 1 + kTrainers, .threads = 1});
  {
    const auto server = remote<BatchServer>((*c)[0], 0, kTrainers, 8);
    std::vector<Future<at::Tensor>> trained;
    for (int i = 0; i < kTrainers; ++i) {
      trained.push_back(rpc_async((*c)[0], i + 1, &train, server, 1.0 * i, kSteps));
    }
    // By hand: the gradients' mean pulls to the mean of the targets, by half of the way each time.
    double expected = 0;
    for (int64_t i = 0; i < kSteps; ++i) expected -= kRate * (expected - 2.0);
    for (const auto& t : trained) {
      EXPECT_TRUE(at::allclose(t.wait(), at::full({8}, expected)));
    }
    EXPECT_EQ(server.rpc_sync(&BatchServer::steps), kSteps);
  }
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, RRefPatterns, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
