#include "weft/tests/contract/etcd_process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/common/runtime.h"
#include "weft/proto/etcd.pb.h"
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

// A length-delimited field of a message that weft does not define.
std::string field(int number, const std::string& bytes) {
  return absl::StrCat(std::string(1, static_cast<char>(number << 3 | 2)),
                      std::string(1, static_cast<char>(bytes.size())), bytes);
}

// One call of etcd's Auth service in plain text: the text of the error, or nothing.
std::string auth_call(int port, const std::string& method, const std::string& request,
                      const std::string& token) {
  const auto channel =
      grpc::CreateChannel(absl::StrCat("localhost:", port), grpc::InsecureChannelCredentials());
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  if (!token.empty()) context.AddMetadata("token", token);
  const grpc::Slice slice(request);
  const grpc::ByteBuffer bytes(&slice, 1);
  grpc::ByteBuffer reply;
  grpc::Status status;
  grpc::CompletionQueue queue;
  auto call = stub.PrepareUnaryCall(&context, "/etcdserverpb.Auth/" + method, bytes, &queue);
  call->StartCall();
  call->Finish(&reply, &status, &context);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  return status.ok() ? "" : absl::StrCat(method, ": ", status.error_message());
}

}  // namespace

std::string EtcdProcess::missing() {
  return find_etcd().empty() ? "etcd is not installed (Debian: etcd-server)" : "";
}

EtcdProcess::EtcdProcess(EtcdSetup setup, EtcdStoreOptions client)
    : setup_(std::move(setup)), client_(std::move(client)), directory_(make_temp_dir()) {
  client_.prefix = "ready";
  client_.timeout = absl::Seconds(20);
  for (int attempt = 0; attempt < 5; ++attempt) {
    choose_ports();
    start();
    if (problem_.empty()) return;
    for (size_t i = 0; i < members_.size(); ++i) kill(i);
    std::error_code ignored;
    std::filesystem::remove_all(directory_ + "/data", ignored);
  }
}

void EtcdProcess::choose_ports() {
  members_.assign(static_cast<size_t>(setup_.members), {});
  for (Member& member : members_) {
    member.port = free_port();
    member.peer_port = free_port();
  }
}

std::vector<EtcdEndpoint> EtcdProcess::endpoints() const {
  std::vector<EtcdEndpoint> out;
  for (const Member& member : members_) out.push_back({"localhost", member.port});
  return out;
}

void EtcdProcess::launch(size_t i) {
  Member& member = members_[i];
  const auto name = [](size_t k) { return absl::StrCat("m", k); };
  const auto peer = [this](size_t k) {
    return absl::StrCat("http://127.0.0.1:", members_[k].peer_port);
  };
  std::string all;
  for (size_t k = 0; k < members_.size(); ++k) {
    absl::StrAppend(&all, k == 0 ? "" : ",", name(k), "=", peer(k));
  }
  const bool has_tls = !setup_.cert_file.empty();
  const std::string url = absl::StrCat(has_tls ? "https" : "http", "://127.0.0.1:", member.port);
  std::vector<std::string> command = {find_etcd(),
                                      "--name",
                                      name(i),
                                      "--data-dir",
                                      absl::StrCat(directory_, "/data/", name(i)),
                                      "--listen-client-urls",
                                      url,
                                      "--advertise-client-urls",
                                      url,
                                      "--listen-peer-urls",
                                      peer(i),
                                      "--initial-advertise-peer-urls",
                                      peer(i),
                                      "--initial-cluster",
                                      all,
                                      "--heartbeat-interval",
                                      "20",
                                      "--election-timeout",
                                      "200",
                                      "--bcrypt-cost",
                                      "4",
                                      "--logger",
                                      "zap",
                                      "--log-level",
                                      "error"};
  const auto option = [&command](const char* flag, const std::string& value) {
    if (!value.empty()) command.insert(command.end(), {flag, value});
  };
  option("--cert-file", setup_.cert_file);
  option("--key-file", setup_.key_file);
  option("--trusted-ca-file", setup_.client_ca_file);
  if (!setup_.client_ca_file.empty()) command.push_back("--client-cert-auth");
  member.pid = spawn(command, directory_ + "/log");
}

void EtcdProcess::start() {
  std::error_code ignored;
  std::filesystem::create_directories(directory_ + "/data", ignored);
  for (size_t i = 0; i < members_.size(); ++i) {
    if (members_[i].pid <= 0) launch(i);
  }
  const auto store = EtcdStore::connect(endpoints(), client_, make_system_runtime());
  problem_ = store.ok()
                 ? ""
                 : absl::StrCat("etcd does not start: ", std::string(store.status().message()));
}

void EtcdProcess::kill(size_t i) {
  Member& member = members_[i];
  if (member.pid <= 0) return;
  ::kill(member.pid, SIGKILL);
  while (::waitpid(member.pid, nullptr, 0) < 0 && errno == EINTR) {
  }
  member.pid = -1;
}

std::string EtcdProcess::enable_users(const std::string& user, const std::string& password,
                                      const std::string& prefix) {
  // type READWRITE, all keys from "<prefix>/" to before "<prefix>0".
  const std::string permission =
      std::string("\x08\x02", 2) + field(2, prefix + "/") + field(3, prefix + "0");
  const std::vector<std::pair<std::string, std::string>> calls = {
      {"UserAdd", field(1, "root") + field(2, "of the root")},
      {"RoleAdd", field(1, "root")},
      {"UserGrantRole", field(1, "root") + field(2, "root")},
      {"UserAdd", field(1, user) + field(2, password)},
      {"RoleAdd", field(1, "job")},
      {"RoleGrantPermission", field(1, "job") + field(2, permission)},
      {"UserGrantRole", field(1, user) + field(2, "job")},
      {"AuthEnable", ""},
  };
  for (const auto& [method, request] : calls) {
    const std::string error = auth_call(port(), method, request, "");
    if (!error.empty()) return error;
  }
  client_.user = user;
  client_.password = password;
  client_.prefix = prefix + "/ready";
  return "";
}

EtcdProcess::~EtcdProcess() {
  for (size_t i = 0; i < members_.size(); ++i) kill(i);
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

}  // namespace weft::testing
