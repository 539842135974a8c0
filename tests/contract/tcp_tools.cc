#include "weft/tests/contract/tcp_tools.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "weft/common/runtime.h"
#include "weft/store/tcp_store.h"
#include "weft/tests/testing/loopback.h"

namespace weft::testing {
namespace {

int dial(int port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = loopback(port);
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return fd;
  ::close(fd);
  return -1;
}

bool send_all(int fd, const char* data, size_t size) {
  while (size > 0) {
    const ssize_t n = ::send(fd, data, size, MSG_NOSIGNAL);
    if (n <= 0) return false;
    data += n;
    size -= static_cast<size_t>(n);
  }
  return true;
}

}  // namespace

RawListener::RawListener() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address = loopback(0);
  socklen_t size = sizeof address;
  EXPECT_EQ(::bind(fd_, reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(::listen(fd_, 64), 0);
  EXPECT_EQ(::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size), 0);
  port_ = ntohs(address.sin_port);
}

RawListener::~RawListener() { ::close(fd_); }

ForeignGrpcServer::ForeignGrpcServer() {
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
  queue_ = builder.AddCompletionQueue();
  server_ = builder.BuildAndStart();
  EXPECT_NE(server_, nullptr);
  poller_ = std::thread([this] {
    void* tag = nullptr;
    bool ok = false;
    while (queue_->Next(&tag, &ok)) {
    }
  });
}

ForeignGrpcServer::~ForeignGrpcServer() {
  server_->Shutdown(gpr_now(GPR_CLOCK_MONOTONIC));
  queue_->Shutdown();
  poller_.join();
}

void send_and_close(int port, const std::string& bytes) {
  const int fd = dial(port);
  ASSERT_GE(fd, 0);
  send_all(fd, bytes.data(), bytes.size());  // the server may hang up in between
  ::close(fd);
}

grpc::StatusCode raw_call(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                          const std::string& request, std::string* reply) {
  const grpc::Slice slice(request);
  const grpc::ByteBuffer bytes(&slice, 1);
  grpc::ByteBuffer answer;
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  grpc::Status status;
  grpc::GenericStub stub(channel);
  auto call = stub.PrepareUnaryCall(&context, method, bytes, &queue);
  call->StartCall();
  call->Finish(&answer, &status, &context);
  queue.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue.Next(&tag, &ok)) {
  }
  std::vector<grpc::Slice> slices;
  reply->clear();
  if (status.ok() && answer.Dump(&slices).ok()) {
    for (const grpc::Slice& s : slices) {
      reply->append(reinterpret_cast<const char*>(s.begin()), s.size());
    }
  }
  return status.error_code();
}

Relay::Relay(int to_port) : to_port_(to_port) {
  acceptor_ = std::thread([this] { accept_loop(); });
}

Relay::~Relay() {
  closing_ = true;
  ::shutdown(listener_.fd(), SHUT_RDWR);
  acceptor_.join();
  for (std::thread& t : connections_) t.join();
}

void Relay::accept_loop() {
  while (!closing_) {
    const int fd = ::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) return;
    ++accepted_;
    connections_.emplace_back([this, fd] { pass(fd); });
  }
}

void Relay::pass(int client) {
  const int server = dial(to_port_);
  char buffer[1 << 16];
  pollfd ends[2] = {{client, POLLIN, 0}, {server, POLLIN, 0}};
  while (server >= 0 && !closing_) {
    if (::poll(ends, 2, 50) < 0) break;
    bool over = false;
    for (int i = 0; i < 2 && !over; ++i) {
      if (ends[i].revents == 0) continue;
      const ssize_t n = ::recv(ends[i].fd, buffer, sizeof buffer, 0);
      over = n <= 0 || (i == 1 && cut_in_.fetch_sub(1) == 1);
      if (i == 1 && delay_ > 0) ::poll(nullptr, 0, delay_);
      if (!over) over = !send_all(ends[1 - i].fd, buffer, static_cast<size_t>(n));
    }
    if (over) break;
  }
  ::close(client);
  if (server >= 0) ::close(server);
}

StoreProcess::StoreProcess(int port, const std::string& role) {
  int ends[2] = {-1, -1};
  EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const std::string role_env = "WEFT_TEST_STORE_ROLE=" + role;
  const std::string port_env = absl::StrCat("WEFT_TEST_STORE_PORT=", port);
  char* const argv[] = {const_cast<char*>("contract_store_test"),
                        const_cast<char*>("--gtest_filter=StoreProcessMain.Run"), nullptr};
  std::vector<char*> env;
  for (char** e = environ; *e != nullptr; ++e) {
    // Which part of the tests this process runs is not the other's concern.
    if (!absl::StartsWith(*e, "GTEST_")) env.push_back(*e);
  }
  env.push_back(const_cast<char*>(role_env.c_str()));
  env.push_back(const_cast<char*>(port_env.c_str()));
  env.push_back(nullptr);
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(127);
    ::dup2(ends[1], 3);  // also clears close-on-exec
    ::execve("/proc/self/exe", argv, env.data());
    ::_exit(127);
  }
  ::close(ends[1]);
  std::string text;
  char c = 0;
  while (::read(ends[0], &c, 1) == 1 && c != '\n') text.push_back(c);
  ::close(ends[0]);
  EXPECT_TRUE(absl::SimpleAtoi(text, &port_)) << "the process said '" << text << "'";
}

void StoreProcess::kill() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
}

// Not a test of its own: what the processes above run. Says its port on descriptor 3.
TEST(StoreProcessMain, Run) {
  const char* role = std::getenv("WEFT_TEST_STORE_ROLE");
  if (role == nullptr) return;
  int port = 0;
  ASSERT_TRUE(absl::SimpleAtoi(std::getenv("WEFT_TEST_STORE_PORT"), &port));
  const auto runtime = make_system_runtime();
  std::unique_ptr<TcpStoreServer> server;
  if (role == std::string("server")) {
    auto started = TcpStoreServer::start({.port = port}, runtime);
    ASSERT_TRUE(started.ok()) << started.status();
    server = *std::move(started);
    port = server->port();
  }
  auto store = TcpStore::connect("127.0.0.1", port, {}, runtime);
  ASSERT_TRUE(store.ok()) << store.status();
  const std::string line = absl::StrCat(port, "\n");
  ASSERT_EQ(::write(3, line.data(), line.size()), static_cast<ssize_t>(line.size()));
  if (server == nullptr) {
    ASSERT_TRUE((*store)->set("client is here", "").ok());
  }
  // Until the parent kills us.
  EXPECT_TRUE((*store)->get("never", kInfinite).ok());
}

}  // namespace weft::testing
