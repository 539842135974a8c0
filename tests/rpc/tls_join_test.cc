// join() with credentials from the environment: workers, their store, and what is never said.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/common/mutex.h"
#include "weft/store/tcp_store.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/loopback.h"
#include "weft/tests/testing/tls_files.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kToken[] = "correct-horse-battery-staple";

int64_t same_number(int64_t x) { return x; }

class Lines : public LogSink {
 public:
  void write(Severity, std::string_view line) override {
    MutexLock lock(&mutex_);
    text_ += line;
  }
  std::string text() {
    MutexLock lock(&mutex_);
    return text_;
  }

 private:
  Mutex mutex_;
  std::string text_;
};

// A port that the system gives to no other process while the object lives, and that a server can
// still listen on.
class HeldPort {
 public:
  HeldPort() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in in = loopback(0);
    socklen_t size = sizeof in;
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&in), size), 0);
    EXPECT_EQ(getsockname(fd_, reinterpret_cast<sockaddr*>(&in), &size), 0);
    port_ = ntohs(in.sin_port);
  }
  ~HeldPort() { close(fd_); }
  int port() const { return port_; }

 private:
  const int fd_;
  int port_ = 0;
};

class TlsJoin : public ::testing::Test {
 protected:
  Environment variables(const Credentials& c) {
    Environment out{
        {"WEFT_TLS_CA", c.ca_file}, {"WEFT_TLS_CERT", c.cert_file}, {"WEFT_TLS_KEY", c.key_file}};
    if (!c.token_file.empty()) out["WEFT_TOKEN_FILE"] = c.token_file;
    return out;
  }
  JoinOptions options(int rank, int world_size, Environment environment) {
    JoinOptions out;
    out.rank = rank;
    out.world_size = world_size;
    out.name = "worker" + std::to_string(rank);
    out.library = Library("app");
    out.library.def("echo", &same_number);
    out.rendezvous = store_;
    out.runtime = runtime_;
    out.environment = std::move(environment);
    out.log_sink = lines_;
    out.log_level = Severity::kDebug;
    out.join_timeout = std::chrono::seconds(30);
    return out;
  }
  // The first worker hosts the store.
  std::vector<StatusOr<Worker>> join(std::vector<JoinOptions> all) {
    std::vector<StatusOr<Worker>> out;
    for (size_t i = 0; i < all.size(); ++i) out.emplace_back(make_error(ErrorKind::kInternal, ""));
    std::vector<std::unique_ptr<Thread>> threads;
    for (size_t i = 0; i < all.size(); ++i) {
      threads.push_back(
          runtime_->spawn("join", [&, i] { out[i] = Worker::try_join(std::move(all[i])); }));
    }
    threads.clear();
    return out;
  }
  void shutdown(std::vector<StatusOr<Worker>>& workers) {
    std::vector<std::unique_ptr<Thread>> threads;
    for (StatusOr<Worker>& worker : workers) {
      threads.push_back(
          runtime_->spawn("shutdown", [&] { EXPECT_TRUE(worker->shutdown().status.ok()); }));
    }
    threads.clear();
    // The worker that hosts the store waits for the others to release it.
    while (!workers.empty()) workers.pop_back();
  }

  TlsFiles files_;
  std::shared_ptr<Runtime> runtime_ = make_system_runtime();
  std::shared_ptr<Lines> lines_ = std::make_shared<Lines>();
  std::string store_;
};

TEST_F(TlsJoin, WorkersAndTheirStoreUseTheCredentialsOfTheEnvironment) {
  const std::string token = files_.write("token", std::string(kToken) + "\n");
  const HeldPort port;
  store_ = "tcp://127.0.0.1:" + std::to_string(port.port());
  std::vector<JoinOptions> all;
  for (int rank : {0, 1}) {
    Credentials own = files_.make("worker" + std::to_string(rank), {.rank = rank});
    own.token_file = token;
    all.push_back(options(rank, 2, variables(own)));
  }
  std::vector<StatusOr<Worker>> workers = join(std::move(all));
  for (const StatusOr<Worker>& worker : workers) ASSERT_TRUE(worker.ok()) << worker.status();
  EXPECT_THAT(workers[0]->address(), HasSubstr("/tls"));
  EXPECT_EQ(rpc_sync(*workers[1], 0, &same_number, 7), 7);
  EXPECT_EQ(rpc_sync(*workers[0], 1, &same_number, 8), 8);
  std::string said = lines_->text();
  for (const auto& [name, value] : workers[0]->debug_info()) said += name;
  shutdown(workers);
  EXPECT_THAT(said + lines_->text(), Not(HasSubstr("horse")));
  EXPECT_THAT(lines_->text(), HasSubstr("joined job"));
}

TEST_F(TlsJoin, BadInput_credentials_that_do_not_fit_the_others) {
  TlsFiles others;
  const std::shared_ptr<Runtime> runtime = runtime_;
  Credentials good = files_.make("worker0");
  auto server = TcpStoreServer::start({.credentials = good}, runtime);
  ASSERT_TRUE(server.ok()) << server.status();
  store_ = (*server)->url();
  // Another authority.
  JoinOptions foreign = options(1, 2, variables(others.make("worker1")));
  const Status unknown = Worker::try_join(std::move(foreign)).status();
  EXPECT_EQ(error_kind(unknown), ErrorKind::kPermission) << unknown;
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("its certificate is not believed"));
  // Another name than the certificate's.
  auto alone = options(1, 2, variables(files_.make("trainer0")));
  alone.rendezvous = "hash://";
  const Status name = Worker::try_join(std::move(alone)).status();
  EXPECT_EQ(error_kind(name), ErrorKind::kPermission) << name;
  EXPECT_THAT(std::string(name.message()), HasSubstr("is that of 'trainer0'"));
  // A file that is not there.
  Credentials gone = good;
  gone.key_file = "/nowhere/key";
  const Status missing = Worker::try_join(options(1, 2, variables(gone))).status();
  EXPECT_EQ(error_kind(missing), ErrorKind::kInvalidArgument) << missing;
  EXPECT_THAT(std::string(missing.message()), HasSubstr("cannot read the key file '/nowhere/key'"));
}

}  // namespace
}  // namespace weft::testing
