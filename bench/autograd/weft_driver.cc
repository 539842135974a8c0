// Ours, as a driver of the `autograd` suite: what a user's program does, through the public API
// alone. Commands besides those of the line protocol (`lat NAME COUNT`, of the names in models.h):
//
//   threads COUNT SECONDS    so many trainers' threads at w0 make passes of their own against w1
//                                     {"rate": passes per second}
//   many COUNT               an optimizer over so many small parameters of w0, groups of 2,000; in ms
//                                     {"made": , "gradients": , "step": , "torch_step": LibTorch's}
//   counters                 at every rank, what this worker has sent so far
//                                     {"messages": n, "discovers": n, "gradients": n, "dones": n}
//
// `--mode fast`: backward takes it that every message is needed. `--step apart`: backward() and
// step() instead of backward_and_step().
//
// A step ends when both sides have applied it; nothing waits for the release of the context.
#include <ATen/Parallel.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "weft/bench/autograd/models.h"
#include "weft/bench/line_protocol.h"
#include "weft/dist_autograd/service.h"
#include "weft/dist_optim/service.h"
#include "weft/rpc/worker.h"
#include "weft/rref/service.h"
#include "weft/transport/grpc_transport.h"

namespace weft::bench {
namespace {

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
        const auto pass = make_model(worker, "pass");
        for (; seconds_since(start) < seconds; ++steps) pass();
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
      .library = models_library(),
      .rendezvous = "file://" + path + ".store?run_id=bench",
      .transport =
          grpc_transport({.local_sockets = option(argc, argv, "--transport", "default") != "tcp"}),
      .services = {rref_service(), dist_autograd_service(), dist_optim_service()},
  });
  {
    Operations operations;
    StepHow how;
    if (option(argc, argv, "--mode", "exact") == "fast") how.mode = BackwardMode::kFast;
    how.apart = option(argc, argv, "--step", "within") == "apart";
    operations.call = [&](std::string_view name) { return make_model(worker, name, how); };
    operations.more["threads"] = [&worker](std::istream& in) { return threads(worker, in); };
    operations.more["many"] = [&worker](std::istream& in) { return many_parameters(worker, in); };
    operations.more["counters"] = [&worker](std::istream&) { return counters(worker); };
    if (rank == 0) make_model(worker, "pass")();
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
