// Leaving a group without harm (DRAIN-8): new calls are refused, in both directions, and peers say
// when they have the answers to theirs.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/rpc/internal/agent/agent_job.h"

namespace weft::internal {
namespace {

constexpr std::string_view kLeavingSignature = "()->none";

bool is_of_service(std::string_view method) { return !method.empty() && method[0] == '@'; }

template <class Chain>
bool in_chain(const Chain& chain, uint64_t incarnation) {
  return std::find(chain.begin(), chain.end(), incarnation) != chain.end();
}

Status is_leaving(std::string_view name) {
  return make_error(ErrorKind::kState,
                    absl::StrCat("worker '", std::string(name),
                                 "' is leaving: it lets calls end and takes part in no new ones"));
}

}  // namespace

Method Agent::leaving_method() {
  Method method;
  method.name = kLeavingMethod;
  method.signature = kLeavingSignature;
  method.inline_ok = true;
  method.waiting_ok = true;
  method.invoke = [this](CallContext& context, const std::shared_ptr<void>&, Payload,
                         ReplyFn reply) { on_leaving(context.caller(), std::move(reply)); };
  return method;
}

Status Agent::check_leaving_locked(const Pending& call, const CallScope* scope,
                                   const Peer& peer) const {
  if (is_of_service(call.spec->call.method)) return absl::OkStatus();
  // For a call that has begun before: its handler here makes this one, or the peer waits for it.
  if (leaving_ && scope == nullptr) return is_leaving(options_.self.name);
  if (peer.leaving && (scope == nullptr || !in_chain(scope->chain, peer.info.incarnation))) {
    return is_leaving(peer.info.name);
  }
  return absl::OkStatus();
}

Status Agent::check_leaving_locked(const v1::CallHeader& header, uint64_t caller) const {
  const uint64_t self = options_.self.incarnation;
  if (is_of_service(header.method()) || caller == self || in_chain(header.chain(), self)) {
    return absl::OkStatus();
  }
  return is_leaving(options_.self.name);
}

void Agent::begin_leaving(absl::Time deadline) {
  std::vector<WorkerInfo> peers;
  {
    MutexLock lock(&mutex_);
    leaving_ = true;
    for (const auto& [incarnation, peer] : peers_) {
      if (incarnation == options_.self.incarnation || peer->links.empty()) continue;
      if (peer->gone.ok()) peers.push_back(peer->info);
    }
  }
  for (const WorkerInfo& peer : peers) {
    UntypedCall call;
    call.method = std::string(kLeavingMethod);
    call.signature = kLeavingSignature;
    call.options.deadline = deadline - now();
    // A peer that dies or leaves meanwhile has nothing of ours to wait for.
    start_call(Destination(peer), std::move(call), [](const StatusOr<Payload>&) {});
  }
}

void Agent::on_leaving(const WorkerInfo& from, ReplyFn reply) {
  std::vector<ReplyFn> ended;
  {
    MutexLock lock(&mutex_);
    const auto it = peers_.find(from.incarnation);
    if (it == peers_.end()) return;
    it->second->leaving = true;
    it->second->when_ended.push_back(std::move(reply));
    ended = ended_with_locked(it->second.get());
  }
  for (ReplyFn& tell : ended) tell(Payload());
}

std::vector<ReplyFn> Agent::ended_with_locked(Peer* peer) {
  for (const auto& [id, call] : pending_) {
    if (call.to.incarnation == peer->info.incarnation && !call.notice) return {};
  }
  return std::exchange(peer->when_ended, {});
}

}  // namespace weft::internal
