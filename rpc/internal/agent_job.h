#ifndef WEFT_RPC_INTERNAL_AGENT_JOB_H_
#define WEFT_RPC_INTERNAL_AGENT_JOB_H_

// A request on its way through the callee's side of the agent.

#include <atomic>
#include <memory>

#include "weft/rpc/call_context.h"
#include "weft/rpc/internal/agent.h"

namespace weft::internal {

// NOLINTNEXTLINE(readability-identifier-naming): declared in agent.h
struct Agent::Job {
  std::shared_ptr<Link> link;
  std::shared_ptr<const v1::CallHeader> header;
  Payload arguments;
  const Method* method = nullptr;
  std::shared_ptr<void> object;
  ObjectTurns* turns = nullptr;
  uint64_t turn = 0;
  absl::Time deadline = absl::InfiniteFuture();
  // Lives until the reply, as handlers were promised.
  std::unique_ptr<CallContext> context;
  // Before the handler runs it may still be added to.
  std::shared_ptr<CallScope> scope;
  std::shared_ptr<const DeviceRoute> back;  // of its result; null: on the CPU
  std::atomic<bool> replied{false};
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_AGENT_JOB_H_
