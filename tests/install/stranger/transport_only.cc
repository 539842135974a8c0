// A program that moves frames by a transport alone: one side listens, the other dials and sends one
// frame.
#include <weft/common/future.h>
#include <weft/common/runtime.h>
#include <weft/transport/grpc_transport.h>

#include <iostream>
#include <memory>
#include <string>

namespace {

weft::Hello hello(const std::string& name, uint32_t id) {
  weft::Hello out;
  out.job_id = "0123456789abcdef";
  out.name = name;
  out.id = id;
  out.incarnation = 0x1000 + id;
  out.max_frame_bytes = 1 << 20;
  return out;
}

class Receiver : public weft::ConnectionHandler {
 public:
  explicit Receiver(std::shared_ptr<weft::Promise<std::string>> got) : got_(std::move(got)) {}
  void on_frame(const weft::FrameView& frame, int) override {
    if (frame.kind == weft::FrameKind::kRequest) got_->set_value(std::string(frame.header));
  }
  void on_lost(weft::Lost) override {}

 private:
  const std::shared_ptr<weft::Promise<std::string>> got_;
};

class Listener : public weft::Acceptor {
 public:
  explicit Listener(std::shared_ptr<weft::ConnectionHandler> handler)
      : handler_(std::move(handler)) {}
  weft::StatusOr<weft::Hello> check_hello(const weft::Hello& theirs) override {
    return theirs.job_id == hello("listener", 1).job_id ? hello("listener", 1) : weft::Hello{};
  }
  std::shared_ptr<weft::ConnectionHandler> on_connection(
      std::shared_ptr<weft::Connection>) override {
    return handler_;
  }

 private:
  const std::shared_ptr<weft::ConnectionHandler> handler_;
};

std::unique_ptr<weft::Transport> make(const std::shared_ptr<weft::Runtime>& runtime,
                                      const std::string& name) {
  weft::TransportContext context;
  context.runtime = runtime;
  context.worker_name = name;
  auto made = weft::grpc_transport()(context);
  if (!made.ok()) {
    std::cerr << made.status() << "\n";
    return nullptr;
  }
  return *std::move(made);
}

}  // namespace

int main() {
  const std::shared_ptr<weft::Runtime> runtime = weft::make_system_runtime();
  const auto got = std::make_shared<weft::Promise<std::string>>();
  const weft::Future<std::string> header = got->future();
  const auto dialled = std::make_shared<weft::Promise<std::shared_ptr<weft::Connection>>>();
  const auto connection = dialled->future();
  const auto listener = make(runtime, "listener");
  const auto dialler = make(runtime, "dialler");
  if (listener == nullptr || dialler == nullptr) return 1;
  const auto receiver = std::make_shared<Receiver>(got);
  const auto address = listener->listen({}, std::make_shared<Listener>(receiver));
  if (!address.ok()) return 1;
  dialler->connect(*address, hello("dialler", 2), runtime->now() + absl::Seconds(20), receiver,
                   [dialled](auto result) {
                     if (result.ok()) dialled->set_value(*std::move(result));
                   });
  weft::Frame frame;
  frame.kind = weft::FrameKind::kRequest;
  frame.header = "over a transport";
  const bool sent = connection.wait()->send(std::move(frame), weft::kControlLane).ok();
  const bool ok = sent && header.wait() == "over a transport";
  dialler->shutdown();
  listener->shutdown();
  if (ok) std::cout << "transport only: ok\n";
  return ok ? 0 : 1;
}
