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
//   push64, pull64, both64  64 MiB of a dense table
//   sync   push_pull of 1 MiB of a dense table
//
// `few NAME COUNT` is `lat` after few calls of the same, for those that take long. `trainers COUNT`: `sync` at all that are no
// servers at once, COUNT each. With --servers 2 w2 is a server, too, with --servers 0 all but w0, and --copies 2 has the
// table of `sync` have a backup. `failover`, `move` and `cut`: see elastic.h, `hogwild`: hogwild.h.
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
#include "weft/bench/ps/elastic.h"
#include "weft/bench/ps/hogwild.h"
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
constexpr int64_t kLarge = (64 << 20) / sizeof(float);
constexpr int64_t kMiddle = (1 << 20) / sizeof(float);
constexpr int kStepsBefore = 5;

const FunctionRef<void(int64_t)> kTrain{"bench_ps.train"};

struct Setup {
  int world = 2;
  int servers = 1;
  uint32_t copies = 1;
};

ps::Client client_of(const Worker& worker, const Setup& setup) {
  std::vector<std::string> names;
  for (int s = 1; s <= setup.servers; ++s) names.push_back("w" + std::to_string(s));
  return ps::Client(worker, {.servers = names});
}

// A trainer's table of 1 MiB, opened when it is used first.
class Sync {
 public:
  Sync(const Worker& worker, const Setup& setup) : client_(client_of(worker, setup)) {
    definition_.copies = setup.copies;
  }
  void train(int64_t count) {
    if (!table_.has_value()) table_ = client_.open_table("sync", definition_);
    for (int64_t i = 0; i < count; ++i) table_->push_pull(gradient_).wait();
  }

 private:
  const ps::Client client_;
  ps::TableDefinition definition_ = ps::dense({kMiddle}, ps::rule<optim::SGD>({.lr = kRate}));
  const at::Tensor gradient_ = at::ones({kMiddle});
  std::optional<ps::Table> table_;
};

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
  Caller(const Worker& worker, const Setup& setup, const std::string& path)
      : worker_(worker),
        setup_(setup),
        client_(client_of(worker, setup)),
        sync_(worker, setup),
        elastic_(worker, path) {
    if (setup.world > 2) return;  // only `sync`, and what several servers are for
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
      if (name == "sync") return [this] { sync_.train(1); };
      if (name == "push64" || name == "pull64" || name == "both64") {
        if (!large_.has_value()) {
          large_ =
              client_.open_table("large", ps::dense({kLarge}, ps::rule<optim::SGD>({.lr = kRate})));
        }
        if (name == "pull64") return [this] { large_->pull().wait(); };
        if (name == "both64") {
          return [this, gradient = at::ones({kLarge})] { large_->push_pull(gradient).wait(); };
        }
        return [this, gradient = at::ones({kLarge})] { large_->push(gradient).wait(); };
      }
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
    out.more["few"] = [this](std::istream& in) { return run_few(operations(), in); };
    out.more["trainers"] = [this](std::istream& in) {
      int64_t count = 0;
      if (!(in >> count) || count < 1) throw std::invalid_argument("trainers COUNT");
      train(kStepsBefore);
      const auto start = Clock::now();
      train(count);
      const auto steps = static_cast<double>(count * (setup_.world - setup_.servers));
      return "{\"rate\":" + std::to_string(steps / seconds_since(start)) + "}";
    };
    out.more["failover"] = [this](std::istream& in) { return elastic_.failover(in); };
    out.more["move"] = [this](std::istream&) { return elastic_.move(); };
    out.more["evict"] = [this](std::istream&) { return elastic_.evict(); };
    out.more["cut"] = [this](std::istream&) { return elastic_.cut(); };
    out.more["hogwild"] = [](std::istream& in) { return hogwild(in); };
    return out;
  }

 private:
  Future<at::Tensor> pull() const { return rows_->pull_rows(keys_); }
  // At all trainers at once.
  void train(int64_t count) {
    std::vector<Future<void>> others;
    for (int rank = setup_.servers + 1; rank < setup_.world; ++rank) {
      others.push_back(rpc_async(worker_, rank, kTrain, count));
    }
    sync_.train(count);
    for (const auto& other : others) other.wait();
  }

  const Worker& worker_;
  const Setup setup_;
  const ps::Client client_;
  Sync sync_;
  Elastic elastic_;
  const at::Tensor pair_ = at::ones({2});
  const at::Tensor row_ = at::ones({1, 2});
  const at::Tensor keys_ = at::randint(kRows, {kKeys}, at::kLong);
  std::vector<at::Tensor> one_key_;
  std::optional<ps::Table> small_;
  std::optional<ps::Table> pairs_;
  std::optional<ps::Table> rows_;
  std::optional<ps::Table> large_;
};

int run(int argc, char** argv) {
  const std::string path = option(argc, argv, "--path", "bench-ps");
  const int rank = std::stoi(option(argc, argv, "--rank", "0"));
  at::set_num_threads(1);
  touch_memory(std::stoll(option(argc, argv, "--touch", "0")));
  Setup setup = {.world = std::stoi(option(argc, argv, "--world", "2")),
                 .servers = std::stoi(option(argc, argv, "--servers", "1")),
                 .copies = static_cast<uint32_t>(std::stoul(option(argc, argv, "--copies", "1")))};
  if (setup.servers == 0) setup.servers = setup.world - 1;
  std::optional<Sync> mine;  // of a trainer that is not the caller
  Library library("bench_ps");
  library.def("train", [&mine](int64_t count) { mine->train(count); });
  Worker worker = Worker::join({
      .name = "w" + std::to_string(rank),
      .rank = rank,
      .world_size = setup.world,
      .library = library,
      .rendezvous = "file://" + path + ".store?run_id=bench",
      .transport = grpc_transport({}),
      .services = {ps_service()},
  });
  if (rank == 0) {
    Caller caller(worker, setup, path);
    const Operations operations = caller.operations();
    serve(&operations);
  } else if (rank <= setup.servers) {
    const ps::Server server(worker);
    serve(nullptr);
  } else {
    mine.emplace(worker, setup);
    serve(nullptr);
    mine.reset();
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
