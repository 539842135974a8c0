#include "weft/rpc/internal/device/device_copier.h"

#include <algorithm>
#include <utility>

#include "ATen/ops/_coalesced.h"
#include "ATen/ops/_indices.h"
#include "ATen/ops/_sparse_coo_tensor_unsafe.h"
#include "ATen/ops/_values.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "weft/rpc/spi/device_order.h"

namespace weft::internal {
namespace {

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

std::vector<DeviceCode> own_devices(const DeviceRoute& route) {
  std::vector<DeviceCode> out;
  for (const auto& [ours, theirs] : route.pairs) out.push_back(ours);
  return out;
}

DeviceCopier::DeviceCopier(std::string self, std::shared_ptr<DeviceBackend> backend,
                           std::shared_ptr<const MemberDevices> devices,
                           std::shared_ptr<Executor> pool)
    : self_(std::move(self)),
      backend_(std::move(backend)),
      devices_(std::move(devices)),
      in_use_(devices_ == nullptr ? std::vector<c10::Device>() : devices_in_use(*devices_)),
      pool_(std::move(pool)) {}

std::shared_ptr<const DeviceRoute> DeviceCopier::route_to(const Member& to) const {
  auto route = std::make_shared<DeviceRoute>();
  route->to = to.info.name;
  const auto map = devices_->maps.find(route->to);
  if (map == devices_->maps.end()) return route;
  route->pairs = map->second;
  // A member of a static group was checked at join; one that came later is looked at here.
  route->wrong = check_device_map(self_, route->to, route->pairs, to.devices.get());
  return route;
}

StatusOr<std::shared_ptr<const DeviceRoute>> DeviceCopier::explicit_route(
    const Member& to, const Payload& payload) const {
  auto route = std::make_shared<DeviceRoute>();
  route->to = to.info.name;
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

StatusOr<DevicePairs> DeviceCopier::read_map(const v1::CallHeader& header) const {
  const auto refuse = [this](const std::string& why) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("the device map of this call ", why, " of '", self_, "'"));
  };
  DevicePairs pairs;
  for (int i = 0; i + 1 < header.device_map_size(); i += 2) {
    const DeviceCode theirs = header.device_map(i);
    const DeviceCode ours = header.device_map(i + 1);
    if (!device_of_code(theirs).has_value() || !device_of_code(ours).has_value()) {
      return refuse(absl::StrCat("holds ", device_text(theirs), " for ", device_text(ours)));
    }
    const DevicePairs one = {{theirs, ours}};
    if (!check_device_map("", "", one, devices_.get()).empty()) {
      return refuse(absl::StrCat("names ", device_text(ours), ", which is no device"));
    }
    pairs.emplace_back(ours, theirs);
  }
  return pairs;
}

StatusOr<std::shared_ptr<const Unstaged>> DeviceCopier::unstaged(
    std::shared_ptr<OutMessage> message) const {
  std::vector<at::Tensor> sources;
  for (const size_t i : message->on_device) sources.push_back(message->buffers[i]);
  if (backend_ == nullptr) {
    return uses_no_devices(self_, "a message has tensors on devices");
  }
  auto out = std::make_shared<Unstaged>();
  WEFT_ASSIGN_OR_RETURN(out->after, backend_->mark(sources));
  out->message = std::move(message);
  return out;
}

void DeviceCopier::stage(const std::shared_ptr<const Unstaged>& unstaged, HostMemory memory,
                         absl::AnyInvocable<void(Status)> done) const {
  std::vector<at::Tensor> sources;
  for (const size_t i : unstaged->message->on_device) {
    sources.push_back(std::move(unstaged->message->buffers[i]));
  }
  backend_->to_host(
      std::move(sources), unstaged->after, std::move(memory),
      [message = unstaged->message, pool = pool_,
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

StatusOr<std::shared_ptr<DeviceWork>> DeviceCopier::make_work(
    const std::vector<DeviceCode>& devices) const {
  std::vector<c10::Device> distinct;
  for (const DeviceCode code : devices) {
    if (code == kCpuCode) continue;
    const c10::Device device = *device_of_code(code);
    if (std::find(distinct.begin(), distinct.end(), device) == distinct.end()) {
      distinct.push_back(device);
    }
  }
  if (backend_ != nullptr) return backend_->make_work(distinct);
  // Gradients for devices of another worker leave a worker without any, too, and have an answer.
  if (distinct.empty()) return std::shared_ptr<DeviceWork>();
  return uses_no_devices(self_, absl::StrCat("a call works on ", distinct.front().str()));
}

void DeviceCopier::land(Payload payload, const std::vector<DeviceCode>& allowed,
                        std::shared_ptr<DeviceWork> work,
                        absl::AnyInvocable<void(StatusOr<Payload>)> done) const {
  const std::vector<uint32_t>& targets = payload.devices->targets;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (targets[i] == kCpuCode || contains(allowed, targets[i])) continue;
    return done(
        make_error(ErrorKind::kInvalidArgument,
                   absl::StrCat("tensor ", i, " of what came belongs on ", device_text(targets[i]),
                                " of '", self_, "', which no device map of the two workers says")));
  }
  if (backend_ == nullptr) {
    return done(uses_no_devices(self_, "a message came for some"));
  }
  std::vector<at::Tensor> hosts;
  std::vector<c10::Device> devices;
  list_blocks(payload, &hosts, &devices);
  payload.devices->guard = work;
  backend_->to_devices(
      std::move(hosts), std::move(devices), work,
      [payload = std::move(payload), pool = pool_,
       done = std::move(done)](StatusOr<std::vector<at::Tensor>> copies) mutable {
        post_or_run(pool.get(), [payload = std::move(payload), copies = std::move(copies),
                                 done = std::move(done)]() mutable {
          if (!copies.ok()) return done(annotate(copies.status(), "copying tensors to devices"));
          put_back(*std::move(copies), &payload);
          done(std::move(payload));
        });
      });
}

GuardRef DeviceCopier::mark_here() const {
  StreamsUsed streams;
  for (const c10::Device device : in_use_) streams.add(stream_here(device));
  return streams.mark();
}

StatusOr<GuardRef> DeviceCopier::mark(const ScopeRef& scope) const {
  if (backend_ == nullptr) return GuardRef();
  try {
    const ScopeGuard in(scope);
    return mark_here();
  } catch (...) {
    return annotate(status_from_current_exception(), "marking a handler's streams");
  }
}

Status DeviceCopier::begin(const GuardRef& after, ObjectStreams* object, bool is_const) {
  try {
    published_.follow();
    use_here(after, {});
    if (object != nullptr && backend_ != nullptr) object->follow(is_const);
    return absl::OkStatus();
  } catch (...) {
    return annotate(status_from_current_exception(), "ordering a handler's streams");
  }
}

Status DeviceCopier::end(const ScopeRef& scope, ObjectStreams* object, bool is_const) const {
  if (object == nullptr || backend_ == nullptr) return absl::OkStatus();
  try {
    const ScopeGuard in(scope);
    object->ended(is_const, [this] { return mark_here(); });
    return absl::OkStatus();
  } catch (...) {
    return annotate(status_from_current_exception(), "marking a handler's streams");
  }
}

}  // namespace weft::internal
