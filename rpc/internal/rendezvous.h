#ifndef WEFT_RPC_INTERNAL_RENDEZVOUS_H_
#define WEFT_RPC_INTERNAL_RENDEZVOUS_H_

// Which store a worker uses when none is given: by URL, or from its launcher's variables.

#include <memory>
#include <string>

#include "weft/common/config.h"
#include "weft/rpc/store.h"

namespace weft::internal {

struct RendezvousOptions {
  std::string url;  // "" or "env://": from the variables
  Config config;
  Environment environment;
  bool is_first = false;  // rank 0: hosts a tcp store
  bool alone = false;     // the only worker: a store of its own will do
  absl::Duration timeout = absl::Seconds(60);
};

StatusOr<std::shared_ptr<Store>> open_rendezvous_store(const RendezvousOptions& options,
                                                       std::shared_ptr<Runtime> runtime);

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_RENDEZVOUS_H_
