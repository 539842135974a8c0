#ifndef WEFT_TESTS_CONTRACT_ETCD_PROCESS_H_
#define WEFT_TESTS_CONTRACT_ETCD_PROCESS_H_

// A real etcd on free loopback ports, with a data directory of its own that is removed at the end.

#include <sys/types.h>

#include <string>

namespace weft::testing {

class EtcdProcess {
 public:
  // Why there is none on this machine; empty when there is.
  static std::string missing();

  EtcdProcess() { start(); }
  ~EtcdProcess();
  EtcdProcess(const EtcdProcess&) = delete;
  EtcdProcess& operator=(const EtcdProcess&) = delete;

  // Empty when it runs.
  const std::string& problem() const { return problem_; }
  int port() const { return port_; }

  // Ends it (SIGKILL); start() goes on with the same port and data.
  void kill();
  void start();

 private:
  std::string directory_;
  std::string problem_;
  int port_ = 0;
  int peer_port_ = 0;
  pid_t pid_ = -1;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_CONTRACT_ETCD_PROCESS_H_
