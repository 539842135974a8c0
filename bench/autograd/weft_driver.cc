// Ours, as a driver of the `autograd` suite: what a user's program does, through the public API
// alone. w1 has the first layers of a small model, w0 the last and the loss. Commands besides those
// of the line protocol (`lat step`: one step, from the context to its end):
//
//   threads COUNT SECONDS    so many trainers' threads at w0 make steps of their own against w1
//                                     {"rate": steps per second}
//   counters                 at every rank, what this worker has sent so far
//                                     {"messages": n, "discovers": n, "gradients": n, "dones": n}
//
// A step ends when both sides have the gradients of their leaves; nothing waits for the release.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "weft/bench/line_protocol.h"
#include "weft/dist_autograd/context.h"
#include "weft/dist_autograd/service.h"
#include "weft/rpc/call.h"
#include "weft/rpc/grpc_transport.h"
#include "weft/rpc/library.h"
#include "weft/rpc/worker.h"
#include "weft/rref/service.h"

namespace weft::bench {
namespace {

constexpr char kServer[] = "w1";
constexpr int64_t kBatch = 8;
constexpr int64_t kWidth = 16;

at::Tensor parameter(at::IntArrayRef sizes) { return at::rand(sizes).set_requires_grad(true); }

Library library() {
  Library lib("bench");
  lib.def("forward", [w = parameter({kWidth, kWidth}), b = parameter({kWidth}),
                      v = parameter({kWidth, kWidth})](const at::Tensor& x) {
    return at::relu(at::linear(at::relu(at::linear(x, w, b)), v));
  });
  return lib;
}

class Trainer {
 public:
  explicit Trainer(const Worker& worker)
      : worker_(worker),
        x_(at::rand({kBatch, kWidth})),
        target_(at::zeros({kBatch, 1})),
        first_(parameter({kWidth, kWidth})),
        last_(parameter({1, kWidth})) {}

  void step() const {
    DistAutogradContext context(worker_);
    const at::Tensor there = rpc_sync(worker_, kServer, forward_, at::linear(x_, first_));
    context.backward({at::mse_loss(at::linear(there, last_), target_)});
    if (context.gradients().size() != 2) throw std::runtime_error("gradients are missing");
  }

 private:
  const Worker& worker_;
  const FunctionRef<at::Tensor(at::Tensor)> forward_{"bench.forward"};
  const at::Tensor x_;
  const at::Tensor target_;
  const at::Tensor first_;
  const at::Tensor last_;
};

std::string threads(const Worker& worker, std::istream& in) {
  int count = 0;
  double seconds = 0;
  if (!(in >> count >> seconds) || count < 1) throw std::invalid_argument("threads COUNT SECONDS");
  std::atomic<int64_t> steps{0};
  std::atomic<bool> failed{false};
  const auto start = Clock::now();
  std::vector<std::thread> trainers;
  for (int i = 0; i < count; ++i) {
    trainers.emplace_back([&] {
      try {
        const Trainer trainer(worker);
        for (; seconds_since(start) < seconds; ++steps) trainer.step();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        failed = true;
      }
    });
  }
  for (std::thread& one : trainers) one.join();
  if (failed) throw std::runtime_error("a trainer has failed");
  return "{\"rate\":" + std::to_string(static_cast<double>(steps) / seconds_since(start)) + "}";
}

std::string counters(const Worker& worker) {
  std::map<std::string, int64_t> now = worker.debug_info();
  int64_t messages = 0;
  for (const auto& [name, value] : now) {
    if (name.starts_with("lane") && name.ends_with("_frames_sent")) messages += value;
  }
  std::ostringstream out;
  out << "{\"messages\":" << messages << ",\"discovers\":" << now["autograd_discovers_sent"]
      << ",\"gradients\":" << now["autograd_gradients_sent"]
      << ",\"dones\":" << now["autograd_dones_sent"] << "}";
  return out.str();
}

int run(int argc, char** argv) {
  const std::string path = option(argc, argv, "--path", "bench-autograd");
  const int rank = std::stoi(option(argc, argv, "--rank", "0"));
  at::set_num_threads(1);
  touch_memory(std::stoll(option(argc, argv, "--touch", "0")));
  Worker worker = Worker::join({
      .name = "w" + std::to_string(rank),
      .rank = rank,
      .world_size = std::stoi(option(argc, argv, "--world", "2")),
      .library = library(),
      .rendezvous = "file://" + path + ".store?run_id=bench",
      .transport =
          grpc_transport({.local_sockets = option(argc, argv, "--transport", "default") != "tcp"}),
      .services = {rref_service(), dist_autograd_service()},
  });
  {
    const Trainer trainer(worker);
    Operations operations;
    operations.call = [&trainer](std::string_view name) -> std::function<void()> {
      if (name != "step") throw std::invalid_argument("unknown function: " + std::string(name));
      return [&trainer] { trainer.step(); };
    };
    operations.more["threads"] = [&worker](std::istream& in) { return threads(worker, in); };
    operations.more["counters"] = [&worker](std::istream&) { return counters(worker); };
    if (rank == 0) trainer.step();
    serve(&operations);
  }
  const ShutdownResult result = worker.shutdown({.deadline = std::chrono::seconds(5)});
  if (!result.status.ok()) throw std::runtime_error(std::string(result.status.message()));
  say("{\"bye\":true}");
  return 0;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  return weft::bench::driver_main("weft_autograd_driver", weft::bench::run, argc, argv);
}
