// Ours, as a driver of the `rpc` suite: what a user's program does, through the public API alone,
// on the transport that a user gets. Commands besides those of the line protocol, at every rank:
//
//   greet              calls every other worker once              {"peers": n}
//   all SECONDS        calls the others round robin               {"rate": calls per second}
//   sink BYTES         one message to w1, which drops it          {"ms": x}
//   debug NAME         a counter of the worker                    {"value": n}
//   kill RANK PID COUNT BYTES
//                      kills a peer with COUNT calls outstanding, in the middle of a message of
//                      BYTES (0: none), and waits for them all    {"ms": x, "failed": n}
//
// --world N starts more than a pair; --bulk-lanes N is what the transport is given. --transport is
// default, tcp, tls, or socket (of this host, without shared memory); gpu
// has the tensors of echo on GPU 0 here and on GPU --gpu-to (0) there.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/rand.h>

#include <signal.h>

#include <atomic>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <thread>

#include "weft/bench/line_protocol.h"
#include "weft/bench/rpc/credentials.h"
#include "weft/rpc/arena.h"
#include "weft/rpc/call.h"
#include "weft/rpc/library.h"
#include "weft/rpc/worker.h"
#include "weft/transport/grpc_transport.h"

namespace weft::bench {
namespace {

constexpr char kCallee[] = "w1";

using Add = FunctionRef<at::Tensor(at::Tensor, at::Tensor)>;

at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return at::add(a, b); }
at::Tensor echo(const at::Tensor& x) { return x; }
std::string echo_text(const std::string& x) { return x; }
void noop() {}
void sink(const at::Tensor& x) { static_cast<void>(x); }
// Never answers: its promise lives as long as the process.
Future<void> hang() {
  static auto* const promises = new std::vector<Promise<void>>();
  promises->emplace_back();
  return promises->back().future();
}

Library library() {
  Library lib("bench");
  lib.aten({"aten::add.Tensor"});
  lib.def("add", &add, {.inline_ok = true});
  lib.def("echo", &echo, {.inline_ok = true});
  lib.def("echo_text", &echo_text, {.inline_ok = true});
  lib.def("noop", &noop, {.inline_ok = true});
  lib.def("sink", &sink, {.inline_ok = true});
  lib.def("hang", &hang, {.inline_ok = true});
  return lib;
}

class Caller {
 public:
  Caller(const Worker& worker, bool by_pointer, bool gpu)
      : worker_(worker), by_pointer_(by_pointer), gpu_(gpu), x_(at::rand({4})) {}

  Operations operations() {
    Operations operations;
    operations.call = [this](std::string_view name) -> std::function<void()> {
      if (name == "add") return [this] { start_add().wait(); };
      if (name == "noop") return [this] { rpc_sync(worker_, kCallee, &noop); };
      if (name == "echo64") {
        return
            [this, text = std::string(64, 'x')] { rpc_sync(worker_, kCallee, &echo_text, text); };
      }
      // "arena<bytes>": a tensor that lies in shared memory, to a function that returns nothing.
      if (name.substr(0, 5) == "arena") {
        const int64_t bytes = std::stoll(std::string(name.substr(5)));
        return [this, x = move_to_arena(worker_, at::rand({bytes / 4}))] {
          rpc_sync(worker_, kCallee, &sink, x);
        };
      }
      throw std::invalid_argument("unknown function: " + std::string(name));
    };
    operations.flight = [this](int depth, int64_t count) {
      std::vector<Future<at::Tensor>> futures;
      for (int64_t done = 0; done < count;) {
        for (int i = 0; i < depth && done < count; ++i, ++done) futures.push_back(start_add());
        for (auto& future : futures) future.wait();
        futures.clear();
      }
    };
    operations.slide = [this](int depth, int64_t count) {
      std::deque<Future<at::Tensor>> futures;
      for (int64_t i = 0; i < count; ++i) {
        if (futures.size() == static_cast<size_t>(depth)) {
          futures.front().wait();
          futures.pop_front();
        }
        futures.push_back(start_add());
      }
      for (auto& future : futures) future.wait();
    };
    operations.echo = [this](int64_t bytes) -> std::function<void()> {
      if (gpu_) {
        return [this, y = at::rand({bytes / 4}).to(c10::Device(c10::kCUDA, 0))] {
          // Done when a value that needs the last byte is here.
          const at::Tensor back = rpc_sync(worker_, kCallee, &echo, y);
          sum_ = back.slice(0, 0, std::nullopt, 1024).sum().item<float>();
        };
      }
      return [this, y = at::rand({bytes / 4})] {
        const at::Tensor back = rpc_sync(worker_, kCallee, &echo, y);
        // One element per page, so that memory mapped lazily is paid for.
        const float* data = back.const_data_ptr<float>();
        float sum = 0;
        for (int64_t i = 0; i < back.numel(); i += 1024) sum += data[i];
        sum_ = sum;
      };
    };
    operations.flow = [this](int64_t bytes) { return start_flow(bytes); };
    add_commands(&operations);
    return operations;
  }

 private:
  Future<at::Tensor> start_add() {
    return by_pointer_ ? rpc_async(worker_, kCallee, &add, x_, x_)
                       : rpc_async(worker_, kCallee, operator_, x_, x_);
  }

  std::function<int64_t()> start_flow(int64_t bytes) {
    struct Flow {
      std::atomic<bool> stop{false};
      std::atomic<int64_t> arrived{0};
      std::thread thread;
    };
    auto flow = std::make_shared<Flow>();
    const at::Tensor x = at::rand({bytes / 4});
    rpc_sync(worker_, kCallee, &sink, x);  // the memory that it arrives in is warm from here on
    flow->thread = std::thread([this, flow, x, bytes] {
      while (!flow->stop.load()) {
        rpc_sync(worker_, kCallee, &sink, x);
        flow->arrived += bytes;
      }
    });
    return [flow] {
      const int64_t arrived = flow->arrived.load();
      flow->stop = true;
      flow->thread.join();
      return arrived;
    };
  }

  void add_commands(Operations* operations) {
    operations->more["greet"] = [this](std::istream&) {
      const std::vector<WorkerInfo> others = peers();
      for (const WorkerInfo& other : others) rpc_sync(worker_, other, operator_, x_, x_);
      return "{\"peers\":" + std::to_string(others.size()) + "}";
    };
    operations->more["all"] = [this](std::istream& in) {
      double seconds = 0;
      if (!(in >> seconds)) throw std::invalid_argument("all SECONDS");
      const std::vector<WorkerInfo> others = peers();
      int64_t calls = 0;
      const auto start = Clock::now();
      for (; seconds_since(start) < seconds; ++calls) {
        const WorkerInfo& other = others[static_cast<size_t>(calls) % others.size()];
        rpc_sync(worker_, other, operator_, x_, x_);
      }
      return "{\"rate\":" + std::to_string(static_cast<double>(calls) / seconds_since(start)) + "}";
    };
    operations->more["sink"] = [this](std::istream& in) {
      int64_t bytes = 0;
      if (!(in >> bytes)) throw std::invalid_argument("sink BYTES");
      const at::Tensor x = at::rand({bytes / 4});
      const double ms = timed([&] { rpc_sync(worker_, kCallee, &sink, x); }) * 1e3;
      return "{\"ms\":" + std::to_string(ms) + "}";
    };
    operations->more["debug"] = [this](std::istream& in) {
      std::string name;
      in >> name;
      return "{\"value\":" + std::to_string(worker_.debug_info()[name]) + "}";
    };
    operations->more["kill"] = [this](std::istream& in) { return kill_peer(in); };
  }

  std::vector<WorkerInfo> peers() const {
    std::vector<WorkerInfo> others = worker_.worker_infos();
    std::erase_if(others, [this](const WorkerInfo& w) { return w.id == worker_.id(); });
    // Every worker begins with the next one, so that not all call the same worker at once.
    const auto next = std::find_if(others.begin(), others.end(),
                                   [this](const WorkerInfo& w) { return w.id > worker_.id(); });
    std::rotate(others.begin(), next, others.end());
    return others;
  }

  std::string kill_peer(std::istream& in) {
    int rank = 0;
    pid_t pid = 0;
    int count = 0;
    int64_t bytes = 0;
    if (!(in >> rank >> pid >> count >> bytes)) {
      throw std::invalid_argument("kill RANK PID COUNT BYTES");
    }
    const WorkerInfo peer = worker_.get_worker_info(rank);
    rpc_sync(worker_, peer, operator_, x_, x_);
    std::vector<Future<void>> futures;
    for (int i = 0; i < count; ++i) futures.push_back(rpc_async(worker_, peer, &hang));
    if (bytes > 0) {
      const int64_t before = bulk_bytes_sent();
      futures.push_back(rpc_async(worker_, peer, &sink, at::rand({bytes / 4})));
      while (bulk_bytes_sent() - before < bytes / 8) std::this_thread::yield();
    }
    const auto start = Clock::now();
    if (::kill(pid, SIGKILL) != 0) throw std::runtime_error("cannot kill " + std::to_string(pid));
    int failed = 0;
    for (auto& future : futures) failed += future.try_wait().ok() ? 0 : 1;
    std::ostringstream out;
    out << "{\"ms\":" << seconds_since(start) * 1e3 << ",\"failed\":" << failed << "}";
    return out.str();
  }

  int64_t bulk_bytes_sent() const {
    int64_t sum = 0;
    for (const auto& [name, value] : worker_.debug_info()) {
      if (name.starts_with("lane") && !name.starts_with("lane0") && name.ends_with("bytes_sent")) {
        sum += value;
      }
    }
    return sum;
  }

  const Worker& worker_;
  const bool by_pointer_;
  const bool gpu_;
  const Add operator_{"aten::add.Tensor"};
  const at::Tensor x_;
  volatile float sum_ = 0;
};

// Made by --make-credentials, in the folder of --path.
Credentials credentials(const std::string& path) {
  const std::string folder = path.substr(0, path.rfind('/')) + "/tls/";
  return {.ca_file = folder + "ca.pem",
          .cert_file = folder + "bench.pem",
          .key_file = folder + "bench.key",
          .shared_certificate = true};
}

int run(int argc, char** argv) {
  const std::string made = option(argc, argv, "--make-credentials", "");
  if (!made.empty()) {
    make_credentials(made);
    return 0;
  }
  const std::string path = option(argc, argv, "--path", "bench-weft");
  const std::string transport = option(argc, argv, "--transport", "default");
  const int rank = std::stoi(option(argc, argv, "--rank", "0"));
  at::set_num_threads(1);
  touch_memory(std::stoll(option(argc, argv, "--touch", "0")));
  const bool gpu = transport == "gpu";
  const bool arena = transport != "socket";
  std::map<std::string, DeviceMap> maps;
  std::vector<c10::Device> devices;
  if (gpu) {
    const c10::Device near(c10::kCUDA, 0);
    const c10::Device far(
        c10::kCUDA, static_cast<c10::DeviceIndex>(std::stoi(option(argc, argv, "--gpu-to", "0"))));
    if (rank == 0) maps[kCallee] = {{near, far}};
    devices = {rank == 0 ? near : far};
  }
  Worker worker = Worker::join({
      .name = "w" + std::to_string(rank),
      .rank = rank,
      .world_size = std::stoi(option(argc, argv, "--world", "2")),
      .library = library(),
      .rendezvous = "file://" + path + ".store?run_id=bench",
      // Where a row says TCP; otherwise what a user gets, a Unix socket between peers of one host.
      .transport =
          grpc_transport({.local_sockets = transport == "default" || gpu || !arena,
                          .arena_bytes = arena ? GrpcTransportOptions().arena_bytes : 0,
                          .bulk_lanes = std::stoi(option(argc, argv, "--bulk-lanes", "2"))}),
      .credentials = transport == "tls" ? credentials(path) : Credentials(),
      .device_maps = maps,
      .devices = devices,
  });
  Caller caller(worker, option(argc, argv, "--mode", "operator") == "function", gpu);
  const Operations operations = caller.operations();
  if (rank == 0) operations.call("add")();
  serve(&operations);
  const ShutdownResult result = worker.shutdown({.deadline = std::chrono::seconds(5)});
  if (!result.status.ok()) throw std::runtime_error(std::string(result.status.message()));
  say("{\"bye\":true}");
  return 0;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  return weft::bench::driver_main("weft_driver", weft::bench::run, argc, argv);
}
