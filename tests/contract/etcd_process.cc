#include "weft/tests/contract/etcd_process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/common/runtime.h"
#include "weft/store/etcd_store.h"
#include "weft/tests/contract/store_world.h"
#include "weft/tests/testing/loopback.h"

namespace weft::testing {
namespace {

std::string find_etcd() {
  const char* path = std::getenv("PATH");
  std::istringstream folders(absl::StrCat(path == nullptr ? "" : path, ":/usr/bin:/usr/local/bin"));
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string file = folder + "/etcd";
    if (!folder.empty() && ::access(file.c_str(), X_OK) == 0) return file;
  }
  return "";
}

// Free a moment ago. etcd cannot take port 0, so a start may fail; it is tried again then.
int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = loopback(0);
  socklen_t size = sizeof address;
  int port = 0;
  if (::bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0) {
    port = ntohs(address.sin_port);
  }
  ::close(fd);
  return port;
}

pid_t spawn(const std::vector<std::string>& command, const std::string& log) {
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  // Only what may be called between fork and exec.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);
  const int fd = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  ::dup2(fd, 1);
  ::dup2(fd, 2);
  ::execv(argv[0], argv.data());
  ::_exit(127);
}

}  // namespace

std::string EtcdProcess::missing() {
  return find_etcd().empty() ? "etcd is not installed (Debian: etcd-server)" : "";
}

void EtcdProcess::start() {
  const std::string binary = find_etcd();
  const auto runtime = make_system_runtime();
  const bool again = port_ != 0;
  if (!again) directory_ = make_temp_dir();
  for (int attempt = 0; attempt < 5; ++attempt) {
    if (!again) {
      port_ = free_port();
      peer_port_ = free_port();
    }
    const std::string client = absl::StrCat("http://127.0.0.1:", port_);
    const std::string peer = absl::StrCat("http://127.0.0.1:", peer_port_);
    pid_ = spawn({binary,
                  "--name",
                  "default",
                  "--data-dir",
                  directory_ + "/data",
                  "--listen-client-urls",
                  client,
                  "--advertise-client-urls",
                  client,
                  "--listen-peer-urls",
                  peer,
                  "--initial-advertise-peer-urls",
                  peer,
                  "--initial-cluster",
                  "default=" + peer,
                  "--heartbeat-interval",
                  "20",
                  "--election-timeout",
                  "200",
                  "--logger",
                  "zap",
                  "--log-level",
                  "error"},
                 directory_ + "/log");
    const auto store = EtcdStore::connect(
        "127.0.0.1", port_, {.prefix = "ready", .timeout = absl::Seconds(10)}, runtime);
    if (store.ok()) {
      problem_.clear();
      return;
    }
    problem_ = absl::StrCat("etcd does not start: ", std::string(store.status().message()));
    kill();
  }
}

void EtcdProcess::kill() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
}

EtcdProcess::~EtcdProcess() {
  kill();
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

}  // namespace weft::testing
