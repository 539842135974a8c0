#ifndef WEFT_RPC_INTERNAL_RENDEZVOUS_H_
#define WEFT_RPC_INTERNAL_RENDEZVOUS_H_

// Which store a worker uses when none is given: by URL, or from its launcher's variables.

#include <memory>
#include <string>

#include "weft/common/api.h"
#include "weft/common/config.h"
#include "weft/rpc/credentials.h"
#include "weft/rpc/store.h"

namespace weft::internal {

struct RendezvousOptions {
  std::string url;  // "" or "env://": from the variables
  Config config;
  Environment environment;
  bool is_first = false;  // rank 0: hosts a tcp store
  bool alone = false;     // the only worker: a store of its own will do
  absl::Duration timeout = absl::Seconds(60);
  Credentials credentials{};  // of a tcp store
};

// A store of the job's own that its workers must clear away (found by dynamic_cast). Whoever lets
// go of it last does.
class SharedPlace {
 public:
  virtual ~SharedPlace() = default;
  // This worker has shut down together with the others: the first one may wait for them, because
  // they are about to let go too. Without this nobody is waited for.
  virtual void others_are_leaving() = 0;
};

WEFT_API StatusOr<std::shared_ptr<Store>> open_rendezvous_store(const RendezvousOptions& options,
                                                                std::shared_ptr<Runtime> runtime);

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_RENDEZVOUS_H_
