// Ours, as a driver of the `rpc` suite: what a user's program does, through the public API alone,
// on the transport that a user gets.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/rand.h>

#include <deque>
#include <string>

#include "weft/bench/rpc/credentials.h"
#include "weft/bench/rpc/line_protocol.h"
#include "weft/rpc/arena.h"
#include "weft/rpc/call.h"
#include "weft/rpc/grpc_transport.h"
#include "weft/rpc/library.h"
#include "weft/rpc/worker.h"

namespace weft::bench {
namespace {

constexpr char kCallee[] = "w1";

using Add = FunctionRef<at::Tensor(at::Tensor, at::Tensor)>;

at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return at::add(a, b); }
at::Tensor echo(const at::Tensor& x) { return x; }
std::string echo_text(const std::string& x) { return x; }
void noop() {}
void take(const at::Tensor& x) { (void)x; }

Library library() {
  Library lib("bench");
  lib.aten({"aten::add.Tensor"});
  lib.def("add", &add, {.inline_ok = true});
  lib.def("echo", &echo, {.inline_ok = true});
  lib.def("echo_text", &echo_text, {.inline_ok = true});
  lib.def("noop", &noop, {.inline_ok = true});
  lib.def("take", &take, {.inline_ok = true});
  return lib;
}

class Caller {
 public:
  Caller(const Worker& worker, bool by_pointer)
      : worker_(worker), by_pointer_(by_pointer), x_(at::rand({4})) {}

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
          rpc_sync(worker_, kCallee, &take, x);
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
      return [this, y = at::rand({bytes / 4})] {
        const at::Tensor back = rpc_sync(worker_, kCallee, &echo, y);
        // One element per page, so that memory mapped lazily is paid for.
        const float* data = back.const_data_ptr<float>();
        float sum = 0;
        for (int64_t i = 0; i < back.numel(); i += 1024) sum += data[i];
        sum_ = sum;
      };
    };
    return operations;
  }

 private:
  Future<at::Tensor> start_add() {
    return by_pointer_ ? rpc_async(worker_, kCallee, &add, x_, x_)
                       : rpc_async(worker_, kCallee, operator_, x_, x_);
  }

  const Worker& worker_;
  const bool by_pointer_;
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
  Worker worker = Worker::join({
      .name = rank == 0 ? "w0" : kCallee,
      .rank = rank,
      .world_size = 2,
      .library = library(),
      .rendezvous = "file://" + path + ".store?run_id=bench",
      // Where a row says TCP; otherwise what a user gets, a Unix socket between peers of one host.
      .transport = grpc_transport({.local_sockets = transport == "default"}),
      .credentials = transport == "tls" ? credentials(path) : Credentials(),
  });
  if (rank == 0) {
    Caller caller(worker, option(argc, argv, "--mode", "operator") == "function");
    const Operations operations = caller.operations();
    operations.call("add")();
    serve(&operations);
  } else {
    serve();
  }
  const ShutdownResult result = worker.shutdown({.deadline = std::chrono::seconds(5)});
  if (!result.status.ok()) throw std::runtime_error(std::string(result.status.message()));
  say("{\"bye\":true}");
  return 0;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  try {
    return weft::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "weft_driver: %s\n", error.what());
    return 1;
  }
}
