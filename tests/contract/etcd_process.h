#ifndef WEFT_TESTS_CONTRACT_ETCD_PROCESS_H_
#define WEFT_TESTS_CONTRACT_ETCD_PROCESS_H_

// A real etcd on free loopback ports, with a data directory of its own that is removed at the end:
// one member, or several on one host; in plain text or over TLS.

#include <sys/types.h>

#include <string>
#include <vector>

#include "weft/store/etcd_store.h"

namespace weft::testing {

struct EtcdSetup {
  int members = 1;
  // PEM files, when it speaks TLS: the server's certificate, and the authority of clients, which
  // are then asked for one.
  std::string cert_file = {};
  std::string key_file = {};
  std::string client_ca_file = {};
};

class EtcdProcess {
 public:
  // Why there is none on this machine; empty when there is.
  static std::string missing();

  // `client`: how it is reached, to see that it runs.
  explicit EtcdProcess(EtcdSetup setup = {}, EtcdStoreOptions client = {});
  ~EtcdProcess();
  EtcdProcess(const EtcdProcess&) = delete;
  EtcdProcess& operator=(const EtcdProcess&) = delete;

  // Empty when it runs.
  const std::string& problem() const { return problem_; }
  int port(size_t member = 0) const { return members_[member].port; }
  // "localhost", which certificates can name, and the port of each member.
  std::vector<EtcdEndpoint> endpoints() const;

  // Ends one member (SIGKILL); start() goes on with the same ports and data.
  void kill(size_t member = 0);
  void start();  // every member that does not run

  // Makes `root`, and `user` with the right to read and write below "<prefix>/" alone; from then on
  // nothing is answered without a user. Empty, or what went wrong.
  std::string enable_users(const std::string& user, const std::string& password,
                           const std::string& prefix);

 private:
  struct Member {
    int port = 0;
    int peer_port = 0;
    pid_t pid = -1;
  };
  void launch(size_t member);
  void choose_ports();

  const EtcdSetup setup_;
  EtcdStoreOptions client_;
  std::string directory_;
  std::string problem_;
  std::vector<Member> members_;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_CONTRACT_ETCD_PROCESS_H_
