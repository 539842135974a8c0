#include "weft/collectives/internal/shm_mesh.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <utility>

#include "absl/strings/escaping.h"
#include "weft/collectives/internal/mesh.h"
#include "weft/collectives/internal/text.h"
#include "weft/common/call_scope.h"
#include "weft/proto/collectives.pb.h"
#include "weft/transport/local_socket.h"

namespace weft::internal {
namespace {

std::string link_text(const char* path) {
  char text[128];
  const ssize_t n = readlink(path, text, sizeof text);
  return n > 0 ? std::string(text, static_cast<size_t>(n)) : std::string();
}

class ShmConnector : Mesh {
 public:
  ShmConnector(const Membership& member, const ShmListener& listener,
               const std::vector<ShmMember>& members, const std::vector<bool>& apart,
               absl::FunctionRef<Status()> given_up, Runtime& runtime, absl::Time deadline)
      : Mesh(member, identities_of(members), apart, given_up, runtime, deadline),
        listener_(listener),
        members_(members) {
    mesh_.files = std::make_shared<ShmFiles>(member.size);
    mesh_.files->by_rank.resize(static_cast<size_t>(member.size));
    mesh_.sockets.resize(static_cast<size_t>(member.size));
  }

  StatusOr<ShmMesh> run() {
    const auto own = static_cast<size_t>(member_.rank);
    mesh_.files->by_rank[own] = std::make_unique<ShmFile>(mesh_.files->layout, listener_.file);
    mesh_.files->heap = std::make_shared<ShmHeap>(mesh_.files->layout, listener_.file);
    for (int peer = 0; peer < member_.rank; ++peer) {
      if (!apart(peer)) WEFT_RETURN_IF_ERROR(dial(peer));
    }
    WEFT_RETURN_IF_ERROR(accept_all());
    for (int peer = 0; peer < member_.rank; ++peer) {
      if (!apart(peer)) WEFT_RETURN_IF_ERROR(await_answer(peer));
    }
    return std::move(mesh_);
  }

 private:
  Status greet(int fd) {
    const int file = listener_.file->fd();
    return send_local(fd, own_hello().SerializeAsString(), {&file, 1});
  }

  Status dial(int peer) {
    const std::string where = cat("rank ", peer, " by its private socket");
    auto made = connect_local(members_[static_cast<size_t>(peer)].name);
    if (!made.ok()) return annotate(made.status(), cat("cannot reach ", where));
    WEFT_ASSIGN_OR_RETURN(const uid_t user, peer_user(made->get()));
    if (user != geteuid()) {
      return make_error(ErrorKind::kPermission, cat(where, " belongs to another user"));
    }
    WEFT_RETURN_IF_ERROR(annotate(greet(made->get()), cat("cannot greet ", where)));
    mesh_.sockets[static_cast<size_t>(peer)] = *std::move(made);
    return absl::OkStatus();
  }

  // Whether the message is the right hello of that peer; its file is then mapped.
  Status take_in(LocalMessage* message, int peer) {
    wire::GroupHello hello;
    const bool right =
        hello.ParseFromString(message->bytes) && fits(hello, peer) && message->files.size() == 1;
    if (!right) {
      return make_error(ErrorKind::kProtocol,
                        cat("rank ", peer, " does not greet as a member of this group"));
    }
    WEFT_ASSIGN_OR_RETURN(
        std::shared_ptr<MemoryFile> file,
        MemoryFile::adopt_to_read(std::move(message->files[0]), mesh_.files->layout.total));
    mesh_.files->by_rank[static_cast<size_t>(peer)] =
        std::make_unique<ShmFile>(mesh_.files->layout, std::move(file));
    return absl::OkStatus();
  }

  Status accept_all() {
    int missing = 0;
    for (int peer = member_.rank + 1; peer < member_.size; ++peer) missing += apart(peer) ? 0 : 1;
    std::vector<UniqueFd> waiting;
    BlockingRegion region;
    WEFT_RETURN_IF_ERROR(region.status());
    while (missing > 0) {
      if (over()) {
        return late("the private socket",
                    [this](int peer) { return !mesh_.sockets[static_cast<size_t>(peer)].valid(); });
      }
      std::vector<pollfd> fds{{listener_.fd.get(), POLLIN, 0}};
      for (const UniqueFd& one : waiting) fds.push_back({one.get(), POLLIN, 0});
      if (poll(fds.data(), fds.size(), milliseconds_left()) == 0) {
        WEFT_RETURN_IF_ERROR(given_up_());
      }
      for (size_t i = 0; i < waiting.size();) {
        auto message = receive_local(waiting[i].get());
        if (message.ok() && message->what == LocalMessage::What::kNothingYet) {
          ++i;
          continue;
        }
        if (message.ok() && message->what == LocalMessage::What::kMessage) {
          WEFT_RETURN_IF_ERROR(welcome(&waiting[i], &*message, &missing));
        }
        waiting.erase(waiting.begin() + static_cast<ptrdiff_t>(i));
      }
      while (true) {
        UniqueFd fd = accept_local(listener_.fd.get());
        if (!fd.valid()) break;
        const auto user = peer_user(fd.get());
        if (user.ok() && *user == geteuid()) waiting.push_back(std::move(fd));
      }
    }
    return absl::OkStatus();
  }

  // Of a stranger: nothing.
  Status welcome(UniqueFd* fd, LocalMessage* message, int* missing) {
    wire::GroupHello hello;
    if (!hello.ParseFromString(message->bytes)) return absl::OkStatus();
    const int peer = dialling_rank(hello);
    if (peer < 0 || apart(peer)) return absl::OkStatus();
    UniqueFd& place = mesh_.sockets[static_cast<size_t>(peer)];
    if (place.valid() || !take_in(message, peer).ok()) return absl::OkStatus();
    WEFT_RETURN_IF_ERROR(annotate(greet(fd->get()), cat("cannot answer rank ", peer)));
    place = std::move(*fd);
    --*missing;
    return absl::OkStatus();
  }

  Status await_answer(int peer) {
    const int fd = mesh_.sockets[static_cast<size_t>(peer)].get();
    while (true) {
      WEFT_ASSIGN_OR_RETURN(LocalMessage message, receive_local(fd));
      if (message.what == LocalMessage::What::kMessage) return take_in(&message, peer);
      if (message.what == LocalMessage::What::kEnd) {
        return make_error(ErrorKind::kUnavailable,
                          cat("rank ", peer, " has closed its private socket"));
      }
      WEFT_RETURN_IF_ERROR(wait(fd, POLLIN, peer, "to answer a hello"));
    }
  }

  static std::vector<uint64_t> identities_of(const std::vector<ShmMember>& members) {
    std::vector<uint64_t> out;
    for (const ShmMember& one : members) out.push_back(one.identity);
    return out;
  }

  const ShmListener& listener_;
  const std::vector<ShmMember>& members_;
  ShmMesh mesh_;
};

}  // namespace

std::string shm_host() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  if (boot.empty()) return {};
  return cat(boot, " ", static_cast<uint64_t>(geteuid()), " ", link_text("/proc/self/ns/net"), " ",
             link_text("/proc/self/ns/user"));
}

StatusOr<ShmListener> ShmListener::make(int size, Runtime& runtime) {
  ShmListener out;
  WEFT_ASSIGN_OR_RETURN(out.file, make_shm_file(size));
  out.name = "weft-group-" + absl::BytesToHexString(view(random_bytes(runtime.random(), 16)));
  WEFT_ASSIGN_OR_RETURN(out.fd, listen_local(out.name, SOCK_SEQPACKET, std::max(size, 16)));
  return out;
}

StatusOr<ShmMesh> connect_shm(const Membership& member, const ShmListener& listener,
                              const std::vector<ShmMember>& members, const std::vector<bool>& apart,
                              absl::FunctionRef<Status()> given_up, Runtime& runtime,
                              absl::Time deadline) {
  return ShmConnector(member, listener, members, apart, given_up, runtime, deadline).run();
}

}  // namespace weft::internal
