// Two workers that prove to each other who they are: TLS with a certificate for each name, and a
// token that all workers of the job have (docs/security.md).
//   examples/secure_rpc/make_credentials.sh DIR worker0 worker1
//   build/bin/weftrun -n 2 build/bin/secure_rpc DIR
// weftrun --tls auto does all of that for any program; this one brings credentials of its own.

#include <cstdlib>
#include <iostream>
#include <string>

#include "weft/weft.h"

// The name was proved by a certificate: no worker can call under that of another.
std::string who_calls(weft::CallContext& context) { return context.caller().name; }

int main(int argc, char** argv) {
  const char* const launched_as = std::getenv("WEFT_NAME");  // by weftrun
  if (argc != 2 || launched_as == nullptr) {
    std::cerr << "usage: weftrun -n 2 secure_rpc DIR\n"
                 "DIR has ca.pem, token, and NAME.pem and NAME.key for each worker\n";
    return 2;
  }
  const std::string dir = std::string(argv[1]) + "/";
  const std::string name = launched_as;

  weft::Library library("secure");
  library.def("who_calls", &who_calls);
  auto worker = weft::try_join({.name = name,
                                .library = library,
                                .credentials = {.ca_file = dir + "ca.pem",
                                                .cert_file = dir + name + ".pem",
                                                .key_file = dir + name + ".key",
                                                .token_file = dir + "token"}});
  if (!worker.ok()) {
    std::cerr << name << ": " << worker.status().message() << std::endl;
    return 1;
  }

  const int neighbour = (worker->rank() + 1) % worker->world_size();
  const std::string seen = weft::rpc_sync(*worker, neighbour, &who_calls);
  std::cout << name << " is " << seen << " to its neighbour" << std::endl;

  return worker->shutdown().status.ok() ? 0 : 1;
}
