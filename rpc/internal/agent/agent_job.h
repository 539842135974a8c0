#ifndef WEFT_RPC_INTERNAL_AGENT_AGENT_JOB_H_
#define WEFT_RPC_INTERNAL_AGENT_AGENT_JOB_H_

// A request on its way through the callee's side of the agent.

#include <atomic>
#include <memory>

#include "weft/rpc/call_context.h"
#include "weft/rpc/internal/agent/agent.h"

namespace weft::internal {

// Services judge their own messages: what comes late may be what gives something back.
inline bool is_service(const Method& method) { return method.name[0] == '@'; }

// NOLINTNEXTLINE(readability-identifier-naming): declared in agent.h
struct Agent::Job final : public IncomingRequest {
  // A job that waits is given up by the thread that moves it from kWaiting to kOver.
  enum class Phase : uint8_t { kArriving, kWaiting, kRunning, kOver };

  virtual ~Job();

  CallContext& context() override { return *call; }
  const Method& method() const override { return *callee; }
  Payload& arguments() override { return payload; }
  void set_target(TargetObject object_of_reference) override {
    target = std::move(object_of_reference);
  }
  void keep_result(KeepFn fn) override { keep = std::move(fn); }
  void set_slot(std::string_view name, std::shared_ptr<void> value) override {
    scope->slots[std::string(name)] = std::move(value);
  }
  void on_end(absl::AnyInvocable<void()> fn) override { ends.push_back(std::move(fn)); }
  // The streams of the object that the call runs on; null when it has no turn.
  ObjectStreams* streams() const { return turns == nullptr ? nullptr : &turns->streams(); }

  std::shared_ptr<Link> link;
  std::shared_ptr<const v1::CallHeader> header;
  Payload payload;
  const Method* callee = nullptr;
  std::shared_ptr<void> object;
  GuardRef object_after;  // null: it is there
  ObjectTurns* turns = nullptr;
  uint64_t turn = 0;
  std::atomic<bool> turn_over{false};
  std::atomic<Phase> phase{Phase::kArriving};
  std::atomic<bool> has_turn{false};  // or waits for it
  CancelToken cancel;
  absl::Time arrived;
  absl::Time deadline = absl::InfiniteFuture();
  // When it waits still it is given up a little before, so that its caller hears of it.
  absl::Time start_by = absl::InfiniteFuture();
  // The bytes of the request in the receive budget, until the handler takes the arguments.
  std::shared_ptr<const void> charge;
  std::shared_ptr<Executor> pool;
  // Lives until the reply, as handlers were promised.
  std::unique_ptr<CallContext> call;
  // Before the handler runs it may still be added to.
  std::shared_ptr<CallScope> scope;
  std::shared_ptr<const DeviceRoute> back;  // of its result; null: on the CPU
  std::atomic<bool> replied{false};

  // For interceptors.
  std::shared_ptr<Agent> asking;  // while they are asked: the agent, and whose turn it is
  int step = 0;
  v1::ErrorHeader::Reach reach = v1::ErrorHeader::NOT_TAKEN;
  TargetObject target;
  KeepFn keep;  // null: the result is sent
  std::vector<absl::AnyInvocable<void()>> ends;
  AttachmentsRef attachments;  // of its answer
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_AGENT_AGENT_JOB_H_
