#ifndef WEFT_RPC_INTERNAL_AGENT_STORE_H_
#define WEFT_RPC_INTERNAL_AGENT_STORE_H_

// torchrun's agent listens on MASTER_PORT with c10d's own store, so rank 0 cannot listen there. One
// value is exchanged through that store, by LibTorch's client for it: the address of ours.

#include <string>

#include "absl/time/time.h"
#include "weft/common/error.h"

namespace weft::internal {

struct AgentStoreAddress {
  std::string host;
  int port = 0;
  std::string key;  // carries the restart count: a value of an earlier life is not met
  absl::Duration timeout = absl::Seconds(60);
};

Status publish_through_agent_store(const AgentStoreAddress& at, const std::string& value);
StatusOr<std::string> read_through_agent_store(const AgentStoreAddress& at);

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_AGENT_STORE_H_
