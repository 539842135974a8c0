// The TensorPipe agent of torch, driven from C++: the peer of rows T1 to T4.
//
// Built-in operators are called by schema, so neither side needs Python or TorchScript. One
// intra-op thread, 16 worker threads.
//   --mode shm   the agent's own choice on one host (shared memory rings)
//   --mode tcp   uv transport, basic channel
//   --mode mpt   uv transport, multiplexed TCP channel
// This program links LibTorch alone and must not link gRPC.
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/request_callback_no_python.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/script_call.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <ATen/Parallel.h>
#include <ATen/ops/rand.h>
#include <unistd.h>

#include <deque>

#include "weft/bench/line_protocol.h"

namespace weft::bench {
namespace {

namespace rpc = torch::distributed::rpc;
using torch::jit::Operator;

std::shared_ptr<Operator> find_operator(const std::string& name, const std::string& overload) {
  for (const auto& candidate : torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(name))) {
    if (candidate->schema().overload_name() == overload) return candidate;
  }
  throw std::runtime_error("no operator " + name + "." + overload);
}

std::shared_ptr<rpc::TensorPipeAgent> make_agent(int rank, int port, const std::string& mode) {
  c10d::TCPStoreOptions store_options;
  store_options.port = static_cast<uint16_t>(port);
  store_options.isServer = rank == 0;
  store_options.numWorkers = 2;
  store_options.timeout = std::chrono::seconds(60);
  auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", store_options);

  using Names = std::optional<std::vector<std::string>>;
  const Names transports = mode == "shm" ? Names() : Names({"uv"});
  const Names channels = mode == "shm"   ? Names()
                         : mode == "mpt" ? Names({"mpt_uv"})
                                         : Names({"basic"});
  rpc::TensorPipeRpcBackendOptions options(16, transports, channels, 60, "env://");
  auto agent = std::make_shared<rpc::TensorPipeAgent>(
      store, rank == 0 ? "w0" : "w1", static_cast<rpc::worker_id_t>(rank), 2, options,
      std::unordered_map<std::string, rpc::DeviceMap>{}, std::vector<c10::Device>{},
      std::make_unique<rpc::RequestCallbackNoPython>());
  rpc::RpcAgent::setCurrentRpcAgent(agent);
  // Answers built-in operators only: every value that arrives is a tensor.
  agent->setTypeResolver(std::make_shared<rpc::TypeResolver>([](const c10::QualifiedName&) {
    return c10::StrongTypePtr(nullptr, c10::TensorType::get());
  }));
  torch::distributed::autograd::DistAutogradContainer::init(rank);
  agent->start();
  return agent;
}

class Caller {
 public:
  explicit Caller(rpc::TensorPipeAgent& agent)
      : agent_(agent),
        to_(agent.getWorkerInfo("w1")),
        add_(find_operator("aten::add", "Tensor")),
        alias_(find_operator("aten::alias", "")),
        is_grad_enabled_(find_operator("aten::is_grad_enabled", "")),
        x_(at::rand({4})) {}

  Operations operations() {
    Operations operations;
    operations.call = [this](std::string_view name) -> std::function<void()> {
      if (name == "add") return [this] { send_add()->waitAndThrow(); };
      if (name == "noop") return [this] { send(is_grad_enabled_, {})->waitAndThrow(); };
      if (name == "echo64") {
        return [this, x = at::rand({16})] { send(alias_, {x})->waitAndThrow(); };
      }
      throw std::invalid_argument("unknown function: " + std::string(name));
    };
    operations.flight = [this](int depth, int64_t count) {
      std::vector<c10::intrusive_ptr<rpc::JitFuture>> futures;
      for (int64_t done = 0; done < count;) {
        for (int i = 0; i < depth && done < count; ++i, ++done) futures.push_back(send_add());
        for (auto& future : futures) future->waitAndThrow();
        futures.clear();
      }
    };
    operations.slide = [this](int depth, int64_t count) {
      std::deque<c10::intrusive_ptr<rpc::JitFuture>> futures;
      for (int64_t i = 0; i < count; ++i) {
        if (futures.size() == static_cast<size_t>(depth)) {
          futures.front()->waitAndThrow();
          futures.pop_front();
        }
        futures.push_back(send_add());
      }
      for (auto& future : futures) future->waitAndThrow();
    };
    operations.echo = [this](int64_t bytes) -> std::function<void()> {
      return [this, y = at::rand({bytes / 4})] {
        auto future = send(alias_, {y});
        future->waitAndThrow();
        read_once(*future);
      };
    };
    return operations;
  }

 private:
  c10::intrusive_ptr<rpc::JitFuture> send(const std::shared_ptr<Operator>& op,
                                          std::vector<c10::IValue> stack) {
    return agent_.send(to_, rpc::ScriptCall(op, std::move(stack)).toMessage());
  }

  c10::intrusive_ptr<rpc::JitFuture> send_add() { return send(add_, {x_, x_, one_}); }

  // One element per page, so that a transport that maps memory lazily pays for it here too.
  void read_once(rpc::JitFuture& future) {
    const auto message = future.constValue().toCustomClass<rpc::Message>();
    float sum = 0;
    for (const auto& tensor : message->tensors()) {
      const float* data = tensor.const_data_ptr<float>();
      for (int64_t i = 0; i < tensor.numel(); i += 1024) sum += data[i];
    }
    sum_ = sum;
  }

  rpc::TensorPipeAgent& agent_;
  const rpc::WorkerInfo to_;
  const std::shared_ptr<Operator> add_;
  const std::shared_ptr<Operator> alias_;
  const std::shared_ptr<Operator> is_grad_enabled_;
  const at::Tensor x_;
  const c10::IValue one_ = 1;
  volatile float sum_ = 0;
};

int run(int argc, char** argv) {
  const int rank = std::stoi(option(argc, argv, "--rank", "0"));
  at::set_num_threads(1);
  touch_memory(std::stoll(option(argc, argv, "--touch", "0")));
  auto agent = make_agent(rank, std::stoi(option(argc, argv, "--port", "29877")),
                          option(argc, argv, "--mode", "shm"));
  if (rank == 0) {
    Caller caller(*agent);
    const Operations operations = caller.operations();
    operations.call("add")();  // connected in both directions before either side says so
    serve(&operations);
  } else {
    serve();
  }
  agent->join();
  agent->shutdown();
  say("{\"bye\":true}");
  return 0;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  try {
    // The agent's own globals do not survive an orderly exit in every version.
    _exit(weft::bench::run(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "peer_tensorpipe: %s\n", error.what());
    _exit(1);
  }
}
