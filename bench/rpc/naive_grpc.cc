// gRPC as its tutorial has it: generated stubs, a synchronous unary call, the tensor in one field
// of bytes. A tensor becomes a string, the string a message, and back again, on both sides (row
// T10).
//   --mode tcp   127.0.0.1
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <grpcpp/grpcpp.h>

#include <cstring>
#include <memory>

#include "naive.grpc.pb.h"
#include "weft/bench/line_protocol.h"

namespace weft::bench {
namespace {

std::string to_string(const at::Tensor& x) {
  return std::string(static_cast<const char*>(x.const_data_ptr()), x.nbytes());
}

at::Tensor to_tensor(const std::string& bytes) {
  at::Tensor x = at::empty({static_cast<int64_t>(bytes.size() / sizeof(float))});
  std::memcpy(x.mutable_data_ptr(), bytes.data(), bytes.size());
  return x;
}

class Service final : public Naive::Service {
  grpc::Status Echo(grpc::ServerContext* context, const Tensor* request,
                    Tensor* response) override {
    static_cast<void>(context);
    response->set_data(to_string(to_tensor(request->data())));
    return grpc::Status::OK;
  }
};

void callee(const std::string& address) {
  Service service;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials());
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.SetMaxReceiveMessageSize(-1);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) throw std::runtime_error("cannot listen on " + address);
  serve();
  server->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(100));
}

void caller(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
  const auto channel =
      grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  if (!channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(60))) {
    throw std::runtime_error("cannot connect to " + address);
  }
  const std::unique_ptr<Naive::Stub> stub = Naive::NewStub(channel);
  float sum = 0;
  const auto call = [&](const at::Tensor& x) {
    grpc::ClientContext context;
    Tensor request;
    Tensor response;
    request.set_data(to_string(x));
    const grpc::Status status = stub->Echo(&context, request, &response);
    if (!status.ok()) throw std::runtime_error(status.error_message());
    const at::Tensor back = to_tensor(response.data());
    const float* data = back.const_data_ptr<float>();
    for (int64_t i = 0; i < back.numel(); i += 1024) sum += data[i];
  };
  Operations operations;
  operations.call = [](std::string_view name) -> std::function<void()> {
    throw std::invalid_argument("this driver only echoes, not " + std::string(name));
  };
  operations.echo = [&](int64_t bytes) -> std::function<void()> {
    return [&call, x = at::rand({bytes / 4})] { call(x); };
  };
  serve(&operations);
  if (sum < 0) say("{\"error\":\"numbers of rand are not negative\"}");
}

int run(int argc, char** argv) {
  const std::string address = "127.0.0.1:" + option(argc, argv, "--port", "29879");
  at::set_num_threads(1);
  return run_pair(
      argc, argv, [&] { caller(address); }, [&] { callee(address); });
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  return weft::bench::driver_main("naive_grpc", weft::bench::run, argc, argv);
}
