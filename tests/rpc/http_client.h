#ifndef WEFT_TESTS_RPC_HTTP_CLIENT_H_
#define WEFT_TESTS_RPC_HTTP_CLIENT_H_

// A client for the small HTTP servers of a worker. Blocks, with a bound.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "absl/strings/numbers.h"

namespace weft::testing {

// A connection to "127.0.0.1:PORT"; every wait on it is bounded.
class HttpClient {
 public:
  explicit HttpClient(const std::string& address) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    const timeval bound = {20, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &bound, sizeof bound);
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    int port = 0;
    const size_t colon = address.rfind(':');
    if (colon == std::string::npos || !absl::SimpleAtoi(address.substr(colon + 1), &port)) return;
    to.sin_port = htons(static_cast<uint16_t>(port));
    ::inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr);
    connected_ = ::connect(fd_, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0;
  }
  ~HttpClient() { ::close(fd_); }
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  bool connected() const { return connected_; }
  // All that comes until the server closes; "" when there is no server.
  std::string ask(const std::string& request) {
    if (!connected_) return "";
    size_t sent = 0;
    while (sent < request.size()) {
      const ssize_t n = ::send(fd_, request.data() + sent, request.size() - sent, MSG_NOSIGNAL);
      if (n <= 0) return "";
      sent += static_cast<size_t>(n);
    }
    std::string answer;
    char buffer[4096];
    ssize_t n = 0;
    while ((n = ::recv(fd_, buffer, sizeof buffer, 0)) > 0) {
      answer.append(buffer, static_cast<size_t>(n));
    }
    return answer;
  }

 private:
  const int fd_;
  bool connected_ = false;
};

inline std::string http_get(const std::string& address, const std::string& path = "/metrics") {
  HttpClient client(address);
  return client.ask("GET " + path + " HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_RPC_HTTP_CLIENT_H_
