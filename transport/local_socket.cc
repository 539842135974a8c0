#include "weft/transport/local_socket.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"

namespace weft::internal {
namespace {

// Maximum number of files in one message; more are closed unseen, and the message is refused.
constexpr size_t kMaxFiles = 4;

struct AbstractName {
  sockaddr_un un = {};
  socklen_t length = 0;
};

std::optional<AbstractName> abstract_name(std::string_view name) {
  AbstractName out;
  out.un.sun_family = AF_UNIX;
  if (name.empty() || name.size() + 1 > sizeof out.un.sun_path) return std::nullopt;
  std::memcpy(out.un.sun_path + 1, name.data(), name.size());
  out.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return out;
}

Status failed(ErrorKind kind, const char* what, std::string_view name, int code) {
  return make_error(kind, absl::StrCat("cannot ", what, " the local socket @", view(name), ": ",
                                       system_error(code)));
}

Status bad_name(std::string_view name) {
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("a local socket's name of ", name.size(), " bytes"));
}

}  // namespace

StatusOr<UniqueFd> listen_local(std::string_view name, int type, int backlog) {
  const std::optional<AbstractName> at = abstract_name(name);
  if (!at.has_value()) return bad_name(name);
  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return failed(ErrorKind::kResource, "make", name, errno);
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&at->un), at->length) != 0) {
    return failed(ErrorKind::kResource, "bind", name, errno);
  }
  if (listen(fd.get(), backlog) != 0) {
    return failed(ErrorKind::kResource, "listen on", name, errno);
  }
  return fd;
}

StatusOr<UniqueFd> connect_local(std::string_view name, int type) {
  const std::optional<AbstractName> at = abstract_name(name);
  if (!at.has_value()) return bad_name(name);
  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return failed(ErrorKind::kResource, "make", name, errno);
  int result;
  do {
    result = connect(fd.get(), reinterpret_cast<const sockaddr*>(&at->un), at->length);
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    return failed(errno == EAGAIN ? ErrorKind::kResource : ErrorKind::kUnavailable, "connect to",
                  name, errno);
  }
  return fd;
}

UniqueFd accept_local(int listener) {
  int fd;
  do {
    fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  } while (fd < 0 && (errno == EINTR || errno == ECONNABORTED));
  return UniqueFd(fd);
}

bool local_name_is_taken(std::string_view name) {
  const std::optional<AbstractName> at = abstract_name(name);
  if (!at.has_value()) return false;
  const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return fd.valid() &&
         bind(fd.get(), reinterpret_cast<const sockaddr*>(&at->un), at->length) != 0 &&
         errno == EADDRINUSE;
}

StatusOr<uid_t> peer_user(int fd) {
  ucred who = {};
  socklen_t length = sizeof who;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &length) != 0) {
    return make_error(
        ErrorKind::kPermission,
        absl::StrCat("cannot tell whose local socket this is: ", system_error(errno)));
  }
  return who.uid;
}

Status send_local(int fd, std::string_view bytes, absl::Span<const int> files) {
  iovec part = {const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFiles)] = {};
  if (!files.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * files.size());
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * files.size());
    std::memcpy(CMSG_DATA(header), files.data(), sizeof(int) * files.size());
  }
  ssize_t sent;
  do {
    sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) {
    return make_error(ErrorKind::kUnavailable,
                      absl::StrCat("cannot send to a local socket: ", system_error(errno)));
  }
  return absl::OkStatus();
}

StatusOr<LocalMessage> receive_local(int fd) {
  LocalMessage out;
  out.bytes.resize(kMaxLocalMessage);
  iovec part = {out.bytes.data(), out.bytes.size()};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFiles)] = {};
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got;
  bool reset = false;
  do {
    got = recvmsg(fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    // A peer that closes with something unread is told once as a reset, before what it has sent.
  } while (got < 0 && (errno == EINTR || (errno == ECONNRESET && !std::exchange(reset, true))));
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    out.bytes.clear();
    return out;
  }
  if (got <= 0) {
    out.what = LocalMessage::What::kEnd;
    out.bytes.clear();
    return out;
  }
  // Whatever came is owned before anything is checked, so that a refusal closes it.
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t n = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < n; ++i) {
      int file;
      std::memcpy(&file, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      out.files.emplace_back(file);
    }
  }
  if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    return make_error(ErrorKind::kProtocol,
                      absl::StrCat("a local message of more than ", kMaxLocalMessage, " bytes or ",
                                   kMaxFiles, " files"));
  }
  out.what = LocalMessage::What::kMessage;
  out.bytes.resize(static_cast<size_t>(got));
  return out;
}

}  // namespace weft::internal
