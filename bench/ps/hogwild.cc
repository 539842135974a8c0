#include "weft/bench/ps/hogwild.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>

#include <functional>
#include <latch>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "weft/bench/line_protocol.h"
#include "weft/dist_optim/optim.h"
#include "weft/ps/hogwild.h"

namespace weft::bench {
namespace {

constexpr int64_t kInputs = 64;
constexpr int64_t kHidden = 64;
constexpr int64_t kOutputs = 10;
constexpr int64_t kBatch = 32;
constexpr int64_t kMatrixRows = 100'000;
constexpr int64_t kMatrixColumns = 64;
constexpr int64_t kRowsOfAnUpdate = 1024;
constexpr int64_t kDense = (1 << 20) / sizeof(float);
constexpr int kThreads = 2;
constexpr int kUpdatesBefore = 20;

struct Work {
  std::function<std::vector<at::Tensor>()> parameters;
  // One update by a thread, of which each has its own.
  std::function<std::function<void()>(const std::vector<at::Tensor>&, const ps::Hogwild&)> update;
};

std::function<void()> step_of(const std::vector<at::Tensor>& shared, const ps::Hogwild& table) {
  // A module of the thread's own on the same memory, so that it has gradients of its own.
  std::vector<at::Tensor> mine;
  for (const at::Tensor& one : shared) mine.push_back(one.detach().requires_grad_(true));
  const at::Tensor images = at::rand({kBatch, kInputs});
  const at::Tensor labels = at::randint(kOutputs, {kBatch}, at::kLong);
  return [mine, images, labels, table] {
    const at::Tensor hidden = at::relu(at::linear(images, mine[0], mine[1]));
    at::cross_entropy_loss(at::linear(hidden, mine[2], mine[3]), labels).backward();
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& one : mine) {
      gradients.push_back(one.grad());
      at::Tensor(one).mutable_grad() = at::Tensor();
    }
    table.push(gradients);
  };
}

std::function<void()> rows_of(const std::vector<at::Tensor>& shared, const ps::Hogwild& table) {
  const at::Tensor keys = at::randint(kMatrixRows, {1, kRowsOfAnUpdate}, at::kLong);
  const at::Tensor values = at::rand({kRowsOfAnUpdate, kMatrixColumns});
  const at::Tensor gradient = at::sparse_coo_tensor(keys, values, shared[0].sizes());
  return [gradient, table] { table.push({gradient}); };
}

std::function<void()> dense_of(const std::vector<at::Tensor>&, const ps::Hogwild& table) {
  return [gradient = at::ones({kDense}), table] { table.push({gradient}); };
}

Work work_of(const std::string& name) {
  if (name == "steps") {
    return {[] {
              return std::vector<at::Tensor>{
                  at::rand({kHidden, kInputs}).mul_(0.1), at::zeros({kHidden}),
                  at::rand({kOutputs, kHidden}).mul_(0.1), at::zeros({kOutputs})};
            },
            &step_of};
  }
  if (name == "rows") {
    return {[] {
              return std::vector<at::Tensor>{at::rand({kMatrixRows, kMatrixColumns})};
            },
            &rows_of};
  }
  if (name == "dense")
    return {[] { return std::vector<at::Tensor>{at::rand({kDense})}; }, &dense_of};
  throw std::invalid_argument("hogwild steps|rows|dense TABLES COUNT");
}

}  // namespace

std::string hogwild(std::istream& in) {
  std::string name;
  int tables = 0;
  int64_t count = 0;
  if (!(in >> name >> tables >> count) || tables < 1 || tables > kThreads || count < 1) {
    throw std::invalid_argument("hogwild steps|rows|dense TABLES COUNT");
  }
  const Work work = work_of(name);
  std::vector<std::vector<at::Tensor>> parameters;
  std::vector<ps::Hogwild> made;
  for (int t = 0; t < tables; ++t) {
    parameters.push_back(work.parameters());
    made.emplace_back(parameters.back(), ps::rule<optim::SGD>({.lr = 1e-4}));
  }
  std::latch begin(kThreads + 1);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const auto mine = static_cast<size_t>(t % tables);
      const std::function<void()> update = work.update(parameters[mine], made[mine]);
      for (int i = 0; i < kUpdatesBefore; ++i) update();
      begin.arrive_and_wait();
      for (int64_t i = 0; i < count; ++i) update();
    });
  }
  begin.arrive_and_wait();
  const auto start = Clock::now();
  for (std::thread& thread : threads) thread.join();
  const double rate = static_cast<double>(count * kThreads) / seconds_since(start);
  return "{\"rate\":" + std::to_string(rate) + "}";
}

}  // namespace weft::bench
