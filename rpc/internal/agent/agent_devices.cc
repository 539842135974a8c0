// The agent's part in tensors on devices: what is copied before a call is sent, after an answer has come and before a
// request is looked at, and in whose scope. DeviceCopier copies.

#include <utility>

#include "weft/rpc/internal/agent/agent_job.h"

namespace weft::internal {

StatusOr<std::shared_ptr<const DeviceRoute>> Agent::find_route(const Destination& to,
                                                               const Payload& payload) const {
  const bool says_itself = payload.devices != nullptr && !payload.devices->targets.empty();
  if (!says_itself && !copier_.has_devices()) return std::shared_ptr<const DeviceRoute>();
  const MemberListRef list = members();
  WEFT_ASSIGN_OR_RETURN(const Member* member, list->resolve(to));
  if (says_itself) return copier_.explicit_route(*member, payload);
  return copier_.route_to(*member);
}

HostMemory Agent::shared_memory() {
  MutexLock lock(&mutex_);
  return [transport = std::weak_ptr<Transport>(transport_)](size_t bytes) {
    // What is smaller goes within a frame.
    const std::shared_ptr<Transport> here = bytes > kMaxBatchBytes ? transport.lock() : nullptr;
    return here == nullptr ? nullptr : here->allocate_shared(bytes);
  };
}

void Agent::stage_call(uint64_t call_id, const std::shared_ptr<const Unstaged>& unstaged) {
  const std::weak_ptr<Agent> weak = weak_from_this();
  copier_.stage(unstaged, shared_memory(), [weak, call_id](const Status& staged) {
    const auto self = weak.lock();
    if (self == nullptr) return;
    if (!staged.ok()) return self->complete(call_id, staged, false);
    {
      MutexLock lock(&self->mutex_);
      auto it = self->pending_.find(call_id);
      if (it == self->pending_.end()) return;  // given up meanwhile
      it->second.on(CallEvent::kStaged);
    }
    self->transmit(call_id);
  });
}

void Agent::land_answer(uint64_t call_id, Payload payload, std::shared_ptr<Metadata> metadata) {
  std::shared_ptr<const DeviceRoute> route;
  std::shared_ptr<Link> link;
  {
    MutexLock lock(&mutex_);
    auto it = pending_.find(call_id);
    if (it != pending_.end()) {
      route = it->second.spec->route;
      it->second.answered = true;
      // The answer is here: what becomes of its connection does not matter to the call any more.
      link = std::move(it->second.link);
      it->second.link = nullptr;
      if (link != nullptr) --link->pending;
    }
  }
  if (link != nullptr) close_if_drained(link);
  std::vector<DeviceCode> ours;
  if (route != nullptr && route->wrong.empty()) ours = own_devices(*route);
  std::shared_ptr<DeviceWork> work;
  if (!ours.empty()) {
    StatusOr<std::shared_ptr<DeviceWork>> made = copier_.make_work(ours);
    if (!made.ok()) return complete(call_id, made.status(), false);
    work = *std::move(made);
  }
  const std::weak_ptr<Agent> weak = weak_from_this();
  copier_.land(std::move(payload), ours, std::move(work),
               [weak, call_id, metadata = std::move(metadata)](StatusOr<Payload> landed) {
                 const auto self = weak.lock();
                 if (self == nullptr) return;
                 if (landed.ok() && metadata != nullptr) {
                   return self->receive_answer(call_id, *std::move(landed), metadata);
                 }
                 self->complete(call_id, std::move(landed), false);
               });
}

void Agent::land_request(const std::shared_ptr<Job>& job) {
  auto back = std::make_shared<DeviceRoute>();
  back->to = job->call->caller().name;
  StatusOr<DevicePairs> read = copier_.read_map(*job->header);
  if (!read.ok()) return reply(job, read.status());
  back->pairs = *std::move(read);
  const std::vector<DeviceCode> ours = own_devices(*back);
  job->back = std::move(back);
  std::shared_ptr<DeviceWork> work;
  if (copier_.has_devices() && !ours.empty()) {
    StatusOr<std::shared_ptr<DeviceWork>> made = copier_.make_work(ours);
    if (!made.ok()) return reply(job, made.status());
    work = *std::move(made);
    job->scope->attachment = work;
  }
  if (job->payload.devices == nullptr) return look_at(job);
  copier_.land(std::move(job->payload), ours, std::move(work),
               [self = shared_from_this(), job](StatusOr<Payload> landed) {
                 if (!landed.ok()) return self->reply(job, landed.status());
                 job->payload = *std::move(landed);
                 self->look_at(job);
               });
}

}  // namespace weft::internal
