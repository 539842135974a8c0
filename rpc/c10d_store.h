#ifndef WEFT_RPC_C10D_STORE_H_
#define WEFT_RPC_C10D_STORE_H_

// torchrun's agent listens on MASTER_PORT with c10d's own store, so rank 0 cannot listen there. One
// value is exchanged through that store, by LibTorch's client for it: the address of ours.

#include <memory>
#include <string_view>

#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/runtime.h"
#include "weft/store/store.h"

namespace weft {

// The rendezvous scheme "c10d": c10d://host:port?key=K&listen=HOST[&allow_insecure=1]. The server
// (options.is_server) hosts a tcp store on HOST and writes its URL under K, the others read it
// there and connect. K carries the restart count, so that a value of an earlier life is not met.
// Threads: any; waits up to options.timeout.
WEFT_API StatusOr<std::shared_ptr<Store>> open_c10d_store(std::string_view url,
                                                          const StoreOptions& options,
                                                          std::shared_ptr<Runtime> runtime);

}  // namespace weft

#endif  // WEFT_RPC_C10D_STORE_H_
