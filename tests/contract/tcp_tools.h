#ifndef WEFT_TESTS_CONTRACT_TCP_TOOLS_H_
#define WEFT_TESTS_CONTRACT_TCP_TOOLS_H_

// Bad company for a TcpStore: listeners that say nothing, servers of something else, raw bytes, a
// relay that loses answers, and processes that can be killed. Loopback only.

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <sys/types.h>

#include <atomic>
#include <list>
#include <memory>
#include <string>
#include <thread>

namespace weft::testing {

// Listens, and never accepts.
class RawListener {
 public:
  RawListener();
  ~RawListener();
  RawListener(const RawListener&) = delete;
  RawListener& operator=(const RawListener&) = delete;
  int port() const { return port_; }
  int fd() const { return fd_; }

 private:
  int fd_ = -1;
  int port_ = 0;
};

// A gRPC server that knows no method.
class ForeignGrpcServer {
 public:
  ForeignGrpcServer();
  ~ForeignGrpcServer();
  int port() const { return port_; }

 private:
  std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::unique_ptr<grpc::Server> server_;
  std::thread poller_;
  int port_ = 0;
};

void send_and_close(int port, const std::string& bytes);

// A unary call with any bytes; `reply` gets the answer's.
grpc::StatusCode raw_call(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                          const std::string& request, std::string* reply);

// Passes bytes on, both ways, to a port of this machine.
class Relay {
 public:
  explicit Relay(int to_port);
  ~Relay();
  int port() const { return listener_.port(); }
  // The nth piece of bytes that comes back from there is dropped, and the connection is cut.
  void cut_answer(int nth = 1) { cut_in_ = nth; }
  // Whether that has happened since.
  bool was_cut() const { return cut_in_ <= 0; }
  // A slow line: so long is every piece of bytes under way that comes back from there.
  void delay_answers(int millis) { delay_ = millis; }
  int connections() const { return accepted_; }

 private:
  void accept_loop();
  void pass(int client);

  const int to_port_;
  RawListener listener_;
  std::atomic<int> cut_in_{0};
  std::atomic<int> delay_{0};
  std::atomic<int> accepted_{0};
  std::atomic<bool> closing_{false};
  std::list<std::thread> connections_;
  std::thread acceptor_;
};

// This program once more, as a store server ("server") or as a client that waits ("client").
class StoreProcess {
 public:
  explicit StoreProcess(int port, const std::string& role = "server");
  ~StoreProcess() { kill(); }
  // The server's; 0 when it could not start.
  int port() const { return port_; }
  void kill();

 private:
  pid_t pid_ = -1;
  int port_ = 0;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_CONTRACT_TCP_TOOLS_H_
