#ifndef WEFT_TESTS_TESTING_LOOPBACK_H_
#define WEFT_TESTS_TESTING_LOOPBACK_H_

#include <arpa/inet.h>
#include <netinet/in.h>

#include <cstdint>

namespace weft::testing {

// 127.0.0.1, in the order of the network. Port 0: the system chooses.
inline sockaddr_in loopback(int port) {
  sockaddr_in in = {};
  in.sin_family = AF_INET;
  in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  in.sin_port = htons(static_cast<uint16_t>(port));
  return in;
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_LOOPBACK_H_
