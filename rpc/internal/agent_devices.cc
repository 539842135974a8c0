// The agent's part in tensors on devices: which map holds for whom, and the way of their bytes
// between devices and messages. What a device is only the backend knows.

#include <algorithm>
#include <utility>

#include "ATen/ops/_coalesced.h"
#include "ATen/ops/_indices.h"
#include "ATen/ops/_sparse_coo_tensor_unsafe.h"
#include "ATen/ops/_values.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "weft/rpc/internal/agent_job.h"

namespace weft::internal {
namespace {

std::vector<DeviceCode> firsts(const DevicePairs& pairs) {
  std::vector<DeviceCode> out;
  for (const auto& [ours, theirs] : pairs) out.push_back(ours);
  return out;
}

bool contains(const std::vector<DeviceCode>& list, DeviceCode code) {
  return std::find(list.begin(), list.end(), code) != list.end();
}

// What has to be copied of these tensors: a dense one is one block, a sparse one has two.
void list_blocks(const Payload& payload, std::vector<at::Tensor>* hosts,
                 std::vector<c10::Device>* targets) {
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < payload.tensors.size(); ++i) {
    const DeviceCode code = payload.devices->targets[i];
    if (code == kCpuCode) continue;
    const at::Tensor tensor = payload.tensors[i].detach();
    const c10::Device target = *device_of_code(code);
    if (tensor.layout() == at::kSparse) {
      hosts->push_back(tensor._indices());
      targets->push_back(target);
      hosts->push_back(tensor._values());
    } else {
      hosts->push_back(tensor);
    }
    targets->push_back(target);
  }
}

// The tensors around the copied blocks, in the places of those that came.
void put_back(std::vector<at::Tensor> copies, Payload* payload) {
  const c10::InferenceMode not_inference(false);
  size_t next = 0;
  for (size_t i = 0; i < payload->tensors.size(); ++i) {
    if (payload->devices->targets[i] == kCpuCode) continue;
    at::Tensor& tensor = payload->tensors[i];
    at::Tensor landed = std::move(copies[next++]);
    if (tensor.layout() == at::kSparse) {
      const c10::NoGradGuard no_grad;
      const at::Tensor values = std::move(copies[next++]);
      landed = at::_sparse_coo_tensor_unsafe(landed, values, tensor.sizes(),
                                             values.options().layout(at::kSparse),
                                             tensor.is_coalesced());
    }
    if (tensor.requires_grad()) landed.set_requires_grad(true);
    tensor = std::move(landed);
  }
  payload->devices->targets.clear();  // where it is
}

Status uses_no_devices(const std::string& self, std::string_view what) {
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("worker '", self, "' uses no devices (JoinOptions::devices), and ",
                                 std::string(what)));
}

}  // namespace

StatusOr<std::shared_ptr<const DeviceRoute>> Agent::route_to(const Destination& to) const {
  auto route = std::make_shared<DeviceRoute>();
  MutexLock lock(&mutex_);
  WEFT_ASSIGN_OR_RETURN(const Member* member, members_->resolve(to));
  route->to = member->info.name;
  const auto map = options_.devices->maps.find(route->to);
  if (map == options_.devices->maps.end()) return route;
  route->pairs = map->second;
  // A member of a static group was checked at join; one that came later is looked at here.
  route->wrong =
      check_device_map(options_.self.name, route->to, route->pairs, member->devices.get());
  return route;
}

StatusOr<std::shared_ptr<const DeviceRoute>> Agent::explicit_route(const Destination& to,
                                                                   const Payload& payload) const {
  auto route = std::make_shared<DeviceRoute>();
  {
    MutexLock lock(&mutex_);
    WEFT_ASSIGN_OR_RETURN(const Member* member, members_->resolve(to));
    route->to = member->info.name;
  }
  const std::vector<uint32_t>& targets = payload.devices->targets;
  if (targets.size() != payload.tensors.size()) {
    return make_error(ErrorKind::kInternal, absl::StrCat(targets.size(), " devices for ",
                                                         payload.tensors.size(), " tensors"));
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    const at::Tensor& tensor = payload.tensors[i];
    if (!tensor.defined() || !(tensor.device().is_cpu() || tensor.device().is_cuda())) continue;
    const std::pair<DeviceCode, DeviceCode> pair(device_code(tensor.device()), targets[i]);
    if (pair.first == kCpuCode && pair.second == kCpuCode) continue;
    if (std::find(route->pairs.begin(), route->pairs.end(), pair) == route->pairs.end()) {
      route->pairs.push_back(pair);
    }
  }
  return route;
}

StatusOr<std::shared_ptr<const Agent::Unstaged>> Agent::unstaged(
    std::shared_ptr<OutMessage> message) const {
  std::vector<at::Tensor> sources;
  for (const size_t i : message->on_device) sources.push_back(message->buffers[i]);
  if (options_.device_backend == nullptr) {
    return uses_no_devices(options_.self.name, "a message has tensors on devices");
  }
  auto out = std::make_shared<Unstaged>();
  WEFT_ASSIGN_OR_RETURN(out->after, options_.device_backend->mark(sources));
  out->message = std::move(message);
  return out;
}

void Agent::stage(const std::shared_ptr<const Unstaged>& unstaged,
                  absl::AnyInvocable<void(Status)> done) const {
  std::vector<at::Tensor> sources;
  for (const size_t i : unstaged->message->on_device) {
    sources.push_back(std::move(unstaged->message->buffers[i]));
  }
  options_.device_backend->to_host(
      std::move(sources), unstaged->after,
      [message = unstaged->message, pool = options_.pool,
       done = std::move(done)](StatusOr<std::vector<at::Tensor>> hosts) mutable {
        const Status status = hosts.status();
        if (status.ok()) {
          for (size_t i = 0; i < hosts->size(); ++i) {
            message->buffers[message->on_device[i]] = std::move((*hosts)[i]);
          }
          message->on_device.clear();
        }
        // Sending is not the backend's work.
        post_or_run(pool.get(), [done = std::move(done), status]() mutable {
          done(status.ok() ? status : annotate(status, "copying tensors to the host"));
        });
      });
}

void Agent::stage_call(uint64_t call_id, const std::shared_ptr<const Unstaged>& unstaged) {
  const std::weak_ptr<Agent> weak = weak_from_this();
  stage(unstaged, [weak, call_id](const Status& staged) {
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

StatusOr<std::shared_ptr<DeviceWork>> Agent::make_work(
    const std::vector<DeviceCode>& devices) const {
  std::vector<c10::Device> distinct;
  for (const DeviceCode code : devices) {
    if (code == kCpuCode) continue;
    const c10::Device device = *device_of_code(code);
    if (std::find(distinct.begin(), distinct.end(), device) == distinct.end()) {
      distinct.push_back(device);
    }
  }
  if (options_.device_backend != nullptr) return options_.device_backend->make_work(distinct);
  // Gradients for devices of another worker leave a worker without any, too, and have an answer.
  if (distinct.empty()) return std::shared_ptr<DeviceWork>();
  return uses_no_devices(options_.self.name,
                         absl::StrCat("a call works on ", distinct.front().str()));
}

void Agent::land(Payload payload, const std::vector<DeviceCode>& allowed,
                 std::shared_ptr<DeviceWork> work,
                 absl::AnyInvocable<void(StatusOr<Payload>)> done) const {
  const std::vector<uint32_t>& targets = payload.devices->targets;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (targets[i] == kCpuCode || contains(allowed, targets[i])) continue;
    return done(make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("tensor ", i, " of what came belongs on ", device_text(targets[i]), " of '",
                     options_.self.name, "', which no device map of the two workers says")));
  }
  if (options_.device_backend == nullptr) {
    return done(uses_no_devices(options_.self.name, "a message came for some"));
  }
  std::vector<at::Tensor> hosts;
  std::vector<c10::Device> devices;
  list_blocks(payload, &hosts, &devices);
  payload.devices->guard = work;
  options_.device_backend->to_devices(
      std::move(hosts), std::move(devices), work,
      [payload = std::move(payload), pool = options_.pool,
       done = std::move(done)](StatusOr<std::vector<at::Tensor>> copies) mutable {
        post_or_run(pool.get(), [payload = std::move(payload), copies = std::move(copies),
                                 done = std::move(done)]() mutable {
          if (!copies.ok()) return done(annotate(copies.status(), "copying tensors to devices"));
          put_back(*std::move(copies), &payload);
          done(std::move(payload));
        });
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
  if (route != nullptr && route->wrong.empty()) ours = firsts(route->pairs);
  std::shared_ptr<DeviceWork> work;
  if (!ours.empty()) {
    StatusOr<std::shared_ptr<DeviceWork>> made = make_work(ours);
    if (!made.ok()) return complete(call_id, made.status(), false);
    work = *std::move(made);
  }
  const std::weak_ptr<Agent> weak = weak_from_this();
  land(std::move(payload), ours, std::move(work),
       [weak, call_id, metadata = std::move(metadata)](StatusOr<Payload> landed) {
         const auto self = weak.lock();
         if (self == nullptr) return;
         if (landed.ok() && metadata != nullptr) {
           return self->receive_answer(call_id, *std::move(landed), metadata);
         }
         self->complete(call_id, std::move(landed), false);
       });
}

GuardRef Agent::mark_here() const {
  StreamsUsed streams;
  for (const c10::Device device : devices_in_use_) streams.add(stream_here(device));
  return streams.mark();
}

StatusOr<GuardRef> Agent::mark_streams(const Job& job) const {
  if (options_.device_backend == nullptr) return GuardRef();
  try {
    const ScopeGuard scope(job.call->scope());
    return mark_here();
  } catch (...) {
    return annotate(status_from_current_exception(), "marking a handler's streams");
  }
}

Status Agent::begin_streams(const Job& job) {
  try {
    streams_.follow();
    use_here(job.object_after, {});
    if (job.turns != nullptr && options_.device_backend != nullptr) {
      job.turns->streams().follow(job.callee->is_const);
    }
    return absl::OkStatus();
  } catch (...) {
    return annotate(status_from_current_exception(), "ordering a handler's streams");
  }
}

Status Agent::end_streams(const Job& job) const {
  if (job.turns == nullptr || options_.device_backend == nullptr) return absl::OkStatus();
  try {
    const ScopeGuard scope(job.call->scope());
    job.turns->streams().ended(job.callee->is_const, [this] { return mark_here(); });
    return absl::OkStatus();
  } catch (...) {
    return annotate(status_from_current_exception(), "marking a handler's streams");
  }
}

Status Agent::read_device_map(const v1::CallHeader& header, DevicePairs* pairs) const {
  const auto refuse = [this](const std::string& why) {
    return make_error(ErrorKind::kInvalidArgument, absl::StrCat("the device map of this call ", why,
                                                                " of '", options_.self.name, "'"));
  };
  for (int i = 0; i + 1 < header.device_map_size(); i += 2) {
    const DeviceCode theirs = header.device_map(i);
    const DeviceCode ours = header.device_map(i + 1);
    if (!device_of_code(theirs).has_value() || !device_of_code(ours).has_value()) {
      return refuse(absl::StrCat("holds ", device_text(theirs), " for ", device_text(ours)));
    }
    const DevicePairs one = {{theirs, ours}};
    if (!check_device_map("", "", one, options_.devices.get()).empty()) {
      return refuse(absl::StrCat("names ", device_text(ours), ", which is no device"));
    }
    pairs->emplace_back(ours, theirs);
  }
  return absl::OkStatus();
}

void Agent::land_request(const std::shared_ptr<Job>& job) {
  auto back = std::make_shared<DeviceRoute>();
  back->to = job->call->caller().name;
  if (Status read = read_device_map(*job->header, &back->pairs); !read.ok()) {
    return reply(job, read);
  }
  const std::vector<DeviceCode> ours = firsts(back->pairs);
  job->back = std::move(back);
  std::shared_ptr<DeviceWork> work;
  if (options_.device_backend != nullptr && !ours.empty()) {
    StatusOr<std::shared_ptr<DeviceWork>> made = make_work(ours);
    if (!made.ok()) return reply(job, made.status());
    work = *std::move(made);
    job->scope->attachment = work;
  }
  if (job->payload.devices == nullptr) return look_at(job);
  land(std::move(job->payload), ours, std::move(work),
       [self = shared_from_this(), job](StatusOr<Payload> landed) {
         if (!landed.ok()) return self->reply(job, landed.status());
         job->payload = *std::move(landed);
         self->look_at(job);
       });
}

}  // namespace weft::internal
