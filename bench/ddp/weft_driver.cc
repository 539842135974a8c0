// Ours, as a driver of the `ddp` suite, through the public API alone. Rank 0 reads the line protocol
// (line_protocol.h), tells the others by a broadcast what comes, and all of them do it.
//
//   --backend shm|tcp   of the group           --listen ADDRESS   of tcp
//   --hybrid 1          ranks 0 and 1 are trainers, 2 is their server
//   --live FILE         started by a launcher; see live()
//
//   step MODEL HOW COUNT   of driver.h, each timed at rank 0    {"us": [...]}
//   zero                   of the model deep                    {"share": x}
//   hybrid COUNT           with --hybrid                        {"us": [...]}
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "weft/bench/ddp/driver.h"
#include "weft/bench/line_protocol.h"
#include "weft/dist_autograd/service.h"
#include "weft/dist_optim/service.h"
#include "weft/rref/service.h"
#include "weft/transport/grpc_transport.h"

namespace weft::bench {
namespace {

constexpr std::array<std::string_view, 3> kModels = {"wide", "deep", "small"};
constexpr std::array<std::string_view, 4> kHows = {"ddp", "mib", "one", "alone"};

enum Command : int64_t { kQuit, kStep, kZero, kHybrid };

class DdpDriver {
 public:
  DdpDriver(const ProcessGroup& group, const Worker* worker) : group_(group), worker_(worker) {}

  void lead() {
    Operations operations;
    operations.more["step"] = [this](std::istream& in) {
      std::string model;
      std::string how;
      int64_t count = 0;
      in >> model >> how >> count;
      const auto m = std::find(kModels.begin(), kModels.end(), model) - kModels.begin();
      const auto h = std::find(kHows.begin(), kHows.end(), how) - kHows.begin();
      if (!in || m == std::ssize(kModels) || h == std::ssize(kHows) || count < 1) {
        throw std::invalid_argument("step wide|deep|small ddp|mib|one|alone COUNT");
      }
      return samples(tell(kStep, m, h, count));
    };
    operations.more["zero"] = [this](std::istream&) {
      return "{\"share\":" + std::to_string(tell(kZero, 0, 0, 0).at(0)) + "}";
    };
    operations.more["hybrid"] = [this](std::istream& in) {
      int64_t count = 0;
      if (!(in >> count) || count < 1 || worker_ == nullptr) {
        throw std::invalid_argument("hybrid COUNT, with --hybrid 1");
      }
      return samples(tell(kHybrid, 0, 0, count));
    };
    serve(&operations);
    announce(kQuit, 0, 0, 0);
  }

  void follow() {
    say(kReady);
    const at::Tensor message = at::empty({4}, at::kLong);
    while (true) {
      group_.broadcast(message);
      const int64_t* const words = message.const_data_ptr<int64_t>();
      if (words[0] == kQuit) return;
      perform(words[0], words[1], words[2], words[3]);
    }
  }

 private:
  static std::string samples(const std::vector<double>& us) {
    return "{\"us\":" + json_array(us) + "}";
  }
  void announce(int64_t what, int64_t model, int64_t how, int64_t count) {
    const int64_t words[] = {what, model, how, count};
    const at::Tensor message = at::empty({4}, at::kLong);
    std::copy(std::begin(words), std::end(words), message.mutable_data_ptr<int64_t>());
    group_.broadcast(message);
  }
  std::vector<double> tell(int64_t what, int64_t model, int64_t how, int64_t count) {
    announce(what, model, how, count);
    return perform(what, model, how, count);
  }
  std::vector<double> perform(int64_t what, int64_t model, int64_t how, int64_t count) {
    if (what == kZero) return {zero_share(make_ddp_model("deep"), group_)};
    const auto step = what == kHybrid
                          ? make_hybrid_step(*worker_, group_)
                          : make_ddp_step(make_ddp_model(kModels.at(static_cast<size_t>(model))),
                                          group_, kHows.at(static_cast<size_t>(how)));
    for (int64_t i = 0; i < count / 4 + 3; ++i) step();
    group_.barrier();
    std::vector<double> us(static_cast<size_t>(count));
    for (double& sample : us) sample = timed(step) * 1e6;
    group_.barrier();
    return us;
  }

  ProcessGroup group_;
  const Worker* worker_;
};

int run_hybrid(const std::string& path, int rank, const std::string& backend) {
  Worker worker = Worker::join({
      .name = "w" + std::to_string(rank),
      .rank = rank,
      .world_size = 3,
      .library = hybrid_library(),
      .rendezvous = "file://" + path + ".store?run_id=bench",
      .transport = grpc_transport(),
      .services = {rref_service(), dist_autograd_service(), dist_optim_service()},
  });
  if (rank == 2) {
    serve();
  } else {
    DdpDriver driver(make_ddp_group(path, rank, 2, backend, "127.0.0.1"), &worker);
    rank == 0 ? driver.lead() : driver.follow();
  }
  const ShutdownResult result = worker.shutdown({.deadline = std::chrono::seconds(5)});
  if (!result.status.ok()) throw std::runtime_error(std::string(result.status.message()));
  return 0;
}

int run(int argc, char** argv) {
  at::set_num_threads(1);
  const std::string log = option(argc, argv, "--live", "");
  if (!log.empty()) return live(log);
  touch_memory(std::stoll(option(argc, argv, "--touch", "0")));
  const int rank = std::stoi(option(argc, argv, "--rank", "0"));
  const std::string path = option(argc, argv, "--path", "bench-ddp");
  const std::string backend = option(argc, argv, "--backend", "shm");
  if (option(argc, argv, "--hybrid", "0") != "0") {
    run_hybrid(path, rank, backend);
  } else {
    DdpDriver driver(make_ddp_group(path, rank, std::stoi(option(argc, argv, "--world", "2")),
                                    backend, option(argc, argv, "--listen", "127.0.0.1")),
                     nullptr);
    rank == 0 ? driver.lead() : driver.follow();
  }
  say("{\"bye\":true}");
  return 0;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  return weft::bench::driver_main("weft_ddp_driver", &weft::bench::run, argc, argv);
}
