#ifndef WEFT_STORE_ETCD_STORE_H_
#define WEFT_STORE_ETCD_STORE_H_

// EtcdStore: a store in an etcd (3.4 or newer) that runs already, through its v3 gRPC API. The data
// outlives every process of the job and is replicated as that etcd is.
//
//   auto store = weft::EtcdStore::connect("10.0.0.5", 2379, {.prefix = "jobs/7f3a"}, runtime);
//
// Keys lie below "<prefix>/k/". Nothing is removed when the job ends: use a prefix of its own for
// every run, and `etcdctl del --prefix <prefix>/` to clean up.
//
// Every operation takes effect at most once, although an etcd client cannot know what became of a
// write whose answer was lost: each change is a transaction on the revision that it saw, and leaves
// a marker below "<prefix>/m/", which the next attempt looks for. Markers have a lease and vanish
// 10 minutes after the client. An operation whose outcome could not be found out for 4 minutes
// fails with kind maybe_executed.
//
// Several endpoints are members of one etcd: one is asked, and when it cannot be reached, or does
// not answer for 5 s, the next in the list. With `ca_file` all of them speak TLS, and their
// certificates must name the host that is dialled. With `user` each request carries a token that
// etcd gave for the password, and a new one when etcd has forgotten it. The job's own Credentials
// are not used: an etcd has authorities of its own.
// Threads: any. A client has no thread of its own.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "weft/common/api.h"
#include "weft/store/delegating_store.h"

namespace weft {

struct EtcdStoreOptions {  // how an EtcdStore is opened
  // Not empty; at most 256 bytes.
  std::string prefix = {};
  // Default for operations that give none, and for connecting: 60 s when unset.
  Timeout timeout = {};
  // The etcd user, when this etcd has users. The user needs the right to read and write keys below
  // "<prefix>/". The password, or a file with it; blanks and line ends around it do not count.
  std::string user = {};
  std::string password = {};
  std::string password_file = {};
  // A password travels without TLS only to this machine, unless this is set.
  bool allow_insecure = false;
  // PEM. TLS when ca_file is set; the other two for an etcd that asks for a client's certificate.
  std::string ca_file = {};
  std::string cert_file = {};
  std::string key_file = {};
};

struct EtcdEndpoint {  // where one member of an etcd listens for clients
  std::string host;
  int port = 2379;  // where etcd listens by default
};

class WEFT_API EtcdStore : public DelegatingStore, public ForkableStore {
 public:
  // Returns when etcd has answered. Fails with unavailable (no member answered in time),
  // unimplemented (something else listens there), permission (etcd requires a user, or another
  // password; a certificate is not trusted), or invalid_argument.
  static StatusOr<std::shared_ptr<EtcdStore>> connect(const std::vector<EtcdEndpoint>& endpoints,
                                                      const EtcdStoreOptions& options,
                                                      std::shared_ptr<Runtime> runtime);
  static StatusOr<std::shared_ptr<EtcdStore>> connect(std::string_view host, int port,
                                                      const EtcdStoreOptions& options,
                                                      std::shared_ptr<Runtime> runtime);
  std::shared_ptr<Store> new_client() override;

 private:
  explicit EtcdStore(std::shared_ptr<Store> inner) : DelegatingStore(std::move(inner)) {}
};

}  // namespace weft

#endif  // WEFT_STORE_ETCD_STORE_H_
