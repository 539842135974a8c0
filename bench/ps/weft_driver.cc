// Ours, as a driver of the `ps` suite: what a user's program does, through the public API alone. w1 is
// the server, w0 has the tables. Names of `lat`:
//
//   push   8 bytes of a dense table, acknowledged
//   pull   1,024 rows of 64 of a sparse table, keys drawn evenly from 100,000
//   embed  the training step of bench/autograd of this name: those rows by ps::Embedding, a dense layer here,
//          backward; ends when the push is acknowledged and the layer has stepped
//   ahead  the same, as ps::Trainer does it: the next step's rows are pulled before, and a push ends in
//          the step after it
//
// `flight DEPTH COUNT`: pushes of a row of 2 floats, each with a key and a future of its own.
// `slide DEPTH COUNT`: pulls as above, DEPTH of them in flight.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "weft/bench/line_protocol.h"
#include "weft/ps/client.h"
#include "weft/ps/layers.h"
#include "weft/ps/server.h"
#include "weft/rpc/worker.h"
#include "weft/transport/grpc_transport.h"

namespace weft::bench {
namespace {

constexpr int64_t kRows = 100'000;
constexpr int64_t kLength = 64;
constexpr int64_t kKeys = 1024;
constexpr int64_t kBlock = 10'000;
constexpr int64_t kWidth = 16;  // of the dense layer
constexpr double kRate = 0.01;

// A step as in bench/autograd/models.h, `embed`.
class Training {
 public:
  Training(const ps::Table& rows, const at::Tensor& ids) : words_(rows), ids_(ids) {
    dense_.requires_grad_(true);
  }
  void step() {
    compute();
    words_.step().wait();
  }
  void step_ahead() {
    if (!pushed_.has_value()) words_.prefetch(ids_);
    words_.prefetch(ids_);
    compute();
    if (pushed_.has_value()) pushed_->wait();
    pushed_ = words_.step();
  }

 private:
  void compute() {
    at::mse_loss(at::linear(words_.forward(ids_), dense_), target_).backward();
    const at::AutoGradMode no_grad(false);
    dense_.add_(dense_.grad(), -kRate);
    dense_.mutable_grad() = at::Tensor();
  }

  ps::Embedding words_;
  const at::Tensor ids_;
  at::Tensor dense_ = at::rand({kWidth, kLength}).mul_(0.1);
  const at::Tensor target_ = at::zeros({kKeys, kWidth});
  std::optional<Future<ps::PushResult>> pushed_;
};

class Caller {
 public:
  explicit Caller(const Worker& worker) : client_(worker, {.servers = {"w1"}}) {
    const auto rule = ps::rule<optim::SGD>({.lr = kRate});
    small_ = client_.open_table("small", ps::dense({2}, rule));
    pairs_ = client_.open_table("pairs", ps::sparse(2, rule));
    rows_ = client_.open_table("rows", ps::sparse(kLength, rule));
    for (int64_t begin = 0; begin < kRows; begin += kBlock) {
      rows_->push_rows(at::arange(begin, begin + kBlock, at::kLong), at::rand({kBlock, kLength}))
          .wait();
    }
    for (int64_t key = 0; key < kKeys; ++key) one_key_.push_back(at::full({1}, key, at::kLong));
  }

  Operations operations() {
    Operations out;
    out.call = [this](std::string_view name) -> std::function<void()> {
      if (name == "push") return [this] { small_->push(pair_).wait(); };
      if (name == "pull") return [this] { pull().wait(); };
      if (name == "embed" || name == "ahead") {
        const auto training = std::make_shared<Training>(*rows_, keys_);
        if (name == "embed") return [training] { training->step(); };
        return [training] { training->step_ahead(); };
      }
      throw std::invalid_argument("unknown function: " + std::string(name));
    };
    out.flight = [this](int depth, int64_t count) {
      std::vector<Future<ps::PushResult>> futures;
      for (int64_t i = 0; i < count; i += depth) {
        for (int64_t k = i; k < std::min(count, i + depth); ++k) {
          futures.push_back(pairs_->push_rows(one_key_[static_cast<size_t>(k % kKeys)], row_));
        }
        for (const auto& future : futures) future.wait();
        futures.clear();
      }
    };
    out.slide = [this](int depth, int64_t count) {
      std::deque<Future<at::Tensor>> futures;
      for (int64_t i = 0; i < count; ++i) {
        if (futures.size() == static_cast<size_t>(depth)) {
          futures.front().wait();
          futures.pop_front();
        }
        futures.push_back(pull());
      }
      for (const auto& future : futures) future.wait();
    };
    return out;
  }

 private:
  Future<at::Tensor> pull() const { return rows_->pull_rows(keys_); }

  const ps::Client client_;
  const at::Tensor pair_ = at::ones({2});
  const at::Tensor row_ = at::ones({1, 2});
  const at::Tensor keys_ = at::randint(kRows, {kKeys}, at::kLong);
  std::vector<at::Tensor> one_key_;
  std::optional<ps::Table> small_;
  std::optional<ps::Table> pairs_;
  std::optional<ps::Table> rows_;
};

int run(int argc, char** argv) {
  const std::string path = option(argc, argv, "--path", "bench-ps");
  const int rank = std::stoi(option(argc, argv, "--rank", "0"));
  at::set_num_threads(1);
  touch_memory(std::stoll(option(argc, argv, "--touch", "0")));
  Worker worker = Worker::join({
      .name = "w" + std::to_string(rank),
      .rank = rank,
      .world_size = std::stoi(option(argc, argv, "--world", "2")),
      .rendezvous = "file://" + path + ".store?run_id=bench",
      .transport = grpc_transport({}),
      .services = {ps_service()},
  });
  if (rank == 0) {
    Caller caller(worker);
    const Operations operations = caller.operations();
    serve(&operations);
  } else {
    const ps::Server server(worker);
    serve(nullptr);
  }
  const ShutdownResult result = worker.shutdown({.deadline = std::chrono::seconds(5)});
  if (!result.status.ok()) throw std::runtime_error(std::string(result.status.message()));
  say("{\"bye\":true}");
  return 0;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  return weft::bench::driver_main("weft_ps_driver", weft::bench::run, argc, argv);
}
